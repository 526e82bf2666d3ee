"""The functions of a request: which of them the model may, or must, call, and those that it has called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_flash.errors import RefusedError


def called(number: str | None, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a call of an earlier answer as chat templates take it."""
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_fields(tools: Sequence[dict[str, Any]], *, must_call: bool = False, name: str | None = None) -> dict[str, Any]:
    """Return the fields of a `GenerationRequest` about functions.

    Args:
        tools: in OpenAI's form. ``strict`` is taken out: chat templates would show it to the model.
        must_call: the answer has to call a function.
        name: that function; None lets the model choose.

    Raises:
        RefusedError: a call is forced of a function that is not there.
    """
    plain = [{**tool, "function": {k: v for k, v in tool["function"].items() if k != "strict"}} for tool in tools]
    names = [tool["function"]["name"] for tool in tools]
    if must_call and not (name in names if name is not None else names):
        raise RefusedError(
            f"tool_choice forces a call of {'a function' if name is None else repr(name)}, and tools has "
            f"{', '.join(map(repr, names)) or 'no functions'}.",
            400,
            "tool_choice",
        )
    return {
        "tools": plain or None,
        "must_call": (names if name is None else [name]) if must_call else [],
        "strict_tools": [tool["function"]["name"] for tool in tools if tool["function"].get("strict")],
    }

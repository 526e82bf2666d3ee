"""The functions of a request: which of them the model may, or must, call, and those that it has called."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from mlx_flash.errors import RefusedError

TEXT = "input"
"""The argument of functions that take one text."""


def called(number: str | None, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a call of an earlier answer as chat templates take it."""
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def text_function(name: str, description: str | None) -> dict[str, Any]:
    """Return a function that takes one text, in OpenAI's form: what others call a custom tool."""
    schema = {"type": "object", "properties": {TEXT: {"type": "string"}}, "required": [TEXT]}
    return function(name, description, schema)


def function(
    name: str, description: str | None, parameters: dict[str, Any] | None, *, is_strict: bool | None = False
) -> dict[str, Any]:
    """Return the description of a function in OpenAI's form, which chat templates know."""
    found: dict[str, Any] = {"name": name}
    if description is not None:
        found["description"] = description
    if parameters is not None:
        found["parameters"] = parameters
    if is_strict:
        found["strict"] = True
    return {"type": "function", "function": found}


def tool_fields(
    tools: Sequence[dict[str, Any]], *, must_call: bool = False, allowed: Collection[str] | None = None
) -> dict[str, Any]:
    """Return the fields of a `GenerationRequest` about functions.

    Args:
        tools: in OpenAI's form. ``strict`` is taken out: chat templates would show it to the model.
        must_call: the answer has to call a function.
        allowed: names of those that it may call; None lets the model choose among all.

    Raises:
        RefusedError: a call is forced of a function that is not there.
    """
    names = [tool["function"]["name"] for tool in tools]
    missing = sorted(set(allowed or ()) - set(names))
    if missing or (must_call and not names):
        raise RefusedError(
            f"tool_choice names {'a function' if not missing else ', '.join(map(repr, missing))}, and tools has "
            f"{', '.join(map(repr, names)) or 'no functions'}.",
            400,
            "tool_choice",
        )
    if allowed is not None:
        names = [name for name in names if name in allowed]
        tools = tools if must_call else [tool for tool in tools if tool["function"]["name"] in names]
    plain = [{**tool, "function": {k: v for k, v in tool["function"].items() if k != "strict"}} for tool in tools]
    return {
        "tools": plain or None,
        "must_call": names if must_call else [],
        "strict_tools": [tool["function"]["name"] for tool in tools if tool["function"].get("strict")],
    }

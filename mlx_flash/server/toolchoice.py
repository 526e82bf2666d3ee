"""The functions of a request: which of them the model may, or must, call, and those that it has called."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from mlx_flash.errors import RefusedError
from mlx_flash.server.request import GenerationRequest

TEXT = "input"
"""The argument of functions that take one text."""


def called(number: str | None, name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """Return a call of an earlier answer as chat templates take it. Arguments that are no JSON object stay text."""
    try:
        value = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        value = arguments
    arguments = value if isinstance(value, dict) else arguments
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def without_broken_calls(request: GenerationRequest) -> GenerationRequest:
    """Return a request whose broken calls are text of their message, and the results of these the user's."""
    found: list[dict[str, Any]] = []
    broken: list[dict[str, Any]] = []
    for message in request.messages or ():
        calls = message.get("tool_calls") or []
        bad = [call for call in calls if isinstance(call["function"]["arguments"], str)]
        if bad:
            broken += bad
            functions = [call["function"] for call in bad]
            text = "\n".join(f'{{"name": "{each["name"]}", "arguments": {each["arguments"]}' for each in functions)
            content = message["content"]
            content = f"{content}{text}" if isinstance(content, str) else [*content, {"type": "text", "text": text}]
            message = {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}
            if good := [call for call in calls if call not in bad]:
                message["tool_calls"] = good
        elif message["role"] == "tool" and any(call["id"] == message.get("tool_call_id") for call in broken):
            message = {"role": "user", "content": message["content"]}
        found.append(message)
    return replace(request, messages=found) if broken else request


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

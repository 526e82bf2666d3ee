"""Conversations in Anthropic's form, as chat templates take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_flash.server.anthropic.schemas import Conversation, ImageBlock, Message, TextBlock, Tool
from mlx_flash.server.grammars import schema_grammar
from mlx_flash.server.request import GenerationRequest
from mlx_flash.server.requestpictures import content_of, data_url, picture_part
from mlx_flash.server.toolchoice import called, tool_fields

_EFFORTS = {"xhigh": "high", "max": "high"}
"""The nearest levels that chat templates know."""


def generation_request(body: Conversation) -> GenerationRequest:
    """Return the request for an answer to a conversation, with the settings of its prompt.

    Raises:
        RefusedError: the schema of the answer cannot be used.
    """
    kind = None if body.tool_choice is None else body.tool_choice.type
    name = None if body.tool_choice is None else body.tool_choice.name
    tools = [] if kind == "none" else [_tool(tool) for tool in body.tools or ()]
    output = body.output_config
    return GenerationRequest(
        model=body.model,
        messages=_messages(body),
        **tool_fields(tools, must_call=kind in ("any", "tool"), name=name),
        template_options=_template_options(body),
        grammar=None
        if output is None or output.format is None
        else schema_grammar(output.format.schema_, "output_config.format.schema"),
        one_call=body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use,
    )


def _messages(body: Conversation) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if body.system:
        found.append({"role": "system", "content": _text(body.system)})
    names: dict[str, str] = {}
    for i, message in enumerate(body.messages):
        is_assistant = message.role == "assistant"
        found += _of_assistant(message, names) if is_assistant else _of_user(message, names, f"messages.{i}")
    return found


def _of_user(message: Message, names: dict[str, str], field: str) -> list[dict[str, Any]]:
    """Return the results of calls, each as a message of its own, and the text and pictures between them.

    Args:
        message: a message of the user.
        names: of the functions of earlier calls, by the number of the call.
        field: its place in the request.
    """
    if isinstance(message.content, str):
        return [{"role": "user", "content": message.content}]
    found: list[dict[str, Any]] = []
    for i, block in enumerate(message.content):
        if block.type == "tool_result":
            result: dict[str, Any] = {
                "role": "tool",
                "content": _text(block.content),
                "tool_call_id": block.tool_use_id,
            }
            if block.tool_use_id in names:
                result["name"] = names[block.tool_use_id]
            found.append(result)
        elif block.type in ("text", "image"):
            if not found or found[-1]["role"] != "user":
                found.append({"role": "user", "content": []})
            found[-1]["content"].append(_part(block, f"{field}.content.{i}.source"))
    for each in found:
        if each["role"] == "user":
            each["content"] = content_of(each["content"], between="\n")
    return found or [{"role": "user", "content": ""}]


def _part(block: TextBlock | ImageBlock, field: str) -> dict[str, str]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    source = block.source
    return picture_part(source.url or "" if source.type == "url" else data_url(source.data or ""), field)


def _of_assistant(message: Message, names: dict[str, str]) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"role": "assistant", "content": message.content}]
    texts: dict[str, str] = {"text": "", "thinking": ""}
    calls = []
    for block in message.content:
        if block.type == "text":
            texts["text"] += block.text
        elif block.type == "thinking":
            texts["thinking"] += block.thinking
        elif block.type == "tool_use":
            names[block.id] = block.name
            calls.append(called(block.id, block.name, block.input))
    found: dict[str, Any] = {"role": "assistant", "content": texts["text"]}
    if texts["thinking"]:
        found["reasoning_content"] = texts["thinking"]
    if calls:
        found["tool_calls"] = calls
    return [found]


def _text(content: str | Sequence[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())


def _tool(tool: Tool) -> dict[str, Any]:
    """Return a tool as chat templates know it: in OpenAI's form."""
    function: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _template_options(body: Conversation) -> dict[str, Any] | None:
    found: dict[str, Any] = {}
    if body.thinking is not None:
        found["enable_thinking"] = body.thinking.type != "disabled"
    effort = None if body.output_config is None else body.output_config.effort
    if effort is not None:
        found["reasoning_effort"] = _EFFORTS.get(effort, effort)
    return found or None

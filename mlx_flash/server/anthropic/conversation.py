"""Conversations in Anthropic's form, as chat templates take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_flash.server.anthropic.schemas import (
    Conversation,
    DocumentBlock,
    ImageBlock,
    Message,
    SearchBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from mlx_flash.server.grammars import schema_grammar
from mlx_flash.server.request import GenerationRequest, continues, thinking_options
from mlx_flash.server.requestpictures import content_of, data_url, picture_part
from mlx_flash.server.toolchoice import called, function, tool_fields


def generation_request(body: Conversation) -> GenerationRequest:
    """Return the request for an answer to a conversation, with the settings of its prompt.

    Raises:
        RefusedError: the schema of the answer cannot be used.
    """
    kind = None if body.tool_choice is None else body.tool_choice.type
    name = None if body.tool_choice is None else body.tool_choice.name
    tools = [] if kind == "none" else _tools(body)
    output = body.output_config
    form = body.output_format if output is None or output.format is None else output.format
    thinking, effort = body.thinking, None if output is None else output.effort
    messages = _messages(body)
    return GenerationRequest(
        model=body.model,
        messages=messages,
        continues=continues(messages),
        **tool_fields(tools, must_call=kind in ("any", "tool"), allowed=None if name is None else [name]),
        template_options=thinking_options(None if thinking is None else thinking.thinks, effort),
        grammar=None if form is None else schema_grammar(form.schema_, "output_config.format.schema"),
        one_call=body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use,
    )


def _messages(body: Conversation) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if body.system:
        found.append({"role": "system", "content": _joined(body.system)})
    names: dict[str, str] = {}
    for i, message in enumerate(body.messages):
        if message.role == "assistant":
            found.append(_of_assistant(message, names, body))
        else:
            found += _of_user(message, names, f"messages.{i}")
    return found


def _of_user(message: Message, names: dict[str, str], field: str) -> list[dict[str, Any]]:
    """Return the results of calls, each as a message of its own, and the text and pictures between them.

    Args:
        message: a message of the user, or of the system.
        names: of the functions of earlier calls, by the number of the call.
        field: its place in the request.
    """
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    found: list[dict[str, Any]] = []
    for i, block in enumerate(message.content):
        place = f"{field}.content.{i}"
        if isinstance(block, ToolResultBlock):
            parts = [] if block.content is None else _parts(block.content, f"{place}.content")
            result = {"role": "tool", "content": _texts(parts), "tool_call_id": block.tool_use_id}
            if block.tool_use_id in names:
                result["name"] = names[block.tool_use_id]
            found.append(result)
            more = [part for part in parts if part["type"] == "image"]  # templates show them in messages of the user
        else:
            more = _parts([block], place)
        if more:
            if not found or found[-1]["role"] != message.role:
                found.append({"role": message.role, "content": []})
            found[-1]["content"] += more
    for each in found:
        if isinstance(each["content"], list):
            each["content"] = content_of(each["content"], between="\n")
    return found or [{"role": message.role, "content": ""}]


def _parts(blocks: str | Sequence[Any], field: str) -> list[dict[str, str]]:
    """Return text and pictures of some blocks."""
    if isinstance(blocks, str):
        return [{"type": "text", "text": blocks}]
    found: list[dict[str, str]] = []
    for i, block in enumerate(blocks):
        if isinstance(block, ImageBlock):
            source = block.source
            url = source.url or "" if source.type == "url" else data_url(source.data or "")
            found.append(picture_part(url, f"{field}.{i}.source"))
        elif isinstance(block, DocumentBlock):
            given = block.source
            head = [text for text in (block.title, block.context) if text]
            found += [{"type": "text", "text": text} for text in head]
            found += _parts(given.data or "" if given.type == "text" else given.content or "", f"{field}.{i}.source")
        elif isinstance(block, SearchBlock):
            found += [{"type": "text", "text": text} for text in (block.title, block.source) if text]
            found += _parts(block.content, f"{field}.{i}.content")
        else:
            text = block.tool_name if isinstance(block, ToolReferenceBlock) else block.text
            found.append({"type": "text", "text": text})
    return found


def _texts(parts: Sequence[dict[str, str]]) -> str:
    return "\n".join(part["text"] for part in parts if part["type"] == "text")


def _joined(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _of_assistant(message: Message, names: dict[str, str], body: Conversation) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    texts: dict[str, str] = {"text": "", "thinking": ""}
    calls = []
    for block in message.content:
        if isinstance(block, TextBlock):
            texts["text"] += block.text
        elif isinstance(block, ThinkingBlock):
            texts["thinking"] += block.thinking
        elif isinstance(block, ToolUseBlock):
            names[block.id] = block.name
            calls.append(called(block.id, block.name, block.input))
        else:
            body.ignore(f"messages.content ({block.type})")
    found: dict[str, Any] = {"role": "assistant", "content": texts["text"]}
    if texts["thinking"]:
        found["reasoning_content"] = texts["thinking"]
    if calls:
        found["tool_calls"] = calls
    return found


def _tools(body: Conversation) -> list[dict[str, Any]]:
    """Return the functions in OpenAI's form, which chat templates know. Anthropic's own tools are ignored."""
    found = []
    for tool in body.tools or ():
        if tool.input_schema is None:
            body.ignore(f"tools ({tool.type})")
        else:
            found.append(function(tool.name, tool.description or "", tool.input_schema, is_strict=tool.strict))
    return found

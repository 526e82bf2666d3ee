"""Anthropic's dialect: ``/v1/messages`` and ``/v1/messages/count_tokens``.

A field that would change the answer unseen, and is not supported, is an error.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_flash.errors import RefusedError
from mlx_flash.server import openai
from mlx_flash.server.events import Begun, End, Event, Piece, ToolCall
from mlx_flash.server.request import (
    GenerationRequest,
    Messages,
    continues,
    data_url,
    function,
    picture_part,
    thinking_options,
    tool_fields,
)
from mlx_flash.server.service import Asked, Asking, Body, Many, Needed, Service, Whole, Writer, collect, ignore, sent


class Source(Body):
    """A picture: its data, or an URL. A document: text, or blocks; other forms are not supported."""

    needed: ClassVar[Needed] = {"base64": ("data",), "url": ("url",), "text": ("data",), "content": ("content",)}

    type: Literal["base64", "url", "text", "content"]
    data: str | None = None
    url: str | None = None
    content: str | Many[Block] | None = None


class Block(Body):
    """A part of a message: of a type that is listed here, or what only Anthropic's servers make or read."""

    needed: ClassVar[Needed] = {
        "text": ("text",),
        "image": ("source",),
        "document": ("source",),
        "tool_reference": ("tool_name",),  # that a search found: this server shows all tools to the model
        "thinking": ("thinking",),
        "tool_use": ("id", "name", "input"),
        "tool_result": ("tool_use_id",),
    }

    type: str
    text: str | None = None
    source: Source | None = None
    title: str | None = None
    context: str | None = None
    content: str | Many[Block] | None = None
    thinking: str | None = None
    id: str = ""
    name: str = ""
    input: dict[str, Any] | None = None
    tool_use_id: str = ""
    tool_name: str | None = None


class Message(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Many[Block]


class Tool(Body):
    """A function that the model may call, or a tool that this server does not know."""

    needed: ClassVar[Needed] = {None: ("input_schema",), "custom": ("input_schema",)}

    type: str | None = None
    name: openai.FunctionName
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(Body):
    """Permission to call functions, or the duty to call any, or one."""

    needed: ClassVar[Needed] = {"tool": ("name",)}

    type: Literal["auto", "none", "any", "tool"]
    name: openai.FunctionName | None = None
    disable_parallel_tool_use: bool = False


class OutputConfig(Body):
    """The form of the answer, and how much work it is worth."""

    format: openai.Form | None = None
    effort: openai.Effort | None = None


class Conversation(Asking):
    """A conversation, or a request for the number of its tokens."""

    model: openai.ModelName
    messages: Annotated[Many[Message], Field(min_length=1)]
    system: str | Many[Block] | None = None
    tools: Annotated[Many[Tool], Field(max_length=512)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: openai.Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: openai.Form | None = None


class MessagesRequest(Conversation):
    """A request for the next message of a conversation."""

    max_tokens: openai.Count
    stop_sequences: openai.Stop | None = None
    stream: bool | None = None
    temperature: openai.Temperature | None = None
    top_p: openai.Share | None = None
    top_k: openai.TopK | None = None


def generation_request(body: Conversation) -> GenerationRequest:
    """Return the request for an answer to a conversation, with the settings of its prompt."""
    choice, output = body.tool_choice or ToolChoice(type="auto"), body.output_config or OutputConfig()
    thinking, messages = body.thinking or openai.Thinking(), _messages(body)
    tools = tool_fields(
        [] if choice.type == "none" else _tools(body),
        must_call=choice.type in ("any", "tool"),
        name=choice.name if choice.type == "tool" else None,
    )
    return GenerationRequest(
        model=body.model,
        messages=messages,
        continues=continues(messages),
        **tools,
        template_options=thinking_options(thinking.thinks, output.effort),
        grammar=openai.grammar_of(output.format or body.output_format, "output_config.format"),
        one_call=choice.disable_parallel_tool_use,
    )


def _messages(body: Conversation) -> list[dict[str, Any]]:
    found = Messages(between="\n")
    if body.system:
        texts = [part for part in _parts(body.system, "system") if part["type"] == "text"]
        found.add("system", texts)
    for i, message in enumerate(body.messages):
        found.begin()
        blocks = [Block(type="text", text=message.content)] if isinstance(message.content, str) else message.content
        for j, block in enumerate(blocks or [Block(type="text", text="")]):
            place = f"messages.{i}.content"
            if message.role == "assistant":
                _add_answer(found, block, f"{place}.{j}.type")
            elif block.type == "tool_result":
                parts = _parts(block.content or "", f"{place}.{j}.content")
                found.add_result(block.tool_use_id, parts, name=found.names.get(block.tool_use_id))
            else:
                found.add(message.role, _parts([block], place, j))
    return found.found


def _add_answer(found: Messages, block: Block, field: str) -> None:
    """Add a block of the assistant's to a conversation. What only Anthropic's servers make is ignored."""
    if block.type == "tool_use":
        found.add_call(block.id, block.name, block.input or {})
    elif block.type in ("text", "thinking"):
        found.add_answer(block.text or "", block.thinking or "")
    elif block.type in Block.needed:
        raise RefusedError(f"a message of the assistant has no {block.type} blocks", 400, field)
    else:
        found.add_answer()
        ignore(f"messages.content ({block.type})")


def _parts(blocks: str | Sequence[Block], field: str, first: int = 0) -> list[dict[str, str]]:
    if isinstance(blocks, str):
        return _plain(blocks)
    found: list[dict[str, str]] = []
    for i, block in enumerate(blocks, first):
        place, source = f"{field}.{i}", block.source
        kind = None if source is None else source.type
        if block.type == "image" and source is not None and kind in ("base64", "url"):
            url = source.url or "" if kind == "url" else data_url(source.data or "")
            found.append(picture_part(url, f"{place}.source"))
        elif block.type == "document" and source is not None and kind in ("text", "content"):
            content = source.data if kind == "text" else source.content
            found += _plain(block.title, block.context) + _parts(content or "", f"{place}.source")
        elif block.type in ("text", "tool_reference"):
            found.append({"type": "text", "text": block.text or block.tool_name or ""})
        else:
            words = f"blocks of type {block.type}" + (f" with a source of type {kind}" if kind else "")
            raise RefusedError(f"{words} are not supported here", 400, f"{place}.type")
    return found


def _plain(*texts: str | None) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts if text]


def _tools(body: Conversation) -> list[dict[str, Any]]:
    """Return the functions in OpenAI's form, which chat templates know. Anthropic's own tools are ignored."""
    found = []
    for tool in body.tools or ():
        if tool.input_schema is None:
            ignore(f"tools ({tool.type})")
        else:
            found.append(function(tool.name, tool.description or "", tool.input_schema))
    return found


_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def answer_messages(body: MessagesRequest) -> Asked:
    """Translate a request for the next message of a conversation."""
    asked = replace(
        generation_request(body),
        sampling=openai.sampling_of(body),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences or (),
    )
    return Asked([asked], _Writer(body), streams=bool(body.stream))


async def count_tokens(service: Service, request: Request, body: Conversation) -> Response:
    """Answer with the number of tokens of a conversation. The model is loaded, because its template decides."""
    (whole,) = await collect(request, service.submit(replace(generation_request(body), work="count")))
    return JSONResponse({"input_tokens": whole.end.num_prompt})


SIGNATURE = "unsigned"
"""The signature of reasoning. Clients send back only reasoning that has one."""


def _head(body: MessagesRequest) -> dict[str, Any]:
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": body.model}


def _blocks(whole: Whole) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if whole.reasoning:
        found.append({"type": "thinking", "thinking": whole.reasoning, "signature": SIGNATURE})
    if whole.text:
        found.append({"type": "text", "text": whole.text})
    return found + [{**_call(call), "input": call.arguments} for call in whole.calls]


def _call(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id or f"toolu_{uuid.uuid4().hex}", "name": call.name, "input": {}}


def _ending(body: MessagesRequest, end: End) -> dict[str, Any]:
    """Return the reason for the end of an answer. A stop text of the model itself is its usual end."""
    stop = end.stop if end.stop in (body.stop_sequences or ()) and end.reason == "stop" else None
    return {"stop_reason": _REASONS[end.reason] if stop is None else "stop_sequence", "stop_sequence": stop}


_USAGE = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")


def _usage(prompt: Begun | End, num_tokens: int) -> dict[str, int]:
    counts = (prompt.num_prompt - prompt.num_cached, 0, prompt.num_cached, num_tokens)
    return dict(zip(_USAGE, counts, strict=True))


NUM_PINGS = 11
"""Pings in a row. Claude Code does not count them, and gives up after 300 seconds without another event."""


class _Writer(Writer):
    """A reply of blocks: text of one kind in a row is one block, and so is each call."""

    def __init__(self, body: MessagesRequest) -> None:
        self._body = body
        self._num_pings = 0
        self._has_started = False
        self._number = 0
        self._kind: str | None = None

    def whole(self, wholes: list[Whole]) -> dict[str, Any]:
        (whole,) = wholes
        found = {**_head(self._body), "content": _blocks(whole), **_ending(self._body, whole.end)}
        return {**found, "usage": _usage(whole.end, whole.end.num_tokens)}

    def write(self, number: int, event: Event) -> Iterator[bytes]:
        if isinstance(event, Begun) and not self._has_started:
            yield self._start_message(_usage(event, 0))
        elif isinstance(event, Piece) and event.text:
            yield from self._write_text(event)
        elif isinstance(event, ToolCall):
            yield from self._start("tool_use", _call(event))
            yield self._delta({"type": "input_json_delta", "partial_json": event.text})
            yield from self._stop()
        elif isinstance(event, End):
            yield from self._stop()
            usage = _usage(event, event.num_tokens)
            yield sent({"type": "message_delta", "delta": _ending(self._body, event), "usage": usage})
            yield sent({"type": "message_stop"})

    def beat(self) -> bytes:
        """Return an event that changes nothing: mostly one that clients skip."""
        self._num_pings = (self._num_pings + 1) % (NUM_PINGS + 1)
        if self._num_pings:
            return sent({"type": "ping"})
        if not self._has_started:
            return self._start_message(dict.fromkeys(_USAGE, 0))
        delta = {"stop_reason": None, "stop_sequence": None}
        return sent({"type": "message_delta", "delta": delta, "usage": {"output_tokens": 0}})

    def _start_message(self, usage: dict[str, int]) -> bytes:
        self._has_started = True
        message = {**_head(self._body), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return sent({"type": "message_start", "message": message})

    def _write_text(self, piece: Piece) -> Iterator[bytes]:
        kind = "text" if piece.kind == "text" else "thinking"
        if kind != self._kind:
            yield from self._start(kind, {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        yield self._delta({"type": f"{kind}_delta", kind: piece.text})

    def _start(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._stop()
        self._kind = kind
        yield sent({"type": "content_block_start", "index": self._number, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return sent({"type": "content_block_delta", "index": self._number, "delta": delta})

    def _stop(self) -> Iterator[bytes]:
        """Yield the events that end the last block, if it is open."""
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._kind is not None:
            yield sent({"type": "content_block_stop", "index": self._number})
            self._number += 1
            self._kind = None

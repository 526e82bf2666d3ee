"""``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_flash.server.anthropic.common import error_body, sent
from mlx_flash.server.anthropic.conversation import generation_request
from mlx_flash.server.anthropic.schemas import CountRequest, MessagesRequest
from mlx_flash.server.events import Begun, CallArguments, CallBegun, End, Event, Failed, Piece, ToolCall
from mlx_flash.server.replies import Whole, Writer, collect_all, stream
from mlx_flash.server.request import Sampling, stop_texts
from mlx_flash.server.service import Service

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def answer_messages(service: Service, request: Request, body: MessagesRequest) -> Response:
    """Answer a request for the next message of a conversation."""
    asked = replace(
        generation_request(body),
        sampling=Sampling(
            temperature=body.temperature, top_p=body.top_p, top_k=None if body.top_k is None else max(0, body.top_k)
        ),
        max_tokens=body.max_tokens,
        stop=stop_texts(body.stop_sequences),
    )
    (answer,) = service.submit(asked)
    if body.stream:
        return await stream(request, [answer], _Writer(body))
    (whole,) = await collect_all(request, [answer])
    found = {**_head(body), "content": _blocks(whole), **_ending(body, whole.end)}
    return JSONResponse({**found, "usage": _usage(whole.end, whole.end.num_tokens)})


async def count_tokens(service: Service, request: Request, body: CountRequest) -> Response:
    """Answer with the number of tokens of a conversation. The model is loaded, because its template decides."""
    (answer,) = service.submit(replace(generation_request(body), work="count"))
    (whole,) = await collect_all(request, [answer])
    return JSONResponse({"input_tokens": whole.end.num_prompt})


def _head(body: MessagesRequest) -> dict[str, Any]:
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": body.model}


def _blocks(whole: Whole) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if whole.reasoning:
        found.append({"type": "thinking", "thinking": whole.reasoning, "signature": ""})
    if whole.text:
        found.append({"type": "text", "text": whole.text})
    return found + [{**_call(call), "input": call.arguments} for call in whole.calls]


def _call(call: CallBegun | ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id or f"toolu_{uuid.uuid4().hex}", "name": call.name, "input": {}}


def _ending(body: MessagesRequest, end: End) -> dict[str, Any]:
    """Return the reason for the end of an answer. A stop text of the model itself is its usual end."""
    stop = end.stop if end.stop in (body.stop_sequences or ()) and end.reason == "stop" else None
    return {"stop_reason": _REASONS[end.reason] if stop is None else "stop_sequence", "stop_sequence": stop}


def _usage(prompt: Begun | End, num_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": prompt.num_prompt - prompt.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": prompt.num_cached,
        "output_tokens": num_tokens,
    }


class _Writer(Writer):
    """A stream of blocks: text of one kind in a row is one block, and so is each call."""

    def __init__(self, body: MessagesRequest) -> None:
        self._body = body
        self._number = 0
        self._kind: str | None = None

    def write(self, number: int, event: Event) -> Iterator[bytes]:
        """Yield the parts for an event."""
        if isinstance(event, Begun):
            message = {**_head(self._body), "content": [], "stop_reason": None, "stop_sequence": None}
            yield sent({"type": "message_start", "message": {**message, "usage": _usage(event, 0)}})
        elif isinstance(event, Piece) and event.text:
            yield from self._write_text(event)
        elif isinstance(event, CallBegun):
            yield from self._start("tool_use", _call(event))
        elif isinstance(event, CallArguments):
            yield self._delta({"type": "input_json_delta", "partial_json": event.text})
        elif isinstance(event, ToolCall):
            yield from self._stop()
        elif isinstance(event, End):
            yield from self._stop()
            usage = _usage(event, event.num_tokens)
            yield sent({"type": "message_delta", "delta": _ending(self._body, event), "usage": usage})
            yield sent({"type": "message_stop"})
        elif isinstance(event, Failed):
            yield sent(error_body(event.error))

    def beat(self) -> bytes:
        """Return an event that clients skip."""
        return sent({"type": "ping"})

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
        """Yield the event that ends the last block, if it is open."""
        if self._kind is not None:
            yield sent({"type": "content_block_stop", "index": self._number})
            self._number += 1
            self._kind = None

"""Replies of dialects: whole ones, streams of events, and clients that leave in between."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mlx_flash.errors import RefusedError
from mlx_flash.logs import log
from mlx_flash.server.events import Answers, End, Event, Failed, Piece, Progress, TokenDetail, ToolCall
from mlx_flash.server.request import GenerationRequest

T = TypeVar("T")

BEAT_SECONDS = 10.0
"""The longest time without an event in a stream, and before it begins."""

PROGRESS_SECONDS = 0.5
"""The least time between two reports of the same work."""

COMMENT = b":"
"""The beginning of a part that is no event to clients."""


@dataclass
class Whole:
    """A complete answer."""

    end: End
    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[TokenDetail] = field(default_factory=list)


async def collect(request: Request, answers: Answers) -> list[Whole]:
    """Return complete answers to a client that waits for all of them."""
    events: defaultdict[int, list[Event]] = defaultdict(list)
    answers.is_whole = True

    async def take() -> None:
        while answers.open:
            number, event = await answers.next()
            if isinstance(event, Failed):
                raise event.error
            events[number].append(event)

    try:
        await while_connected(request.receive, take())
    finally:
        answers.leave()
    return [_whole(events[number]) for number in sorted(events)]


def _whole(events: Sequence[Event]) -> Whole:
    *parts, end = events
    assert isinstance(end, End)
    pieces = [part for part in parts if isinstance(part, Piece)]
    text, reasoning = ("".join(piece.text for piece in pieces if piece.kind == kind) for kind in ("text", "reasoning"))
    calls = [part for part in parts if isinstance(part, ToolCall)]
    return Whole(end, text, reasoning, calls, [token for piece in pieces for token in piece.tokens])


class Writer(ABC):
    """The form of a reply in a dialect: whole, or a stream."""

    media_type = "text/event-stream"

    @abstractmethod
    def whole(self, wholes: list[Whole]) -> dict[str, Any]:
        """Return the reply that has complete answers."""

    def begin(self) -> Iterable[bytes]:
        """Return the parts before the first event."""
        return ()

    @abstractmethod
    def write(self, number: int, event: Event) -> Iterable[bytes]:
        """Return the parts for an event."""

    def fail(self, path: str, error: RefusedError) -> bytes:
        """Return the last part of a stream whose request came to a path, and that an error ends."""
        return sent(error_body(path, error))

    @abstractmethod
    def beat(self) -> bytes:
        """Return a part that changes nothing, and that clients count as an event."""


class Asked(NamedTuple):
    """A request of a dialect in the form that all have."""

    requests: Sequence[GenerationRequest]
    writer: Writer
    streams: bool


_json = json.JSONEncoder(ensure_ascii=False).encode


def sent(value: Mapping[str, Any]) -> bytes:
    """Return an event of a stream, which is named after its type if it has one."""
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {_json(value)}\n\n".encode("utf-8", "replace")


def line(value: Mapping[str, Any]) -> bytes:
    """Return a part of a stream of lines."""
    return f"{_json(value)}\n".encode("utf-8", "replace")


_ANTHROPICS_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(path: str, error: RefusedError) -> dict[str, Any]:
    """Return an error as the clients of a path read it."""
    text = str(error)
    if path.startswith(("/api/", "/v1/messages")) and error.field is not None and error.field not in text:
        text = f"{error.field}: {text}"  # these dialects have no place for it
    if path.startswith("/api/"):
        return {"error": text}
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": {"type": _ANTHROPICS_KINDS.get(error.status, "api_error"), "message": text}}
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    code = "model_not_found" if error.status == 404 else None
    return {"error": {"message": text, "type": kind, "param": error.field, "code": code}}


def error_reply(path: str, error: RefusedError, headers: Mapping[str, str] | None = None) -> Response:
    """Return the reply to a request that is refused."""
    return JSONResponse(error_body(path, error), error.status, headers)


async def reply(request: Request, answers: Answers, writer: Writer, *, streams: bool) -> Response:
    """Return the reply that has some answers: whole, or as they grow.

    A stream waits :data:`BEAT_SECONDS` for the first event of each answer, so that the reply to a request that is
    refused at once has the status of its error. Later errors are part of the stream.
    """
    if not streams:
        return JSONResponse(writer.whole(await collect(request, answers)))
    began = time.monotonic()
    try:
        with contextlib.suppress(asyncio.TimeoutError):
            await while_connected(request.receive, asyncio.wait_for(answers.begin(), BEAT_SECONDS))
    except BaseException:
        answers.leave()
        raise
    return Stream(request.url.path, answers, writer, began)


class Stream(StreamingResponse):
    """A reply in parts, which ends when its client leaves."""

    def __init__(self, path: str, answers: Answers, writer: Writer, began: float) -> None:
        self._path, self._answers, self._writer, self._sent_at = path, answers, writer, began
        super().__init__(self._parts(), media_type=writer.media_type, headers={"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._wake_for_beat()
        try:
            await while_connected(receive, self.stream_response(send))
        except ClientDisconnect:
            log.info("a client left, or stopped reading, before its answer was complete")
        finally:
            self._timer.cancel()
            self._answers.leave()

    def _wake_for_beat(self) -> None:
        self._answers.wake()
        left = self._sent_at + BEAT_SECONDS - time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(left if left > 0 else BEAT_SECONDS, self._wake_for_beat)

    async def _parts(self) -> AsyncIterator[bytes]:
        """Yield the parts, with beats by the clock: a pass may take minutes.

        Of two reports of the same work within a short time, only the first is sent.
        """
        for part in self._writer.begin():
            self._sent_at = time.monotonic()
            yield part
        stage, reported = None, 0.0
        while self._answers.open:
            now = time.monotonic()
            if (found := self._answers.take()) is None:
                if now - self._sent_at < BEAT_SECONDS:
                    await self._answers.wait()
                else:
                    self._sent_at = now
                    yield self._writer.beat()
                continue
            number, event = found
            if isinstance(event, Progress):
                if event.stage == stage and now - reported < PROGRESS_SECONDS:
                    continue
                stage, reported = event.stage, now
            elif isinstance(event, Failed):
                yield self._writer.fail(self._path, event.error)
                return
            for part in self._writer.write(number, event):
                if not part.startswith(COMMENT):
                    self._sent_at = now
                yield part


async def while_connected(receive: Callable[[], Awaitable[object]], work: Awaitable[T]) -> T:
    """Return the result of some work for a client whose request is read completely."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Callable[[], Awaitable[object]]) -> None:
    while True:
        message = await receive()
        if isinstance(message, dict) and message["type"] == "http.disconnect":
            return

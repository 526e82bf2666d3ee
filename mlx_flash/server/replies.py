"""Replies of dialects: whole ones, streams of events, and clients that leave in between."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_flash.server.answer import Answer
from mlx_flash.server.events import End, Event, Failed, Piece, TokenDetail, ToolCall

_log = logging.getLogger("mlx_flash")

T = TypeVar("T")


class ClientLeftError(ConnectionError):
    """The client closed its connection before its answer was complete."""


@dataclass
class Whole:
    """A complete answer.

    Attributes:
        text, reasoning: its text.
        calls: tool calls.
        tokens: details of its tokens, where they were asked for.
        end: its end.
    """

    end: End
    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[TokenDetail] = field(default_factory=list)


async def collect(answer: Answer) -> Whole:
    """Return a complete answer.

    Raises:
        RefusedError: it failed.
    """
    parts: dict[str, list[str]] = {"text": [], "reasoning": []}
    calls: list[ToolCall] = []
    tokens: list[TokenDetail] = []
    async for event in answer:
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, End):
            return Whole(event, "".join(parts["text"]), "".join(parts["reasoning"]), calls, tokens)
        if isinstance(event, Piece):
            parts[event.kind].append(event.text)
            tokens += event.tokens
        elif isinstance(event, ToolCall):
            calls.append(event)
    raise ClientLeftError("the answer was left")


async def collect_all(request: Request, answers: Sequence[Answer]) -> list[Whole]:
    """Return complete answers to a client that waits for all of them.

    Raises:
        RefusedError: one failed. The others are ended.
        ClientLeftError: the client has left.
    """
    try:
        return await while_connected(request.receive, asyncio.gather(*map(collect, answers)))
    finally:
        for answer in answers:
            answer.leave()


async def opened(request: Request, answer: Answer) -> AsyncIterator[Event]:
    """Return the events of an answer once the first one is there, before a stream of them begins.

    Raises:
        RefusedError: the request was refused: the reply can have its status.
        ClientLeftError: the client has left.
    """
    events = aiter(answer)
    try:
        first = await while_connected(request.receive, anext(events))
        if isinstance(first, Failed):
            raise first.error
    except BaseException:
        answer.leave()
        raise
    return _after(first, events)


async def opened_all(request: Request, answers: Sequence[Answer]) -> list[AsyncIterator[Event]]:
    """Return the events of several answers once the first one of each is there.

    Raises:
        RefusedError, ClientLeftError: as :func:`opened`. All answers are ended.
    """
    try:
        return [await opened(request, answer) for answer in answers]
    except BaseException:
        for answer in answers:
            answer.leave()
        raise


async def _after(first: Event, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    yield first
    async for event in events:
        yield event


async def merged(answers: Sequence[AsyncIterator[Event]]) -> AsyncIterator[tuple[int, Event]]:
    """Yield the events of several answers as they come, each with the number of its answer."""
    if len(answers) == 1:  # most requests: no task for each event
        async for event in answers[0]:
            yield 0, event
        return
    tasks = {asyncio.ensure_future(anext(events)): (i, events) for i, events in enumerate(answers)}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: tasks[task][0]):
                i, events = tasks.pop(task)
                if task.exception() is None:
                    tasks[asyncio.ensure_future(anext(events))] = (i, events)
                    yield i, task.result()
                elif not isinstance(task.exception(), StopAsyncIteration):
                    task.result()
    finally:
        for task in tasks:
            task.cancel()


class Stream(Response):
    """A reply in parts, which ends when its client leaves.

    Args:
        parts: the parts.
        answers: what they are made from; left when the stream ends in any way.
        media_type: of the whole.
    """

    def __init__(self, parts: AsyncIterator[bytes], answers: Sequence[Answer], media_type: str) -> None:
        super().__init__(status_code=200, media_type=media_type, headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._parts = parts
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the parts."""
        try:
            await while_connected(receive, self._send(send))
        except ClientLeftError:
            _log.info("a client left, or stopped reading, before its answer was complete")
        finally:
            for answer in self._answers:
                answer.leave()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive: Callable[[], Awaitable[object]], work: Awaitable[T]) -> T:
    """Return the result of some work for a client whose request is read completely.

    Raises:
        ClientLeftError: the client has left. The work is cancelled.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeftError("the client closed its connection")
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

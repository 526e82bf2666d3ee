"""The way of an answer from the generation thread to the event loop of its client."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable

from mlx_flash.errors import RefusedError
from mlx_flash.server.events import CallArguments, End, Event, Failed, Piece, Progress

MAX_EVENTS = 256
"""Events that may wait for a client. Further pieces of text are joined to the last one, so that none is lost."""


class Answer:
    """An asynchronous stream of events. It ends after ``End`` or ``Failed``.

    Made in the event loop of the client. :meth:`put` belongs to the generation thread, everything else to the loop.

    Args:
        on_leave: called when the client has left before the end.

    Attributes:
        is_over: the last event was taken, or the client has left.
    """

    def __init__(self, on_leave: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._on_leave = on_leave
        self.is_over = False

    def put(self, event: Event) -> None:
        """Send an event. Never blocks."""
        with self._lock:
            is_awaited = not self._events  # otherwise the loop is awake already
            if len(self._events) >= MAX_EVENTS and (joined := _joined(self._events[-1], event)) is not None:
                self._events[-1] = joined
            else:
                self._events.append(event)
        try:
            if is_awaited:
                self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:  # the loop is closed, and the client with it
            self._events.clear()

    def leave(self) -> None:
        """End the answer, because its client has left. Harmless after its end."""
        if not self.is_over:
            self.is_over = True
            self._on_leave()

    async def refusal(self, seconds: float) -> RefusedError | None:
        """Wait for the first event, at most so long. Return its error, if it is one."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), seconds)
        with self._lock:
            first = self._events[0] if self._events else None
        return first.error if isinstance(first, Failed) else None

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield the events. Whoever stops early calls :meth:`leave`."""
        while not self.is_over:
            event = await self._next()
            self.is_over = self.is_over or isinstance(event, End | Failed)
            yield event

    async def _next(self) -> Event:
        while True:
            with self._lock:
                if self._events:
                    return self._events.popleft()
                self._arrived.clear()
            await self._arrived.wait()


def _joined(last: Event, event: Event) -> Event | None:
    """Return an event that replaces two; None if both have to stay."""
    if isinstance(last, Progress) and isinstance(event, Progress):
        return event
    if isinstance(last, Piece) and isinstance(event, Piece) and last.kind == event.kind:
        return Piece(last.text + event.text, last.kind, last.tokens + event.tokens)
    if isinstance(last, CallArguments) and isinstance(event, CallArguments):
        return CallArguments(last.text + event.text)
    return None

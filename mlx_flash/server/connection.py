"""A connection of a client: uvicorn's, with deadlines and a limit."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 512
"""The most open connections."""

REQUEST_SECONDS = 30.0
"""The longest time from a connection, or the first byte of another request, to the end of the request's body."""

SEND_SECONDS = 60.0
"""The longest time that a client may leave what was sent to it unread."""


class Connection(H11Protocol):
    """A connection that ends when its request is late, when its client reads nothing, or when there are too many."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, unless there are too many connections."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._expect_request()

    def data_received(self, data: bytes) -> None:
        """Read on. Another request on the same connection has a deadline of its own."""
        if self._late is None and self._is_reading:
            self._expect_request()
        super().data_received(data)

    def on_response_complete(self) -> None:
        """End the deadline of the request that was answered. The next one may have come, in part, before."""
        if self._late is not None:
            self._late.cancel()
            self._late = None
        super().on_response_complete()
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete:
            self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the deadlines."""
        for timer in (self._late, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Wait for the client to read, for a limited time."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(SEND_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on, since the client reads."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    @property
    def _is_reading(self) -> bool:
        """True while a request is not complete."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _expect_request(self) -> None:
        self._late = self.loop.call_later(REQUEST_SECONDS, self._end_if_late)

    def _end_if_late(self) -> None:
        self._late = None
        if self._is_reading:
            self.transport.abort()

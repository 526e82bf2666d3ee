"""Events of an answer with few reports of progress, for dialects that send each of them to the client."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from mlx_flash.server.events import Event, Progress

INTERVAL_SECONDS = 0.5
"""The least time between two reports of the same work."""


async def paced(events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    """Yield events, and of reports of the same work only those that come some time after the last one."""
    stage, sent = None, 0.0
    async for event in events:
        if isinstance(event, Progress):
            now = time.monotonic()
            if event.stage == stage and now - sent < INTERVAL_SECONDS:
                continue
            stage, sent = event.stage, now
        yield event

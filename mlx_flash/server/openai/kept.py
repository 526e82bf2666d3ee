"""Conversations of earlier responses, for requests that go on from one."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from mlx_flash.errors import RefusedError

KEPT_SECONDS = 3600.0
"""The time that a conversation is kept after its last response."""

MAX_KEPT_BYTES = 64 << 20
"""The most bytes of all conversations, as JSON. The oldest ones leave first."""


class KeptResponses:
    """Conversations in memory, by the number of their last response, the oldest one first."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, list[dict[str, Any]], int]] = {}

    def keep(self, name: str, messages: Sequence[dict[str, Any]]) -> None:
        """Keep a conversation for a time, if it is not too long.

        Args:
            name: number of the response that ends it.
            messages: all of it, as chat templates take them, without instructions.
        """
        self._kept[name] = time.monotonic(), list(messages), len(json.dumps(messages))
        oldest = time.monotonic() - KEPT_SECONDS
        total = sum(nbytes for _, _, nbytes in self._kept.values())
        for other, (kept_at, _, nbytes) in list(self._kept.items()):
            if kept_at < oldest or total > MAX_KEPT_BYTES:
                del self._kept[other]
                total -= nbytes

    def messages(self, name: str) -> list[dict[str, Any]]:
        """Return a conversation.

        Raises:
            RefusedError: it is not kept, or not any more.
        """
        kept_at, messages, _ = self._kept.get(name, (-KEPT_SECONDS, [], 0))
        if kept_at < time.monotonic() - KEPT_SECONDS or not messages:
            raise RefusedError(
                f"the response {name!r} is not kept here: responses without `store: false` are, for "
                f"{KEPT_SECONDS / 60:.0f} minutes, until the server ends. Hint: send the whole conversation as input.",
                404,
                "previous_response_id",
            )
        return messages

"""A count of the tasks that may write to a buffer."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError

_POLL_SECONDS = 0.0002


class Gate:
    """A counter of the tasks that may write to a buffer, until it is shut. It is light, since every ticket has one."""

    __slots__ = ("_is_shut", "_lock", "_num_inside")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._is_shut = False

    def __enter__(self) -> None:
        with self._lock:
            if self._is_shut:
                raise CancelledError
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1

    def shut(self) -> None:
        """Keep new tasks out, and wait until those inside have left.

        There is no event to wait for: an interrupt may leave the lock of one held.
        """
        with self._lock:
            self._is_shut = True
        while self._num_inside:
            time.sleep(_POLL_SECONDS)

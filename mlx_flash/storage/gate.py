"""A count of the tasks that may write to a buffer."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError


class Gate:
    """A counter of the tasks that may write to a buffer, until it is shut. It is light, since every ticket has one."""

    __slots__ = ("_empty", "_lock", "_num_inside")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._empty: threading.Event | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._empty is not None:
                raise CancelledError
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._empty is not None and not self._num_inside:
                self._empty.set()

    def shut(self) -> None:
        """Keep new tasks out, and wait until those inside have left."""
        with self._lock:
            if self._empty is None:
                self._empty = threading.Event()
            if not self._num_inside:
                self._empty.set()
        self._empty.wait()

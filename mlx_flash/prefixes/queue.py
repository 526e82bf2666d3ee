"""Work that a thread does behind the caller's back, as much of it as a number of bytes allows."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class WriteQueue:
    """Pieces of work with names, done one after another in a thread that begins with the first of them.

    Threads may use a queue at the same time.

    Args:
        limit: the most bytes that may wait or be worked on.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pending: dict[str, int] = {}
        self._work: deque[tuple[str, Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def __contains__(self, name: str) -> bool:
        with self._changed:
            return name in self._pending

    @property
    def nbytes(self) -> int:
        """Bytes that wait or are worked on."""
        with self._changed:
            return sum(self._pending.values())

    def reserve(self, name: str, nbytes: int, *, waits: bool = False) -> bool:
        """Sets room aside for work, which has to be submitted or given up; ``waits`` for it where it can be had.

        Returns:
            Whether there is room, and nothing of that name.
        """
        with self._changed:
            if waits and nbytes <= self._limit:
                self._changed.wait_for(lambda: self._is_closed or self.nbytes + nbytes <= self._limit)
            if self._is_closed or name in self._pending or self.nbytes + nbytes > self._limit:
                return False
            self._pending[name] = nbytes
            return True

    def give_up(self, name: str) -> None:
        """Gives back room that was set aside."""
        with self._changed:
            del self._pending[name]
            self._changed.notify_all()

    def submit(self, name: str, work: Callable[[], None]) -> None:
        """Has work done for which there is room."""
        with self._changed:
            self._work.append((name, work))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="mlx-flash-prefixes", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until all is done. Returns whether it is, after so many seconds at most."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout)

    def close(self) -> None:
        """Takes nothing more, waits until all is done, and ends the thread. Again does nothing."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self.flush()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while (item := self._next()) is not None:
                name, work = item
                work()
                self.give_up(name)
                del item, work  # it holds the bytes
        finally:
            with self._changed:  # after an error that nobody expected nothing may wait for this thread
                self._pending.clear()
                self._work.clear()
                self._changed.notify_all()

    def _next(self) -> tuple[str, Callable[[], None]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._work or (self._is_closed and not self._pending))
            return self._work.popleft() if self._work else None

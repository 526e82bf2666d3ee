"""Threads that work for others. They see no MLX object: MLX's streams belong to threads."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from mlx_flash.forks import THREAD_PREFIX, finalize

T = TypeVar("T")


class Workers(Generic[T]):
    """Threads that serve one queue. Work is in it once for each thread that may do it; None ends a thread.

    They do not keep their owner, whose method works and handles all errors, and end with it.
    """

    def __init__(self, name: str, number: int, work: Callable[[T], None]) -> None:
        self.queue: SimpleQueue[T | None] = SimpleQueue()
        self.are_started = False
        self._name, self._number, self._work = f"{THREAD_PREFIX}-{name}", number, weakref.WeakMethod(work)
        self._threads: list[threading.Thread] = []
        finalize(self, _end, self.queue, number)  # also of one that an interrupt has hidden

    def start(self) -> None:
        """Start the threads, once. They end with Python if nobody ends them before."""
        while len(self._threads) < self._number:
            thread = threading.Thread(target=_serve, args=(self.queue, self._work), name=self._name, daemon=True)
            thread.start()
            self._threads.append(thread)
        self.are_started = True

    def end(self) -> None:
        _end(self.queue, self._number)
        for thread in self._threads:
            thread.join()


def _end(queue: SimpleQueue[T | None], number: int) -> None:
    for _ in range(number):
        queue.put(None)


def _serve(queue: SimpleQueue[T | None], work_of: weakref.WeakMethod[Callable[[T], None]]) -> None:
    """Do the work in a queue until None comes, or nobody owns it."""
    while (what := queue.get()) is not None and (work := work_of()) is not None:
        work(what)
        del what, work  # the buffer belongs to others

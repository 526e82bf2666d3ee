"""Threads that work for others, and their work. They see no MLX object: MLX's streams belong to threads."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from mlx_flash.forks import THREAD_PREFIX, finalize

T = TypeVar("T")


class Work:
    """Work for a thread. An interrupt of those who wait leaves no lock of it held, as it can one of a ``Future``."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.is_done = False
        self._work: Callable[[], object] | None = work
        self._error: BaseException | None = None
        self._under_way = threading.Lock()  # held until it has ended
        self._under_way.acquire()

    def run(self, error: BaseException | None = None) -> None:
        """Do it, unless there is a reason not to. In the thread that works."""
        work, self._work, self._error = self._work, None, error
        assert work is not None
        try:
            if error is None:
                work()
        except BaseException as found:  # noqa: BLE001 those who wait get it
            self._error = found
        finally:
            self.is_done, under_way = True, self._under_way
            del self, work, error  # the traceback refers to this frame
            under_way.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end, at most so many seconds where no signals arrive. Return whether it came."""
        if seconds is None:
            with self._under_way:
                return True
        if is_done := self._under_way.acquire(timeout=seconds):
            self._under_way.release()
        return is_done

    def failure(self) -> BaseException | None:
        """Wait for the end. Return the error of the work; None if there is none."""
        self.wait()
        return self._error


class Workers(Generic[T]):
    """Threads that serve one queue. Work is in it once for each thread that may do it; None ends a thread.

    They do not keep their owner, whose method works and handles all errors, and end with it.
    """

    def __init__(self, name: str, number: int, work: Callable[[T], None]) -> None:
        self.queue: SimpleQueue[T | None] = SimpleQueue()
        self.are_started = False
        self._name, self._number, self._work = f"{THREAD_PREFIX}-{name}", number, work
        self._threads: list[tuple[threading.Thread, threading.Lock]] = []  # a thread holds its lock until it ends
        finalize(self, _end, self.queue, number)  # also of one that an interrupt has hidden

    def start(self) -> None:
        """Start the threads, once. They end with Python if nobody ends them before."""
        while len(self._threads) < self._number:
            running = threading.Lock()
            running.acquire()
            arguments = self.queue, weakref.WeakMethod(self._work), running
            thread = threading.Thread(target=_serve, args=arguments, name=self._name, daemon=True)
            thread.start()
            self._threads.append((thread, running))
        self.are_started = True

    def end(self) -> None:
        _end(self.queue, self._number)
        for thread, running in self._threads:
            with running:  # after a `join` that an interrupt ended, Python 3.11 takes the thread for stopped
                thread.join()


def _end(queue: SimpleQueue[T | None], number: int) -> None:
    for _ in range(number):
        queue.put(None)


def _serve(
    queue: SimpleQueue[T | None], work_of: weakref.WeakMethod[Callable[[T], None]], running: threading.Lock
) -> None:
    """Do the work in a queue until None comes, or nobody owns it. Then release the lock."""
    try:
        while (what := queue.get()) is not None and (work := work_of()) is not None:
            work(what)
            del what, work  # the buffer belongs to others
    finally:
        running.release()

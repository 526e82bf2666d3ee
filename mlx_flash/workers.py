"""Threads that run tasks, which an interrupt of the thread that submits them cannot stop."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor


class Workers(ThreadPoolExecutor):
    """An executor that counts its idle threads without a lock.

    Python's semaphore for them is Python code, which an interrupt may end with its lock held: then every thread waits
    for it at the end of its task, and the next task is never submitted.
    """

    def __init__(self, most: int, name: str) -> None:
        super().__init__(most, thread_name_prefix=name)
        self._idle_semaphore = _IdleThreads()  # type: ignore[assignment]  # a name of Python's, from 3.9 on


class _IdleThreads:
    """The methods that an executor calls. Each has one step, the call of a deque's method, that changes anything."""

    def __init__(self) -> None:
        self._idle: deque[None] = deque()

    def acquire(self, timeout: float) -> bool:
        """Take an idle thread, if there is one; never wait."""
        try:
            self._idle.pop()
        except IndexError:
            return False
        return True

    def release(self) -> None:
        """Note that a thread is idle."""
        self._idle.append(None)

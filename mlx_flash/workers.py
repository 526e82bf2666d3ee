"""Threads that run tasks, which an interrupt of the thread that submits them cannot stop."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from typing import Any


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


class Job:
    """A task, to be submitted as :meth:`run`. To be waited for and cancelled in place of a future.

    Every use of a future takes its condition, which is Python code too: an interrupt may end it with the lock held, and
    then the thread that runs the task waits for ever.
    """

    def __init__(self, function: Callable[..., object], *args: Any) -> None:
        self._call: Callable[[], object] | None = partial(function, *args)
        self._owner: dict[str, str] = {}
        self._error: BaseException | None = None
        self._is_done = False
        self._under_way = threading.Lock()
        self._under_way.acquire()

    def _belongs_to(self, who: str) -> bool:
        """Return whether the job belongs to who runs it, or who cancels it: the first one that asks, in one step."""
        return self._owner.setdefault("owner", who) == who

    def run(self) -> None:
        """Run the task, once, unless it was cancelled. An error is kept for :meth:`result`."""
        call, self._call = self._call, None
        if call is None or not self._belongs_to("runner"):
            return
        try:
            call()
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._is_done = True
            self._under_way.release()
            del self, call  # the traceback of an error refers to them

    def cancel(self) -> bool:
        """Keep the task from running. Return False if it has begun."""
        return self._belongs_to("canceller")

    def done(self) -> bool:
        """Return whether the task ended, or was cancelled."""
        return self._is_done or self._owner.get("owner") == "canceller"

    def result(self) -> None:
        """Wait for the end of the task. Raises: CancelledError: it was cancelled; and what the task has raised."""
        if not self.done():
            with self._under_way:
                pass
        if self._error is not None:
            raise self._error
        if not self._is_done:
            raise CancelledError

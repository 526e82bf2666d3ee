"""Threads that run tasks, which an interrupt of the thread that submits them cannot stop."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from types import FunctionType, SimpleNamespace
from typing import Any, cast


class Workers(ThreadPoolExecutor):
    """An executor that starts its threads, and counts the idle ones, without Python's conditions.

    These are Python code, which an interrupt may end with its lock held. Then every thread waits for it at the end of
    its task, and the next task is never submitted; or a thread waits for it when it starts, and the process never ends.
    """

    def __init__(self, most: int, name: str) -> None:
        super().__init__(most, thread_name_prefix=name)
        self._idle_semaphore = _IdleThreads()  # type: ignore[assignment]  # a name of Python's, from 3.9 on

    def _adjust_thread_count(self) -> None:
        _adjust_thread_count(self)


class _Started:
    """The event that a thread has started, with the methods that Python's threads call. One thread waits for it."""

    def __init__(self) -> None:
        self._is_set = False
        self._news: SimpleQueue[None] = SimpleQueue()

    def is_set(self) -> bool:
        """Return whether the thread has started."""
        return self._is_set

    def set(self) -> None:
        """Note that it has."""
        self._is_set = True
        self._news.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it."""
        while not self._is_set:
            self._news.get(timeout=timeout)
        return True

    def _at_fork_reinit(self) -> None:
        self._news = SimpleQueue()


class _Thread(threading.Thread):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._started = _Started()


def _with_threads() -> Callable[[ThreadPoolExecutor], None]:
    """Return the method of Python's executor that starts threads, with threads of ours."""
    method = cast(FunctionType, cast(Any, ThreadPoolExecutor)._adjust_thread_count)
    names = {**method.__globals__, "threading": SimpleNamespace(Thread=_Thread)}
    return FunctionType(method.__code__, names, method.__name__, method.__defaults__, method.__closure__)


_adjust_thread_count = _with_threads()


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

    Each waiting thread has a queue of its own: it may be woken twice, and does not depend on others that wait.
    """

    def __init__(self, function: Callable[..., object], *args: Any) -> None:
        self._call: Callable[[], object] | None = partial(function, *args)
        self._owner: dict[str, str] = {}
        self._error: BaseException | None = None
        self._is_done = False
        self._waiting: list[SimpleQueue[None]] = []

    def _belongs_to(self, who: str) -> bool:
        """Return whether the job belongs to who runs it, or who cancels it: the first one that asks, in one step."""
        return self._owner.setdefault("owner", who) == who

    def run(self) -> None:
        """Run the task, once, unless it was cancelled. An error is kept for :meth:`result`."""
        call, self._call = self._call, None
        if call is None or not self._belongs_to("runner"):
            self._wake()  # an interrupt may have kept the canceller from it
            return
        try:
            call()
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._is_done = True
            self._wake()
            del self, call  # the traceback of an error refers to them

    def cancel(self) -> bool:
        """Keep the task from running. Return False if it has begun."""
        if not self._belongs_to("canceller"):
            return False
        self._call = None
        self._wake()
        return True

    def done(self) -> bool:
        """Return whether the task ended, or was cancelled."""
        return self._is_done or self._owner.get("owner") == "canceller"

    def result(self) -> None:
        """Wait for the end of the task. Raises: CancelledError: it was cancelled; and what the task has raised."""
        error = self.error()
        if error is not None:
            raise error

    def error(self) -> BaseException | None:
        """Wait for the end of the task. Return what :meth:`result` raises."""
        if not self.done():
            end: SimpleQueue[None] = SimpleQueue()
            self._waiting.append(end)
            while not self.done():  # the job ends first, and then wakes those that wait
                end.get()
        return self._error if self._is_done else CancelledError()

    def _wake(self) -> None:
        """Have all waiting threads look whether the job has ended. Harmless when repeated."""
        for end in self._waiting:
            end.put(None)


class InOrder:
    """A thread that runs jobs in the order in which they were submitted.

    An executor whose start of a thread was interrupted may have two threads, or a task less. So the order is that of a
    queue of our own, and each task runs all jobs in it.
    """

    def __init__(self, name: str) -> None:
        self._workers = Workers(1, name)
        self._jobs: deque[Job] = deque()
        self._one_runs = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """Number of jobs that have not begun."""
        return len(self._jobs)

    def submit(self, job: Job) -> None:
        """Run a job after those before it. An interrupt may leave it queued until the next one is submitted."""
        self._jobs.append(job)
        self._workers.submit(self._run)

    def close(self) -> None:
        """Cancel the jobs that have not begun, and end the thread."""
        self._cancel()
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._cancel()  # those that were submitted meanwhile

    def _cancel(self) -> None:
        """Cancel all jobs in the queue. They stay in it: after an interrupt here, the thread goes on with them."""
        for job in self._jobs.copy():
            job.cancel()

    def _run(self) -> None:
        with self._one_runs:
            while self._jobs:
                job = self._jobs.popleft()
                with suppress(BaseException):  # the job keeps it; an interrupted submit left no other task to go on
                    job.run()
                del job

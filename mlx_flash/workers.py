"""Threads that run tasks, which an interrupt of the thread that submits them cannot stop; and the ends of threads."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

_TASKS = Path("/proc/self/task")


def wait_for_end_of_thread(native_id: int | None) -> None:
    """Wait for a thread that Python has joined to end, at most 5 seconds.

    Before Python 3.13 it is still alive then. MLX's cache of compiled functions, one for each thread, is freed at its
    end and needs Python for that, which must not be ending meanwhile.
    """
    deadline = time.monotonic() + 5
    while native_id is not None and _TASKS.joinpath(str(native_id)).exists() and time.monotonic() < deadline:
        time.sleep(0.005)


@contextmanager
def joined_to_the_end() -> Iterator[None]:
    """Let ``Thread.join`` wait as :func:`wait_for_end_of_thread` does, in a program that joins threads of its own."""
    join = threading.Thread.join

    def join_to_the_end(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, timeout)
        if not thread.is_alive():
            wait_for_end_of_thread(thread.native_id)

    threading.Thread.join = join_to_the_end  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        threading.Thread.join = join  # type: ignore[method-assign]


class Workers:
    """A pool of threads that run tasks. Its threads start when they are needed, and end with it.

    Python's executors start their threads, and count the idle ones, with conditions. These are Python code, which an
    interrupt may end with its lock held: then the next task never runs, or the process never ends. Here each step that
    changes anything is one call of C code.

    Args:
        most: the most threads.
        name: of the threads.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle: deque[None] = deque()
        self._threads: list[_Thread] = []
        self._is_closed = False
        weakref.finalize(self, self._tasks.put, None)

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task, which raises nothing. An interrupt may leave it in the queue until the next one is submitted.

        Raises:
            RuntimeError: the pool was shut down.
        """
        if self._is_closed:
            raise RuntimeError(f"the threads {self._name} have ended")
        self._tasks.put(task)
        try:
            self._idle.pop()
        except IndexError:
            if len(self._threads) < self._most:
                thread = _Thread(self._name, self._tasks, self._idle)
                thread.start()
                self._threads.append(thread)

    def shutdown(self) -> None:
        """End the threads after the tasks that were submitted, and wait for that. Harmless when repeated."""
        self._is_closed = True
        self._tasks.put(None)
        for thread in self._threads:
            thread.join()


class _Thread(threading.Thread):
    """A thread of a pool. It refers to the queues of the pool alone, so that a pool that nobody uses ends."""

    def __init__(self, name: str, tasks: SimpleQueue[Callable[[], None] | None], idle: deque[None]) -> None:
        super().__init__(name=name, daemon=True)
        self._tasks, self._idle = tasks, idle
        self._started = _Started()  # a name of Python's

    def run(self) -> None:
        """Run tasks until the pool ends."""
        while (task := self._tasks.get()) is not None:
            task()
            del task
            self._idle.append(None)
        self._tasks.put(None)  # for the next thread


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
        except BaseException as error:  # noqa: BLE001 whoever waits for the job gets it
            self._error = error
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
        self.done_by(math.inf)
        return self._error if self._is_done else CancelledError()

    def done_by(self, moment: float) -> bool:
        """Wait for the end of the task up to a moment (``time.perf_counter()``). Return as :meth:`done` then."""
        if not self.done():
            end: SimpleQueue[None] = SimpleQueue()
            self._waiting.append(end)
            while not self.done() and (left := moment - time.perf_counter()) > 0:
                with suppress(Empty):
                    end.get(timeout=None if left == math.inf else left)  # the job ends first, and then wakes
        return self.done()

    def _wake(self) -> None:
        """Have all waiting threads look whether the job has ended. Harmless when repeated."""
        for end in self._waiting:
            end.put(None)


class InOrder:
    """A thread that runs jobs in the order in which they were submitted.

    A pool whose start of a thread was interrupted may have two threads, or a task that waits. So the order is that of
    another queue, and each task runs all jobs in it.
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
        self._workers.shutdown()
        self._cancel()  # those that were submitted meanwhile

    def _cancel(self) -> None:
        """Cancel all jobs in the queue. They stay in it: after an interrupt here, the thread goes on with them."""
        for job in self._jobs.copy():
            job.cancel()

    def _run(self) -> None:
        with self._one_runs:
            while self._jobs:
                self._jobs.popleft().run()

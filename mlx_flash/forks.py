"""Finalizers, which run in a thread of their own, in the process that made them; and the ends of other threads.

Python calls finalizers in any thread at any moment. In the main thread what a signal handler raises would end one half
way, and its work would be lost. In a reader of the model that is freed, closing that would wait for this very thread.
So the end of an object only puts something into a queue, which Python does without running any code between.

A forked child has the parent's objects, but runs none of their finalizers: it would remove files that the parent uses.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

THREAD_PREFIX = "mlx-flash"
"""Names of the threads of this package begin with it."""


_MOST_SECONDS = 5.0
"""Longest wait for finalizers. They take milliseconds, unless the disk does not answer."""


def reported(work: Callable[[], object]) -> None:
    """Do work that nobody waits for, whose error Python reports as that of a thread."""
    try:
        work()
    except BaseException:  # noqa: BLE001 the thread has more to do
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


class _End(weakref.ref[Any]):
    """A reference to an object, and what is left to do after its end."""

    __slots__ = ("work",)
    work: Callable[[], object]


class _Finalizers:
    """The thread, which is there from the first finalizer on."""

    def __init__(self) -> None:
        self.pending: dict[int, _End] = {}  # in the order of their making
        self.gone: SimpleQueue[_End] = SimpleQueue()  # may run
        self.threads: list[int] = []  # the thread
        self._starting = threading.Lock()

    def start(self) -> None:
        """Start the thread, if it does not run yet."""
        with self._starting, suppress(RuntimeError):  # from 3.12 on Python refuses it when it ends
            if not self.threads:  # noted in the step that starts it, between whose parts no signal handler runs
                self.threads.extend(map(start_new_thread, [self._serve], [()]))

    def _serve(self) -> None:
        while True:
            self.finish(self.gone.get())

    def finish(self, end: _End) -> None:
        """Do what is left to do, once."""
        if self.pending.pop(id(end), None) is not None:
            reported(end.work)


_of_process = _Finalizers()


def _forget() -> None:
    """Leave the finalizers to the parent: what its objects put into its queue in a child nobody takes out."""
    global _of_process
    _of_process = _Finalizers()


os.register_at_fork(after_in_child=_forget)


def finalize(owner: object, function: Callable[..., object], *args: Any) -> None:
    """Call a function once an object is gone, or Python ends. It may wait for no thread and no lock of this package.

    Its arguments must not refer to the object.
    """
    finalizers = _of_process
    finalizers.start()  # before: an interrupt here leaves no resource behind
    end = _End(owner, finalizers.gone.put)
    end.work = partial(function, *args)
    finalizers.pending[id(end)] = end


class _Owner:
    """An object that is gone at once."""


def wait_for_finalizers() -> None:
    """Wait until the finalizers of all objects that are gone have run, at most some seconds."""
    done: SimpleQueue[None] = SimpleQueue()
    finalize(_Owner(), done.put, None)
    if _of_process.threads:
        with suppress(Empty):
            done.get(timeout=_MOST_SECONDS)


def _end() -> None:
    """Finalize what is left, the last first. Models that end write pages, and those who write wait for the thread."""
    for end in reversed(list(_of_process.pending.values())):
        _of_process.finish(end)
    wait_for_finalizers()


atexit.register(_end)


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

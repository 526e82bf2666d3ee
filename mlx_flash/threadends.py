"""The ends of threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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

"""Finalizers that run only in the process that made them, and in no thread that they may wait for.

A forked child has the parent's objects, but not its threads. A child that ran the finalizers would remove files that
the parent still uses, or wait for ever. Python's collector runs finalizers in any thread, also in a reader of the
model that it frees: closing the reader there would wait for that very thread, or for a lock that it holds.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

THREAD_PREFIX = "mlx-flash"
"""Names of the threads of this package begin with it."""


def finalize(
    owner: object, function: Callable[..., object], *args: Any, waits: bool = False
) -> weakref.finalize[..., Any]:
    """Return a ``weakref.finalize`` that does nothing in a forked child.

    Args:
        owner: at its end the function is called.
        function: called with ``args``.
        waits: whether it waits for threads of this package. In one of them it is left to a new thread.
    """
    return weakref.finalize(owner, _run_in, os.getpid(), waits, function, *args)


def _run_in(pid: int, waits: bool, function: Callable[..., object], *args: Any) -> None:
    if os.getpid() != pid:
        return
    if waits and threading.current_thread().name.startswith(THREAD_PREFIX):
        threading.Thread(target=function, args=args, name=f"{THREAD_PREFIX}-finalizer").start()
    else:
        function(*args)

"""Finalizers that run only in the process that made them, and never in a thread that they wait for.

A forked child has the parent's objects, but not its threads. A child that ran the finalizers would remove files that
the parent still uses, or wait for ever. Python's collector runs a finalizer in whatever thread allocates memory, which
may be one that the finalizer ends.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

WORKERS = ("mlx-flash-reader", "mlx-flash-kv-writer", "mlx-flash-telemetry")
"""Names of the threads that finalizers end; numbers may follow."""


def finalize(owner: object, function: Callable[..., object], *args: Any) -> weakref.finalize[..., Any]:
    """Return a ``weakref.finalize`` that does nothing in a forked child, and leaves background threads at once."""
    return weakref.finalize(owner, _run_in, os.getpid(), function, *args)


def _run_in(pid: int, function: Callable[..., object], *args: Any) -> None:
    if os.getpid() != pid:
        return
    if threading.current_thread().name.startswith(WORKERS):
        threading.Thread(target=function, args=args, name="mlx-flash-closer").start()
    else:
        function(*args)

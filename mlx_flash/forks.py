"""Finalizers that run only in the process that made them.

A forked child has the parent's objects, but not its threads. A child that ran the finalizers would remove files that
the parent still uses, or wait for ever.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any


def finalize(owner: object, function: Callable[..., object], *args: Any) -> weakref.finalize[..., Any]:
    """Return a ``weakref.finalize`` that does nothing in a forked child."""
    return weakref.finalize(owner, _run_in, os.getpid(), function, *args)


def _run_in(pid: int, function: Callable[..., object], *args: Any) -> None:
    if os.getpid() == pid:
        function(*args)

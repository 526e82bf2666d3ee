"""Forked processes: a child leaves the files and threads of its parent alone, and cannot call the parent's models.

Threads do not survive ``os.fork()``. A child that waited for the reader's threads would hang, and a child that ran the
parent's finalizers would remove files that the parent still uses.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

from mlx_flash.errors import ClosedError


def _detach_finalizers() -> None:
    """Detach every finalizer of this package. Runs in each forked child."""
    registry: dict[weakref.finalize[..., Any], Any] = weakref.finalize._registry  # type: ignore[attr-defined]
    for finalizer in list(registry):
        alive = finalizer.peek()
        if alive is not None and (alive[1].__module__ or "").startswith("mlx_flash."):
            finalizer.detach()


os.register_at_fork(after_in_child=_detach_finalizers)


class Origin:
    """The process that made an object which owns threads or files."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """True in the process that made the object."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Refuse to go on in a forked child.

        Raises:
            ClosedError: this is not the process that made the object.
        """
        if not self.is_here:
            raise ClosedError(
                f"the model was loaded in process {self._pid}, and this is its fork {os.getpid()}, without the threads "
                "that read. Hint: load the model after the fork, or use the spawn method of multiprocessing."
            )

"""Signals that reach the main thread while it generates, and reads of weights that fail."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ALARM = "the caller's own alarm"


def struck(operation: Callable[[], None], kind: type[BaseException], delays: Sequence[float]) -> list[BaseException]:
    """Run an operation in the main thread, where signals raise an error after each delay. Return what surfaced.

    The system's timer sends them: a thread could only when the main thread gives Python's lock away. A signal that
    arrives in a callback of a weak reference ends only that, as Python has it.
    """
    errors: list[BaseException] = []
    unraisable: list[sys.UnraisableHookArgs] = []
    hook, left = sys.unraisablehook, iter(delays)

    def ring(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, next(left, 0))
        raise kind(ALARM)

    def run(levels: int) -> None:
        """Each level catches an error, also one that falls into what a level below does with another."""
        try:
            if levels:
                run(levels - 1)
            else:
                signal.setitimer(signal.ITIMER_REAL, next(left))
                operation()
        except BaseException as error:
            errors.append(error)
        signal.setitimer(signal.ITIMER_REAL, 0)

    before, timer = signal.signal(signal.SIGALRM, ring), signal.getitimer(signal.ITIMER_REAL)
    sys.unraisablehook = unraisable.append  # in which no signal can arrive
    run(len(delays) + 1)
    sys.unraisablehook = hook
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, *timer)  # pytest's own limit of time
    while unraisable:  # the collector does not look into them: in a frame of their tracebacks they would stay for ever
        if not is_ours(unraisable[-1].exc_value):
            hook(unraisable[-1])
        unraisable.pop()
    return errors


def is_ours(error: BaseException | None) -> bool:
    """Return whether an error is one that the handler of :func:`struck` raised."""
    return isinstance(error, KeyboardInterrupt | TimeoutError) and error.args == (ALARM,)


class Reads:
    """The reads of a folder's files: counts their bytes, and lets some fail."""

    KINDS = ("error", "end", "part")

    def __init__(self, folder: Path, pattern: str = "*.safetensors") -> None:
        self._files = {(status.st_dev, status.st_ino) for status in map(os.stat, folder.glob(pattern))}
        self._lock = threading.Lock()
        self._kind, self._first, self._last = "", 0, 0
        self.num_reads = 0
        self.nbytes = 0
        self.num_failed = 0

    @contextlib.contextmanager
    def watched(self, kind: str = "", first: int = 0, count: int = 0) -> Iterator[Reads]:
        """Count bytes as long as the block lasts, and let ``count`` reads fail from the ``first`` on.

        ``kind`` is an ``error`` of the disk, the ``end`` of the file, or only a ``part`` of the bytes.
        """
        self._kind, self._first, self._last, self.num_reads, self.nbytes = kind, first, first + count, 0, 0
        real = os.preadv, os.pread
        os.preadv, os.pread = (self._wrapped(function) for function in real)
        try:
            yield self
        finally:
            os.preadv, os.pread = real

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def read(descriptor: int, what: Any, *rest: Any) -> Any:
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) not in self._files:
                return function(descriptor, what, *rest)
            with self._lock:
                self.num_reads += 1
                fails = self._first < self.num_reads <= self._last
                self.num_failed += fails
            if fails and self._kind == "error":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if fails and self._kind == "end":
                return 0 if isinstance(what, Sequence) else b""
            found = function(descriptor, what, *rest)
            if fails and isinstance(found, int) and found > 8192:
                found = found // 8192 * 4096
            with self._lock:
                self.nbytes += found if isinstance(found, int) else len(found)
            return found

        return read

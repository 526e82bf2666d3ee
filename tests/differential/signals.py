"""Signals that reach the main thread while it generates, and reads of weights that fail."""

from __future__ import annotations

import contextlib
import errno
import functools
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ALARM = "the caller's own alarm"


PROGRAM = """
import mmap, os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
shared, parent = mmap.mmap(int(sys.argv[1]), 16), os.getppid()
for line in sys.stdin:
    order, number, *delays = line.split()
    order = int(order).to_bytes(8, "little")
    for delay in map(float, delays):
        end = time.perf_counter() + delay
        while (left := end - time.perf_counter()) > 0 and shared[:8] != order:
            if left > 2e-4:
                time.sleep(min(left - 1e-4, 1e-3))
        if shared[:8] == order:
            break
        os.kill(parent, int(number))
    shared[8:] = order
"""


class Killer:
    """A process that sends signals to this one: a thread could only when the main thread gives Python's lock away."""

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as file:
            file.truncate(16)
            self._shared = mmap.mmap(file.fileno(), 16)
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(file.fileno())], stdin=subprocess.PIPE, pass_fds=[file.fileno()]
            )
        self._number = 0

    def prepared(self, signal_number: int, delays: Sequence[float]) -> bytes:
        """Return an order to send a signal after each of some delays, as :meth:`begin` takes it."""
        self._number += 1
        return " ".join(map(str, [self._number, signal_number, *delays])).encode() + b"\n"

    def begin(self, order: bytes) -> None:
        """Begin to send signals."""
        assert self._process.stdin is not None
        os.write(self._process.stdin.fileno(), order)

    def end(self) -> None:
        """Wait until no more signals come. It may be interrupted, and called again."""
        order = self._number.to_bytes(8, "little")
        self._shared[:8] = order
        while self._shared[8:] != order:
            time.sleep(1e-4)
        time.sleep(5e-4)  # the last one is delivered


@functools.cache
def killer() -> Killer:
    """Return the process of all trials. It ends with this one."""
    return Killer()


def _ring(*_: object) -> None:
    raise TimeoutError(ALARM)


def struck(operation: Callable[[], None], number: int, delays: Sequence[float]) -> list[BaseException]:
    """Run an operation in the main thread while signals arrive. Return the errors that surfaced.

    A signal that arrives in a finalizer ends only that, as Python has it.
    """
    errors: list[BaseException] = []
    hook, order = sys.unraisablehook, killer().prepared(number, delays)
    before = signal.signal(number, signal.default_int_handler if number == signal.SIGINT else _ring)
    sys.unraisablehook = lambda event: None if is_ours(event.exc_value) else hook(event)

    def run(levels: int) -> None:
        """Each level catches an error, also one that falls into what a level below does with another."""
        try:
            if levels:
                run(levels - 1)
            else:
                killer().begin(order)
                operation()
        except BaseException as error:
            errors.append(error)
        killer().end()

    run(len(delays) + 1)
    sys.unraisablehook = hook
    signal.signal(number, before)
    return errors


def is_ours(error: BaseException | None) -> bool:
    """Return whether an error is one that a handler of :func:`struck` raised."""
    return type(error) is KeyboardInterrupt or (type(error) is TimeoutError and error.args == (ALARM,))


class Reads:
    """The reads of some files: counts their bytes, and lets some fail.

    Args:
        folder: the files.

    Attributes:
        nbytes: bytes read.
        num_reads: calls.
        num_failed: reads that failed.
    """

    KINDS = ("error", "end", "part")

    def __init__(self, folder: Path) -> None:
        self._files = {(status.st_dev, status.st_ino) for status in map(os.stat, folder.glob("*.safetensors"))}
        self._lock = threading.Lock()
        self._kind, self._first, self._last = "", 0, 0
        self.num_reads = 0
        self.nbytes = 0
        self.num_failed = 0

    @contextlib.contextmanager
    def watched(self, kind: str = "", first: int = 0, count: int = 0) -> Iterator[Reads]:
        """Count bytes as long as the block lasts, and let some reads fail.

        Args:
            kind: an ``error`` of the disk, the ``end`` of the file, or only a ``part`` of the bytes.
            first: number of the read that fails.
            count: reads that fail.
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

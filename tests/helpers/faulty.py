"""Disks that fail, and what is left behind: files, descriptors and threads."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlx_flash import enginethread
from mlx_flash.forks import THREAD_PREFIX, wait_for_finalizers
from mlx_flash.storage import prefetcher as prefetcher_module

CREATING = ("mkdir", "open", "replace", "rename", "ftruncate", "truncate", "pwrite", "write", "sendfile", "fsync")
"""Functions of ``os`` that write. All but the last need room on the disk."""

CHANGING = (*CREATING, "utime", "unlink", "rmdir", "chmod")
"""Functions of ``os`` that fail on a disk that cannot be written to."""


class FailingDisk:
    """Writing calls of this process, which are counted, and fail from the first of some number on, once or always.

    With ``needs_room``, only calls that need room on the disk are counted: ENOSPC and EDQUOT leave others alone.
    """

    def __init__(self, code: int = 0, first: int = 1 << 30, *, always: bool = False, needs_room: bool = False) -> None:
        self.count = 0
        self._error = code
        self._first = first
        self._always = always
        self._names = CREATING if needs_room else CHANGING
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def mounted(self) -> Iterator[FailingDisk]:
        """Replace the functions of ``os``, and ``open``, as long as the block lasts."""
        real = {name: getattr(os, name) for name in self._names}
        real_open = io.open
        try:
            for name, function in real.items():
                setattr(os, name, self._wrapped(function, _writes if name == "open" else lambda *_: True))
            io.open = self._wrapped(real_open, _is_for_writing)
            yield self
        finally:
            io.open = real_open
            for name, function in real.items():
                setattr(os, name, function)

    def _wrapped(self, function: Callable[..., Any], counts: Callable[..., bool]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            if counts(*args, *keywords.values()) and self._fails():
                raise OSError(self._error, os.strerror(self._error))
            return function(*args, **keywords)

        return call

    def _fails(self) -> bool:
        with self._lock:
            self.count += 1
            return self.count > self._first if self._always else self.count == self._first + 1


def _writes(path: object, flags: int, *_: object) -> bool:
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _is_for_writing(file: object, mode: str = "r", *_: object) -> bool:
    return not isinstance(file, int) and any(letter in mode for letter in "wax+")


def open_things() -> tuple[int, list[str]]:
    """Return the number of open descriptors, and the names of our threads, after the finalizers of what is gone."""
    for _ in range(2):  # they may leave garbage
        gc.collect()
        wait_for_finalizers()
        enginethread.run(int)
    threads = [thread.name for thread in threads_of_models()]
    return len(list(Path("/dev/fd").iterdir())), threads


def open_in_the_end(expected: tuple[int, list[str]]) -> tuple[int, list[str]]:
    """Return what :func:`open_things` does once it is as expected, or after some seconds.

    MLX's own threads close the files of lazily loaded arrays a little after the last reference has gone.
    """
    end = time.monotonic() + 5
    while (found := open_things()) != expected and time.monotonic() < end:
        time.sleep(0.01)
    return found


def unfinished(folder: Path) -> list[Path]:
    """Return the files and folders in a folder that a writer should have completed or removed.

    Telemetry of a running process is left out: who looks after its end removes what it could not remove itself.
    """
    found = [
        path for path in folder.rglob("*") if ".partial" in path.name or path.name.startswith("mlx-flash-session-")
    ]
    return [path for path in found if not path.name.startswith(f"{os.getpid()}-")]


def threads_of_models() -> list[threading.Thread]:
    """Return the threads that end with models: all but the engine thread, which stays for the next ones."""
    return [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith(THREAD_PREFIX) and thread.name != f"{THREAD_PREFIX}-engine"
    ]


Preadv = Callable[[int, Sequence[memoryview], int], int]


class Disk:
    """The disk, as it is made to behave."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_broken = False
        self.gate = threading.Event()
        self.gate.set()
        self.real: Preadv = os.preadv
        monkeypatch.setattr(prefetcher_module.os, "preadv", self.preadv)
        monkeypatch.setattr(prefetcher_module, "RETRY_SECONDS", 0)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.gate.wait(20)
        if self.is_broken:
            raise OSError(errno.EIO, "Input/output error")
        return self.real(fd, buffers, offset)

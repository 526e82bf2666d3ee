from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence

import pytest

from mlx_flash.storage import ranges as ranges_module

Preadv = Callable[[int, Sequence[memoryview], int], int]


class Disk:
    """The disk, as it is made to behave."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_broken = False
        self.gate = threading.Event()
        self.gate.set()
        self.real: Preadv = os.preadv
        monkeypatch.setattr(ranges_module.os, "preadv", self.preadv)
        monkeypatch.setattr(ranges_module, "RETRY_SECONDS", 0)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.gate.wait(20)
        if self.is_broken:
            raise OSError(errno.EIO, "Input/output error")
        return self.real(fd, buffers, offset)

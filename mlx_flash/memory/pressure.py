"""Memory of the machine as a budget that follows it needs it: how much is free, and whether tasks wait for some.

In a container the limit of its control group counts as the machine.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from mlx_flash.memory.footprint import available_memory, group_folders, total_memory

FREE_SHARE = 0.1
"""Share of the machine that stays free for others."""

MOST_SHARE = 0.8
"""The most that a budget takes of the machine."""

_PRESSURE = Path("/proc/pressure/memory")
_DARWIN_LEVELS = {1: 0.0, 2: 0.3, 4: 1.0}
"""Normal, warning and critical."""

_DARWIN_FREE = ("vm.page_free_count", "vm.page_purgeable_count", "vm.page_pageable_external_count")


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """One look at the memory of the machine.

    Attributes:
        total: bytes of memory.
        available: bytes that can be taken now without swapping.
        pressure: share of the last ten seconds in which tasks waited for memory.
    """

    total: int
    available: int
    pressure: float = 0.0

    def room(self, held: int) -> int:
        """Return the bytes that a process may have which holds some already."""
        return max(0, min(int(self.total * MOST_SHARE), held + self.available - int(self.total * FREE_SHARE)))


def read_memory() -> MemoryReading:
    """Look at the memory of the machine now."""
    if sys.platform == "darwin":
        return darwin_reading(_sysctl)
    files = [_PRESSURE, *(group / "memory.pressure" for group in group_folders())]
    return MemoryReading(total_memory(), available_memory(), linux_pressure(files))


def linux_pressure(files: Iterable[Path]) -> float:
    """Return the highest share of time in which tasks waited for memory, from files of PSI. Some may be missing."""
    highest = 0.0
    for file in files:
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue  # an old kernel, a kernel without PSI, or another version of control groups
        averages = [line.split()[1] for line in lines if line.startswith("some ")]
        highest = max([highest, *(float(average.removeprefix("avg10=")) / 100 for average in averages)])
    return highest


def darwin_reading(sysctl: Callable[[str], int]) -> MemoryReading:
    """Return the memory of a Mac.

    Args:
        sysctl: returns the value of a name.
    """
    available = sum(map(sysctl, _DARWIN_FREE)) * sysctl("hw.pagesize")
    level = sysctl("kern.memorystatus_vm_pressure_level")
    return MemoryReading(sysctl("hw.memsize"), available, _DARWIN_LEVELS.get(level, 1.0))


def _sysctl(name: str) -> int:
    value, size = ctypes.c_uint64(0), ctypes.c_size_t(8)  # little-endian: a shorter value fills the low bytes
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0) != 0:
        raise OSError(ctypes.get_errno(), f"sysctlbyname({name}) failed")
    return int(value.value)

"""Memory of the machine as a budget that follows it needs it: how much is free, and whether tasks wait for some.

In a container the limit of its control group counts as the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from mlx_flash.memory.footprint import available_memory, group_folders, total_memory
from mlx_flash.memory.kernel import DARWIN_LEVEL, DARWIN_LEVELS, PRESSURE, linux_pressure, sysctl

FREE_SHARE = 0.1
"""Share of the machine that stays free for others."""

MOST_SHARE = 0.8
"""The most that a budget takes of the machine."""

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
        return darwin_reading(sysctl)
    files = [PRESSURE, *(group / "memory.pressure" for group in group_folders())]
    return MemoryReading(total_memory(), available_memory(), linux_pressure(files))


def darwin_reading(sysctl: Callable[[str], int]) -> MemoryReading:
    """Return the memory of a Mac.

    Args:
        sysctl: returns the value of a name.
    """
    available = sum(map(sysctl, _DARWIN_FREE)) * sysctl("hw.pagesize")
    return MemoryReading(sysctl("hw.memsize"), available, DARWIN_LEVELS.get(sysctl(DARWIN_LEVEL), 1.0))

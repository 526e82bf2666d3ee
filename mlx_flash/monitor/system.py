"""Memory and memory pressure of the machine."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

_PRESSURE = Path("/proc/pressure/memory")
_DARWIN_LEVELS = {1: "normal", 2: "warning", 4: "critical"}


@dataclass(frozen=True, slots=True)
class SystemMemory:
    """Memory of the machine, in bytes.

    Attributes:
        total, available: main memory.
        swap_total, swap_used: swap space.
        pressure: in words; None where the system reports none.
    """

    total: int
    available: int
    swap_total: int
    swap_used: int
    pressure: str | None


def system_memory() -> SystemMemory:
    """Return the memory now."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    return SystemMemory(int(memory.total), int(memory.available), int(swap.total), int(swap.used), pressure())


def pressure() -> str | None:
    """Return the kernel's level on macOS; on Linux the shares of ten seconds that some, and all, tasks waited."""
    if sys.platform == "darwin":
        return _darwin_pressure()
    return _linux_pressure() if sys.platform == "linux" else None


def _linux_pressure() -> str | None:
    try:
        lines = _PRESSURE.read_text().splitlines()
    except OSError:  # the kernel has no such counters, or they are switched off
        return None
    shares = []
    for line in lines:
        kind, *fields = line.split()
        shares.append(f"{kind} {float(dict(field.split('=') for field in fields)['avg10']):.0f}%")
    return " ".join(shares)


def _darwin_pressure() -> str | None:
    level, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    name = b"kern.memorystatus_vm_pressure_level"
    if ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(level), ctypes.byref(size), None, 0) != 0:
        return None
    return _DARWIN_LEVELS.get(level.value)

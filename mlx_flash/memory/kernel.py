"""Numbers of the kernel about memory. Importing this does not import MLX, which takes seconds."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from pathlib import Path

PRESSURE = Path("/proc/pressure/memory")

DARWIN_LEVELS = {1: 0.0, 2: 0.3, 4: 1.0}
"""Normal, warning and critical."""

DARWIN_LEVEL = "kern.memorystatus_vm_pressure_level"


def pressure() -> float:
    """Return the share of the last ten seconds in which tasks of the machine waited for memory."""
    return DARWIN_LEVELS.get(sysctl(DARWIN_LEVEL), 1.0) if sys.platform == "darwin" else linux_pressure([PRESSURE])


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


def sysctl(name: str) -> int:
    """Return the value of a name on macOS."""
    value, size = ctypes.c_uint64(0), ctypes.c_size_t(8)  # little-endian: a shorter value fills the low bytes
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0) != 0:
        raise OSError(ctypes.get_errno(), f"sysctlbyname({name}) failed")
    return int(value.value)

"""Memory of the machine and of this process.

The *footprint* is what a budget is compared with. On macOS it is ``phys_footprint``, the number the system itself
limits and Activity Monitor shows; on Linux it is the resident set, shared libraries included. A GPU with memory of its
own adds what the process takes there: MLX's arrays and freed buffers, and CUDA's context. Managed memory counts once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import psutil

from mlx_flash.forks import wait_for_finalizers
from mlx_flash.memory.driver import context_bytes, has_own_memory
from mlx_flash.memory.pagecache import DARWIN_LEVEL, DARWIN_LEVELS, PRESSURE, linux_pressure, sysctl

_PROC = Path("/proc/self")
_CGROUPS = Path("/sys/fs/cgroup")

_MANAGED = "/dev/nvidia-uvm"
_FEW_SHARED_BYTES = 8_000_000


def footprint() -> int:
    """Return the bytes of memory that this process holds now."""
    if sys.platform == "darwin":
        return _darwin_footprint()[0]
    if sys.platform == "linux":
        return _in_host() + _arrays_on_device() + context_bytes()
    return int(psutil.Process().memory_info().rss)


def peak_footprint() -> int:
    """Return the most bytes that this process ever held."""
    if sys.platform == "darwin":
        return _darwin_footprint()[1]
    if sys.platform == "linux":
        # Managed memory in the host is in the kernel's peak, and MLX's peak has it, too.
        arrays = max(_arrays_on_device(), int(mx.get_peak_memory())) if has_own_memory() else 0
        _, found, rest = (_PROC / "status").read_text().partition("\nVmHWM:")
        if not found:
            raise OSError("/proc/self/status has no VmHWM: is /proc mounted?")
        return max(int(rest.split(maxsplit=1)[0]) * 1024, _in_host() + arrays) + context_bytes()
    return int(psutil.Process().memory_info().rss)


def _in_host() -> int:
    """Return the resident set without managed memory. Asked before each token: few calls let other threads run."""
    file = os.open(f"{_PROC}/statm", os.O_RDONLY)
    try:
        _, resident, shared = (int(pages) * mmap.PAGESIZE for pages in os.read(file, 256).split(maxsplit=3)[:3])
    finally:
        os.close(file)
    return resident - (_managed_in_host(shared) if has_own_memory() else 0)


def _arrays_on_device() -> int:
    """Return the bytes of arrays and freed buffers that the resident set does not have, or has as managed memory."""
    return int(mx.get_active_memory() + mx.get_cache_memory()) if has_own_memory() else 0


def total_memory() -> int:
    """Return the bytes of memory of the machine, or the limit of this process's control group."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _cgroup_limits())])


def available_memory() -> int:
    """Return the bytes of memory that can be taken now without swapping; with Metal, no more than it keeps wired."""
    inside = [limit - used for limit, used in _cgroup_limits()]
    wired = wired_limit()
    return max(0, min([int(psutil.virtual_memory().available), *inside, *([] if wired is None else [wired])]))


def wired_limit() -> int | None:
    """Return the bytes that Metal keeps wired at most, by ``iogpu.wired_limit_mb`` or MLX's figure; None elsewhere."""
    if sys.platform != "darwin" or not mx.metal.is_available():
        return None
    with suppress(OSError):  # an older system
        if limit := sysctl("iogpu.wired_limit_mb"):
            return limit << 20
    return int(mx.device_info()["max_recommended_working_set_size"])


_managed_seen = (0, 0)
"""The resident shared pages and those of managed memory in them, in bytes, when they were last counted."""


def _managed_in_host(shared: int) -> int:
    """Return the bytes of managed memory in the host, where MLX counts them as arrays.

    Counting takes milliseconds, and holds until the resident shared pages, to which these belong, have changed.
    """
    global _managed_seen
    counted_at, managed = _managed_seen
    if abs(shared - counted_at) > _FEW_SHARED_BYTES:
        managed, is_managed = 0, False
        for line in (_PROC / "smaps").read_text().splitlines():
            if line.startswith("Rss:"):
                managed += is_managed * int(line.split()[1]) * 1024
            elif "-" in line.split(" ", 1)[0]:
                is_managed = line.endswith(_MANAGED)
        _managed_seen = (shared, managed)
    return managed


def _cgroup_limits() -> list[tuple[int, int]]:
    """Return (limit, unreclaimable use) in bytes of the memory control groups of this process, v1 and v2."""
    shared = "shmem"  # counted as cache, but nothing can take it back without swap
    found = [_cgroup_limit(group, "memory.max", ("anon", shared)) for group in group_folders()]
    version_1 = ("total_rss", f"total_{shared}")
    found += [_cgroup_limit(group, "memory.limit_in_bytes", version_1) for group in group_folders("memory")]
    return [entry for entry in found if entry is not None]


def group_folders(controller: str = "") -> list[Path]:
    """Return the folders of this process's control group and of its parents; those of version 2 without a name."""
    try:
        entries = [line.split(":", 2) for line in (_PROC / "cgroup").read_text().splitlines()]
    except FileNotFoundError:
        return []  # not Linux
    groups = [group for _, controllers, group in entries if controller in controllers.split(",")]
    root = _CGROUPS / controller
    found = [root / group.lstrip("/") for group in groups]  # a container often sees only the root
    return [at for inner in found for at in (inner, *inner.parents) if at.is_relative_to(root)]


def _cgroup_limit(group: Path, limit_file: str, used_fields: Sequence[str]) -> tuple[int, int] | None:
    try:
        limit = (group / limit_file).read_text().strip()
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (FileNotFoundError, PermissionError):
        return None  # the controller is not on, or this mount shows another tree
    return None if limit == "max" else (int(limit), sum(int(stat.get(field, 0)) for field in used_fields))


class _RUsageInfo(ctypes.Structure):
    """``struct rusage_info_v4`` of macOS's <sys/resource.h>; only the footprints are used."""

    _fields_ = (
        ("ri_uuid", ctypes.c_uint8 * 16),
        ("before_footprint", ctypes.c_uint64 * 7),
        ("ri_phys_footprint", ctypes.c_uint64),
        ("between", ctypes.c_uint64 * 20),
        ("ri_lifetime_max_phys_footprint", ctypes.c_uint64),
        ("after", ctypes.c_uint64 * 16),
    )


def _darwin_footprint() -> tuple[int, int]:
    """Return (now, lifetime maximum) from ``proc_pid_rusage``."""
    info = _RUsageInfo()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.proc_pid_rusage(os.getpid(), 4, ctypes.byref(info)) != 0:
        raise OSError(ctypes.get_errno(), "proc_pid_rusage failed")
    return int(info.ri_phys_footprint), int(info.ri_lifetime_max_phys_footprint)


def release_freed_memory() -> None:
    """Return freed memory to the system. Linux's allocator keeps what is not at the end of its heap."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


MAPPED_BYTES = 256 << 10
"""Blocks of this size and more are mapped one by one. Of 256 KiB and 1 MiB this left the smaller peak."""

_M_MMAP_THRESHOLD = -3  # <malloc.h>


def map_large_blocks() -> None:
    """Make Linux's allocator map blocks of 256 KiB and more one by one, so that freeing them returns their memory.

    glibc does so at first, but moves the bound up to the largest block that was freed, up to 32 MiB. Arrays below it
    come from the heap then, where those that stay keep the holes of others. The bound is set for the whole process.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)


FREE_SHARE = 0.1
"""Share of the machine that stays free for others."""

MOST_SHARE = 0.8
"""The most that a budget takes of the machine."""

_DARWIN_FREE = ("vm.page_free_count", "vm.page_purgeable_count", "vm.page_pageable_external_count")


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """One look at the memory of the machine."""

    total: int  # bytes of memory
    available: int  # bytes that can be taken now without swapping
    pressure: float = 0.0  # share of the last ten seconds in which tasks waited for memory

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
    """Return the memory of a Mac, as ``sysctl`` tells it."""
    available = sum(map(sysctl, _DARWIN_FREE)) * sysctl("hw.pagesize")
    return MemoryReading(sysctl("hw.memsize"), available, DARWIN_LEVELS.get(sysctl(DARWIN_LEVEL), 1.0))


_lock = threading.RLock()  # the collector may end another model while it is held
_held: dict[int, int] = {}
_before = 0


def limit_buffers(owner: object, nbytes: int) -> None:
    """Have MLX keep at most so many bytes of freed buffers for later arrays, or as many as another owner allows.

    Free what is above. Every back end has a default, the CPU one 32 MiB. Owners are not kept alive.
    """
    global _before
    with _lock:
        is_first = not _held
        _held[id(owner)] = nbytes
        limit = mx.set_cache_limit(max(_held.values()))
        if is_first:
            _before = limit
    mx.clear_cache()


def free_unused() -> None:
    """Return to the system what MLX and the allocator keep of freed memory."""
    wait_for_finalizers()
    mx.clear_cache()
    release_freed_memory()


def end_limit(owner: object) -> None:
    """Forget the limit of an owner. After the last one on a GPU, MLX has the limit that it had before.

    On the CPU the limit stays, and speed does not depend on it. There MLX waits for all streams before it changes the
    limit, and for that gives each that was never used a system thread: also those of Python threads that have ended.
    """
    with _lock:
        if id(owner) in _held and mx.default_device() == mx.gpu:
            mx.set_cache_limit(max((held for other, held in _held.items() if other != id(owner)), default=_before))
        _held.pop(id(owner), None)

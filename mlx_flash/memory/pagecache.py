"""Questions to the system, without MLX: its page cache, direct reads past it, and how much it lacks memory."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

from mlx_flash.files import open_regular

DIRECT_ALIGNMENT = max(mmap.PAGESIZE, 4096)
"""Direct reads need their file offset, length and memory address to be multiples of this many bytes."""

_CACHESTAT = 451
"""The number of the system call, which glibc has no function for. It is the same on x86-64 and on Arm."""

_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


def open_direct(path: Path) -> int | None:
    """Open a regular file for reads that bypass the page cache. Return None where the file system cannot.

    Linux uses ``O_DIRECT`` and tries one read, since some file systems accept the flag and refuse the reads; macOS uses
    ``F_NOCACHE``.
    """
    fd = None
    try:
        if sys.platform == "darwin":
            import fcntl

            fd = open_regular(path)
            fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        elif sys.platform == "linux":
            fd = open_regular(path, os.O_DIRECT)
            with mmap.mmap(-1, DIRECT_ALIGNMENT) as page:
                os.preadv(fd, [page], 0)
    except OSError as error:
        if fd is not None:
            os.close(fd)
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return fd


def open_buffered(path: Path) -> int:
    """Open a regular file for reads through the page cache, without read-ahead: our reads are large enough."""
    fd = open_regular(path)
    try:
        if sys.platform == "linux":
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    except OSError:
        os.close(fd)
        raise
    return fd


def drop_file(path: Path, offset: int = 0, nbytes: int | None = None) -> None:
    """Drop the cached pages of a file, or of a byte range of it."""
    with open(open_buffered(path), "rb", buffering=0) as file:
        drop_cached(file.fileno(), offset, path.stat().st_size if nbytes is None else nbytes)


def drop_cached(fd: int, offset: int, nbytes: int) -> None:
    """Ask the operating system to drop the cached pages of a byte range. Nothing depends on its answer."""
    if nbytes <= 0:
        return
    if sys.platform == "linux":
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
    elif sys.platform == "darwin":
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        with mmap.mmap(fd, offset + nbytes - start, prot=mmap.PROT_READ, offset=start) as pages:
            pages.madvise(mmap.MADV_DONTNEED)


def is_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Return whether the page cache of Linux is known to hold all pages of a byte range. Brings none there.

    This asks ``cachestat`` of Linux 6.5. ``mincore`` needs a mapping, and making one waits for page faults of other
    threads. On macOS reads with ``F_NOCACHE`` use cached pages by themselves.
    """
    if sys.platform != "linux" or nbytes <= 0:
        return False
    asked = (ctypes.c_uint64 * 2)(offset, nbytes)
    found = (ctypes.c_uint64 * 5)()  # pages in the cache; dirty, being written back, evicted, recently evicted
    if _libc().syscall(_CACHESTAT, fd, asked, found, 0) != 0:
        return False  # an older system, or a file of another user
    return int(found[0]) >= -(-(offset + nbytes) // mmap.PAGESIZE) - offset // mmap.PAGESIZE


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def round_up(number: int, multiple: int) -> int:
    """Round a number up to the next multiple."""
    return -(-number // multiple) * multiple


def aligned_offsets(sizes: Iterable[int], alignment: int, start: int = 0) -> list[int]:
    """Return the offsets of blocks with some sizes, one after another and aligned, and the end of the last one."""
    return list(accumulate([round_up(nbytes, alignment) for nbytes in sizes], initial=start))


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

"""What each operating system offers to read past its page cache, or to empty it behind us."""

from __future__ import annotations

import errno
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

DIRECT_ALIGNMENT = max(mmap.PAGESIZE, 4096)
"""Direct reads need their file offset, length and memory address to be multiples of this many bytes."""

_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


def open_direct(path: Path) -> int | None:
    """Opens a file for reads that bypass the page cache.

    Linux uses ``O_DIRECT`` and tries one read, since some file systems accept the flag and refuse the reads; macOS
    uses ``F_NOCACHE``.

    Returns:
        A file descriptor, or None where the file system or the operating system cannot.
    """
    if sys.platform == "darwin":
        import fcntl

        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return _kept_if(fd, lambda: fcntl.fcntl(fd, fcntl.F_NOCACHE, 1))
    if sys.platform != "linux":
        return None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return _kept_if(fd, lambda: _read_page(fd))


def _kept_if(fd: int, trial: Callable[[], object]) -> int | None:
    """The descriptor; closed, and None, where the file system refuses the trial."""
    try:
        trial()
    except OSError as error:
        os.close(fd)
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return fd


def _read_page(fd: int) -> None:
    with mmap.mmap(-1, DIRECT_ALIGNMENT) as page:
        os.preadv(fd, [page], 0)


def open_buffered(path: Path) -> int:
    """Opens a file for reads through the page cache, without read-ahead: our reads are as large as they should be."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if sys.platform == "linux":
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    except OSError:
        os.close(fd)
        raise
    return fd


def drop_cached(fd: int, offset: int, nbytes: int) -> None:
    """Asks the operating system to forget the cached pages of a byte range. A hint: nothing depends on it."""
    if nbytes <= 0:
        return
    if sys.platform == "linux":
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
    elif sys.platform == "darwin":
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        with mmap.mmap(fd, offset + nbytes - start, prot=mmap.PROT_READ, offset=start) as pages:
            pages.madvise(mmap.MADV_DONTNEED)

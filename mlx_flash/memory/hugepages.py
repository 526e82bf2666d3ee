"""Memory on pages of 2 MiB, which Linux has; elsewhere nothing happens.

Direct reads hand the disk a list of pages, and long lists of scattered small pages are slower. New memory is made page
by page when it is written to: with small pages 512 times as often. Computing from huge pages is a little faster too.
"""

from __future__ import annotations

import ctypes
import sys
import time

from mlx_flash.memory.pagecache import round_up

HUGE_PAGE = 2 << 20
"""A huge page of Linux, in bytes."""

_QUICK_SECONDS = 0.5e-3
"""Processor time for a huge page that is worth it. Measured: 0.2 ms, where 512 small ones take 1 ms; 2 to 10 ms on a
virtual machine that had given the memory back to its host."""

_PAUSE = 16
"""Pieces that get small pages after a huge page took long to make."""

_MADV_HUGEPAGE, _MADV_NOHUGEPAGE, _MADV_COLLAPSE = 14, 15, 25  # <linux/mman.h>


def use_huge_pages(buffer: memoryview, *, at_once: bool = True) -> None:
    """Ask Linux to put writable memory on huge pages. Its content stays.

    The call takes about 0.2 s per GB. Where the system has no such pages (before Linux 6.1), nothing happens.

    Args:
        buffer: the memory.
        at_once: convert all of it, which commits untouched pages; otherwise only pages that are written from now on.
    """
    address, length = _huge_part(buffer)
    if length:
        _advise(address, length, _MADV_HUGEPAGE)
        if at_once:
            _advise(address, length, _MADV_COLLAPSE)


class PageChoice:
    """A choice between huge and small pages for new memory, which is taken in one piece or more.

    The system may have to move other pages out of the way to make a huge one, or get memory from the host of a virtual
    machine. So the first huge page of a piece is made at once, and timed in processor time.
    """

    def __init__(self) -> None:
        self._pause = 0

    def take(self, buffer: memoryview) -> None:
        """Ask Linux to put the next piece on huge pages, unless it took long to make one lately.

        Args:
            buffer: the memory, which nothing was written to.
        """
        address, length = _huge_part(buffer)
        if not length:
            return
        if not self._pause and not _is_quick(address):
            self._pause = _PAUSE
        _advise(address, length, _MADV_NOHUGEPAGE if self._pause else _MADV_HUGEPAGE)
        self._pause = max(0, self._pause - 1)


def _is_quick(address: int) -> bool:
    """Make a huge page. Return whether that took little time."""
    _advise(address, HUGE_PAGE, _MADV_HUGEPAGE)
    began = time.thread_time()
    ctypes.memset(address, 0, 1)
    return time.thread_time() - began < _QUICK_SECONDS


def _huge_part(buffer: memoryview) -> tuple[int, int]:
    """Return the address and length of the huge pages inside some memory; a length of 0 where there are none."""
    if sys.platform != "linux" or not buffer.nbytes:
        return 0, 0
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    start = round_up(address, HUGE_PAGE)
    return start, max(0, (address + buffer.nbytes - start) // HUGE_PAGE * HUGE_PAGE)


def _advise(address: int, length: int, advice: int) -> None:
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice)

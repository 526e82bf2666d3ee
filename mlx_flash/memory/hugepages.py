"""Memory on pages of 2 MiB, which Linux has; elsewhere nothing happens.

Direct reads hand the disk a list of pages, and long lists of scattered small pages are slower. New memory is made page
by page when it is written to: with small pages 512 times as often. Computing from large pages is a little faster too.
"""

from __future__ import annotations

import ctypes
import sys
import time

HUGE_PAGE = 2 << 20
"""A large page of Linux, in bytes."""

_TRIED_PAGES = 2
_QUICK_SECONDS = 0.5e-3
"""Processor time for a large page that is worth it. Measured: 0.2 ms, where 512 small ones take 1 ms; 2 to 10 ms on a
virtual machine that had given the memory back to its host."""

_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # <linux/mman.h>


def use_huge_pages(buffer: memoryview, *, at_once: bool = True) -> None:
    """Ask Linux to put writable memory on large pages. Its content stays.

    The call takes about 0.2 s per GB. Where the system has no such pages (before Linux 6.1), nothing happens.

    Args:
        buffer: the memory.
        at_once: convert all of it, which commits untouched pages; otherwise only pages that are written from now on.
    """
    address, length = _large_part(buffer)
    if length:
        _advise(address, length, _MADV_HUGEPAGE)
        if at_once:
            _advise(address, length, _MADV_COLLAPSE)


def use_quick_huge_pages(buffer: memoryview) -> None:
    """Ask Linux to put memory that is going to be written to on large pages, if it makes these quickly now.

    It may have to move other pages out of the way first, or get memory from the host of a virtual machine. So the first
    pages are made at once, and timed; their content is lost.

    Args:
        buffer: the memory, which nothing was written to.
    """
    address, length = _large_part(buffer)
    tried = _TRIED_PAGES * HUGE_PAGE
    if length < 4 * tried:
        return
    _advise(address, tried, _MADV_HUGEPAGE)
    began = time.thread_time()
    for page in range(0, tried, HUGE_PAGE):
        ctypes.memset(address + page, 0, 1)
    if time.thread_time() - began < _TRIED_PAGES * _QUICK_SECONDS:
        _advise(address, length, _MADV_HUGEPAGE)


def _large_part(buffer: memoryview) -> tuple[int, int]:
    """Return the address and length of the large pages inside some memory; a length of 0 where there are none."""
    if sys.platform != "linux" or not buffer.nbytes:
        return 0, 0
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    start = -(-address // HUGE_PAGE) * HUGE_PAGE
    return start, max(0, (address + buffer.nbytes - start) // HUGE_PAGE * HUGE_PAGE)


def _advise(address: int, length: int, advice: int) -> None:
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice)

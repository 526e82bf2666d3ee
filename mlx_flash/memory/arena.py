"""Memory that MLX computes from and threads read files into.

An arena is one evaluated ``mx.array`` of bytes. The prefetcher fills its memory through a writable ``memoryview``. A
model's modules hold typed arrays that are views of it. Nothing is copied between the two.
"""

from __future__ import annotations

import ctypes
import errno
import io
import json
import math
import mmap
import sys
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import mlx.core as mx
import numpy as np

from mlx_flash.compat.arrays import address_of, array_over, memory_of
from mlx_flash.forks import finalize
from mlx_flash.memory.driver import clear, has_own_memory
from mlx_flash.memory.footprint import footprint, free_unused, total_memory
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, round_up

HUGE_PAGE = 2 << 20
"""A huge page of Linux, in bytes. Direct reads hand the disk a list of pages, and long lists of small pages are slower.
New memory is made page by page when it is written to: with small pages 512 times as often."""

_QUICK_SECONDS = 0.5e-3
"""Processor time for a huge page that is worth it. Measured: 0.2 ms, where 512 small ones take 1 ms; 2 to 10 ms on a
virtual machine that had given the memory back to its host."""

_PAUSE = 16
"""Pieces that get small pages after a huge page took long to make."""

_MADV_HUGEPAGE, _MADV_NOHUGEPAGE, _MADV_COLLAPSE = 14, 15, 25  # <linux/mman.h>


def use_huge_pages(buffer: memoryview, *, at_once: bool = True) -> None:
    """Ask Linux to put writable memory on huge pages. Its content stays.

    All of it is converted at once, which commits untouched pages and takes about 0.2 s per GB, or only pages that are
    written from now on. Where the system has no such pages (before Linux 6.1), nothing happens.
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
        """Ask Linux to put the next piece, untouched, on huge pages, unless it took long to make one lately."""
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


_PROBE_BYTES = 4 << 20
"""Less than what plans set aside for what running adds to a process."""

_committed: dict[int, int] = {}
"""Bytes of maps in use that were written to and not given back."""

_idle_maps: list[mmap.mmap] = []
"""Address ranges for later pools. None is ever unmapped, since arrays of MLX may still refer to it."""


@lru_cache(maxsize=1)
def commits_lazily() -> bool:
    """Return whether pages of an array can be released, and committed again when written to. Tried once a process.

    They can on Linux with MLX's CPU back end, whose arrays are private anonymous memory. A GPU's driver commits a whole
    buffer once a kernel uses it.
    """
    if sys.platform != "linux" or mx.default_device() == mx.gpu or mx.cuda.is_available():
        return False
    array = mx.ones((_PROBE_BYTES,), mx.uint8)
    mx.eval(array)
    before = footprint()
    uncommit(memory_of(array))
    gone = before - footprint()
    return gone > _PROBE_BYTES // 2 and not bool(array[_PROBE_BYTES // 2 :][:DIRECT_ALIGNMENT].any())


def untouched(num_rows: int, width: int) -> mx.array:
    """Return rows of bytes of any value, without writing to them: the system commits pages when they are read into.

    MLX's own zeros are written page by page, which takes as long as reading them from a fast disk. So the array is one
    that MLX loads from a file, and this file writes nothing.
    """
    file = cast(Any, _Nothing(num_rows, width))
    array = cast(dict[str, mx.array], mx.load(file, format="safetensors", stream=mx.cpu))["rows"]
    mx.eval(array)
    return array


class _Nothing(io.BytesIO):
    """A safetensors file with a header, whose data leaves the reader's memory as it is."""

    def __init__(self, num_rows: int, width: int) -> None:
        entry = {"dtype": "U8", "shape": [num_rows, width], "data_offsets": [0, num_rows * width]}
        text = json.dumps({"rows": entry}).encode()
        super().__init__(len(text).to_bytes(8, "little") + text)
        self._end = len(self.getbuffer()) + num_rows * width

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return super().seek(self._end + offset) if whence == io.SEEK_END else super().seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        nbytes = memoryview(buffer).nbytes
        self.seek(nbytes - super().readinto(buffer), io.SEEK_CUR)
        return nbytes


def uncommit(memory: memoryview) -> None:
    """Replace whole pages by zeros that take no memory until they are written to."""
    address = address_of(memory)
    start = round_up(address, mmap.PAGESIZE)
    nbytes = (address + memory.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if nbytes > 0:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED) != 0:
            raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED) failed")


def active_memory() -> int:
    """Return the bytes of all arrays of this process: what MLX counts, and the slots that it does not know."""
    return int(mx.get_active_memory()) + sum(list(_committed.values()))


def _take_map(nbytes: int) -> mmap.mmap | None:
    """Return addresses for zeros that take memory when they are written to; None if the system has none.

    Linux refuses a range that is larger than its memory, and in strict mode (``vm.overcommit_memory`` is 2) or under a
    limit of addresses (``ulimit -v``) one that is larger than what is left.
    """
    if not commits_lazily():
        return None
    if fitting := [pages for pages in _idle_maps if len(pages) >= nbytes]:
        pages = min(fitting, key=len)
        _idle_maps.remove(pages)
        return pages
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        return None


def _end(pages: mmap.mmap) -> None:
    """Give memory back to the system. Arrays that share it read zeros from then on."""
    _committed.pop(id(pages), None)
    uncommit(memoryview(pages))
    _idle_maps.append(pages)


class Arena:
    """A page-aligned buffer of bytes, in new memory or in evaluated rows of one page, and typed views of it.

    Memory that the disk writes to is faster on huge pages. If it is read once and stays, it gets small pages while huge
    ones take long to make.
    """

    def __init__(
        self, nbytes: int, pages: mx.array | None = None, *, is_read_into: bool = True, is_read_once: bool = False
    ) -> None:
        # Rows of one page: MLX's dimensions are 32-bit, a flat array would end at 2 GiB.
        is_large = nbytes >= HUGE_PAGE  # not the rows of an embedding that a token looks up
        is_untouched = is_large and commits_lazily()
        make = untouched if is_untouched else _zeros
        self.array = make(-(-nbytes // DIRECT_ALIGNMENT) + 1, DIRECT_ALIGNMENT) if pages is None else pages
        everything = memory_of(self.array)
        self._start = _first_page(everything)
        self.nbytes = nbytes
        self.memory = everything[self._start : self._start + nbytes]  # at a multiple of ``DIRECT_ALIGNMENT``
        if pages is None and is_read_into and is_large:
            if not is_read_once:
                use_huge_pages(self.memory, at_once=not is_untouched)
            elif is_untouched:
                PageChoice().take(self.memory)

    def view(self, offset: int, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        """Return an evaluated array that begins ``offset`` bytes, a multiple of the item size, into the arena."""
        return views_of([(self, offset, shape, dtype)])[0]

    def _lazy_view(self, offset: int, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        size = math.prod(shape)
        first = self._start + offset
        page, within = divmod(first, DIRECT_ALIGNMENT)
        last_page = -(-(first + size * dtype.size) // DIRECT_ALIGNMENT)
        flat = self.array[page:last_page].view(dtype).reshape(-1)
        index = within // dtype.size
        return flat[index : index + size].reshape(shape)  # of (), reshape(*shape) would crash

    def fill(self, byte: int) -> None:
        """Write one value to every byte; 255 makes NaN in every floating-point dtype."""
        np.frombuffer(self.memory, np.uint8)[:] = byte


def views_of(places: Sequence[tuple[Arena, int, Sequence[int], mx.Dtype]]) -> list[mx.array]:
    """Return what :meth:`Arena.view` does for several places, in one evaluation: a thread may have to wait for each."""
    arrays = [arena._lazy_view(offset, shape, dtype) for arena, offset, shape, dtype in places]
    mx.eval(arrays)
    for array, (arena, offset, *_) in zip(arrays, places, strict=True):
        if array.size and address_of(memory_of(array)) != address_of(arena.memory) + offset:
            raise AssertionError(f"MLX copied a view of {array.nbytes} bytes at {offset}: it does not share the arena")
    return arrays


class SlotArena:
    """Slots of one size in one array, and views of them that have one row in each slot.

    One page of the ``pitch``, from one slot to the next, cannot be used: MLX's CPU allocator aligns to 16 bytes only.
    Slots beyond ``num_slots`` take no memory until :meth:`resize`, if the system can do that; else there are none.
    """

    def __init__(self, num_slots: int, pitch: int, capacity: int = 0) -> None:
        self.num_slots = self._num_small = num_slots
        self.num_touched = num_slots  # slots that have memory: those up to the last one that was used
        self.pitch = pitch
        self.capacity = max(num_slots, min(capacity, total_memory() // pitch))  # rows of the views
        self._map = _take_map(self.capacity * pitch)
        if self._map is None:
            self.capacity, self._array = num_slots, _zeros(num_slots, pitch)
        else:
            whole = memoryview(self._map)[: self.capacity * pitch]
            self._array = array_over(whole, (self.capacity, pitch))
            finalize(self, _end, self._map)
        self._everything = memory_of(self._array)
        self._start = _first_page(self._everything)
        use_huge_pages(self._everything[: num_slots * pitch])
        self._pages = PageChoice()
        self._note()

    @property
    def can_resize(self) -> bool:
        """True if slots can give their memory back."""
        return self._map is not None

    def resize(self, num_slots: int) -> None:
        """Change the number of slots, up to the capacity. Slots that go give their memory back."""
        self.num_slots = num_slots
        if num_slots < self.num_touched:
            uncommit(self._everything[num_slots * self.pitch : self.committed])
            self.num_touched = num_slots
            self._note()

    def touch(self, slot: int) -> None:
        if slot >= self.num_touched:
            before = self.committed
            self.num_touched = slot + 1
            self._pages.take(self._everything[before : self.committed + HUGE_PAGE])  # with the huge page across the end
            self._note()

    @property
    def committed(self) -> int:
        nbytes = self.num_touched * self.pitch
        if self.num_touched <= self._num_small:
            return nbytes
        return min(round_up(nbytes, HUGE_PAGE), len(self._everything))

    def num_within(self, nbytes: int) -> int:
        """Return the number of slots that so much memory is enough for."""
        num_slots = nbytes // HUGE_PAGE * HUGE_PAGE // self.pitch
        return num_slots if num_slots > self._num_small else min(nbytes // self.pitch, self._num_small)

    def _note(self) -> None:
        if self._map is not None:
            _committed[id(self._map)] = self.committed

    def memory(self, slot: int) -> memoryview:
        """Return the bytes of a slot; their address is a multiple of ``DIRECT_ALIGNMENT``."""
        first = slot * self.pitch + self._start
        return self._everything[first : first + self.pitch - DIRECT_ALIGNMENT]

    def part(self, slot: int, offset: int, nbytes: int) -> memoryview:
        return self.memory(slot)[offset : offset + nbytes]

    def num_head(self, nbytes: int) -> int:
        return -(-(nbytes + DIRECT_ALIGNMENT) // self.pitch)

    def view(self, offset: int, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        """Return an evaluated array ``(slots, *shape)`` whose row of each slot begins ``offset`` bytes into it."""
        first, size = (self._start + offset) // dtype.size, math.prod(shape)
        rows = self._array.view(dtype)[:, first : first + size]
        # Not reshape(), which copies what is not contiguous.
        array = mx.unflatten(rows, 1, tuple(shape)) if shape else rows.squeeze(1)
        ends = array[:1], array[self.num_slots - 1 : self.num_slots]
        mx.eval(array, ends)
        for slot, row in zip((0, self.num_slots - 1), ends, strict=True):
            if address_of(memory_of(row)) != address_of(self.memory(slot)) + offset:
                raise AssertionError(f"MLX copied a view of {shape} at {offset}: it does not share the slots")
        return array

    def head(self, num_slots: int) -> Arena:
        pages = self._array[:num_slots].reshape(-1, DIRECT_ALIGNMENT)
        mx.eval(pages)
        return Arena(num_slots * self.pitch - DIRECT_ALIGNMENT, pages)

    def fill(self, slot: int, byte: int) -> None:
        np.frombuffer(self.memory(slot), np.uint8)[:] = byte


def kernel_alignment() -> int:
    """Return the address alignment in bytes that MLX's kernels may rely on.

    GPU kernels and the libraries behind them choose by alignment, and so might give other bits; the CPU's do not.
    """
    return 16 if mx.default_device() == mx.gpu else 1


def _zeros(rows: int, columns: int) -> mx.array:
    if has_own_memory():  # a kernel's zeros are copied when their address is asked for, and are there twice for a while
        array = untouched(rows, columns)
        clear(memory_of(array))
        return array
    array = mx.zeros((rows, columns), dtype=mx.uint8)
    mx.eval(array)
    return array


def _first_page(memory: memoryview) -> int:
    return -address_of(memory) % DIRECT_ALIGNMENT


_ALIGNMENT = 256
"""Stacks start at a multiple of this, as MLX's own GPU allocations do."""

_DISTANCE = 1 << 40
"""From the offset of a part to that of the next one: more than the bytes of any part."""

_STEP = 9 / 8
"""Numbers of slots differ by so much, since another number takes all slots their contents."""


class StackArena:
    """Slots of equal parts: one array for each part, with the slot as its first axis.

    Kernels that take no gaps between rows take these. In :class:`SlotArena` all parts of a slot lie together instead,
    so that one read can fill it. The number of slots to begin with is the least that there will be.
    """

    can_resize = True

    def __init__(self, num_slots: int, pitch: int, widths: Sequence[int], capacity: int = 0) -> None:
        self.capacity, self.pitch = max(capacity, num_slots), pitch
        self.offsets = tuple(part * _DISTANCE for part in range(len(widths)))
        self.least, self._widths = num_slots, tuple(widths)
        self._make(num_slots)

    def _make(self, num_slots: int) -> None:
        starts, end = {}, 0
        for part in sorted(range(len(self._widths)), key=lambda i: -self._widths[i]):  # the widest first: see head()
            starts[part] = end
            end = round_up(end + num_slots * self._widths[part], _ALIGNMENT)
        self._starts = [starts[part] for part in range(len(self._widths))]
        self._arena = Arena(max(num_slots * self.pitch, end))
        self.num_slots = self.num_touched = num_slots

    def resize(self, num_slots: int) -> None:
        """Change the number of slots, which lose their contents. No view may be left. An error leaves the fewest."""
        del self._arena
        free_unused()
        try:
            self._make(num_slots)
        except BaseException:
            self._make(self.least)
            raise

    @property
    def committed(self) -> int:
        return self.num_slots * self.pitch

    def num_within(self, nbytes: int) -> int:
        """Return how many slots to have in so much memory: as many as now, or clearly more or fewer."""
        number, now = min(max(self.least, nbytes // self.pitch), self.capacity), self.num_slots
        if number >= now:
            return number if number >= now * _STEP or number == self.capacity else now
        return max(self.least, min(number, int(now / _STEP)))

    def touch(self, slot: int) -> None:
        """Do nothing: all slots have memory."""

    def memory(self, slot: int) -> StackedSlot:
        return StackedSlot(self, slot)

    def part(self, slot: int, offset: int, nbytes: int) -> memoryview:
        part, within = divmod(offset, _DISTANCE)
        return self._arena.memory[self._starts[part] + slot * self._widths[part] + within :][:nbytes]

    def view(self, offset: int, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        return self._arena.view(self._starts[offset // _DISTANCE], (self.num_slots, *shape), dtype)

    def num_head(self, nbytes: int) -> int:
        stacks = zip(self._starts, self._widths, strict=True)
        return min(self.num_slots, max(-(-(nbytes - start) // width) for start, width in stacks))

    def head(self, num_slots: int) -> Arena:
        """Return the memory of the first slots as one buffer. It goes on beyond what :meth:`num_head` was asked for."""
        return self._arena

    def fill(self, slot: int, byte: int) -> None:
        for offset, width in zip(self.offsets, self._widths, strict=True):
            np.frombuffer(self.part(slot, offset, width), np.uint8)[:] = byte


class StackedSlot:
    """The bytes of a slot of a :class:`StackArena`, as a reader takes them: slices of one part each."""

    def __init__(self, arena: StackArena, slot: int) -> None:
        self._arena, self._slot = arena, slot

    def __len__(self) -> int:
        return len(self._arena.offsets) * _DISTANCE

    def __getitem__(self, place: slice) -> memoryview:
        return self._arena.part(self._slot, place.start, place.stop - place.start)

"""Memory that MLX computes from and threads read files into.

An arena is one evaluated ``mx.array`` of bytes. The prefetcher fills its memory through a writable ``memoryview``. A
model's modules hold typed arrays that are views of it. Nothing is copied between the two.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_flash.compat.arrays import address_of, memory_of
from mlx_flash.memory.driver import clear, has_own_memory
from mlx_flash.memory.footprint import total_memory
from mlx_flash.memory.hugepages import HUGE_PAGE, PageChoice, use_huge_pages
from mlx_flash.memory.lazy import LazyRows, commits_lazily, uncommit, untouched
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, round_up

_MARK = 0xA5


class Arena:
    """A page-aligned buffer of bytes and typed views of it.

    Args:
        nbytes: usable size.
        pages: evaluated rows of one page to use, instead of new memory.
        is_read_into: the disk writes to it, which is faster on huge pages. Reads commit them, where the system can.
        is_read_once: its bytes are read once and stay. They get small pages while huge ones take long to make.

    Attributes:
        memory: the writable bytes; their address is a multiple of ``DIRECT_ALIGNMENT``.
    """

    def __init__(
        self, nbytes: int, pages: mx.array | None = None, *, is_read_into: bool = True, is_read_once: bool = False
    ) -> None:
        # Rows of one page: MLX's dimensions are 32-bit, a flat array would end at 2 GiB.
        is_untouched = commits_lazily()
        make = untouched if is_untouched else _zeros
        self._array = make(-(-nbytes // DIRECT_ALIGNMENT) + 1, DIRECT_ALIGNMENT) if pages is None else pages
        everything = memory_of(self._array)
        self._start = _first_page(everything)
        self.nbytes = nbytes
        self.memory = everything[self._start : self._start + nbytes]
        if pages is None and is_read_into:
            if not is_read_once:
                use_huge_pages(self.memory, at_once=not is_untouched)
            elif is_untouched:
                PageChoice().take(self.memory)

    def view(self, offset: int, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        """Return an evaluated array whose memory begins ``offset`` bytes into the arena.

        Args:
            offset: a multiple of the item size.
            shape: of the array.
            dtype: of the array.
        """
        return views_of([(self, offset, shape, dtype)])[0]

    def _lazy_view(self, offset: int, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        size = math.prod(shape)
        first = self._start + offset
        page, within = divmod(first, DIRECT_ALIGNMENT)
        last_page = -(-(first + size * dtype.size) // DIRECT_ALIGNMENT)
        flat = self._array[page:last_page].view(dtype).reshape(-1)
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

    Args:
        num_slots: slots to have memory for now.
        pitch: bytes from one slot to the next, a multiple of ``DIRECT_ALIGNMENT``. One page of it cannot be used: MLX's
            CPU allocator aligns to 16 bytes only.
        capacity: the most rows of the views, which memory may bound further. Slots beyond ``num_slots`` take no memory
            until :meth:`resize`, where the system can do that; elsewhere the capacity is ``num_slots``.

    Attributes:
        num_slots: slots that may be used.
        capacity: rows of the views.
        pitch: as given.
        num_touched: slots that have memory: those up to the last one that was used.
    """

    def __init__(self, num_slots: int, pitch: int, capacity: int = 0) -> None:
        self.num_slots = self.num_touched = self._num_small = num_slots
        self.pitch = pitch
        self._rows = _lazy_rows(num_slots, capacity, pitch) if commits_lazily() else None
        self._array = _zeros(num_slots, pitch) if self._rows is None else self._rows.array
        self.capacity = len(self._array)
        self._everything = memory_of(self._array)
        self._bytes = np.frombuffer(self._everything, np.uint8)
        self._start = _first_page(self._everything)
        use_huge_pages(self._everything[: num_slots * pitch])
        self._pages = PageChoice()
        self._note()

    @property
    def can_resize(self) -> bool:
        """True if slots can give their memory back."""
        return self._rows is not None

    def resize(self, num_slots: int) -> None:
        """Change the number of slots, up to the capacity. Slots that go give their memory back."""
        self.num_slots = num_slots
        if num_slots < self.num_touched:
            uncommit(self._everything[num_slots * self.pitch : self.committed])
            self.num_touched = num_slots
            self._note()

    def touch(self, slot: int) -> None:
        """Note that a slot gets memory."""
        if slot >= self.num_touched:
            before = self.committed
            self.num_touched = slot + 1
            self._pages.take(self._everything[before : self.committed + HUGE_PAGE])  # with the huge page across the end
            self._note()

    @property
    def committed(self) -> int:
        """Memory of the slots in bytes."""
        nbytes = self.num_touched * self.pitch
        if self.num_touched <= self._num_small:
            return nbytes
        return min(round_up(nbytes, HUGE_PAGE), len(self._everything))

    def num_within(self, nbytes: int) -> int:
        """Return the number of slots that so much memory is enough for."""
        num_slots = nbytes // HUGE_PAGE * HUGE_PAGE // self.pitch
        return num_slots if num_slots > self._num_small else min(nbytes // self.pitch, self._num_small)

    def _note(self) -> None:
        if self._rows is not None:
            self._rows.note(self.committed)

    def memory(self, slot: int) -> memoryview:
        """Return the bytes of a slot; their address is a multiple of ``DIRECT_ALIGNMENT``."""
        first = slot * self.pitch + self._start
        return self._everything[first : first + self.pitch - DIRECT_ALIGNMENT]

    def part(self, slot: int, offset: int, nbytes: int) -> memoryview:
        """Return some bytes of a slot."""
        return self.memory(slot)[offset : offset + nbytes]

    def num_head(self, nbytes: int) -> int:
        """Return the number of slots that :meth:`head` takes for so many bytes."""
        return -(-(nbytes + DIRECT_ALIGNMENT) // self.pitch)

    def view(self, offset: int, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        """Return an evaluated array ``(slots, *shape)`` whose row of each slot begins ``offset`` bytes into it.

        The slots must be empty: the check overwrites bytes of the first and the last that have memory.

        Args:
            offset: a multiple of the item size.
            shape: of a row.
            dtype: of the array.
        """
        first, size = (self._start + offset) // dtype.size, math.prod(shape)
        rows = self._array.view(dtype)[:, first : first + size]
        # Not reshape(), which copies what is not contiguous.
        array = mx.unflatten(rows, 1, tuple(shape)) if shape else rows.squeeze(1)
        mx.eval(array)
        for slot in {0, self.num_slots - 1}:
            if not self._shares(array, slot, offset):
                raise AssertionError(f"MLX copied a view of {shape} at {offset}: it does not share the slots")
        return array

    def _shares(self, array: mx.array, slot: int, offset: int) -> bool:
        """Return whether bytes written to the ends of a slot's part show in an array's row."""
        row = np.frombuffer(self.memory(slot), np.uint8)[offset:][: array[slot].nbytes]
        size = array.itemsize
        for byte in (_MARK, 0):
            row[:size] = row[-size:] = byte
            for end in (0, -1):  # one element: flatten() may copy a row, which takes as long as reading it
                element = array[(slot, *[end] * (array.ndim - 1))]
                if not bool((element.reshape(1).view(mx.uint8) == byte).all()):
                    return False
        return True

    def head(self, num_slots: int) -> Arena:
        """Return the memory of the first slots as one buffer."""
        pages = self._array[:num_slots].reshape(-1, DIRECT_ALIGNMENT)
        mx.eval(pages)
        return Arena(num_slots * self.pitch - DIRECT_ALIGNMENT, pages)

    def fill(self, slot: int, byte: int) -> None:
        """Write one value to every byte of a slot."""
        first = slot * self.pitch + self._start
        self._bytes[first : first + self.pitch - DIRECT_ALIGNMENT] = byte


def kernel_alignment() -> int:
    """Return the address alignment in bytes that MLX's kernels may rely on.

    GPU kernels and the libraries behind them choose by alignment, and so might give other bits; the CPU's do not.
    """
    return 16 if mx.default_device() == mx.gpu else 1


def _lazy_rows(num_slots: int, capacity: int, pitch: int) -> LazyRows | None:
    """Return rows for slots now and later; None if the system reserves no addresses for them.

    Linux refuses a range that is larger than its memory, and in strict mode (``vm.overcommit_memory`` is 2) or under a
    limit of addresses (``ulimit -v``) one that is larger than what is left.
    """
    try:
        return LazyRows(max(num_slots, min(capacity, total_memory() // pitch)), pitch)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        return None


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

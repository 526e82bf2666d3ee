"""The buffers that pages of layers are read into, and that attention reads.

MLX does not report when it is done with an array. But it writes in place only while nothing else refers to the array's
memory, and into a copy otherwise. So before a slot is reused, MLX writes one byte of it: if a pending computation needs
the slot, that computation keeps the old memory, and the slot continues in the copy.

A slot that is interrupted while it changes belongs to no layer until it is assigned again.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from mlx_flash.compat.arrays import address_of, memory_of
from mlx_flash.kv.layout import RowBytes, RowLayout
from mlx_flash.kv.options import LARGE_SLOT_BYTES, slot_memory
from mlx_flash.memory.arena import Arena
from mlx_flash.memory.footprint import release_freed_memory
from mlx_flash.memory.hugepages import use_huge_pages
from mlx_flash.memory.lazy import commits_lazily, give_back, reserve
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT
from mlx_flash.storage.prefetcher import Ticket

if TYPE_CHECKING:
    from mlx_flash.kv.disk import DiskRows


class Slot:
    """One layer's rows, with all tokens of a head one after another, as attention needs them.

    Attributes:
        tokens: number of the owner's tokens in the slot, or after :meth:`wait`.
        capacity: number of tokens that there is room for, in the owner's layout.
        used_at: time of the last use, in seconds.
        touched: bytes written to since the memory was allocated.
        num_moved: number of times that a pending computation kept the old memory.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.capacity = 0
        self.used_at = 0.0
        self.touched = 0
        self.num_moved = 0
        self._pages: mx.array | None = None
        self._arena: Arena | None = None
        self._is_handed_out = False
        self._is_large = False
        self._owner: weakref.ref[DiskRows] | None = None
        self._reading: tuple[Ticket, DiskRows] | None = None
        self._is_torn = False

    @property
    def nbytes(self) -> int:
        """Size of the memory in bytes."""
        return 0 if self._arena is None else self._arena.nbytes

    @property
    def memory(self) -> memoryview:
        """The bytes of the slot."""
        assert self._arena is not None
        return self._arena.memory

    def belongs_to(self, rows: object) -> bool:
        """Return whether the slot holds rows of this layer."""
        return self._owner is not None and self._owner() is rows

    def assign(self, rows: DiskRows, capacity: int, most: int = 0) -> None:
        """Empty the slot for another layer, or for more tokens. Wait until nothing reads or writes it.

        Args:
            rows: the layer.
            capacity: number of tokens to make room for.
            most: number of tokens expected soon: memory is allocated for as many.
        """
        self.clear()
        needed = rows.layout.slot_bytes(capacity)
        if self.nbytes < needed:
            self.release()  # the old memory first, then the new
            needed = max(needed, rows.layout.slot_bytes(most))
            self._pages = reserve((needed // DIRECT_ALIGNMENT + 1, DIRECT_ALIGNMENT), mx.uint8)
            mx.eval(self._pages)
            self._arena, self._is_handed_out = Arena(needed, self._pages), False
        self.claim()
        if commits_lazily() and not self._is_large and rows.layout.slot_bytes(capacity) >= LARGE_SLOT_BYTES:
            use_huge_pages(self.memory, at_once=False)
            self._is_large = True
        self.capacity = capacity
        self._owner = weakref.ref(rows)

    def release(self) -> None:
        """Empty the slot, and free its memory."""
        self.clear()
        if self._pages is None:
            return
        self._forget_memory()
        release_freed_memory()

    def _forget_memory(self) -> None:
        self._arena, self._pages, self._is_handed_out, self.touched, self._is_large = None, None, False, 0, False

    def clear(self) -> None:
        """Empty the slot, and cancel reads into it."""
        self._owner, self.tokens, self.capacity = None, 0, 0
        if self._reading is not None:
            self._reading[0].cancel()
            self._reading = None
        if self._is_torn:
            self._forget_memory()
            self._is_torn = False

    def read(self, start: Callable[[], Ticket], rows: DiskRows, tokens: int) -> None:
        """Start reads that fill the slot up to so many of the owner's tokens.

        If an interrupt hides the ticket, the reads cannot be waited for: then they keep the memory, and the slot gets
        other memory.
        """
        owner, self._owner = self._owner, None
        self._is_torn = True
        self._reading = (start(), rows)
        self._is_torn = False
        self.tokens = tokens
        self._owner = owner

    def wait(self) -> float:
        """Wait for the reads in flight. Return the seconds waited while reads were in flight.

        Raises:
            ReadError: bytes could not be read; the slot is empty then.
        """
        if self._reading is None:
            return 0.0
        try:
            waited = self._reading[0].wait()
        except BaseException:
            self.clear()
            raise
        self._reading = None
        return waited

    def claim(self) -> None:
        """Make sure that no pending computation reads the memory. If one does, the slot becomes empty and moves."""
        if not self._is_handed_out or self._pages is None or self._arena is None:
            return
        nbytes, address = self._arena.nbytes, address_of(self._arena.memory)
        owner, self._owner = self._owner, None
        self._arena = None
        pages = self._pages
        pages[-1:, -1:] = mx.array(0, mx.uint8)  # the last byte is unused: an extra page aligns the others
        mx.eval(pages)
        self._arena, self._is_handed_out = Arena(nbytes, pages), False
        if address_of(self._arena.memory) != address:
            self.num_moved += 1
            self.tokens = 0  # the copy may have another offset in its page
            self._is_large, self.touched = False, 0
            if commits_lazily():
                give_back(pages)  # a copy is committed as a whole
        self._owner = owner

    def write(self, layout: RowLayout, rows: RowBytes, at: int) -> None:
        """Write rows, ``(heads, tokens, bytes)`` for each array, from token ``at`` on. The slot must be claimed."""
        for offset, component, new in zip(layout.slot_offsets(self.capacity), layout.components, rows, strict=True):
            size = component.heads * self.capacity * component.width_bytes
            whole = np.frombuffer(self.memory, np.uint8)[offset : offset + size]
            whole.reshape(component.heads, self.capacity, -1)[:, at : at + new.shape[1]] = new

    def hand_out(self, layout: RowLayout, length: int) -> list[mx.array]:
        """Return the first tokens as arrays, ``(batch, heads, length, width)``, that share the slot's memory."""
        assert self._arena is not None
        self.touched = max(self.touched, slot_memory(layout.slot_bytes(self.capacity if self._is_large else length)))
        arrays = []
        for offset, component in zip(layout.slot_offsets(self.capacity), layout.components, strict=True):
            shape = (*component.shape, self.capacity, component.width)
            arrays.append(self._arena.view(offset, shape, component.dtype)[..., :length, :])
        self._is_handed_out, self.used_at = True, time.perf_counter()
        return arrays


def row_bytes(arrays: Sequence[mx.array]) -> RowBytes:
    """Return the bytes of evaluated, contiguous arrays as ``(heads, tokens, bytes)``, the heads of all sequences."""
    found = []
    for array in arrays:
        batch, heads, length, width = array.shape
        memory = memory_of(array)
        found.append(np.frombuffer(memory, np.uint8).reshape(batch * heads, length, width * array.itemsize))
    return found

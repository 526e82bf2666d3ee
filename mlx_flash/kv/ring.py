"""The ring of slots: the buffers that layers on disk are read into, and that attention reads.

While attention reads one slot, pages of the next layer are prefetched into the other. Where memory is short there is
one slot, and nothing is prefetched.

MLX does not report when it is done with an array. But it writes in place only while nothing else refers to the array's
memory, and into a copy otherwise. So before tokens in a slot are replaced, MLX writes one byte of it: if a pending
computation needs the slot, that computation keeps the old memory, and the slot continues in the copy. New tokens of the
same layer are written behind those that were handed out, which stay as they are. So parts of a prompt that wait inside
their attention share one slot.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import suppress

import mlx.core as mx
import numpy as np

from mlx_flash.compat.arrays import address_of
from mlx_flash.errors import ReadError, WriteError
from mlx_flash.kv.disk import DiskRows, RowBytes, RowLayout, segments
from mlx_flash.kv.kvledger import COPY_ROOM_STEPS, NUM_SLOTS, KVOptions
from mlx_flash.memory.arena import Arena
from mlx_flash.memory.footprint import release_freed_memory
from mlx_flash.memory.pagecache import round_up
from mlx_flash.storage.prefetcher import Ticket


class Slot:
    """One layer's rows, with all tokens of a head one after another, as attention needs them."""

    def __init__(self) -> None:
        self.tokens = 0  # of the owner, in the slot, or there after :meth:`wait`
        self.capacity = 0  # tokens that there is room for, in the owner's layout
        self.handed_out = 0  # tokens of the owner in arrays that may still be in use
        self.used_at = 0.0  # seconds
        self.num_moved = 0  # times that a pending computation kept the old memory
        self._arena: Arena | None = None
        self._owner: weakref.ref[DiskRows] | None = None
        self._reading: tuple[Ticket, DiskRows] | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._arena is None else self._arena.nbytes

    @property
    def memory(self) -> memoryview:
        assert self._arena is not None
        return self._arena.memory

    def belongs_to(self, rows: object) -> bool:
        return self._owner is not None and self._owner() is rows

    def assign(self, rows: DiskRows, capacity: int) -> None:
        """Empty the slot for some tokens of a layer. Wait first until nothing uses it."""
        self.clear()
        if self.nbytes < rows.layout.slot_bytes(capacity):
            self.release()  # the old memory first, then the new
            self._arena = Arena(rows.layout.slot_bytes(capacity))
        self.claim()
        self.capacity = capacity
        self._owner = weakref.ref(rows)

    def release(self) -> None:
        """Empty the slot, and free its memory."""
        self.clear()
        if self._arena is not None:
            self._arena, self.handed_out = None, 0
            release_freed_memory()

    def clear(self) -> None:
        """Empty the slot, and cancel reads into it."""
        self._owner, self.tokens, self.capacity = None, 0, 0
        if self._reading is not None:
            self._reading[0].cancel()
            self._reading = None

    def read(self, reads: Ticket, rows: DiskRows, tokens: int) -> None:
        """Note reads in flight, which fill the slot up to so many of the owner's tokens."""
        self._reading = (reads, rows)
        self.tokens = tokens

    def wait(self) -> float:
        """Wait for the reads in flight. Return the seconds waited. Raises: ReadError; the slot is empty then."""
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
        """Make sure that no pending computation reads the memory. If one does, the slot moves, and is empty then."""
        if not self.handed_out or self._arena is None:
            return
        nbytes, address, array = self._arena.nbytes, address_of(self._arena.memory), self._arena.array
        owner, self._owner = self._owner, None
        self._arena = None
        array[-1:, -1:] = mx.array(0, mx.uint8)  # the last byte is unused: an extra page of memory aligns the others
        mx.eval(array)
        self._arena, self.handed_out = Arena(nbytes, array), 0
        if address_of(self._arena.memory) != address:
            self.num_moved += 1
            self.tokens = 0
        self._owner = owner

    def write(self, layout: RowLayout, rows: RowBytes, at: int) -> None:
        """Write rows, ``(heads, tokens, bytes)`` for each array, to the places from token ``at`` on.

        No array that was handed out may have tokens there.
        """
        for offset, component, new in zip(layout.slot_offsets(self.capacity), layout.components, rows, strict=True):
            size = component.heads * self.capacity * component.width_bytes
            whole = np.frombuffer(self.memory, np.uint8)[offset : offset + size]
            whole.reshape(component.heads, self.capacity, -1)[:, at : at + new.shape[1]] = new

    def hand_out(self, layout: RowLayout, length: int) -> list[mx.array]:
        """Return the first tokens as arrays, ``(batch, heads, length, width)``, that share the slot's memory."""
        assert self._arena is not None
        arrays = []
        for offset, component in zip(layout.slot_offsets(self.capacity), layout.components, strict=True):
            shape = (*component.shape, self.capacity, component.width)
            arrays.append(self._arena.view(offset, shape, component.dtype)[..., :length, :])
        self.handed_out, self.used_at = max(self.handed_out, length), time.perf_counter()
        return arrays


class SlotRing:
    """The slots, and the order in which layers use them: the prefetched layer is the one that followed last time.

    Attributes:
        wait_seconds: time spent waiting for reads.
        is_tight: whether a slot takes no more memory than its layer needs, for a pass that parts of a prompt share.
    """

    def __init__(self, options: KVOptions) -> None:
        self.slots = [Slot() for _ in range(NUM_SLOTS)]
        self.wait_seconds = 0.0
        self.is_tight = False
        self._options = options
        self._successor: weakref.WeakKeyDictionary[DiskRows, weakref.ref[DiskRows]] = weakref.WeakKeyDictionary()
        self._last: weakref.ref[DiskRows] | None = None

    @property
    def nbytes(self) -> int:
        return sum([slot.nbytes for slot in self.slots])

    def resize(self, num_slots: int) -> None:
        """Use so many slots from now on; the memory of others is freed."""
        for slot in self.slots[num_slots:]:
            slot.release()
        self.slots = self.slots[:num_slots] + [Slot() for _ in range(num_slots - len(self.slots))]

    def append(self, disk: DiskRows, new: Sequence[mx.array]) -> list[mx.array]:
        """Add tokens, ``(batch, heads, new tokens, width)`` for each array. Evaluate them, and so the other slot's use.

        Return all tokens of the layer, in a slot. Raises: WriteError, ReadError.
        """
        fresh = disk.layout.to_rows(new)
        end = disk.length + fresh[0].shape[1]
        slot = self._filled_slot(disk, end)
        slot.write(disk.layout, fresh, disk.length)
        disk.append(fresh)
        slot.tokens = end  # those behind them mean nothing after an error
        return self._hand_out(disk, slot)

    def fetch(self, disk: DiskRows) -> list[mx.array]:
        """Return all tokens of a layer, in a slot. Raises: ReadError."""
        return self._hand_out(disk, self._filled_slot(disk, disk.length))

    def forget(self, disk: DiskRows, length: int) -> None:
        """Invalidate a layer's tokens from ``length`` on."""
        for slot in self.slots:
            if slot.belongs_to(disk):
                slot.tokens = min(slot.tokens, length)

    def release(self) -> None:
        """End reads, and free the memory of the slots."""
        for slot in self.slots:
            slot.release()

    def _hand_out(self, disk: DiskRows, slot: Slot) -> list[mx.array]:
        arrays = slot.hand_out(disk.layout, disk.length)
        last = self._last() if self._last is not None else None
        if last is not None and last is not disk:  # parts of a prompt use a layer one after another
            self._successor[last] = weakref.ref(disk)
        self._last = weakref.ref(disk)
        self._read_ahead(disk, slot)
        if not self._options.copies_slots:
            return arrays
        capacity = min(disk.capacity, disk.length + COPY_ROOM_STEPS * self._options.step)
        return [_as_grown(array, capacity) for array in arrays]

    def _filled_slot(self, disk: DiskRows, end: int) -> Slot:
        """Return a slot with all tokens of a layer, and room up to ``end`` that no pending computation reads."""
        slot = next((slot for slot in self.slots if slot.belongs_to(disk)), None)
        if slot is None:
            slot = min(self.slots, key=lambda slot: slot.used_at)
        if not slot.belongs_to(disk) or slot.capacity < end:
            self._assign(slot, disk, end)
        try:
            self.wait_seconds += slot.wait()
        except ReadError:  # of a read ahead, which may have failed before the disk worked again: it is repeated
            self._assign(slot, disk, end)
        if slot.tokens < disk.length or disk.length < slot.handed_out:  # not only what follows is written
            slot.claim()
        if slot.tokens < disk.length:
            self._fill(slot, disk)
        return slot

    def _assign(self, slot: Slot, disk: DiskRows, tokens: int) -> None:
        """Empty a slot for a layer of so many tokens, and those that the pass brings."""
        capacity = round_up(max(tokens, disk.length + disk.coming, 1), self._options.step)
        if self.is_tight and slot.nbytes > disk.layout.slot_bytes(capacity):
            slot.release()
        slot.assign(disk, capacity)

    def _fill(self, slot: Slot, disk: DiskRows) -> None:
        if slot.tokens < disk.paged_tokens:
            self._read(slot, disk, slot.tokens, urgent=True)
            self.wait_seconds += slot.wait()
        slot.write(disk.layout, disk.tail, disk.paged_tokens)
        slot.tokens = disk.length

    def _read(self, slot: Slot, disk: DiskRows, start: int, *, urgent: bool = False) -> None:
        """Start reading from the page with the token ``start`` on."""
        disk.settle(start)
        reads = segments(disk.file.path, disk.pages, disk.layout, start, disk.paged_tokens, slot.capacity)
        ticket = disk.file.reader.submit(reads, slot.memory, urgent=urgent)
        slot.read(ticket, disk, disk.paged_tokens)

    def _read_ahead(self, disk: DiskRows, busy: Slot) -> None:
        """Prefetch the layer that is expected next into the other slot."""
        link = self._successor.get(disk)
        upcoming = link() if link is not None else None
        if upcoming is None or not upcoming.paged_tokens or any(slot.belongs_to(upcoming) for slot in self.slots):
            return
        slot = next((slot for slot in self.slots if slot is not busy), None)
        if slot is None:
            return
        self._assign(slot, upcoming, upcoming.length)
        with suppress(WriteError):  # of pages that another sequence may have lost: its own call raises it
            self._read(slot, upcoming, 0)


def _as_grown(array: mx.array, capacity: int) -> mx.array:
    """Return a copy of rows ``(batch, heads, tokens, width)`` in a buffer with room for so many tokens, as mlx-lm's."""
    length = array.shape[2]
    shape = (*array.shape[:2], max(0, capacity - length), array.shape[3])
    room = mx.broadcast_to(mx.array(0, array.dtype), shape)  # takes no memory of its own
    return mx.concatenate([array, room], axis=2)[..., :length, :]

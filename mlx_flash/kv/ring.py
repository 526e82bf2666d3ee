"""Slots for layers on disk: while attention reads one, pages of the next layer are prefetched into the other.

Where memory is short there is one slot, and nothing is prefetched.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import mlx.core as mx

from mlx_flash.kv.disk import NOTHING_PLANNED, DiskRows, Planned
from mlx_flash.kv.options import LARGE_SLOT_BYTES, NUM_SLOTS, KVOptions
from mlx_flash.kv.pages import segments
from mlx_flash.kv.slots import Slot, row_bytes
from mlx_flash.kv.stats import KVStats
from mlx_flash.memory.lazy import commits_lazily
from mlx_flash.memory.pagecache import round_up


class SlotRing:
    """The slots, and the order in which layers use them: the prefetched layer is the one that followed last time.

    Args:
        options: the settings.
        stats: counters to add to.

    Attributes:
        slots: the slots in use; :meth:`resize` changes their number.
    """

    def __init__(self, options: KVOptions, stats: KVStats) -> None:
        self.slots = [Slot() for _ in range(NUM_SLOTS)]
        self._stats = stats
        self._options = options
        self._successor: weakref.WeakKeyDictionary[DiskRows, weakref.ref[DiskRows]] = weakref.WeakKeyDictionary()
        self._last: weakref.ref[DiskRows] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that MLX counts as active for the slots."""
        return sum(slot.nbytes for slot in self.slots)

    @property
    def held(self) -> int:
        """Bytes that the slots take."""
        return sum(slot.touched for slot in self.slots) if commits_lazily() else self.nbytes

    def resize(self, num_slots: int) -> None:
        """Use so many slots from now on; the memory of others is freed."""
        for slot in self.slots[num_slots:]:
            slot.release()
        self.slots = self.slots[:num_slots] + [Slot() for _ in range(num_slots - len(self.slots))]

    def append(
        self, disk: DiskRows, new: Sequence[mx.array], planned: Mapping[int, Planned] = NOTHING_PLANNED
    ) -> list[mx.array]:
        """Add tokens, ``(batch, heads, new tokens, width)`` for each array. Evaluate them, and so the other slot's use.

        Args:
            disk: the layer.
            new: the tokens.
            planned: see :meth:`DiskRows.append`.

        Returns:
            All tokens of the layer, in a slot.

        Raises:
            WriteError: the disk is full, or fails.
            ReadError: pages could not be read.
        """
        plain = [mx.contiguous(a.astype(c.dtype)) for a, c in zip(new, disk.layout.components, strict=True)]
        mx.eval(plain)
        fresh = row_bytes(plain)
        end = disk.length + fresh[0].shape[1]
        slot = self._filled_slot(disk, end)
        slot.write(disk.layout, fresh, disk.length)
        try:
            disk.append(fresh, planned)
        except BaseException:
            slot.clear()
            raise
        slot.tokens = end
        return self._hand_out(disk, slot, fresh[0].shape[1])

    def fetch(self, disk: DiskRows) -> list[mx.array]:
        """Return all tokens of a layer, in a slot. Raises: ReadError."""
        return self._hand_out(disk, self._filled_slot(disk, disk.length), 0)

    def forget(self, disk: DiskRows, length: int) -> None:
        """Invalidate a layer's tokens from ``length`` on."""
        for slot in self.slots:
            if slot.belongs_to(disk):
                slot.wait()
                slot.tokens = min(slot.tokens, length)

    def release(self) -> None:
        """End reads, and free the memory of the slots."""
        for slot in self.slots:
            slot.release()

    def _hand_out(self, disk: DiskRows, slot: Slot, num_new: int) -> list[mx.array]:
        arrays = slot.hand_out(disk.layout, disk.length)
        self._stats.num_fetched += 1
        last = self._last() if self._last is not None else None
        if last is not None:
            self._successor[last] = weakref.ref(disk)
        self._last = weakref.ref(disk)
        self._read_ahead(disk, slot, num_new)
        return arrays

    def _filled_slot(self, disk: DiskRows, end: int) -> Slot:
        """Return a slot with all tokens of a layer and room up to ``end``, which no pending computation reads."""
        slot = next((slot for slot in self.slots if slot.belongs_to(disk)), None)
        if slot is None:
            slot = min(self.slots, key=lambda slot: slot.used_at)
        if not slot.belongs_to(disk) or slot.capacity < end:
            self._assign(slot, disk, end)
        self._stats.wait_seconds += slot.wait()
        slot.claim()
        if slot.tokens < disk.length:
            self._fill(slot, disk)
        return slot

    def _assign(self, slot: Slot, disk: DiskRows, tokens: int) -> None:
        """Empty a slot for a layer of so many tokens."""
        most, least = self._options.slot_tokens(tokens), round_up(max(tokens, 1), self._options.step)
        # Lazily committed large pages would be committed for the room behind each head too.
        has_room = not commits_lazily() or disk.layout.slot_bytes(least) < LARGE_SLOT_BYTES
        if len(self.slots) == 1:  # memory is short
            has_room, most = False, least
        slot.assign(disk, most if has_room else least, most)

    def _fill(self, slot: Slot, disk: DiskRows) -> None:
        if slot.tokens < disk.paged_tokens:
            self._stats.num_unpredicted += 1
            self._read(slot, disk, slot.tokens, urgent=True)
            self._stats.wait_seconds += slot.wait()
        slot.write(disk.layout, disk.tail, disk.paged_tokens)
        slot.tokens = disk.length

    def _read(self, slot: Slot, disk: DiskRows, start: int, *, urgent: bool = False) -> None:
        """Start reading from the page with the token ``start`` on."""
        disk.flush()
        reads = segments(disk.pages, disk.layout, start, disk.paged_tokens, slot.capacity)
        slot.read(lambda: disk.file.reader.submit(reads, slot.memory, urgent=urgent), disk, disk.paged_tokens)

    def _read_ahead(self, disk: DiskRows, busy: Slot, num_new: int) -> None:
        """Prefetch the layer that is expected next into the other slot."""
        link = self._successor.get(disk)
        upcoming = link() if link is not None else None
        if upcoming is None or not upcoming.paged_tokens or any(slot.belongs_to(upcoming) for slot in self.slots):
            return
        slot = next((slot for slot in self.slots if slot is not busy), None)
        if slot is None:
            return
        self._assign(slot, upcoming, self._options.held_tokens(upcoming.length + num_new, num_new))
        self._read(slot, upcoming, 0)

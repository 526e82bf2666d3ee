"""Slots whose parts lie in stacks: one array for each tensor, with the slot as its first axis.

Kernels that take no gaps between rows take these. In :class:`~mlx_flash.memory.arena.SlotArena` all parts of a slot lie
together instead, so that one read can fill it.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_flash.memory.arena import Arena
from mlx_flash.memory.buffers import free_unused
from mlx_flash.memory.pagecache import round_up

_ALIGNMENT = 256
"""Stacks start at a multiple of this, as MLX's own GPU allocations do."""

_DISTANCE = 1 << 40
"""From the offset of a part to that of the next one: more than the bytes of any part."""

_STEP = 9 / 8
"""Numbers of slots differ by so much, since another number takes all slots their contents."""


class StackArena:
    """Slots of equal parts, in one buffer.

    Args:
        num_slots: number of slots, and the least that there will be.
        pitch: bytes to set aside for each slot, at least the sum of its parts.
        widths: bytes of each part of a slot.
        capacity: the most slots.

    Attributes:
        num_slots: slots that there are.
        least, capacity: the fewest and the most.
        num_touched: as in :class:`~mlx_flash.memory.arena.SlotArena`; all of them here.
        pitch: as given.
        offsets: the offset of each part in a slot.
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
        """Change the number of slots, up to the capacity. All lose their contents, and no view may be left.

        After an error there are the fewest.
        """
        del self._arena
        free_unused()
        try:
            self._make(num_slots)
        except BaseException:
            self._make(self.least)
            raise

    @property
    def committed(self) -> int:
        """Memory of the slots in bytes."""
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
        """Return the bytes of a slot."""
        return StackedSlot(self, slot)

    def part(self, slot: int, offset: int, nbytes: int) -> memoryview:
        """Return some bytes of a part of a slot."""
        part, within = divmod(offset, _DISTANCE)
        return self._arena.memory[self._starts[part] + slot * self._widths[part] + within :][:nbytes]

    def view(self, offset: int, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        """Return a stack as an evaluated array ``(slots, *shape)``.

        Args:
            offset: of the part.
            shape: of a row.
            dtype: of the array.
        """
        return self._arena.view(self._starts[offset // _DISTANCE], (self.num_slots, *shape), dtype)

    def num_head(self, nbytes: int) -> int:
        """Return the number of slots that :meth:`head` takes for so many bytes."""
        stacks = zip(self._starts, self._widths, strict=True)
        return min(self.num_slots, max(-(-(nbytes - start) // width) for start, width in stacks))

    def head(self, num_slots: int) -> Arena:
        """Return the memory of the first slots as one buffer. It goes on beyond what :meth:`num_head` was asked for."""
        return self._arena

    def fill(self, slot: int, byte: int) -> None:
        """Write one value to every byte of a slot."""
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

"""Slots whose parts lie in stacks: one array for each tensor, with the slot as its first axis.

Kernels that take no gaps between rows take these. In :class:`~mlx_flash.memory.arena.SlotArena` all parts of a slot lie
together instead, so that one read can fill it.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_flash.memory.arena import Arena
from mlx_flash.memory.pagecache import round_up

_ALIGNMENT = 256
"""Stacks start at a multiple of this, as MLX's own GPU allocations do."""


class StackArena:
    """Slots of equal parts, in one buffer. Their number cannot change.

    Args:
        num_slots: number of slots.
        pitch: bytes to set aside for each slot, at least the sum of its parts.
        widths: bytes of each part of a slot.

    Attributes:
        num_slots, capacity, num_touched: as in :class:`~mlx_flash.memory.arena.SlotArena`; the same number here.
        pitch: as given.
        starts: for each part the offset of its stack.
    """

    can_resize = False

    def __init__(self, num_slots: int, pitch: int, widths: Sequence[int]) -> None:
        self.num_slots = self.capacity = self.num_touched = num_slots
        self.pitch = pitch
        ends, end = {}, 0
        for part in sorted(range(len(widths)), key=lambda i: -widths[i]):  # the widest first: head() takes fewer slots
            ends[part] = end
            end = round_up(end + num_slots * widths[part], _ALIGNMENT)
        self.starts = tuple(ends[part] for part in range(len(widths)))
        self._widths = tuple(widths)
        self._arena = Arena(max(num_slots * pitch, end))

    @property
    def committed(self) -> int:
        """Memory of the slots in bytes."""
        return self.num_slots * self.pitch

    def num_within(self, nbytes: int) -> int:
        """Return the number of slots that so much memory is enough for."""
        return min(nbytes // self.pitch, self.num_slots)

    def touch(self, slot: int) -> None:
        """Do nothing: all slots have memory."""

    def memory(self, slot: int) -> memoryview:
        """Return the bytes that the reads of a slot write to: those of all stacks."""
        return self._arena.memory

    def part(self, slot: int, start: int, nbytes: int) -> memoryview:
        """Return a part of a slot.

        Args:
            slot: number of the slot.
            start: where the stack of the part starts.
            nbytes: size of the part.
        """
        return self._arena.memory[start + slot * nbytes :][:nbytes]

    def view(self, start: int, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        """Return a stack as an evaluated array ``(slots, *shape)``.

        Args:
            start: where the stack starts.
            shape: of a row.
            dtype: of the array.
        """
        return self._arena.view(start, (self.num_slots, *shape), dtype)

    def num_head(self, nbytes: int) -> int:
        """Return the number of slots that :meth:`head` takes for so many bytes."""
        stacks = zip(self.starts, self._widths, strict=True)
        return min(self.num_slots, max(-(-(nbytes - start) // width) for start, width in stacks))

    def head(self, num_slots: int) -> Arena:
        """Return the memory of the first slots as one buffer. It goes on beyond what :meth:`num_head` was asked for."""
        return self._arena

    def fill(self, slot: int, byte: int) -> None:
        """Write one value to every byte of a slot."""
        for start, width in zip(self.starts, self._widths, strict=True):
            np.frombuffer(self.part(slot, start, width), np.uint8)[:] = byte

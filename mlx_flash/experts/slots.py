"""The slots of the expert pool: which expert is in which slot, and which one gives way.

A slot holds one expert of one layer. The layers of a model share all slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, cast

import numpy as np

from mlx_flash.experts.eviction import Expert, Mask, Numbers, Uses
from mlx_flash.layout.experts import place_experts
from mlx_flash.layout.parts import ExpertStack
from mlx_flash.memory.arena import SlotArena
from mlx_flash.memory.stacks import StackArena
from mlx_flash.storage.placement import Piece, RowPlacement, Segment
from mlx_flash.streaming.stream import POISON

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
ABSENT = -1


@dataclass(slots=True)
class ExpertStats:
    """Counters of the experts.

    Attributes:
        num_calls: calls of layers of experts.
        num_full: those that ran at the full number of experts.
        num_routed: experts that calls needed, each once a call.
        num_hits: those of them that were in the pool, or in flight, when the call came.
        num_predicted: experts that were read because a router was expected to choose them.
        num_predicted_right: those of them that the next call of their layer needed.
        num_evicted: experts that lost their slots to others.
        read_bytes: bytes of experts that were read.
        wait_seconds: time that calls waited for experts.
    """

    num_calls: int = 0
    num_full: int = 0
    num_routed: int = 0
    num_hits: int = 0
    num_predicted: int = 0
    num_predicted_right: int = 0
    num_evicted: int = 0
    read_bytes: int = 0
    wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolLayer:
    """The experts of one layer, as the pool sees them.

    Attributes:
        placement: where the tensors of each expert lie, in its file and in a slot.
        kept: arrays that are always in memory, as bytes ``(experts, row)``, and where their rows go in a slot.
        expert_bytes: bytes of one expert that are read from disk.
        stacks: where the stack of each tensor that is read starts, if slots are parts of stacks. ``kept`` has the
            starts of stacks then, too.
    """

    placement: RowPlacement
    kept: Sequence[tuple[int, Bytes]]
    expert_bytes: int
    stacks: tuple[int, ...] | None = None

    @property
    def offsets(self) -> tuple[int, ...]:
        """Places of the tensors that are read: the start of a stack, or the offset in each slot."""
        return self.placement.offsets if self.stacks is None else self.stacks

    @property
    def widths(self) -> list[int]:
        """Bytes of each tensor of an expert: first those that are read, then those that are kept."""
        pieces = chain.from_iterable(segment.pieces for segment in self.placement.segments[0])
        sizes = {piece.buffer_offset: piece.nbytes for piece in pieces}
        return [*(sizes[offset] for offset in self.placement.offsets), *(rows.shape[1] for _, rows in self.kept)]

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return len(self.placement.segments)

    def file_order(self, expert: int) -> tuple[str, int]:
        """Return a key that sorts experts as their bytes lie on disk."""
        first = self.placement.segments[expert][0]
        return str(first.path), first.offset


def pool_layer(stack: ExpertStack, alignment: int) -> PoolLayer:
    """Return what the pool needs of a stack, whose small parameters have been evaluated."""
    placed = place_experts(stack, alignment)
    rows = [
        np.frombuffer(memoryview(cast(Any, p.array)).cast("B"), np.uint8).reshape(stack.num_experts, -1)
        for p in stack.unit.small
    ]
    return PoolLayer(placed.read, list(zip(placed.kept, rows, strict=True)), stack.expert_bytes)


def stack_layers(layers: Sequence[PoolLayer], starts: Sequence[int]) -> list[PoolLayer]:
    """Return layers whose experts lie in stacks.

    Args:
        layers: layers whose experts have tensors of the same sizes.
        starts: where the stack of each tensor starts, in the order of :attr:`PoolLayer.widths`.
    """
    num_read = len(layers[0].placement.offsets)
    read, kept = tuple(starts[:num_read]), starts[num_read:]
    return [
        replace(layer, stacks=read, kept=[(start, rows) for start, (_, rows) in zip(kept, layer.kept, strict=True)])
        for layer in layers
    ]


class ExpertSlots:
    """A table of slots. An expert that gets a slot takes that of the expert that was used least.

    Args:
        slots: the memory.
        layers: the layers with experts, in calling order.
        poison: fill slots with NaN bytes when an expert leaves.

    Attributes:
        slots: as given.
        layers: as given.
        slot_of: for each layer the slot of each expert, or ``ABSENT``. Everything else follows from it, so that
            :meth:`recover` can put it right after an exception at any point.
        filling: experts whose slots do not hold all of their bytes yet. The caller of :meth:`enter` takes them out.
        stats: the counters.
    """

    def __init__(self, slots: SlotArena | StackArena, layers: Sequence[PoolLayer], poison: bool) -> None:
        self.slots = slots
        self.layers = layers
        self.slot_of: list[Numbers] = [np.full(layer.num_experts, ABSENT) for layer in layers]
        self.filling: set[Expert] = set()
        self.stats = ExpertStats()
        self._poison = poison
        self._free = list(reversed(range(slots.num_slots)))
        self._cleared = 0
        self._held: Numbers = np.empty(0, np.int64)
        self._uses = Uses([layer.num_experts for layer in layers], slots.capacity)

    @property
    def num_resident(self) -> int:
        """Number of experts that have slots."""
        return sum(int(np.count_nonzero(table != ABSENT)) for table in self.slot_of)

    @property
    def num_usable(self) -> int:
        """Number of slots that hold experts, or may."""
        return self.slots.num_slots - self._cleared

    def hold(self, layer: int, experts: Iterable[int]) -> None:
        """Keep some experts in their slots until the next call of this method."""
        self._held = self.slot_of[layer][np.fromiter(experts, np.int64)]

    def needed(self, layer: int, experts: Sequence[int]) -> Mask:
        """Return for each slot whether it belongs to some experts, or to those that are held."""
        mask = np.zeros(self.slots.capacity, np.bool_)
        slots = self.slot_of[layer][list(experts)]
        mask[slots[slots != ABSENT]] = True
        mask[self._held] = True
        return mask

    def use(self, layer: int, experts: Numbers, counts: Numbers, num_tokens: int) -> None:
        """Count the uses of one call. The experts used most stay longest.

        Args:
            layer: number of the layer.
            experts: distinct.
            counts: for each of them the number of tokens that it computes.
            num_tokens: tokens of the call.
        """
        self._uses.add(layer, experts, counts, num_tokens)
        there = experts[self.slot_of[layer][experts] != ABSENT]
        self._uses.refresh(layer, there, self.slot_of[layer][there])

    def enter(self, key: Expert, spared: Mask) -> int | None:
        """Give an expert a slot, and copy into it the arrays that are always in memory. The caller fills the rest.

        Args:
            key: the expert.
            spared: for each slot whether its expert must stay. The new one is added.

        Returns:
            The slot; None when all are spared.
        """
        layer, expert = key
        if not self._free:
            least = self._uses.least(spared)
            if least is None:
                return None
            self.stats.num_evicted += 1
            self.leave(least)
        slot = self._free.pop()
        self.slots.touch(slot)
        for offset, rows in self.layers[layer].kept:
            row = rows[expert]
            np.frombuffer(self.slots.part(slot, offset, len(row)), np.uint8)[:] = row
        self.filling.add(key)
        self.slot_of[layer][expert] = slot
        self._uses.enter(slot, key)
        spared[slot] = True
        return slot

    def reads(self, key: Expert) -> tuple[Sequence[Segment], memoryview]:
        """Return the reads that fill an expert's slot, and the memory that they write to."""
        layer, slot = self.layers[key[0]], int(self.slot_of[key[0]][key[1]])
        segments = layer.placement.segments[key[1]]
        if isinstance(self.slots, SlotArena):
            return segments, self.slots.memory(slot)
        starts = dict(zip(layer.placement.offsets, layer.offsets, strict=True))
        return [_into_stacks(segment, starts, slot) for segment in segments], self.slots.everything

    def leave(self, key: Expert) -> None:
        """Take an expert's slot away."""
        layer, expert = key
        slot = int(self.slot_of[layer][expert])
        if slot == ABSENT:  # an exception has cut an earlier call in two
            return
        self.slot_of[layer][expert] = ABSENT
        self.filling.discard(key)
        self._uses.leave(slot)
        if self._poison:
            self.slots.fill(slot, POISON)
        self._free.append(slot)

    def clear_head(self, num_slots: int) -> None:
        """Take the first slots away from their experts, until :meth:`restore_head`."""
        for layer, table in enumerate(self.slot_of):
            for expert in np.flatnonzero((table != ABSENT) & (table < num_slots)):
                self.leave((layer, int(expert)))
        self._free = [slot for slot in self._free if slot >= num_slots]
        self._cleared = num_slots

    def restore_head(self) -> None:
        """Give the slots of :meth:`clear_head` back."""
        self._free = [*reversed(range(self._cleared)), *self._free]
        self._cleared = 0

    def recover(self) -> None:
        """Take the slots of experts away that are not all there, and make everything that follows from the table anew.

        For an exception that cut a change in two. No read may be in flight.
        """
        for layer, expert in self.filling:
            self.slot_of[layer][expert] = ABSENT
        self.filling.clear()
        self._held = np.empty(0, np.int64)
        self._cleared = 0
        for slot in range(self.slots.capacity):
            self._uses.leave(slot)
        taken = set()
        for layer, table in enumerate(self.slot_of):
            for expert in np.flatnonzero(table != ABSENT).tolist():
                slot = int(table[expert])
                taken.add(slot)
                self._uses.enter(slot, (layer, expert))
        self._free = [slot for slot in reversed(range(self.slots.num_slots)) if slot not in taken]

    def resize(self, num_slots: int) -> None:
        """Change the number of slots. Of all experts, those that were used most stay.

        Everything that computes with slots must be evaluated, and no slot may be cleared.
        """
        before = self.slots.num_slots
        going = np.arange(self.slots.capacity) >= num_slots
        self._held = np.empty(0, np.int64)
        assert isinstance(self.slots, SlotArena)
        self._free = [*reversed(range(before, num_slots)), *(slot for slot in self._free if slot < num_slots)]
        for slot in range(num_slots, before):
            self._vacate(slot, going)
        self.slots.resize(num_slots)

    def _vacate(self, slot: int, going: Mask) -> None:
        """Take a slot from its expert, which gets that of an expert in another slot if that one was used less."""
        key = self._uses.holder(slot)
        if key is None:
            return
        if not self._free and (least := self._uses.least(going)) is not None and self._uses.is_more(key, least):
            self.leave(least)
        if self._free:
            to = self._free.pop()
            assert isinstance(self.slots, SlotArena)  # the others keep their size
            self.slots.touch(to)
            self.slots.memory(to)[:] = self.slots.memory(slot)
            self.slot_of[key[0]][key[1]] = to
            self._uses.leave(slot)
            self._uses.enter(to, key)
        else:
            self.leave(key)
            self._free.pop()

    def adopt(self, layer: int, experts: Iterable[int], spared: Mask) -> dict[int, int]:
        """Give slots to experts that the caller will fill: free ones, and those of experts that were used less.

        Args:
            layer: number of the layer.
            experts: experts without slots, the most important first.
            spared: for each slot whether its expert must stay.

        Returns:
            The slot of each expert that got one.
        """
        adopted: dict[int, int] = {}
        for expert in experts:
            least = None if self._free else self._uses.least(spared)
            if not self._free and (least is None or not self._uses.is_more((layer, expert), least)):
                break
            slot = self.enter((layer, expert), spared)
            assert slot is not None
            adopted[expert] = slot
        return adopted


def _into_stacks(segment: Segment, starts: Mapping[int, int], slot: int) -> Segment:
    """Return a read whose pieces go to a slot's rows of stacks.

    Args:
        segment: the read for a slot whose parts lie together.
        starts: by offset in such a slot, where the stack of the part starts.
        slot: number of the slot.
    """
    pieces = (Piece(p.name, p.offset, p.nbytes, starts[p.buffer_offset] + slot * p.nbytes) for p in segment.pieces)
    return Segment(segment.path, segment.offset, segment.nbytes, None, tuple(pieces))

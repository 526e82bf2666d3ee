"""The expert pool: experts in slots that all layers of a model share, and the reads that bring them there.

A slot holds one expert of one layer. An expert that gets a slot takes that of the expert that was used least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, cast

import numpy as np

from mlx_flash.errors import ClosedError, ReadError
from mlx_flash.layout.parts import ExpertStack
from mlx_flash.layout.units import place_experts
from mlx_flash.memory.arena import SlotArena, StackArena
from mlx_flash.storage.placement import PlacedRows, Segment
from mlx_flash.storage.prefetcher import BackgroundPrefetcher, Buffer, Caching, Reads, Ticket
from mlx_flash.streaming.stream import POISON

Expert = tuple[int, int]
"""Number of the layer, number of the expert in it."""

HALF_LIFE = 32
"""A use counts half after so many passes."""

_MOST_USES = 1 / (1 - 2 ** (-1 / HALF_LIFE))
"""The sum of the uses of an expert that every pass needs."""

Numbers = np.ndarray[Any, np.dtype[np.int64]]

Slots = np.ndarray[Any, np.dtype[np.uint32]]
"""Numbers of slots, as MLX takes them for indices. An expert without one has :data:`ABSENT`, which is more than any."""

ABSENT = 2**32 - 1


class Uses:
    """The uses of each expert. The least used one in a slot gives way, and recent uses count more.

    Compared on recorded routing (docs/lab-notes.md): least recently used keeps nothing when a pass needs more experts
    than there are slots, and is behind frequency at any size; frequency that forgets is as good as frequency where
    routing stays as it is, and better where it changes.

    Sums are kept as logarithms of their value at the start, so that time passing does not change them.
    """

    def __init__(self, slot_of: Sequence[Slots], num_slots: int) -> None:
        self._slot_of = slot_of  # by layer and expert, which the pool changes
        self._sums = [np.full(len(slots), -np.inf) for slots in slot_of]
        self._in_slots = np.full(num_slots, np.inf)
        self.holders: list[Expert | None] = [None] * num_slots  # by slot
        self._order: list[int] = []
        self._ordered_by = self._in_slots
        self._now = 0.0
        self._last = -1

    def add(self, layer: int, experts: Numbers, counts: Numbers, num_tokens: int) -> None:
        """Count a call of a layer: distinct experts, and how many tokens each computes. The most used stay longest.

        Tokens of one call count as if they were spread evenly over as many passes.
        """
        if layer <= self._last:
            self._now += 1 / HALF_LIFE
            self.reorder()
        self._last = layer
        weight = (1 - 2 ** (-num_tokens / HALF_LIFE)) * _MOST_USES / num_tokens
        sums = self._sums[layer]
        found = sums[experts] = np.logaddexp2(sums[experts], self._now + np.log2(counts * weight))
        slots = self._slot_of[layer][experts]
        is_there = slots != ABSENT
        self._in_slots[slots[is_there]] = found[is_there]

    def enter(self, slot: int, key: Expert) -> None:
        self.holders[slot] = key
        self._in_slots[slot] = self._sums[key[0]][key[1]]

    def leave(self, slot: int) -> None:
        self.holders[slot] = None
        self._in_slots[slot] = np.inf

    def least(self, spared: Collection[int], number: int) -> list[Expert]:
        """Return some of the experts in slots that were used least, or fewer where slots are spared.

        Slots are put in order once a pass: numpy lets go of Python's lock for so many, and threads that read would take
        it each time. What has been used or has entered since stays.
        """
        found, seen, is_new = list[int](), list[int](), False
        while len(found) < number:
            if not self._order:
                if is_new:
                    break
                self._put_in_order()
                found, seen, is_new = [], [], True
                continue
            slot = self._order.pop()
            if slot in spared:
                seen.append(slot)
            elif self._in_slots[slot] == self._ordered_by[slot]:
                found.append(slot)
                seen.append(slot)  # it may stay
        self._order += reversed(seen)
        return [key for slot in found if (key := self.holders[slot]) is not None]

    def reorder(self) -> None:
        """Have slots put in order again, by what was used and has entered up to now."""
        self._order.clear()

    def _put_in_order(self) -> None:
        """List the slots with experts, those that were used least last."""
        self._ordered_by = self._in_slots.copy()
        number = int(np.count_nonzero(self._in_slots < np.inf))
        self._order = self._in_slots.argsort()[:number][::-1].tolist()

    def is_more(self, key: Expert, than: Expert) -> bool:
        return bool(self._sums[key[0]][key[1]] > self._sums[than[0]][than[1]])


Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(slots=True)
class ExpertStats:
    """Counters of the experts."""

    num_calls: int = 0  # calls of layers of experts
    num_full: int = 0  # those that ran at the full number of experts
    num_routed: int = 0  # experts that calls needed, each once a call
    num_hits: int = 0  # those of them that were in the pool, or in flight, when the call came
    num_predicted: int = 0  # experts that were read because a router was expected to choose them
    num_predicted_right: int = 0  # those of them that the next call of their layer needed
    num_evicted: int = 0  # experts that lost their slots to others
    read_bytes: int = 0  # bytes of experts that were read
    wait_seconds: float = 0.0  # time that calls waited for experts


@dataclass(frozen=True)
class PoolLayer:
    """The experts of one layer, as the pool sees them."""

    # where the tensors of each expert lie, in its file and in a slot: there all in the same places
    placements: PlacedRows
    # arrays that are always in memory, as bytes ``(experts, row)``, and where their rows go in a slot
    kept: Sequence[tuple[int, Bytes]]
    expert_bytes: int  # bytes of one expert that are read from disk

    @property
    def widths(self) -> list[int]:
        """Bytes of each tensor of an expert: first those that are read, then those that are kept."""
        return [*(record.nbytes for record in self.placements.rows[0]), *(rows.shape[1] for _, rows in self.kept)]


def pool_layer(stack: ExpertStack) -> PoolLayer:
    """Return what the pool needs of a stack, whose small parameters have been evaluated."""
    placed = place_experts(stack)
    rows = [
        np.frombuffer(memoryview(cast(Any, p.array)).cast("B"), np.uint8).reshape(stack.num_experts, -1)
        for p in stack.unit.small
    ]
    return PoolLayer(placed.read, list(zip(placed.kept, rows, strict=True)), stack.expert_bytes)


def stack_layers(layers: Sequence[PoolLayer], offsets: Sequence[int]) -> list[PoolLayer]:
    """Return layers whose experts, of tensors of the same sizes, lie in stacks with these offsets in a slot."""
    number = len(layers[0].placements.offsets)
    found = []
    for layer in layers:
        placements = replace(layer.placements, offsets=tuple(offsets[:number]), in_place=(), copied=range(number))
        kept = [(offset, rows) for offset, (_, rows) in zip(offsets[number:], layer.kept, strict=True)]
        found.append(replace(layer, placements=placements, kept=kept))
    return found


READS_PAST_CACHE = 3
"""4 to 8 % faster than 1 with pools of middle size, 2 % slower with the smallest; 5 is like 3 (docs/lab-notes.md)."""


class ExpertPool:
    """A table of slots that experts are read into.

    Everything that computes with a slot must be evaluated before the next call of :meth:`request` or
    :meth:`clear_head`, except for the experts of the last request. An expert is first read ``reads_past_cache`` times
    past the page cache: most are in the pool by then, and filling the page cache takes processor time from the
    computation.
    """

    def __init__(
        self,
        slots: SlotArena | StackArena,
        layers: Sequence[PoolLayer],
        reader: BackgroundPrefetcher,
        poison: bool,
        *,
        reads_past_cache: int,
    ) -> None:
        self.slots = slots
        self.layers = layers
        # By layer and expert: the slot, from the start of its read on, and the same once it has been read.
        self.slot_of = [np.full(len(layer.placements), ABSENT, np.uint32) for layer in layers]
        self._ready = [table.copy() for table in self.slot_of]
        self.stats = ExpertStats()
        self.poison = poison
        self.reader = reader
        self._reads_past_cache = reads_past_cache
        self._num_reads: Counter[Expert] = Counter()
        self._prepared: dict[Expert, Reads] = {}
        self._in_flight: list[dict[int, Ticket]] = [{} for _ in layers]
        self._predicted: list[set[int]] = [set() for _ in layers]
        self._free = list(reversed(range(slots.num_slots)))
        self._num_cleared = 0
        self._held: list[int] = []
        self._uses = Uses(self.slot_of, slots.capacity)
        self.use = self._uses.add

    @property
    def num_resident(self) -> int:
        return len(self._uses.holders) - self._uses.holders.count(None)

    @property
    def num_usable(self) -> int:
        """Number of slots that hold experts, or may."""
        return self.slots.num_slots - self._num_cleared

    def ready(self, layer: int) -> Slots:
        """Return the slot of each expert of a layer; :data:`ABSENT` until it has been read."""
        if self._in_flight[layer]:
            self._settle(layer, list(self._in_flight[layer]))
        return self._ready[layer].copy()

    def request(self, layer: int, experts: list[int]) -> list[int]:
        """Start to read the missing ones of distinct experts, in the order of their files. Raises: ClosedError.

        All of them stay until the next request, or :meth:`clear_head`. Return those in flight, in the order of reads.
        """
        self._held = []
        in_flight = self._in_flight[layer]
        if in_flight:
            self._settle(layer, experts)
        missing = self.count(layer, experts)
        if missing:
            if not self._free_slots(len(missing), lambda: self.spared(layer, experts)) and not self._free_slots(
                len(missing), lambda: self.spared(layer, experts, ())
            ):
                raise AssertionError(f"{len(experts)} experts do not fit {self.num_usable} slots")
            for expert in sorted(missing, key=self.layers[layer].placements.starts.__getitem__):
                self._read((layer, expert), urgent=True)
        self._held = self.slot_of[layer][experts].tolist()
        if not in_flight:
            return []
        needed = set(experts)
        late = [expert for expert in in_flight if expert in needed]
        for expert in late:
            if not in_flight[expert].is_urgent:
                in_flight[expert].hurry()
        return late

    def read_ahead(self, layer: int, experts: list[int], most: int, *, urgent: bool = False) -> None:
        """Start to read experts that the next call of a layer may need, the likeliest first.

        Over all layers, at most ``most`` predicted experts have slots. Urgent reads are for a call that comes soon.
        """
        num_left = most - sum(map(len, self._predicted))
        missing = [*compress(experts, self.slot_of[layer][experts] == ABSENT)][: max(0, num_left)]
        self._free_slots(len(missing), lambda: self.spared(layer, experts))
        for expert in missing[: len(self._free)]:
            self._read((layer, expert), urgent=urgent)
            self._predicted[layer].add(expert)
            self.stats.num_predicted += 1

    def wait(self, layer: int, experts: Sequence[int]) -> None:
        """Wait until some requested experts are there. After a ReadError, all in flight have lost their slots."""
        in_flight = self._in_flight[layer]
        try:
            for expert in experts:
                if expert in in_flight:
                    self.stats.wait_seconds += in_flight[expert].wait()
                    self._arrive(layer, expert)
        except ReadError:
            for expert in list(in_flight):
                self.leave((layer, expert))
            raise

    def wait_any(self, layer: int, experts: Sequence[int]) -> Sequence[int]:
        """Return those of some requested experts that are in their slots. If none is, wait for the first one."""
        in_flight = self._in_flight[layer]
        came = [expert for expert in experts if expert not in in_flight or in_flight[expert].done()] or experts[:1]
        self.wait(layer, came)
        return came

    def count(self, layer: int, wanted: list[int]) -> list[int]:
        """Count the experts that a call of a layer needs. Return those that have no slots."""
        stats, predicted = self.stats, self._predicted[layer]
        missing = [*compress(wanted, self.slot_of[layer][wanted] == ABSENT)]
        stats.num_routed += len(wanted)
        stats.num_hits += len(wanted) - len(missing)
        if predicted:
            stats.num_predicted_right += len(predicted.intersection(wanted))
            predicted.clear()
        return missing

    def spared(self, layer: int, experts: list[int], predicted: Sequence[Collection[int]] | None = None) -> set[int]:
        """Return the slots of some experts, of held ones, and of predicted ones of any layer."""
        slots = {*self._held, *self.slot_of[layer][experts].tolist()}
        for other, some in enumerate(self._predicted if predicted is None else predicted):
            if some:
                slots.update(self.slot_of[other][list(some)].tolist())
        return slots - {ABSENT}

    def _free_slots(self, number: int, spared: Callable[[], set[int]]) -> bool:
        """Take slots from the experts that were used least, until so many are free. Return whether they are."""
        short = number - len(self._free)
        if short > 0:
            least = self._uses.least(spared(), short)
            self.stats.num_evicted += len(least)
            for key in least:
                self.leave(key)
        return len(self._free) >= number

    def _read(self, key: Expert, *, urgent: bool) -> None:
        layer, expert = key
        slot = self._enter(key)
        caching: Caching = "none" if self._num_reads[key] < self._reads_past_cache else "shared"
        self._num_reads[key] += 1
        try:
            # One thread is enough where there is time: handing work over takes processor time from the computation.
            self._in_flight[layer][expert] = self.reader.start(
                self._prepared.get(key) or self._prepare(key),
                self.slots.memory(slot),
                caching=caching,
                urgent=urgent,
                num_threads=None if urgent else 1,
            )
        except ClosedError:
            self.leave(key)
            raise
        self.stats.read_bytes += self.layers[layer].expert_bytes

    def _prepare(self, key: Expert) -> Reads:
        reads = self._prepared[key] = self.reader.prepare(self.layers[key[0]].placements.segments(key[1]))
        return reads

    def _enter(self, key: Expert) -> int:
        """Give an expert a free slot, and copy into it the arrays that are always in memory. Return the slot."""
        layer, expert = key
        slot = self._free.pop()
        self.slots.touch(slot)
        for offset, rows in self.layers[layer].kept:
            row = rows[expert]
            np.frombuffer(self.slots.part(slot, offset, len(row)), np.uint8)[:] = row
        self.slot_of[layer][expert] = slot
        self._uses.enter(slot, key)
        return slot

    def _arrive(self, layer: int, expert: int) -> None:
        del self._in_flight[layer][expert]
        self._ready[layer][expert] = self.slot_of[layer][expert]

    def leave(self, key: Expert) -> None:
        layer, expert = key
        ticket = self._in_flight[layer].pop(expert, None)
        if ticket is not None:
            ticket.cancel()
        self._predicted[layer].discard(expert)
        slot = int(self.slot_of[layer][expert])
        self.slot_of[layer][expert] = self._ready[layer][expert] = ABSENT
        self._uses.leave(slot)
        if self.poison:
            self.slots.fill(slot, POISON)
        self._free.append(slot)

    def _settle(self, layer: int, experts: Iterable[int]) -> None:
        """Note which reads of some experts have ended. Take the slots away from those whose reads have failed."""
        in_flight = self._in_flight[layer]
        for expert in experts:
            if expert in in_flight and in_flight[expert].done():
                try:
                    in_flight[expert].wait()
                except ReadError:  # it is read again
                    self.leave((layer, expert))
                else:
                    self._arrive(layer, expert)

    def drop_unread(self, layer: int, experts: Sequence[int]) -> None:
        self._settle(layer, experts)
        for expert in self._in_flight[layer].keys() & set(experts):
            self.leave((layer, expert))

    def reads(self, key: Expert) -> tuple[Sequence[Segment], Buffer]:
        """Return the reads that fill an expert's slot, and the memory that they write to."""
        layer, expert = key
        return self.layers[layer].placements.segments(expert), self.slots.memory(int(self.slot_of[layer][expert]))

    def clear_head(self, num_slots: int) -> None:
        """Take the first slots away from their experts, until :meth:`restore_head`."""
        self._held = []
        for key in self._uses.holders[:num_slots]:
            if key is not None:
                self.leave(key)
        self._free = [slot for slot in self._free if slot >= num_slots]
        self._num_cleared = num_slots

    def restore_head(self) -> None:
        self._free = [*reversed(range(self._num_cleared)), *self._free]
        self._num_cleared = 0

    def adopt(self, layer: int, experts: Iterable[int], spared: set[int]) -> dict[int, int]:
        """Give slots to experts that the caller will fill, the most important first. Return the slots by expert.

        They are free ones, and those of experts that were used less. Spared slots keep theirs; new ones become spared.
        """
        adopted: dict[int, int] = {}
        for expert in experts:
            if not self._free:
                least = self._uses.least(spared, 1)
                if not least or not self._uses.is_more((layer, expert), least[0]):
                    break
                self.stats.num_evicted += 1
                self.leave(least[0])
            slot = adopted[expert] = self._ready[layer][expert] = self._enter((layer, expert))
            spared.add(slot)
        return adopted

    def resize(self, num_slots: int) -> None:
        """Change the number of slots. Of all experts in their slots, those that were used most stay, if slots can.

        Everything that computes with slots must be evaluated, none may be cleared, and no view of stacks may be left.
        """
        self._held = []
        if isinstance(self.slots, StackArena):
            self.clear_head(self.slots.num_slots)
            try:
                self.slots.resize(num_slots)
            finally:
                self._free, self._num_cleared = [*reversed(range(self.slots.num_slots))], 0
            return
        for layer, in_flight in enumerate(self._in_flight):
            for expert in [expert for expert in in_flight if self.slot_of[layer][expert] >= num_slots]:
                self.leave((layer, expert))
        before, going = self.slots.num_slots, range(num_slots, self.slots.capacity)
        self._free = [*reversed(range(before, num_slots)), *(slot for slot in self._free if slot < num_slots)]
        self._uses.reorder()
        num_leaving = len(self._uses.holders[num_slots:]) - self._uses.holders[num_slots:].count(None)
        leaving = self._uses.least(range(num_slots), num_leaving)
        others = iter(self._uses.least(going, num_leaving))
        for key in reversed(leaving):
            self._vacate(key, others)
        self.slots.resize(num_slots)

    def _vacate(self, key: Expert, others: Iterator[Expert]) -> None:
        """Give an expert a free slot, or that of the next one of others if it was used less."""
        assert isinstance(self.slots, SlotArena)
        slot = int(self.slot_of[key[0]][key[1]])
        if not self._free and (least := next(others, None)) is not None and self._uses.is_more(key, least):
            self.leave(least)
        if self._free:
            to = self._free.pop()
            self.slots.touch(to)
            self.slots.memory(to)[:] = self.slots.memory(slot)
            self.slot_of[key[0]][key[1]] = self._ready[key[0]][key[1]] = to
            self._uses.leave(slot)
            self._uses.enter(to, key)
        else:
            self.leave(key)
            self._free.pop()

    def close(self) -> None:
        """Cancel all reads, and wait until none writes to a slot. Free the slots where the system can do that."""
        for in_flight in self._in_flight:
            for ticket in in_flight.values():
                ticket.cancel()
            in_flight.clear()
        if isinstance(self.slots, SlotArena) and self.slots.can_resize:
            self.slots.resize(0)

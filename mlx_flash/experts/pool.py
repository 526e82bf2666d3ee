"""The experts that are in memory: a pool of slots that all layers of a model share.

A slot holds one expert of one layer. Which stays is decided by use: an expert that is needed and missing takes the
place of the one that is least likely to be needed.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_flash.compat.arrays import memory_of
from mlx_flash.errors import ReadError
from mlx_flash.experts.eviction import Expert, Mask, Numbers, Uses
from mlx_flash.layout.experts import place_experts
from mlx_flash.layout.load import ExpertStack
from mlx_flash.memory.arena import SlotArena
from mlx_flash.storage.placement import RowPlacement
from mlx_flash.storage.prefetcher import BackgroundPrefetcher, Ticket
from mlx_flash.streaming.stream import POISON

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
ABSENT = -1


@dataclass(slots=True)
class ExpertStats:
    """What the experts did so far.

    Attributes:
        num_calls: calls of layers of experts.
        num_full: those that ran at the full number of experts.
        num_routed: experts that calls needed, each once a call.
        num_hits: those of them that were in the pool, or on their way, when the call came.
        num_predicted: experts that were read because a router was expected to choose them.
        num_predicted_right: those of them that the next call of their layer needed.
        num_evicted: experts whose place was taken.
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
        kept: arrays that are in memory always, as bytes ``(experts, row)``, and where their rows go in a slot.
        expert_bytes: of one expert, read from disk.
    """

    placement: RowPlacement
    kept: Sequence[tuple[int, Bytes]]
    expert_bytes: int

    @property
    def num_experts(self) -> int:
        """How many there are."""
        return len(self.placement.segments)


def pool_layer(stack: ExpertStack, alignment: int) -> PoolLayer:
    """What the pool needs of a stack, whose small parameters have been evaluated."""
    placed = place_experts(stack, alignment)
    rows = [np.frombuffer(memory_of(p.array), np.uint8).reshape(stack.num_experts, -1) for p in stack.unit.small]
    return PoolLayer(placed.read, list(zip(placed.kept, rows, strict=True)), stack.expert_bytes)


class ExpertPool:
    """Brings experts into slots.

    Not for several threads at once: the caller holds a lock around a whole forward pass. What computes with a slot
    must have been evaluated before the next call of :meth:`request` or :meth:`clear_tail`, except for the experts that
    :meth:`hold` names.

    Args:
        slots: the memory.
        layers: whose experts.
        reader: reads them.
        poison: fill slots with NaN bytes when an expert leaves.

    Attributes:
        stats: what happened so far.
        slot_of: for each layer the slot of each expert, or ``ABSENT``.
    """

    def __init__(
        self, slots: SlotArena, layers: Sequence[PoolLayer], reader: BackgroundPrefetcher, poison: bool
    ) -> None:
        self.stats = ExpertStats()
        self.slots = slots
        self.layers = layers
        self.slot_of: list[Numbers] = [np.full(layer.num_experts, ABSENT) for layer in layers]
        self._reader = reader
        self._poison = poison
        self._free = list(reversed(range(slots.num_slots)))
        self._cleared = 0
        self._tickets: dict[Expert, Ticket] = {}
        self._predicted: list[set[int]] = [set() for _ in layers]
        self._held: Numbers = np.empty(0, np.int64)
        self._uses = Uses([layer.num_experts for layer in layers], slots.num_slots)

    @property
    def num_resident(self) -> int:
        """Experts that are in slots, or on their way."""
        return sum(int(np.count_nonzero(table != ABSENT)) for table in self.slot_of)

    @property
    def num_usable(self) -> int:
        """Slots that hold experts, or may."""
        return self.slots.num_slots - self._cleared

    def hold(self, layer: int, experts: Iterable[int]) -> None:
        """Keeps some experts where they are, until other ones are named."""
        self._held = self.slot_of[layer][np.fromiter(experts, np.int64)]

    def ready(self, layer: int) -> Mask:
        """Of each expert of a layer, whether it can be computed with now."""
        self.drop_failed(layer, [expert for of, expert in self._tickets if of == layer])
        mask: Mask = self.slot_of[layer] != ABSENT
        mask[[expert for of, expert in self._tickets if of == layer]] = False
        return mask

    def request(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Begins to read those of some experts that are missing, in the order of their files.

        Args:
            layer: whose.
            experts: distinct; at most ``num_usable``.

        Returns:
            Those that have to be waited for.

        Raises:
            ClosedError: the reader was closed.
        """
        self.drop_failed(layer, experts)
        self.count(layer, experts)
        missing = [expert for expert in experts if self.slot_of[layer][expert] == ABSENT]
        if missing:
            spared = self._spared(layer, experts)
            for expert in sorted(missing, key=lambda expert: self._file_order(layer, expert)):
                is_read = self._read((layer, expert), spared, urgent=True)
                if not is_read and not self._read((layer, expert), self._needed(layer, experts), urgent=True):
                    raise AssertionError(f"{len(experts)} experts do not fit {self.num_usable} slots")
        late = [expert for expert in experts if (layer, expert) in self._tickets]
        for expert in late:
            self._tickets[layer, expert].hurry()
        return late

    def _spared(self, layer: int, experts: Sequence[int]) -> Mask:
        """The slots of some experts, of those that are held, and of those that are expected to be needed soon."""
        mask = self._needed(layer, experts)
        mask[[int(self.slot_of[i][expert]) for i, experts in enumerate(self._predicted) for expert in experts]] = True
        return mask

    def _needed(self, layer: int, experts: Sequence[int]) -> Mask:
        """The slots of some experts, and of those that are held."""
        mask = np.zeros(self.slots.num_slots, np.bool_)
        slots = self.slot_of[layer][list(experts)]
        mask[slots[slots != ABSENT]] = True
        mask[self._held] = True
        return mask

    def use(self, layer: int, experts: Numbers, counts: Numbers, num_tokens: int) -> None:
        """Notes that a call uses experts: those used most stay longest.

        Args:
            layer: whose.
            experts: distinct.
            counts: how many of the tokens each of them computes.
            num_tokens: of the call.
        """
        self._uses.add(layer, experts, counts, num_tokens)
        there = experts[self.slot_of[layer][experts] != ABSENT]
        self._uses.refresh(layer, there, self.slot_of[layer][there])

    def count(self, layer: int, wanted: Sequence[int]) -> None:
        """Notes that a call of a layer needs some experts."""
        stats, predicted = self.stats, self._predicted[layer]
        stats.num_routed += len(wanted)
        stats.num_hits += sum(bool(self.slot_of[layer][expert] != ABSENT) for expert in wanted)
        stats.num_predicted_right += len(predicted.intersection(wanted))
        predicted.clear()

    def _file_order(self, layer: int, expert: int) -> tuple[str, int]:
        first = self.layers[layer].placement.segments[expert][0]
        return str(first.path), first.offset

    def drop_failed(self, layer: int, experts: Iterable[int]) -> None:
        """Takes the slots away from those of some experts that could not be read before they were needed."""
        for expert in experts:
            ticket = self._tickets.get((layer, expert))
            if ticket is not None and ticket.done():
                with suppress(ReadError):  # they are read again
                    self._finish((layer, expert), ticket)

    def drop_unread(self, layer: int, experts: Sequence[int]) -> None:
        """Takes the slots away from those of some experts that are not in them yet."""
        self.drop_failed(layer, experts)
        self.forget(layer, [expert for expert in experts if (layer, expert) in self._tickets])

    def wait(self, layer: int, experts: Sequence[int]) -> None:
        """Returns when some experts, all of them requested, are in their slots.

        Raises:
            ReadError: one of them could not be read. They may be requested again.
        """
        left = list(experts)
        while left:
            came = self.wait_any(layer, left)
            left = [expert for expert in left if expert not in came]

    def wait_any(self, layer: int, experts: Sequence[int]) -> Sequence[int]:
        """Returns those of some experts, all of them requested, that are in their slots.

        Waits only if none is, and then for the one that is read longest.

        Raises:
            ReadError: one of them could not be read. They may be requested again.
        """
        began = time.perf_counter()
        came = [expert for expert in experts if (layer, expert) not in self._tickets]
        under_way = [key for key in self._tickets if key[0] == layer and key[1] in experts]
        try:
            for key in under_way:
                if not came or self._tickets[key].done():
                    self._finish(key, self._tickets[key])
                    came.append(key[1])
        except BaseException:  # all of them, or each would fail one more call
            self._free += [self._leave(key) for key in under_way if key in self._tickets]
            raise
        finally:
            self.stats.wait_seconds += time.perf_counter() - began
        return came

    def wait_for(self, ticket: Ticket) -> None:
        """Waits for reads of the caller's, and counts the time."""
        began = time.perf_counter()
        try:
            ticket.wait()
        finally:
            self.stats.wait_seconds += time.perf_counter() - began

    def _finish(self, key: Expert, ticket: Ticket) -> None:
        try:
            ticket.wait()
        except BaseException:
            self._free.append(self._leave(key))
            raise
        del self._tickets[key]

    def read_ahead(self, layer: int, experts: Sequence[int], most: int, *, urgent: bool = False) -> None:
        """Begins to read experts that may be needed by the next call of a layer.

        Args:
            layer: whose.
            experts: the likeliest first.
            most: how many of them may be on their way at once, over all layers.
            urgent: the call comes soon.
        """
        table, under_way = self.slot_of[layer], sum(map(len, self._predicted))
        missing = [expert for expert in experts if table[expert] == ABSENT][: max(0, most - under_way)]
        if not missing:
            return
        spared = self._spared(layer, experts)
        for expert in missing:
            if not self._read((layer, expert), spared, urgent=urgent):
                return
            self._predicted[layer].add(expert)
            self.stats.num_predicted += 1

    def _read(self, key: Expert, spared: Mask, *, urgent: bool) -> bool:
        """Begins to read an expert. Returns whether there was a slot for it."""
        layer, expert = key
        slot = self._enter(key, spared)
        if slot is None:
            return False
        segments = self.layers[layer].placement.segments[expert]
        try:
            # One thread is enough for what has time: handing work over takes some of it from what computes.
            num_tasks = None if urgent else 1
            memory = self.slots.memory(slot)
            self._tickets[key] = self._reader.submit(segments, memory, urgent=urgent, num_tasks=num_tasks)
        except BaseException:
            self._free.append(self._leave(key))
            raise
        self.stats.read_bytes += self.layers[layer].expert_bytes
        return True

    def _enter(self, key: Expert, spared: Mask) -> int | None:
        """Gives an expert a slot that is spared from now on, with what is in memory of it; none when all are spared."""
        layer, expert = key
        slot = self._free.pop() if self._free else self._evict(spared)
        if slot is None:
            return None
        for offset, rows in self.layers[layer].kept:
            row = rows[expert]
            np.frombuffer(self.slots.memory(slot), np.uint8)[offset : offset + len(row)] = row
        self.slot_of[layer][expert] = slot
        self._uses.enter(slot, key)
        spared[slot] = True
        return slot

    def _evict(self, spared: Mask) -> int | None:
        key = self._uses.least(spared)
        if key is None:
            return None
        self.stats.num_evicted += 1
        return self._leave(key)

    def _leave(self, key: Expert) -> int:
        """Takes an expert's slot away. Returns the slot."""
        layer, expert = key
        ticket = self._tickets.pop(key, None)
        if ticket is not None:
            ticket.cancel()
        self._predicted[layer].discard(expert)
        slot = int(self.slot_of[layer][expert])
        self._uses.leave(slot)
        self.slot_of[layer][expert] = ABSENT
        if self._poison:
            self.slots.fill(slot, POISON)
        return slot

    def clear_tail(self, num_slots: int) -> None:
        """Takes the last slots away from their experts, until :meth:`restore_tail`."""
        first = self.slots.num_slots - num_slots
        for layer, table in enumerate(self.slot_of):
            for expert in np.flatnonzero(table >= first):
                self._leave((layer, int(expert)))
        self._free = [slot for slot in self._free if slot < first]
        self._cleared = num_slots

    def restore_tail(self) -> None:
        """Gives the slots of :meth:`clear_tail` back."""
        first = self.slots.num_slots - self._cleared
        self._free = [*reversed(range(first, self.slots.num_slots)), *self._free]
        self._cleared = 0

    def adopt(self, layer: int, experts: Iterable[int], keep: Collection[int]) -> dict[int, int]:
        """Gives slots to experts that the caller will fill: free ones, and those of experts that were used less.

        Args:
            layer: whose.
            experts: that are not in the pool, those that matter most first.
            keep: experts of the layer that must not give way.

        Returns:
            The slot of each that got one.
        """
        spared = self._spared(layer, list(keep))
        slots: dict[int, int] = {}
        for expert in experts:
            least = None if self._free else self._uses.least(spared)
            if not self._free and (least is None or not self._uses.is_more((layer, expert), least)):
                break
            slot = self._enter((layer, expert), spared)
            assert slot is not None
            slots[expert] = slot
        return slots

    def forget(self, layer: int, experts: Iterable[int]) -> None:
        """Takes the slots of some experts away, which were not filled."""
        self._free += [self._leave((layer, expert)) for expert in experts]

    def close(self) -> None:
        """Returns when nothing writes to a slot any more."""
        for ticket in self._tickets.values():
            ticket.cancel()
        self._tickets.clear()

"""The expert pool: experts in slots that all layers of a model share, and the reads that bring them there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from mlx_flash.errors import ReadError
from mlx_flash.experts.eviction import Expert, Mask
from mlx_flash.experts.slots import ABSENT, ExpertSlots, PoolLayer
from mlx_flash.memory.arena import SlotArena
from mlx_flash.memory.stacks import StackArena
from mlx_flash.storage.prefetcher import BackgroundPrefetcher, Caching, Ticket

READS_PAST_CACHE = 3
"""4 to 8 % faster than 1 with pools of middle size, 2 % slower with the smallest; 5 is like 3 (docs/lab/experts.md)."""


class ExpertPool(ExpertSlots):
    """A pool of slots that experts are read into.

    Not for several threads at once: the caller holds a lock around a whole forward pass. Everything that computes with
    a slot must be evaluated before the next call of :meth:`request` or :meth:`clear_head`, except for the experts that
    :meth:`hold` names.

    Args:
        slots: the memory.
        layers: the layers with experts, in calling order.
        reader: reads the experts.
        poison: fill slots with NaN bytes when an expert leaves.
        reads_past_cache: read an expert so many times past the page cache. Most are in the pool by then. Filling the
            page cache takes processor time, which is for the computation where the processor does that too.
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
        super().__init__(slots, layers, poison)
        self._reads_past_cache = reads_past_cache
        self._num_reads: Counter[Expert] = Counter()
        self._reader = reader
        self._tickets: dict[Expert, Ticket] = {}
        self._predicted: list[set[int]] = [set() for _ in layers]

    def ready(self, layer: int) -> Mask:
        """Return for each expert of a layer whether it is in its slot."""
        self.drop_failed(layer, [expert for of, expert in self._tickets if of == layer])
        mask: Mask = self.slot_of[layer] != ABSENT
        mask[[expert for of, expert in self._tickets if of == layer]] = False
        return mask

    def request(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Start to read the missing ones of some experts, in the order of their files.

        Args:
            layer: number of the layer.
            experts: distinct; at most ``num_usable``.

        Returns:
            The experts in flight.

        Raises:
            ClosedError: the reader was closed.
        """
        self.drop_failed(layer, experts)
        self.count(layer, experts)
        missing = [expert for expert in experts if self.slot_of[layer][expert] == ABSENT]
        if missing:
            spared = self.spared(layer, experts)
            for expert in sorted(missing, key=self.layers[layer].file_order):
                is_read = self._read((layer, expert), spared, urgent=True)
                if not is_read and not self._read((layer, expert), self.needed(layer, experts), urgent=True):
                    raise AssertionError(f"{len(experts)} experts do not fit {self.num_usable} slots")
        late = [expert for expert in experts if (layer, expert) in self._tickets]
        for expert in late:
            self._tickets[layer, expert].hurry()
        return late

    def spared(self, layer: int, experts: Sequence[int]) -> Mask:
        """Return for each slot whether it belongs to some experts, to held ones, or to predicted ones."""
        mask = self.needed(layer, experts)
        mask[[int(self.slot_of[i][expert]) for i, experts in enumerate(self._predicted) for expert in experts]] = True
        return mask

    def count(self, layer: int, wanted: Sequence[int]) -> None:
        """Count the experts that a call of a layer needs."""
        stats, predicted = self.stats, self._predicted[layer]
        stats.num_routed += len(wanted)
        stats.num_hits += sum(bool(self.slot_of[layer][expert] != ABSENT) for expert in wanted)
        stats.num_predicted_right += len(predicted.intersection(wanted))
        predicted.clear()

    def read_ahead(self, layer: int, experts: Sequence[int], most: int, *, urgent: bool = False) -> None:
        """Start to read experts that the next call of a layer may need.

        Args:
            layer: number of the layer.
            experts: the likeliest first.
            most: number of predicted experts that may have slots at once, over all layers.
            urgent: the call comes soon.
        """
        table, num_predicted = self.slot_of[layer], sum(map(len, self._predicted))
        missing = [expert for expert in experts if table[expert] == ABSENT][: max(0, most - num_predicted)]
        if not missing:
            return
        spared = self.spared(layer, experts)
        for expert in missing:
            if not self._read((layer, expert), spared, urgent=urgent):
                return
            self._predicted[layer].add(expert)
            self.stats.num_predicted += 1

    def _read(self, key: Expert, spared: Mask, *, urgent: bool) -> bool:
        """Start to read an expert. Return False when there is no slot for it."""
        slot = self.enter(key, spared)
        if slot is None:
            return False
        try:
            # One thread is enough where there is time: handing work over takes processor time from the computation.
            num_tasks = None if urgent else 1
            segments, memory = self.reads(key)
            caching: Caching = "none" if self._num_reads[key] < self._reads_past_cache else "shared"
            self._num_reads[key] += 1
            self._tickets[key] = self._reader.submit(
                segments, memory, caching=caching, urgent=urgent, num_tasks=num_tasks
            )
        except BaseException:
            self.leave(key)
            raise
        self.stats.read_bytes += self.layers[key[0]].expert_bytes
        return True

    def wait(self, layer: int, experts: Sequence[int]) -> None:
        """Wait until some requested experts are in their slots.

        Raises:
            ReadError: one of them could not be read. They may be requested again.
        """
        left = list(experts)
        while left:
            came = self.wait_any(layer, left)
            left = [expert for expert in left if expert not in came]

    def wait_any(self, layer: int, experts: Sequence[int]) -> Sequence[int]:
        """Return those of some requested experts that are in their slots.

        If none is, wait for the one whose read started first.

        Raises:
            ReadError: one of them could not be read. They may be requested again.
        """
        came = [expert for expert in experts if (layer, expert) not in self._tickets]
        in_flight = [key for key in self._tickets if key[0] == layer and key[1] in experts]
        try:
            for key in in_flight:
                if not came or self._tickets[key].done():
                    self.stats.wait_seconds += self._tickets[key].wait()
                    self.filling.discard(key)
                    del self._tickets[key]
                    came.append(key[1])
        except BaseException:
            for key in in_flight:  # all of them, or each would fail one more call
                if key in self._tickets:
                    self.leave(key)
            raise
        return came

    def leave(self, key: Expert) -> None:
        """Take an expert's slot away. Cancel its read."""
        ticket = self._tickets.get(key)
        if ticket is not None:
            ticket.cancel()
        super().leave(key)
        self._tickets.pop(key, None)
        self._predicted[key[0]].discard(key[1])

    def recover(self) -> None:
        """Drop all reads in flight, and everything that an exception has cut in two."""
        for ticket in self._tickets.values():
            ticket.cancel()
        self._tickets.clear()
        for predicted in self._predicted:
            predicted.clear()
        super().recover()

    def resize(self, num_slots: int) -> None:
        """Change the number of slots. Experts in flight to slots that go are dropped."""
        for key in [key for key in self._tickets if self.slot_of[key[0]][key[1]] >= num_slots]:
            self.leave(key)
        super().resize(num_slots)

    def drop_failed(self, layer: int, experts: Iterable[int]) -> None:
        """Take the slots away from those of some experts whose reads have failed."""
        for expert in experts:
            ticket = self._tickets.get((layer, expert))
            if ticket is not None and ticket.done():
                try:
                    ticket.wait()
                except ReadError:  # it is read again
                    self.leave((layer, expert))
                else:
                    self.filling.discard((layer, expert))
                    del self._tickets[layer, expert]

    def drop_unread(self, layer: int, experts: Sequence[int]) -> None:
        """Take the slots away from those of some experts that are in flight."""
        self.drop_failed(layer, experts)
        for expert in experts:
            if (layer, expert) in self._tickets:
                self.leave((layer, expert))

    def close(self) -> None:
        """Cancel all reads, and wait until none writes to a slot. Free the slots where the system can do that."""
        for ticket in self._tickets.values():
            ticket.cancel()
        self._tickets.clear()
        if isinstance(self.slots, SlotArena) and self.slots.can_resize:
            self.slots.resize(0)

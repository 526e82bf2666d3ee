"""An oracle of the ledger of keys and values: sums over live layers, written before the ledger and without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import mlx.core as mx

from mlx_flash.kv.disk import DiskRows
from mlx_flash.kv.layout import RowLayout
from mlx_flash.kv.memory import MemoryRows
from mlx_flash.kv.options import GROWTH, NUM_SLOTS, SLOT_PADDING, KVOptions, slot_memory
from mlx_flash.kv.parking import Parking
from mlx_flash.kv.ring import SlotRing
from mlx_flash.kv.rows import Rows
from mlx_flash.memory.lazy import commits_lazily
from mlx_flash.memory.pagecache import round_up


class Coming(NamedTuple):
    """Tokens that a call adds to a layer.

    Attributes:
        nbytes: bytes of a token.
        num_new: new tokens.
        held: the most tokens that the layer holds meanwhile; fewer than all where old ones are dropped.
    """

    nbytes: int
    num_new: int
    held: int


class Way(NamedTuple):
    """A way for a call to stay within a limit.

    Attributes:
        missing: bytes that it lacks.
        under_way_bytes: kept free during the call: for reads and writes, or for the eviction of a layer.
        num_slots: buffers for layers on disk; 0 where nothing goes there.
        disk_bytes: what it adds to the files.
    """

    missing: int
    under_way_bytes: int = 0
    num_slots: int = 0
    disk_bytes: int = 0


class KVBudget:
    """Sums over all caches of a model. Rows that several caches hold count once.

    Args:
        options: the settings.
        layers: every layer of every cache.
        slots: the slots that these layers are computed from.
        parking: the parts that layers share.
    """

    def __init__(self, options: KVOptions, layers: Collection[Rows], slots: SlotRing, parking: Parking) -> None:
        self._options = options
        self._layers = layers
        self._slots = slots
        self._parking = parking

    @property
    def on_disk(self) -> dict[Rows, DiskRows]:
        """The layers whose rows are on disk."""
        return {rows: disk for rows in self._layers if (disk := rows.disk) is not None}

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory now: caches, slots, and the last tokens of layers on disk."""
        return sum(rows.memory.held for rows in self._layers) + self._parking.shared_bytes() + self._disk_overhead()

    @property
    def reserved_bytes(self) -> int:
        """Bytes that MLX counts as active for caches in memory and slots."""
        arrays = sum(array.nbytes for rows in self._layers for array in rows.memory.arrays)
        return arrays + self._parking.shared_bytes() + self._slots.nbytes

    def _disk_overhead(self, new: Mapping[Rows, int] = MappingProxyType({})) -> int:
        """Return the memory of layers on disk: slots for the largest, and the last tokens of each."""
        on_disk = self.on_disk
        if not on_disk:
            return self._slots.held
        tails = sum(disk.tail_bytes for disk in on_disk.values())
        return max(self.slots_needed(new), self._slots.held) + tails

    def slots_needed(self, new: Mapping[Rows, int]) -> int:
        """Return the bytes of all slots, for the largest layer on disk after new tokens came to some."""
        layers = [(disk, new.get(rows, 0)) for rows, disk in self.on_disk.items()]
        slot = max((self._slot_bytes(disk.layout, disk.length + more) for disk, more in layers), default=0)
        return len(self._slots.slots) * slot

    def _slot_bytes(self, layout: RowLayout, tokens: int) -> int:
        """Return the memory of a slot that holds so many tokens."""
        if commits_lazily() or len(self._slots.slots) == 1:
            return slot_memory(layout.slot_bytes(round_up(tokens, self._options.step)))
        return layout.slot_bytes(self._options.slot_tokens(tokens))

    def needed(self, rows: Rows, new: Sequence[mx.array]) -> int:
        """Return the peak memory while new tokens come to one layer."""
        is_on_disk = rows.disk is not None
        others = sum(layer.memory.held for layer in self._layers if layer is not rows)
        num_new = new[0].shape[2] if new else 0
        nbytes = token_bytes(rows) or sum(array.nbytes for array in new) // max(1, num_new)
        mine = 0 if is_on_disk else rows.memory.held
        if not is_on_disk and num_new and rows.memory.takes_more(num_new):  # the old buffers, and the new ones
            mine += nbytes * capacity_after(rows.memory, num_new)
        return others + mine + self._parking.shared_bytes() + self._disk_overhead({rows: num_new})

    def needed_for(self, coming: Mapping[Rows, Coming]) -> int:
        """Return the peak memory while new tokens come to some layers, one layer after another."""
        new = {rows: max(0, each.held - rows.length) for rows, each in coming.items()}
        within = [rows for rows in coming if rows.disk is None]
        held = {rows: coming[rows].nbytes * capacity_after(rows.memory, new[rows]) for rows in within}
        growing = [rows for rows in held if rows.memory.takes_more(new[rows])]
        shared = self._parking.shared_bytes(but=growing)
        # one layer at a time has its old buffers besides, or the parts that nobody else holds
        num_holders = Counter(id(part.rows) for rows in self._layers for part in rows.memory.parts)
        own = {
            rows: sum(part.rows.nbytes for part in rows.memory.parts if num_holders[id(part.rows)] == 1)
            for rows in growing
        }
        moved = max((rows.memory.held + own[rows] for rows in growing), default=0)
        others = sum(rows.memory.held for rows in self._layers if rows not in held)
        return others + sum(held.values()) + moved + shared + self._disk_overhead(new)

    def for_call(self, coming: Mapping[Rows, Coming]) -> int:
        """Return the peak memory while a call, or several in lockstep, add tokens, with layers where they are."""
        needed = self.needed_for(coming)
        dropping = [rows for rows, each in coming.items() if each.held < rows.length + each.num_new]
        if dropping:  # a layer that drops tokens is copied
            needed = max(needed, self.memory_bytes + max(rows.memory.held for rows in dropping))
        return needed

    def coming(
        self, layers: Sequence[Rows], num_new: Sequence[int], step: int, row_bytes: Sequence[int]
    ) -> dict[Rows, Coming]:
        """Return the tokens that a call adds to layers; its arguments are those of :meth:`KVPool.admit`."""
        return {
            rows: Coming(token_bytes(rows) or nbytes, new, self._options.held_tokens(rows.length + new, step))
            for rows, new, nbytes in zip(layers, num_new, row_bytes, strict=True)
        }

    def way(self, coming: Mapping[Rows, Coming], step: int, limit: int) -> Way:
        """Return how a call stays within a limit.

        Args:
            coming: the tokens that it adds.
            step: how many of them go through the model at a time.
            limit: the most memory of all caches together, reads and writes in flight included.
        """
        sizes, options = [each.nbytes for each in coming.values()], self._options
        needed = self.for_call(coming)
        first = {rows: capacity_after(rows.memory, min(step, each.num_new)) for rows, each in coming.items()}
        if any(first[rows] < rows.length + each.num_new for rows, each in coming.items()):
            needed += options.step * sum(sizes)  # caches that grow several times have more room
        if options.budget_bytes is None:
            return Way(max(0, needed - limit))
        eviction = options.eviction_bytes(sizes)
        if not self.on_disk and needed + eviction <= limit:
            return Way(0, eviction)
        tokens = max((each.held for each in coming.values()), default=0)
        for num_slots in (NUM_SLOTS, 1):
            under_way = options.under_way_bytes(sizes, tokens, step, num_slots)
            least = self.least(coming, num_slots) + under_way
            if least <= limit:
                fresh = sum(each.num_new * each.nbytes for rows, each in coming.items() if rows.disk is not None)
                return Way(0, under_way, num_slots, fresh + max(0, needed + under_way - limit))
        # nothing can be evicted
        return Way(max(0, min(least, needed + under_way * bool(self.on_disk)) - limit))

    def least(self, coming: Mapping[Rows, Coming], num_slots: int) -> int:
        """Return the memory needed with every layer on disk after new tokens came to some."""
        every = {rows: coming[rows].nbytes if rows in coming else token_bytes(rows) for rows in self._layers}
        every = {rows: nbytes for rows, nbytes in every.items() if nbytes}
        lengths = {rows: coming[rows].held if rows in coming else rows.length for rows in every}
        step = self._options.step
        room = {
            rows: round_up(length, step) if commits_lazily() or num_slots == 1 else self._options.slot_tokens(length)
            for rows, length in lengths.items()
        }
        slot = slot_memory(max((room[rows] * nbytes for rows, nbytes in every.items()), default=0) + SLOT_PADDING)
        return num_slots * slot + step * sum(every.values())


def token_bytes(rows: Rows) -> int:
    """Return the bytes of a token; 0 before the first one."""
    layout = rows.layout
    return 0 if layout is None else sum(c.heads * c.width_bytes for c in layout.components)


def capacity_after(memory: MemoryRows, num_new: int) -> int:
    """Return the capacity of buffers in memory after new tokens came."""
    end, options = memory.length + num_new, memory._options
    capacity = int(memory.arrays[0].shape[2]) if memory.arrays else 0
    if memory.arrays and end <= capacity:
        return capacity
    if options.form == "step":
        return memory.length + round_up(num_new, options.step)
    if end <= options.reserved_tokens:
        return options.reserved_tokens
    return round_up(max(end, capacity + capacity // GROWTH), options.step)

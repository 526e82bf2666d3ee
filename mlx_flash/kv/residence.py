"""The layers of a model's KV caches, in memory or on disk, and the budget that decides where."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from math import inf
from types import MappingProxyType

import mlx.core as mx

from mlx_flash.kv.disk import DiskRows
from mlx_flash.kv.files import PageFiles
from mlx_flash.kv.ledger import Coming, KVLedger, no_room
from mlx_flash.kv.memory import Changes
from mlx_flash.kv.options import KVOptions
from mlx_flash.kv.parking import Parking
from mlx_flash.kv.ring import SlotRing
from mlx_flash.kv.rows import LayerRows
from mlx_flash.kv.stats import KVStats, KVUsage
from mlx_flash.memory.footprint import release_freed_memory
from mlx_flash.memory.lazy import commits_lazily


class Residence:
    """The budget, files and slots of a model's caches, and the eviction of layers to disk.

    Args:
        options: the settings.
        count_written: called from another thread with the number of bytes written.

    Attributes:
        options: the settings.
        budget_bytes: the most memory of all caches together; None for no limit. May be changed.
        under_way_bytes: the part of it that is kept free: for reads and writes, or for the eviction of a layer.
        ring: the slots that layers on disk are computed from.
        stats: counters.
        usage: sizes at the last :meth:`note`. Any thread may read it.
        parking: the pages of layers that copies share.
        files: the files of layers on disk.
    """

    def __init__(self, options: KVOptions, count_written: Callable[[int], None]) -> None:
        self.options = options
        self.budget_bytes = options.budget_bytes
        self.under_way_bytes = 0
        self.stats = KVStats()
        self.usage = KVUsage()
        self.ring = SlotRing(options, self.stats)
        self._layers: weakref.WeakSet[LayerRows] = weakref.WeakSet()
        self.parking = Parking(self._layers, options.step)
        self.files = PageFiles(options, count_written)
        self._used: dict[int, int] = {}
        self._held = 0
        self._num_on_disk = 0
        self._added_up_at = (0, 0)

    @property
    def on_disk(self) -> dict[LayerRows, DiskRows]:
        """The layers whose rows are on disk."""
        return {rows: disk for rows in self._layers if (disk := rows.disk) is not None}

    @property
    def is_on_disk(self) -> bool:
        """True if the rows of a layer are on disk."""
        self._add_up()
        return self._num_on_disk > 0

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory now: caches, slots, and the last tokens of layers on disk."""
        return self.ledger().now if self.is_on_disk else self._held + self.ring.held

    @property
    def reserved_bytes(self) -> int:
        """Bytes that MLX counts as active for caches and slots."""
        self._add_up()
        return self._held + self.ring.nbytes

    def _add_up(self) -> None:
        """Add up buffers and shared rows, if a layer has changed, or if there are more or fewer of them."""
        now = Changes.last, len(self._layers)
        if now != self._added_up_at:
            layers = list(self._layers)
            buffers = [rows.memory.buffers for rows in layers]
            shared = {id(page.where): page.where.nbytes for each in buffers for page in each.pages}
            self._held = sum([each.nbytes for each in buffers]) + sum(shared.values())
            self._num_on_disk = sum([rows.disk is not None for rows in layers])
            self._added_up_at = now

    def ledger(self, coming: Mapping[LayerRows, Coming] = MappingProxyType({}), step: int = 1) -> KVLedger:
        """Return the layers in numbers, and those of a call.

        Args:
            coming: the tokens that it adds.
            step: how many of them go through the model at a time.
        """
        layers = {rows: rows.store.in_numbers for rows in self._layers}
        slots = self.ring.held, len(self.ring.slots), commits_lazily(), self.under_way_bytes
        return KVLedger(self.options, layers, coming, step, *slots)

    def note(self) -> KVUsage:
        """Bring :attr:`usage` up to date, and return it."""
        files, stats = self.files, self.stats
        files_used = {disk.file for disk in self.on_disk.values()} if self.is_on_disk else ()
        disk_bytes = sum([file.nbytes for file in files_used]) + files.draft_bytes
        sizes = self.memory_bytes, disk_bytes, self.reserved_bytes, files.read_bytes, files.written_bytes
        self.usage = KVUsage(*sizes, stats.num_spilled, stats.wait_seconds)
        return self.usage

    def _make_fit(self, needed: Callable[[], int], group: int, rows: LayerRows, new: Sequence[mx.array]) -> None:
        """Free memory until a need fits. Raises: BudgetError, WriteError."""
        self._free(needed, group, rows, new)
        num_new = new[0].shape[2] if new else 0
        if needed() > self._limit and self.ring.held > self.ledger().slots_needed({rows: num_new}):
            self.ring.release()  # it was larger for a longer context
        if needed() > self._limit:
            self.ring.resize(1)
        if (nbytes := needed()) > self._limit:
            raise no_room(nbytes, rows.length + num_new, self.budget_bytes or 0)

    def _free(
        self, needed: Callable[[], int], group: int, asking: LayerRows | None = None, new: Sequence[mx.array] = ()
    ) -> None:
        """Free memory until a need fits, or nothing is left that can go to disk. ``asking`` has new tokens."""
        while needed() > self._limit:
            if self.ring.held and not self.is_on_disk:
                self.ring.release()
            elif (idle := self.parking.next_without_copy(group)) is not None:
                self.parking.park(idle)
            elif (victim := self._victim(asking)) is not None:
                self._spill(victim, new if victim is asking else ())
                release_freed_memory()
            else:
                return

    def _victim(self, asking: LayerRows | None) -> LayerRows | None:
        """Return the layer to evict next: of the sequence used longest ago, and far from those that were evicted.

        Args:
            asking: the layer that new tokens come to; None before a call.
        """
        layers = [rows for rows in self._layers if rows.disk is None and (rows.memory.length or rows is asking)]
        return min(layers, key=lambda r: (self._used.get(r.group, 0), _spread(r.index), r.index), default=None)

    @property
    def _limit(self) -> float:
        return inf if self.budget_bytes is None else self.budget_bytes - self.under_way_bytes

    def _spill(self, rows: LayerRows, new: Sequence[mx.array]) -> None:
        others = [(disk, length) for other, length in rows.lineage.relatives() if (disk := other.disk)]
        rows.replace(self.files.write(rows.memory, new, others, rows.stored, rows.planned))
        rows.stored = ()
        self.stats.num_spilled += 1


def _spread(index: int) -> int:
    """Return a number by which to sort indices so that the first few are far apart: the bits backwards."""
    return int(f"{index:016b}"[::-1], 2)

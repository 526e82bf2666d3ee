"""The layers of a model's KV caches, in memory or on disk, and the budget that decides where."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from math import inf

import mlx.core as mx

from mlx_flash.kv.budget import KVBudget, no_room
from mlx_flash.kv.disk import DiskRows
from mlx_flash.kv.files import PageFiles
from mlx_flash.kv.options import KVOptions
from mlx_flash.kv.parking import Parking
from mlx_flash.kv.ring import SlotRing
from mlx_flash.kv.rows import Rows
from mlx_flash.kv.stats import KVStats, KVUsage
from mlx_flash.memory.footprint import release_freed_memory


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
        parking: the parts of layers that copies share.
        files: the files of layers on disk.
    """

    def __init__(self, options: KVOptions, count_written: Callable[[int], None]) -> None:
        self.options = options
        self.budget_bytes = options.budget_bytes
        self.under_way_bytes = 0
        self.stats = KVStats()
        self.usage = KVUsage()
        self.ring = SlotRing(options, self.stats)
        self._layers: weakref.WeakSet[Rows] = weakref.WeakSet()
        self.parking = Parking(self._layers, options.step)
        self._sums = KVBudget(options, self._layers, self.ring, self.parking)
        self.files = PageFiles(options, count_written)
        self._used: dict[int, int] = {}

    @property
    def on_disk(self) -> dict[Rows, DiskRows]:
        """The layers whose rows are on disk."""
        return self._sums.on_disk

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory now: caches, slots, and the last tokens of layers on disk."""
        return self._sums.memory_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes that MLX counts as active for caches and slots."""
        return self._sums.reserved_bytes

    def note(self) -> KVUsage:
        """Bring :attr:`usage` up to date, and return it."""
        files, stats = self.files, self.stats
        disk_bytes = sum(file.nbytes for file in {disk.file for disk in self.on_disk.values()})
        sizes = self.memory_bytes, disk_bytes, self.reserved_bytes, files.read_bytes, files.written_bytes
        self.usage = KVUsage(*sizes, stats.num_spilled, stats.wait_seconds)
        return self.usage

    def _make_fit(self, needed: Callable[[], int], group: int, rows: Rows, new: Sequence[mx.array]) -> None:
        """Free memory until a need fits. Raises: BudgetError, WriteError."""
        self._free(needed, group, rows, new)
        num_new = new[0].shape[2] if new else 0
        if needed() > self._limit and self.ring.held > self._sums.slots_needed({rows: num_new}):
            self.ring.release()  # it was larger for a longer context
        if needed() > self._limit:
            self.ring.resize(1)
        if (nbytes := needed()) > self._limit:
            raise no_room(nbytes, rows.length + num_new, self.budget_bytes or 0)

    def _free(
        self, needed: Callable[[], int], group: int, asking: Rows | None = None, new: Sequence[mx.array] = ()
    ) -> None:
        """Free memory until a need fits, or nothing is left that can go to disk. ``asking`` has new tokens."""
        while needed() > self._limit:
            if self.ring.held and not self.on_disk:
                self.ring.release()
            elif (idle := self.parking.next_without_copy(group)) is not None:
                self.parking.park(idle)
            elif (victim := self._sums.victim(asking, self._used)) is not None:
                self._spill(victim, new if victim is asking else ())
                release_freed_memory()
            else:
                return

    @property
    def _limit(self) -> float:
        return inf if self.budget_bytes is None else self.budget_bytes - self.under_way_bytes

    def _spill(self, rows: Rows, new: Sequence[mx.array]) -> None:
        others = [(disk, length) for other, length in rows.lineage.relatives() if (disk := other.disk)]
        rows.store = self.files.write(rows.memory, new, others, rows.stored)
        rows.stored = ()
        self.stats.num_spilled += 1

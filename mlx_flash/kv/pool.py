"""All KV caches of one model: the layers in memory, the layers on disk, and the budget.

Beyond the budget layers are evicted to disk one by one: first those of the sequence used longest ago, spread over the
layers. Copies of a cache are parked: they share the memory of their common first tokens. The copy that is computed has
these tokens a second time, in buffers for attention. It is parked when another one is computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from itertools import count

import mlx.core as mx

from mlx_flash.errors import ClosedError
from mlx_flash.forks import finalize
from mlx_flash.kv.ledger import Coming, KVLedger, Way
from mlx_flash.kv.memory import MemoryRows
from mlx_flash.kv.options import KVOptions
from mlx_flash.kv.residence import Residence
from mlx_flash.kv.rows import LayerRows
from mlx_flash.memory.footprint import release_freed_memory


class KVPool(Residence):
    """The order in which the caches of a model are used, and the room that calls need.

    Args:
        options: the settings.
        count_written: called from another thread with the number of bytes written.

    Attributes:
        lock: held while caches change. Callers run one forward pass at a time.
    """

    def __init__(self, options: KVOptions, count_written: Callable[[int], None] = lambda _: None) -> None:
        super().__init__(options, count_written)
        self.lock = threading.RLock()
        self._groups = count()
        self._current_groups: frozenset[int] = frozenset()
        self._clock = count(1)
        self._closed = False
        if options.always_on_disk:  # nobody closes these pools
            finalize(self, self.files.close, waits=True)

    def new_group(self) -> int:
        """Return a number for another list of caches."""
        return next(self._groups)

    def new_rows(self, group: int, index: int) -> LayerRows:
        """Return empty rows for the layer at ``index`` of a list."""
        rows = LayerRows(self, group, index)
        self._layers.add(rows)
        return rows

    def make_room(self, rows: LayerRows, new: Sequence[mx.array]) -> None:
        """Evict layers to disk until the memory, with new tokens of one layer, fits the budget.

        Raises:
            BudgetError: it does not fit even with every layer on disk.
            WriteError: the disk is full, or fails.
        """
        self._begin(self._current_groups if rows.group in self._current_groups else {rows.group})
        if self.options.always_on_disk and rows.disk is None and (new or rows.memory.length):
            self._spill(rows, new)
        if self.budget_bytes is None:
            return
        if not new:
            self._make_fit(lambda: self.memory_bytes, rows.group, rows, new)
        elif rows.store.takes_more(num_new := new[0].shape[2]):
            nbytes = sum(rows.store.in_numbers.widths) or sum(array.nbytes for array in new) // num_new
            coming = {rows: Coming(nbytes, num_new, rows.length + num_new)}
            self._make_fit(lambda: self.ledger(coming).peak, rows.group, rows, new)

    def fork(self, rows: LayerRows, group: int) -> LayerRows:
        """Return a copy of a layer in another list of caches that shares the pages. Raises: BudgetError, WriteError."""
        with self.lock:
            other = self.new_rows(group, rows.index)
            self.make_room_for_copy(rows, group)  # which may send this one to disk
            if (disk := rows.disk) is not None:
                other.replace(disk.fork())
            else:
                other.memory.park(self.parking.as_pages(rows), rows.memory.examples)
                other.memory.num_forgotten = rows.memory.num_forgotten
                other.stored = rows.stored
            rows.lineage.copy_to(other.lineage, rows.length)
            self.park_idle(rows)
            return other

    def make_room_for_copy(self, rows: LayerRows, group: int) -> None:
        """Evict layers to disk until a copy of one layer, in a list of its own, fits the budget.

        Raises:
            BudgetError, WriteError: as :meth:`make_room`.
        """
        self._check_open()
        self._used.setdefault(group, next(self._clock))
        self._make_fit(lambda: self.memory_bytes + self.parking.copied_bytes(rows), group, rows, ())

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the KV caches of this model were closed. Hint: make new ones.")

    def _begin(self, groups: Collection[int]) -> None:
        """Note which sequences are computed now, in lockstep if there are several, and park the previous ones."""
        self._check_open()
        if groups == self._current_groups:
            return
        previous, self._current_groups = self._current_groups, frozenset(groups)
        self._used.update((group, next(self._clock)) for group in sorted(groups))
        if sum(self.park_idle(rows) for rows in self._layers if rows.group in previous):
            release_freed_memory()

    def park_idle(self, rows: LayerRows) -> bool:
        """Park a layer if it is idle, that saves memory, and the copy has room. Return whether it was parked."""
        pays = rows.group not in self._current_groups and self.parking.pays(rows)
        if not pays or self.memory_bytes + self.parking.copied_bytes(rows) > self._limit:
            return False
        self.parking.park(rows)
        return True

    def admit(
        self, layers: Sequence[LayerRows], num_new: Sequence[int], step: int, row_bytes: Sequence[int], limit: int
    ) -> int:
        """Prepare a call, or several in lockstep: evict layers before it takes memory, and set what it may take.

        Args:
            layers: the layers that tokens are added to.
            num_new: new tokens of each layer.
            step: how many of them go through the model at a time.
            row_bytes: bytes of a token in each layer; not used where there are tokens already.
            limit: the most memory of all caches together, reads and writes in flight included.

        Returns:
            The number of bytes that are missing: 0 when the call can begin.

        Raises:
            WriteError: there is no room on the disk.
        """
        if layers:
            self._begin({rows.group for rows in layers})
        call = self.call(layers, num_new, step, row_bytes)
        way = self.way(call, limit)
        if way.missing or self.options.budget_bytes is None:
            return way.missing
        self.budget_bytes, self.under_way_bytes = limit, way.under_way_bytes
        if way.num_slots:
            self.ring.resize(way.num_slots)
            self.files.limit_queue(way.num_slots)
        if layers:
            self._free(lambda: self.ledger(call.coming, step).peak, layers[0].group)
        return 0

    def admit_quietly(self, layers: Sequence[LayerRows], num_new: Sequence[int], limit: int) -> bool:
        """Prepare a call that takes no more memory, for which :meth:`admit` would do nothing else.

        Most tokens are such a call: the buffers of every layer have room for them. No layer is looked at twice.

        Args:
            layers, num_new, limit: as there.

        Returns:
            False, and nothing has changed, for any other call.
        """
        largest = self.quiet_width(layers, num_new)
        if largest is None:
            return False
        eviction = 0 if self.options.budget_bytes is None else self.options.eviction_bytes([largest])
        if self.memory_bytes + eviction > limit:
            return False
        self._begin({rows.group for rows in layers})
        if self.options.budget_bytes is not None:
            self.budget_bytes, self.under_way_bytes = limit, eviction
        return True

    def quiet_width(self, layers: Sequence[LayerRows], num_new: Sequence[int]) -> int | None:
        """Return the most bytes of a token in a layer if the buffers of all layers have room for the new tokens.

        Returns:
            None where they have not, where a layer is on disk, and where tokens may be dropped.
        """
        if self.is_on_disk or self.options.max_tokens is not None:
            return None
        largest = 0
        for rows, more in zip(layers, num_new, strict=True):
            store = rows.store
            if not isinstance(store, MemoryRows) or store.takes_more(more):
                return None
            if (width := store.buffers.nbytes // store.buffers.capacity) > largest:
                largest = width
        return largest

    def call(
        self, layers: Sequence[LayerRows], num_new: Sequence[int], step: int, row_bytes: Sequence[int]
    ) -> KVLedger:
        """Return the ledger of a call; the arguments are those of :meth:`admit`."""
        held = self.options.held_tokens
        coming = {
            rows: Coming(sum(rows.store.in_numbers.widths) or nbytes, new, held(rows.length + new, step))
            for rows, new, nbytes in zip(layers, num_new, row_bytes, strict=True)
        }
        return self.ledger(coming, step)

    def way(self, call: KVLedger, limit: int) -> Way:
        """Return how a call stays within a limit. Raises: WriteError: there is no room on the disk."""
        way = call.way(limit)
        self.files.check_room(way.disk_bytes)
        return way

    def close(self) -> None:
        """End the threads and remove the files. The pool's caches cannot be used any more. Idempotent."""
        with self.lock:
            self._closed = True
            self.ring.release()
            self.files.close()

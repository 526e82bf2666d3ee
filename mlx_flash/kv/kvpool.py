"""All KV caches of one model: the layers in memory, the layers on disk, and the budget.

Beyond the budget layers are offloaded to disk one by one: first those of the sequence used longest ago, spread over the
layers. Copies of a cache are parked: they share the memory of their common first tokens. The copy that is computed has
these tokens a second time, in buffers for attention. It is parked when another one is computed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_flash.errors import ClosedError
from mlx_flash.forks import finalize
from mlx_flash.kv.kvfiles import KVFiles
from mlx_flash.kv.kvledger import Coming, Kind, KVLedger, Layer, Way, no_room
from mlx_flash.kv.layerrows import (
    CacheGroup,
    LayerRows,
    Layers,
    as_pages,
    copied_bytes,
    is_admitted,
    note_copy,
    park,
    parking_pays,
)
from mlx_flash.kv.memory import MemoryRows
from mlx_flash.kv.options import KVOptions
from mlx_flash.kv.ring import KVStats, SlotRing
from mlx_flash.layout.reachable import Opaque
from mlx_flash.memory.footprint import release_freed_memory
from mlx_flash.memory.lazy import commits_lazily


@dataclass(frozen=True, slots=True)
class KVUsage:
    """Sizes of a pool's caches at one moment, and what they cost so far."""

    memory_bytes: int = 0  # keys and values in memory, slots included
    disk_bytes: int = 0
    reserved_bytes: int = 0  # what MLX counts as active for them
    read_bytes: int = 0
    written_bytes: int = 0
    num_offloaded: int = 0  # layers offloaded to disk
    wait_seconds: float = 0.0


class Adding(NamedTuple):
    """Tokens that a call, or several in lockstep, add to layers of caches.

    Attributes:
        tokens: how many each sequence gets in a layer, how many it has then, and the bytes of one of all sequences;
            these are not used where there are tokens already.
        step: how many of them go through the model at a time.
    """

    tokens: Mapping[LayerRows, tuple[int, int, int]]
    step: int = 1

    @property
    def in_parts(self) -> bool:
        """True if the tokens come in parts."""
        return max([num_new for num_new, _, _ in self.tokens.values()], default=0) > self.step


NOTHING = Adding(MappingProxyType({}))


class KVPool(Opaque):
    """The caches of a model, their budget, and the order in which they are used.

    Args:
        options: how the caches are stored.
        count_written: called from another thread with the number of bytes.
        passes: held during each pass of the model. Copies wait for it.
    """

    def __init__(
        self,
        options: KVOptions,
        count_written: Callable[[int], None] = lambda _: None,
        passes: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.options = options
        self.budget_bytes = options.budget_bytes  # the most memory of all caches together; may be changed
        self.under_way_bytes = 0  # the part of it that is kept free: for reads and writes, or to offload a layer
        self.stats = KVStats()
        self.usage = KVUsage()  # at the last :meth:`note`; any thread may read it
        self.layers = Layers(options.step)
        self.no_rows = MemoryRows(options)  # in memory, of a layer on disk
        self.ring = SlotRing(options, self.stats)
        self.files = KVFiles(options, count_written)
        self.lock = threading.RLock()  # held while caches change; callers run one forward pass at a time
        self._passes = passes or nullcontext()
        self._numbers = count(1)  # of lists and layers
        # number of the last admission. Its layers have room: a sum over all, for each of them, takes milliseconds
        self.admission = 0
        self.computed: frozenset[CacheGroup] = frozenset()  # what is computed now
        self.in_turns: frozenset[CacheGroup] = frozenset()  # computed in turns now: none is parked while it waits
        self._clock = count(1)
        self.is_closed = False
        if options.always_on_disk:  # nobody closes these pools
            finalize(self, self.files.close, waits=True)

    def new_group(self) -> CacheGroup:
        """Return another list of caches."""
        return CacheGroup(next(self._numbers))

    def new_rows(self, group: CacheGroup, index: int) -> LayerRows:
        """Return empty rows for the layer at ``index`` of a list."""
        rows, number = LayerRows(self, group, index), next(self._numbers)
        self.layers.by_number[number] = rows
        return rows

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory now: caches, slots, and the last tokens of layers on disk."""
        return self.ledger().now

    @property
    def reserved_bytes(self) -> int:
        """Bytes that MLX counts as active for caches and slots."""
        return self.ledger().arrays + self.ring.nbytes

    @property
    def limit(self) -> float:
        """The most memory of all caches together, without reads and writes in flight."""
        return inf if self.budget_bytes is None else self.budget_bytes - self.under_way_bytes

    def ledger(self, adding: Adding = NOTHING) -> KVLedger:
        """Return the layers of all caches in numbers, and the tokens that a call adds to some."""
        alike, kinds, options, step = Counter[Any](), list[Kind](), self.options, adding.step
        tokens_of = adding.tokens.get
        for reference in self.layers.by_number.valuerefs():  # for each pass: no function is called for a layer
            if (rows := reference()) is None:
                continue
            store, new = rows.store, tokens_of(rows)
            if isinstance(store, MemoryRows) and not (buffers := store.buffers).pages:
                widths = () if buffers.layout is None else buffers.layout.widths
                alike[widths, store.num_rows, buffers.capacity, new] += 1
            else:
                layer = store.in_numbers
                kinds.append(Kind(layer, new and _coming(layer, new, options, step)))
        for (widths, length, capacity, new), number in alike.items():
            layer = Layer(widths, length, capacity)
            kinds.append(Kind(layer, new and _coming(layer, new, options, step), number))
        slots = self.ring.held, len(self.ring.slots), commits_lazily(), self.under_way_bytes
        return KVLedger(options, kinds, step, *slots)

    def note(self) -> KVUsage:
        """Bring :attr:`usage` up to date, and return it."""
        ledger, files, stats = self.ledger(), self.files, self.stats
        files_used = {disk.file for disk in self.layers.on_disk.values()} if ledger.is_on_disk else ()
        self.usage = KVUsage(
            memory_bytes=ledger.now,
            disk_bytes=sum([file.nbytes for file in files_used]) + files.draft_bytes,
            reserved_bytes=ledger.arrays + self.ring.nbytes,
            read_bytes=files.read_bytes,
            written_bytes=files.written_bytes,
            num_offloaded=stats.num_offloaded,
            wait_seconds=stats.wait_seconds,
        )
        return self.usage

    def admit(self, adding: Adding, limit: int, way: Way | None = None) -> int:
        """Prepare a call, or several in lockstep: offload layers before it takes memory, and set what it may take.

        ``limit`` is the most memory of all caches together, reads and writes in flight included; ``way`` is how they
        stay within it, if that is known. Return the bytes that are missing: 0 when the call can begin.

        Raises:
            WriteError: there is no room on the disk.
        """
        options = self.options
        if self.begin({rows.group for rows in adding.tokens}) or way is None:
            way = self.way(self.ledger(adding), limit)
        if way.missing or options.budget_bytes is None:
            return way.missing
        self.budget_bytes, self.under_way_bytes = limit, way.under_way_bytes
        in_parts, lengths = adding.in_parts, {rows: length for rows, (_, length, _) in adding.tokens.items()}
        if options.max_tokens is not None:
            lengths = {rows: options.held_tokens(length, adding.step) for rows, length in lengths.items()}
        if way.num_slots:
            for rows, length in lengths.items():
                rows.expect(length if in_parts else 0)
            self.ring.resize(way.num_slots)
            self.files.limit_queue(way.num_slots)
            with self.lock:
                self.free(lambda: self.ledger(adding).peak, next(iter(adding.tokens)).group)
        self.admission += 1
        if not way.num_slots:
            for rows, length in lengths.items():
                rows.expected, rows.admitted = length if in_parts else 0, (self.admission, length)
        return 0

    def way(self, ledger: KVLedger, limit: int) -> Way:
        """Return how a call stays within a limit. Raises: WriteError: there is no room on the disk."""
        way = ledger.way(limit)
        self.files.check_room(way.disk_bytes)
        return way

    def make_room(self, rows: LayerRows, new: Sequence[mx.array]) -> None:
        """Offload layers to disk until the memory, with new tokens of one layer, fits the budget.

        Raises: BudgetError: it does not fit even with every layer on disk; WriteError.
        """
        if self.is_closed:
            raise _closed()
        if rows.group not in self.computed:
            self.begin({rows.group})
        if self.options.always_on_disk and rows.disk is None and (new or rows.memory.length):
            rows.offload(new)
        if self.budget_bytes is None:
            return
        if not new:
            self._make_fit(lambda: self.memory_bytes, rows.group, rows, new)
            return
        num_new, store = new[0].shape[2], rows.store
        length = store.length + num_new
        if store.takes_more(num_new) and not is_admitted(rows, length):
            adding = Adding({rows: (num_new, length, sum(array.nbytes for array in new) // num_new)}, num_new)
            self._make_fit(lambda: self.ledger(adding).peak, rows.group, rows, new)

    def fork(self, layer: LayerRows, group: CacheGroup, *, is_alone: bool) -> dict[LayerRows, LayerRows]:
        """Return copies that share the pages: of a layer, and unless it ``is_alone`` of all others of its list.

        These are copied together, between two passes: those of a list that is computed would differ in length.

        Args:
            layer: the layer that is asked for.
            group: the list that the copies are for.
            is_alone: no other layer of its list is copied with it.

        Raises:
            BudgetError, WriteError: as :meth:`make_room`.
        """
        with self._passes, self.lock:
            if self.is_closed:
                raise _closed()
            group.used_at = group.used_at or next(self._clock)
            copies = dict[LayerRows, LayerRows]()
            for rows in [layer] if is_alone else [rows for rows in self.layers if rows.group is layer.group]:
                copies[rows] = other = self.new_rows(group, rows.index)
                # this may send the layer to disk
                self._make_fit(partial(_with_copy, self, rows), group, rows, ())
                if (disk := rows.disk) is not None:
                    other.replace(disk.fork())
                else:
                    other.memory.hold(as_pages(rows), rows.memory.layout)
                    other.memory.num_forgotten = rows.memory.num_forgotten
                    other.stored = rows.stored
                note_copy(rows, other, rows.length)
                self._park_idle(rows)
            return copies

    def begin(self, groups: Collection[CacheGroup]) -> bool:
        """Note which sequences are computed now, in lockstep if there are several, and park the previous ones.

        Return whether some were parked.
        """
        if self.is_closed:
            raise _closed()
        groups = self.in_turns if self.in_turns.issuperset(groups) else groups
        if groups == self.computed:
            return False
        with self.lock:
            previous = {group for group in self.computed if group.has_copies}
            self.computed = frozenset(groups)
            for group in sorted(groups, key=lambda group: group.number):
                group.used_at = next(self._clock)
            if previous and sum([self._park_idle(rows) for rows in self.layers if rows.group in previous]):
                release_freed_memory()
                return True
        return False

    def _park_idle(self, rows: LayerRows) -> bool:
        """Park a layer if it is idle, that saves memory, and the copy has room. Return whether it was parked."""
        if rows.group in self.computed or not parking_pays(rows, self.options.step):
            return False
        if _with_copy(self, rows) > self.limit:
            return False
        park(rows)
        return True

    def _make_fit(self, needed: Callable[[], int], group: CacheGroup, rows: LayerRows, new: Sequence[mx.array]) -> None:
        """Free memory until a need fits. Raises: BudgetError, WriteError."""
        self.admission += 1  # that no layer is part of
        if needed() <= self.limit:
            return
        self.free(needed, group, rows, new)
        num_new = new[0].shape[2] if new else 0
        slots_needed = self.ledger(Adding({rows: (num_new, rows.length + num_new, 0)}, num_new)).slots_needed(more=True)
        if needed() > self.limit and self.ring.held > slots_needed:
            self.ring.release()  # it was larger for a longer context
        if needed() > self.limit:
            self.ring.resize(1)
        if (nbytes := needed()) > self.limit:
            raise no_room(nbytes, rows.length + num_new, self.limit)

    def free(
        self,
        needed: Callable[[], int],
        group: CacheGroup,
        asking: LayerRows | None = None,
        new: Sequence[mx.array] = (),
    ) -> None:
        """Free memory until a need fits, or nothing is left that can go to disk. Raises: WriteError.

        The list of caches that needs it is not parked. ``asking`` is the layer that new tokens come to; None before a
        call.
        """
        while needed() > self.limit:
            if self.ring.held and not self.layers.on_disk:
                self.ring.release()
            elif (idle := self.layers.next_to_park(group)) is not None:
                park(idle)
            elif (victim := self.layers.next_to_offload(asking)) is not None:
                victim.offload(new if victim is asking else ())
                release_freed_memory()
            else:
                return

    def close(self) -> None:
        """End the threads and remove the files. The pool's caches cannot be used any more. Idempotent."""
        with self.lock:
            self.is_closed = True
            self.computed = frozenset()  # so that each use asks for room, and is refused
            self.ring.release()
            self.files.close()


def _with_copy(pool: KVPool, rows: LayerRows) -> int:
    """Return the bytes in memory with a copy of a layer."""
    return pool.memory_bytes + copied_bytes(rows)


def _coming(layer: Layer, new: tuple[int, int, int], options: KVOptions, step: int) -> Coming:
    num_new, length, nbytes = new
    return Coming(layer.token_bytes or nbytes, num_new, options.held_tokens(length, step))


def _closed() -> ClosedError:
    return ClosedError("the KV caches of this model were closed. Hint: make new ones.")

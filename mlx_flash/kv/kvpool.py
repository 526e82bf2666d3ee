"""All KV caches of one model: the rows of each layer, in memory and on disk, and the budget.

Beyond the budget layers go to disk one by one, between two calls: first those of the sequence used longest ago, spread
over the layers. Copies of a layer in memory have buffers of their own, those of a layer on disk share its pages.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_flash import enginethread
from mlx_flash.errors import ClosedError
from mlx_flash.forks import finalize
from mlx_flash.kv.disk import DiskRows, KVFiles
from mlx_flash.kv.kvledger import KVLedger, Layers, Way, no_room
from mlx_flash.kv.memory import MemoryRows
from mlx_flash.kv.options import KVOptions, queued_bytes
from mlx_flash.kv.ring import KVStats, SlotRing
from mlx_flash.layout.reachable import Opaque
from mlx_flash.memory.arena import commits_lazily
from mlx_flash.memory.footprint import release_freed_memory


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
        tokens: how many each sequence gets in a layer, and the bytes of one of all sequences, if the layer has none.
        step: how many of them go through the model at a time.
    """

    tokens: Mapping[LayerRows, tuple[int, int]]
    step: int = 1


NOTHING = Adding(MappingProxyType({}))


@dataclass(eq=False)
class CacheGroup:
    """A list of caches, and when it was used last; 0 for never."""

    used_at: int = 0


class LayerRows:
    """The rows of one layer. Made by :meth:`KVPool.new_rows`.

    What cannot change in one step is replaced as a whole, so that an error leaves the old rows or the new ones.
    """

    def __init__(self, pool: KVPool, group: CacheGroup, index: int) -> None:
        self.pool = pool
        self.options = pool.options
        self.store: MemoryRows | DiskRows = MemoryRows(self.options)
        self.group = group  # the list of caches that the layer belongs to
        self.index = index  # its place in that list
        self.goes_to_disk = self.options.always_on_disk  # with the next tokens, if it is not there

    def offload(self, new: Sequence[mx.array] = ()) -> None:
        """Go to disk: at once, or with the first tokens if there are none. Raises: WriteError."""
        if new or self.memory.layout is not None:
            self.replace(self.pool.files.write(self.memory, new))
            self.pool.stats.num_offloaded += 1
        self.goes_to_disk = True

    def replace(self, store: MemoryRows | DiskRows) -> None:
        """Hold other rows from now on."""
        self.store = store
        self.goes_to_disk = isinstance(store, DiskRows) or self.options.always_on_disk

    @property
    def memory(self) -> MemoryRows:
        """The rows while they are in memory; empty while they are on disk."""
        return self.store if isinstance(self.store, MemoryRows) else self.pool.no_rows

    @property
    def disk(self) -> DiskRows | None:
        """The rows on disk; None while they are in memory."""
        return self.store if isinstance(self.store, DiskRows) else None

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.store.length

    def append(self, new: Sequence[mx.array], *, fetches: bool = True) -> list[mx.array]:
        """Add tokens, ``(batch, heads, new tokens, width)`` for each array. Return all.

        On disk they take a slot and are returned if it ``fetches``. Raises: WriteError, ReadError.
        """
        with self.pool.lock:
            self.pool.use([self.group])
            if self.goes_to_disk and self.disk is None:
                self.offload(new)
            store = self.store
            if isinstance(store, DiskRows):
                store.capacity = self.options.capacity_after(store.length, store.capacity, new[0].shape[2])
                if fetches:
                    return self.pool.ring.append(store, new)
                store.append(store.layout.to_rows(new))
                return []
            store.append(new)
            return store.fetch()

    def fetch(self) -> list[mx.array]:
        """Return all tokens. Raises: ReadError."""
        with self.pool.lock:
            disk = self.disk
            return self.memory.fetch() if disk is None else self.pool.ring.fetch(disk)

    def read(self, start: int, stop: int) -> list[mx.array]:
        """Return the rows of some tokens. Those on disk take no slot. Raises: ReadError."""
        with self.pool.lock:
            disk = self.disk
            return self.memory.read(start, stop) if disk is None else disk.layout.to_arrays(disk.read(start, stop))

    def truncate(self, length: int) -> None:
        """Remove the tokens from ``length`` on. Raises: ReadError."""
        with self.pool.lock:
            if (disk := self.disk) is not None:
                self.pool.ring.forget(disk, length)
            self.store.truncate(length)

    def set(self, arrays: Sequence[mx.array], length: int) -> None:
        """Replace all tokens by those in some arrays. Raises: BudgetError, WriteError."""
        with self.pool.lock:
            self.pool.use([self.group])
            self.replace(MemoryRows(self.options, arrays, length))
            if self.options.always_on_disk:
                self.offload()
            self.pool.fit(lambda: self.pool.memory_bytes, length)


def _spread(index: int) -> int:
    """Return a number by which to sort indices so that the first few are far apart: the bits backwards."""
    return int(f"{index:016b}"[::-1], 2)


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
        self._by_number: weakref.WeakValueDictionary[int, LayerRows] = weakref.WeakValueDictionary()
        self.no_rows = MemoryRows(options)  # in memory, of a layer on disk
        self.ring = SlotRing(options, self.stats)
        self.files = KVFiles(options, count_written)
        self.lock = threading.RLock()  # held while caches change; callers run one forward pass at a time
        self._passes = passes or nullcontext()
        self._numbers = count()  # of layers
        self._clock = count(1)
        self.is_closed = False
        if options.always_on_disk:  # nobody closes these pools
            finalize(self, enginethread.leave, self.files.close)

    def new_rows(self, group: CacheGroup, index: int) -> LayerRows:
        """Return empty rows for the layer at ``index`` of a list."""
        rows, number = LayerRows(self, group, index), next(self._numbers)
        self._by_number[number] = rows
        return rows

    @property
    def layers(self) -> list[LayerRows]:
        """The layers of all caches. One leaves with the last reference to it. Any thread may add some."""
        return [rows for reference in self._by_number.valuerefs() if (rows := reference()) is not None]

    @property
    def on_disk(self) -> dict[LayerRows, DiskRows]:
        """The layers whose rows are on disk."""
        return {rows: disk for rows in self.layers if (disk := rows.disk) is not None}

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory now: caches, slots, and the last tokens of layers on disk."""
        return self.ledger().now

    @property
    def limit(self) -> float:
        """The most memory of all caches together, without reads and writes in flight."""
        return inf if self.budget_bytes is None else self.budget_bytes - self.under_way_bytes

    def ledger(self, adding: Adding = NOTHING) -> KVLedger:
        """Return the layers of all caches in numbers, and the tokens that a call adds to some."""
        alike, tokens_of, none = Counter[Any](), adding.tokens.get, (0, 0)
        for reference in self._by_number.valuerefs():  # for each pass: no function is called for a layer
            if (rows := reference()) is None:
                continue
            store, (num_new, token_bytes) = rows.store, tokens_of(rows, none)
            if store.layout is not None:
                token_bytes = store.layout.token_bytes
            is_on_disk = isinstance(store, DiskRows)
            capacity = self.options.step if is_on_disk else store.capacity
            alike[token_bytes, store.length, capacity, is_on_disk or (rows.goes_to_disk and not capacity), num_new] += 1
        layers = [Layers(*each)._replace(number=number) for each, number in alike.items()]
        slots = self.ring.held, len(self.ring.slots), commits_lazily(), self.under_way_bytes
        return KVLedger(self.options, layers, adding.step, *slots)

    def note(self) -> KVUsage:
        """Bring :attr:`usage` up to date, and return it."""
        ledger, files, stats = self.ledger(), self.files, self.stats
        files_used = {disk.file for disk in self.on_disk.values()} if ledger.is_on_disk else ()
        self.usage = KVUsage(
            memory_bytes=ledger.now,
            disk_bytes=sum([file.nbytes for file in files_used]),
            reserved_bytes=ledger.arrays + self.ring.nbytes,
            read_bytes=files.read_bytes,
            written_bytes=files.writer.nbytes,
            num_offloaded=stats.num_offloaded,
            wait_seconds=stats.wait_seconds,
        )
        return self.usage

    def admit(self, adding: Adding, limit: int, way: Way | None = None) -> int:
        """Prepare a call, or several in lockstep: decide which layers are on disk while it runs.

        ``limit`` is the most memory of all caches together, reads and writes in flight included; ``way`` is how they
        stay within it, if that is known. Return the bytes that are missing: 0 when the call can begin. Raises:
        WriteError: there is no room on the disk; BudgetError: layers on disk take more than the ledger says.
        """
        options = self.options
        self.use(dict.fromkeys([rows.group for rows in adding.tokens]))  # a generator is entered for each layer
        way = way or self.way(self.ledger(adding), limit)
        if way.missing or options.budget_bytes is None:
            return way.missing
        self.budget_bytes, self.under_way_bytes = limit, way.under_way_bytes
        in_parts = max([num_new for num_new, _ in adding.tokens.values()], default=0) > adding.step
        for rows, (num_new, _) in adding.tokens.items():  # for each token: no function is called for a layer
            store = rows.store
            store.expected = store.length + num_new if in_parts else 0
        if way.num_slots:
            self.ring.resize(way.num_slots)
            self.files.writer.limit_bytes = queued_bytes(way.num_slots)
            with self.lock:
                tokens = max([rows.length + num_new for rows, (num_new, _) in adding.tokens.items()], default=0)
                self.fit(lambda: self.ledger(adding).peak, tokens, adding.tokens)
        return 0

    def way(self, ledger: KVLedger, limit: int) -> Way:
        """Return how a call stays within a limit. Raises: WriteError: there is no room on the disk."""
        way = ledger.way(limit)
        self.files.check_room(way.disk_bytes)
        return way

    def fork(self, layer: LayerRows, group: CacheGroup, *, is_alone: bool) -> dict[LayerRows, LayerRows]:
        """Return copies: of a layer, and unless it ``is_alone`` of all others of its list. Those on disk share pages.

        These are copied together for another ``group``, between two passes: those of a list that is computed would
        differ in length. Raises: BudgetError, WriteError.
        """
        with self._passes, self.lock:
            if self.is_closed:
                raise _closed()
            group.used_at = group.used_at or next(self._clock)
            copies = dict[LayerRows, LayerRows]()
            for rows in [layer] if is_alone else [rows for rows in self.layers if rows.group is layer.group]:
                copies[rows] = other = self.new_rows(group, rows.index)
                self.fit(partial(_with_copy, self, rows), rows.length)  # this may send the layer to disk
                other.replace(rows.store.fork())
            return copies

    def use(self, groups: Iterable[CacheGroup]) -> None:
        """Note that lists of caches are used now. Raises: ClosedError."""
        if self.is_closed:
            raise _closed()
        for group in groups:
            group.used_at = next(self._clock)

    def fit(self, needed: Callable[[], int], tokens: int, coming: Container[LayerRows] = ()) -> None:
        """Offload layers until a need of so many tokens is within the limit. Raises: BudgetError, WriteError.

        The order is that of the last use of their sequences, and far from each other in the model. Layers without
        tokens go if some are ``coming``.
        """
        while (nbytes := needed()) > self.limit:
            layers = [
                rows for rows in self.layers if not rows.goes_to_disk and (rows.memory.capacity or rows in coming)
            ]
            if self.ring.held and not self.on_disk:
                self.ring.release()
            elif layers:
                min(layers, key=lambda rows: (rows.group.used_at, _spread(rows.index), rows.index)).offload()
                release_freed_memory()
            elif self.ring.held:
                self.ring.release()  # it was larger for a longer context
            elif len(self.ring.slots) > 1:
                self.ring.resize(1)
            else:
                raise no_room(nbytes, tokens, self.limit)

    def close(self) -> None:
        """End the threads and remove the files. The pool's caches cannot be used any more. Idempotent."""
        with self.lock:
            self.is_closed = True
            for rows in self.layers:
                rows.goes_to_disk = True  # so that each use is refused
            self.ring.release()
            self.files.close()


def _with_copy(pool: KVPool, rows: LayerRows) -> int:
    """Return the bytes in memory with a copy of a layer."""
    if (disk := rows.disk) is not None:
        return pool.memory_bytes + disk.tail_bytes
    layout = rows.memory.layout
    return pool.memory_bytes + (0 if layout is None else rows.memory.had_capacity * layout.token_bytes)


def _closed() -> ClosedError:
    return ClosedError("the KV caches of this model were closed. Hint: make new ones.")

"""The rows of each layer of each cache: where they are, what changes them, and which other ones begin with them.

Copies of a sequence share memory while they are idle: their layers are parked, as pages that others hold, too. Lineages
record which layers begin with the same tokens, because one is a copy of the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from mlx_flash.kv.disk import NOTHING_PLANNED, DiskRows
from mlx_flash.kv.kvfiles import KVFiles, Stored
from mlx_flash.kv.memory import MemoryRows
from mlx_flash.kv.options import KVOptions
from mlx_flash.kv.pages import MemoryPages, Page, cut, num_tokens
from mlx_flash.kv.ring import KVStats, SlotRing


class Pool(Protocol):
    """The pool of a layer, as the layer uses it: see :class:`mlx_flash.kv.kvpool.KVPool`."""

    options: KVOptions
    files: KVFiles
    ring: SlotRing
    stats: KVStats
    computed: frozenset[CacheGroup]
    no_rows: MemoryRows
    admission: int

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while layers change."""

    def make_room(self, rows: LayerRows, new: Sequence[mx.array]) -> None:
        """Offload layers until new tokens of one fit."""


@dataclass(eq=False)
class CacheGroup:
    """A list of caches.

    Attributes:
        number: that no other list has.
        used_at: when it was used last; 0 for never.
        has_copies: whether it is a copy of another list, or was copied.
    """

    number: int
    used_at: int = 0
    has_copies: bool = False


class LayerRows:
    """The rows of one layer. Made by :meth:`mlx_flash.kv.kvpool.KVPool.new_rows`.

    What cannot change in one step is replaced as a whole, so that an interrupt leaves the old rows or the new ones: see
    :meth:`replace`.
    """

    def __init__(self, pool: Pool, group: CacheGroup, index: int) -> None:
        self.pool = pool
        self.options = pool.options
        self.store: MemoryRows | DiskRows = MemoryRows(self.options)
        self.group = group  # the list of caches that the layer belongs to
        self.index = index  # its place in that list
        self.lineages: list[Lineage] = []  # the layers with the same first tokens
        # the first tokens in files of the prefix cache, while the rows are in memory: they go to disk without a copy
        self.stored: tuple[Page[Stored], ...] = ()
        self.expected = 0  # as in DiskRows
        self.admitted = 0, 0  # number of an admission, and the tokens that have room since then
        self.planned = NOTHING_PLANNED  # pages that the prefix cache wants of the call under way, by first token
        self.may_stay = self.options.max_tokens is None and not self.options.always_on_disk  # in memory, with room

    def offload(self, new: Sequence[mx.array]) -> None:
        """Go to disk, without the tokens that other layers have there. The pool decides when. Raises: WriteError.

        The shapes of ``new`` tokens, which are about to be added, count if there are no others yet.
        """
        others = [(disk, length) for other, length in relatives(self) if (disk := other.disk)]
        self.replace(self.pool.files.write(self.memory, new, others, self.stored, self.planned))
        self.stored = ()
        self.pool.stats.num_offloaded += 1

    def replace(self, store: MemoryRows | DiskRows) -> None:
        """Hold other rows from now on."""
        if isinstance(store, DiskRows):
            store.expected = self.expected
        self.store = store

    def expect(self, length: int) -> None:
        """Note the tokens after a pass that parts of a prompt share; 0 for another pass."""
        self.expected = length
        if isinstance(self.store, DiskRows):
            self.store.expected = length

    def cut(self, length: int) -> None:
        """Record that the tokens from ``length`` on were changed or removed."""
        for lineage in self.lineages:
            lineage[self] = min(length, lineage.get(self, 0))
            if not length:
                del lineage[self]
        self.lineages = self.lineages if length else []
        self.stored = cut(self.stored, length)

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

    def append(self, new: Sequence[mx.array], stored: Page[Stored] | None = None) -> list[mx.array]:
        """Add tokens, ``(batch, heads, new tokens, width)`` for each array. Return all that are kept.

        ``stored`` is their place in a file of the prefix cache: on disk they stay there, and nothing is returned.
        Raises: BudgetError: they do not fit even with every layer on disk; WriteError, ReadError.
        """
        with self.pool.lock:
            options = self.options
            if options.max_tokens is not None and (n := options.forgotten_tokens(self.length, new[0].shape[2])):
                self.drop(options.kept_tokens, options.kept_tokens + n)
            self.pool.make_room(self, new)
            store = self.store
            if isinstance(store, DiskRows):
                is_referred = stored is not None and self.pool.files.refer(store, stored)
                return [] if is_referred else self.pool.ring.append(store, new, self.planned)
            follows = stored is not None and num_tokens(self.stored) == store.length
            store.append(new)
            if stored is not None and follows:
                self.stored += (stored,)
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
            self.cut(length)
            if (disk := self.disk) is not None:
                self.pool.ring.forget(disk, length)
            self.store.truncate(length)

    def drop(self, start: int, stop: int) -> None:
        """Remove whole pages; the tokens behind them move up."""
        with self.pool.lock:
            self.cut(start)
            disk = self.disk
            self.replace(self.memory.without(start, stop) if disk is None else disk.fork(start, stop))

    def set(self, arrays: Sequence[mx.array], length: int, num_forgotten: int = 0) -> None:
        """Replace all tokens by those in some arrays. Raises: BudgetError, WriteError."""
        with self.pool.lock:
            self.cut(0)
            self.replace(MemoryRows(self.options, arrays, length, num_forgotten))
            self.pool.make_room(self, ())

    def succeed(self, other: LayerRows, arrays: Sequence[mx.array]) -> None:
        """Hold the tokens of another layer in another form. The next append makes room, when the other is dropped.

        The other layer keeps its tokens: an interrupt may leave it in use.
        """
        with self.pool.lock:
            self.replace(MemoryRows(self.options, arrays, other.length))


def is_admitted(rows: LayerRows, length: int) -> bool:
    """Return whether the call under way was checked with so many tokens in a layer."""
    return (rows.pool.admission, length) <= rows.admitted


class Layers:
    """Every layer of every cache. A layer leaves with the last reference to it. Any thread may add some.

    Args:
        step: the fewest tokens that are worth sharing.

    Attributes:
        by_number: the layers; their numbers ascend.
    """

    def __init__(self, step: int) -> None:
        self.by_number: weakref.WeakValueDictionary[int, LayerRows] = weakref.WeakValueDictionary()
        self._step = step

    def __iter__(self) -> Iterator[LayerRows]:
        """Iterate over the layers that there are now. Another thread may add some meanwhile."""
        return iter([rows for reference in self.by_number.valuerefs() if (rows := reference()) is not None])

    @property
    def on_disk(self) -> dict[LayerRows, DiskRows]:
        """The layers whose rows are on disk."""
        return {rows: disk for rows in self if (disk := rows.disk) is not None}

    def next_to_offload(self, asking: LayerRows | None) -> LayerRows | None:
        """Return the layer to offload next: of the sequence used longest ago, and far from those that were offloaded.

        ``asking`` is the layer that new tokens come to; None before a call.
        """
        layers = [rows for rows in self if rows.disk is None and (rows.memory.length or rows is asking)]
        return min(layers, key=lambda rows: (rows.group.used_at, _spread(rows.index), rows.index), default=None)

    def next_to_park(self, group: CacheGroup) -> LayerRows | None:
        """Return a layer of another list of caches that frees memory when it is parked, without a copy."""
        others = (rows for rows in self if rows.group is not group)
        return next((rows for rows in others if parking_pays(rows, self._step) and not copied_bytes(rows)), None)


def _spread(index: int) -> int:
    """Return a number by which to sort indices so that the first few are far apart: the bits backwards."""
    return int(f"{index:016b}"[::-1], 2)


def park(rows: LayerRows) -> None:
    """Replace the buffers of a layer in memory by pages, shared ones where other layers have the same tokens."""
    rows.memory.hold(as_pages(rows))


def as_pages(rows: LayerRows) -> MemoryPages:
    """Return all tokens of a layer in memory as pages. Copy and evaluate those that are in none."""
    memory, known = rows.memory, _known_pages(rows)
    return memory.pages or (*known, *memory.copied(num_tokens(known)))


def parking_pays(rows: LayerRows, step: int) -> bool:
    """Return whether others hold at least ``step`` tokens of a layer's buffers, so that parking it saves memory."""
    return bool(rows.memory.arrays) and num_tokens(_known_pages(rows)) >= step


def copied_bytes(rows: LayerRows) -> int:
    """Return the bytes that a copy of a layer takes: tokens that are in no page yet, or on disk in no page."""
    if (disk := rows.disk) is not None:
        return disk.tail_bytes
    memory = rows.memory
    missing = memory.length - num_tokens(_known_pages(rows))  # a page has one more token than it holds
    return sum(a.nbytes // memory.buffers.capacity * (missing + 1) for a in memory.arrays) if missing else 0


def _known_pages(rows: LayerRows) -> MemoryPages:
    """Return the first tokens of a layer as pages that another, parked layer holds."""
    found = [(length, other) for other, length in relatives(rows) if other.memory.pages]
    length, other = max(found, key=lambda pair: pair[0], default=(0, rows))
    return cut(other.memory.pages, length)


Lineage = weakref.WeakKeyDictionary[LayerRows, int]
"""Layers that begin with the same tokens, because all but one are copies: with how many of these each begins."""


def relatives(rows: LayerRows) -> Iterator[tuple[LayerRows, int]]:
    """Yield layers that begin with the same tokens, each with their number; the largest comes last for each."""
    for lineage in rows.lineages:
        for other, length in lineage.items():
            if other is not rows:
                yield other, min(length, lineage.get(rows, 0))


def note_copy(rows: LayerRows, copy: LayerRows, length: int) -> None:
    """Record that a layer begins with so many tokens of another one."""
    rows.group.has_copies = copy.group.has_copies = True
    rows.lineages = [lineage for lineage in rows.lineages if len(lineage) > 1]  # no other layer has those any more
    if length and length not in [lineage.get(rows) for lineage in rows.lineages]:
        rows.lineages.append(weakref.WeakKeyDictionary({rows: length}))
    copy.lineages += rows.lineages
    for lineage in rows.lineages:
        lineage[copy] = lineage.get(rows, 0)

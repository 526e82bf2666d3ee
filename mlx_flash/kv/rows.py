"""The rows of one layer's cache: where they are, what else begins with them, and what changes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import mlx.core as mx

from mlx_flash.kv.disk import NOTHING_PLANNED, DiskRows
from mlx_flash.kv.files import KVFiles
from mlx_flash.kv.lineage import Lineage
from mlx_flash.kv.memory import Changes, MemoryRows
from mlx_flash.kv.opened import Stored
from mlx_flash.kv.options import KVOptions
from mlx_flash.kv.pages import Page, cut, num_tokens
from mlx_flash.kv.ring import SlotRing
from mlx_flash.kv.stats import KVStats


class Pool(Protocol):
    """The pool of a layer, as the layer uses it: see :class:`mlx_flash.kv.pool.KVPool`."""

    options: KVOptions
    files: KVFiles
    ring: SlotRing
    stats: KVStats

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while layers change."""

    def make_room(self, rows: LayerRows, new: Sequence[mx.array]) -> None:
        """Evict layers until new tokens of one fit."""


class LayerRows:
    """The rows of one layer. Made by :meth:`mlx_flash.kv.pool.KVPool.new_rows`.

    Args:
        pool: the pool that the layer belongs to.
        group: number of the list of caches that the layer belongs to.
        index: its place in that list.

    Attributes:
        store: the rows, in memory or on disk. What cannot change in one step is replaced as a whole, so that an
            interrupt leaves the old rows or the new ones: see :meth:`replace`.
        options: the settings.
        group, index: as given.
        lineage: the layers with the same first tokens.
        stored: the first tokens in files of the prefix cache, while the rows are in memory. They go to disk without a
            copy, as far as these files are still there.
        planned: the pages that the prefix cache wants of the call under way, by first token. It takes those that are
            written to drafts as they are.
    """

    def __init__(self, pool: Pool, group: int, index: int) -> None:
        self._pool: Callable[[], Pool] = lambda: pool  # hides other caches from a search for arrays in attributes
        self.options = pool.options
        self.store: MemoryRows | DiskRows = MemoryRows(self.options)
        self.group = group
        self.index = index
        self.lineage = Lineage(self)
        self.stored: tuple[Page[Stored], ...] = ()
        self.planned = NOTHING_PLANNED
        self._no_rows = MemoryRows(self.options)

    @property
    def pool(self) -> Pool:
        """The pool that the layer belongs to."""
        return self._pool()

    def evict(self, new: Sequence[mx.array]) -> None:
        """Go to disk, without the tokens that other layers have there. The pool decides when.

        Args:
            new: tokens that are about to be added; their shapes count if there are no others yet.

        Raises:
            WriteError: the disk is full, or fails.
        """
        others = [(disk, length) for other, length in self.lineage.relatives() if (disk := other.disk)]
        self.replace(self.pool.files.write(self.memory, new, others, self.stored, self.planned))
        self.stored = ()
        self.pool.stats.num_evicted += 1

    def replace(self, store: MemoryRows | DiskRows) -> None:
        """Hold other rows from now on."""
        Changes.note()
        self.store = store

    def cut(self, length: int) -> None:
        """Record that the tokens from ``length`` on were changed or removed."""
        self.lineage.cut(length)
        self.stored = cut(self.stored, length)

    @property
    def memory(self) -> MemoryRows:
        """The rows while they are in memory; empty while they are on disk."""
        return self.store if isinstance(self.store, MemoryRows) else self._no_rows

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

        Args:
            new: the tokens, as the cache stores them.
            stored: their place in a file of the prefix cache. On disk they stay there, and nothing is returned.

        Raises:
            BudgetError: they do not fit the budget even with every layer on disk.
            WriteError: the disk is full, or fails.
            ReadError: pages could not be read.
        """
        with self.pool.lock:
            if forgotten := self.options.forgotten_tokens(self.length, new[0].shape[2]):
                self.drop(self.options.kept_tokens, self.options.kept_tokens + forgotten)
            self.pool.make_room(self, new)
            if (disk := self.disk) is not None:
                is_referred = stored is not None and self.pool.files.refer(disk, stored)
                return [] if is_referred else self.pool.ring.append(disk, new, self.planned)
            follows = stored is not None and num_tokens(self.stored) == self.length
            self.memory.append(new)
            if stored is not None and follows:
                self.stored += (stored,)
            return self.memory.fetch()

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

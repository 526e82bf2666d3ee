"""Deduplication of caches that mlx-lm's batches computed and a prompt cache keeps.

A batch computes in a cache of its own and extracts a plain one for each sequence, with all of its tokens. Kept caches
with the same first tokens are candidates for sharing; their rows are compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from mlx_flash.kv.base import PooledCache
from mlx_flash.kv.diskcache import DiskKVCache
from mlx_flash.kv.history import pass_on
from mlx_flash.kv.kvpool import KVPool
from mlx_flash.kv.layerrows import LayerRows, note_copy, park, relatives
from mlx_flash.kv.memory import MemoryRows
from mlx_flash.kv.pages import InMemory, MemoryPages, Page, cut, sizes
from mlx_flash.memory.footprint import release_freed_memory

_COMPARED_TOKENS = 1024
"""Tokens that are compared at a time."""

_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
"""Integer types that compare bits, by size in bytes."""


class KeptCache(list[Any]):
    """A list owned by the prompt cache; other holders keep weak references."""


class KeptCaches:
    """Weak references to the caches that a prompt cache keeps, with their tokens."""

    def __init__(self) -> None:
        self._tokens: WeakKeyDictionary[LayerRows, Sequence[int]] = WeakKeyDictionary()
        self._lists: WeakValueDictionary[int, KeptCache] = WeakValueDictionary()
        self._numbers = count()

    def take(self, cache: list[Any], tokens: Sequence[int], pool: KVPool) -> KeptCache:
        """Register a cache that will be kept. Replace each ``KVCache`` of mlx-lm in it by a cache of the pool.

        The cache is that of one sequence that is not computed with any more. Each new entry shares the rows that
        another kept entry in memory has, bit for bit. The pool's budget is raised to the memory in use: the rows were
        in memory before, and the next call limits what may stay. Return the list to keep, with the same entries.
        """
        with pool.lock:
            taken, common, group = [], dict[int, int](), pool.new_group()
            for index, entry in enumerate(cache):
                if type(entry) is KVCache and entry.offset:
                    found = list(self._candidates(index, tokens, pool, common))
                    cache[index] = self._taken(entry, pool.new_rows(group, index), found)
                    taken.append(cache[index].rows)
                    del entry
            if taken:
                _make_room(pool, taken[0])
        for entry in cache:
            if isinstance(entry, PooledCache):
                self._tokens[entry.rows] = tokens
        if any(any(relatives(rows)) for rows in taken):
            release_freed_memory()
        kept = self._lists[next(self._numbers)] = KeptCache(cache)
        return kept

    @property
    def shared_bytes(self) -> int:
        """Bytes of memory that sharing saves: the additional memory if each kept cache held all of its tokens."""
        entries = [entry for kept in list(self._lists.values()) for entry in kept]
        own = [entry for entry in entries if isinstance(entry, PooledCache)]
        held = [entry.rows.memory.pages for entry in own]
        return sum(page.where.nbytes for pages in held for page in pages) - sum(sizes(held).values())

    def _candidates(
        self, index: int, tokens: Sequence[int], pool: KVPool, common: dict[int, int]
    ) -> Iterator[tuple[int, LayerRows]]:
        """Yield layers that may begin with the same rows, each with the number of tokens; the largest comes first."""
        found = []
        for rows, others in self._tokens.items():
            if rows.pool is pool and rows.index == index and rows.disk is None:
                if id(others) not in common:
                    common[id(others)] = num_common(tokens, others)
                found.append((min(common[id(others)], rows.length), rows))
        yield from sorted((pair for pair in found if pair[0] >= pool.options.step), key=lambda p: p[0], reverse=True)

    def _taken(self, entry: KVCache, rows: LayerRows, candidates: Sequence[tuple[int, LayerRows]]) -> DiskKVCache:
        arrays = [array[..., : entry.offset, :] for array in (entry.keys, entry.values)]
        mx.eval(arrays)
        length, nearest = 0, rows
        for most, other in candidates:
            if most > length and (same := num_equal(other, arrays, most)) > length:
                length, nearest = same, other
        known: MemoryPages = ()
        if length >= rows.options.step:
            if not nearest.memory.pages:
                park(nearest)
            self._split_at(nearest, length)
            known = cut(nearest.memory.pages, length)
            note_copy(nearest, rows, length)
            rows.cut(length)  # nothing in common with the sequences that share more with the other
        else:
            length = 0
        plain = MemoryRows(rows.options, arrays, entry.offset)
        rows.memory.hold((*known, *plain.copied(length)), plain.layout)
        cache = DiskKVCache(rows=rows)
        pass_on(entry, cache)
        return cache

    def _split_at(self, rows: LayerRows, length: int) -> None:
        """Split the page of a parked layer at ``length``, so that shared pages hold few unshared tokens."""
        begin = 0
        for page in rows.memory.pages:
            if begin + page.length >= length:
                self._split(page.where, length - begin, rows)
                return
            begin += page.length

    def _split(self, whole: InMemory, at: int, rows: LayerRows) -> None:
        """Split shared rows in two for all holders, if the rest is at least a page."""
        if whole.length - at < rows.options.step:
            return
        holders = [r for r in self._tokens if any(page.where is whole for page in r.memory.pages)]
        longest = max(page.length for r in holders for page in r.memory.pages if page.where is whole)
        first = InMemory([array[..., :at, :] for array in whole.arrays])
        second = InMemory([array[..., at:longest, :] for array in whole.arrays]) if longest > at else None
        for holder in holders:
            pages: list[Page[InMemory]] = []
            for page in holder.memory.pages:
                if page.where is not whole:
                    pages.append(page)
                    continue
                pages.append(Page(first, min(page.length, at)))
                if second is not None and page.length > at:
                    pages.append(Page(second, page.length - at))
            holder.memory.hold(tuple(pages))


def _make_room(pool: KVPool, rows: LayerRows) -> None:
    if pool.budget_bytes is not None:
        pool.budget_bytes = max(pool.budget_bytes, pool.memory_bytes + pool.under_way_bytes)
    pool.make_room(rows, ())  # marks the sequence as used now


def num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def num_equal(rows: LayerRows, arrays: Sequence[mx.array], most: int) -> int:
    """Return how many of the first ``most`` tokens of a layer equal those of some arrays, bit for bit."""
    for start in range(0, most, _COMPARED_TOKENS):
        stop = min(start + _COMPARED_TOKENS, most)
        equal = mx.ones((stop - start,), mx.bool_)
        for mine, array in zip(rows.read(start, stop), arrays, strict=True):
            theirs = array[..., start:stop, :]
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                return 0
            kind = _BITS[mine.itemsize]
            equal = equal & (mine.view(kind) == theirs.view(kind)).all(axis=(0, 1, 3))
        if not equal.all().item():
            return start + int(np.array(equal).argmin())
    return most

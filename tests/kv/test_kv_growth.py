"""Sizes of mlx-lm's caches, compared with MLX's own count of memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as stock
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_flash.compat.caches import entries_of
from mlx_flash.kv.growth import update_growth
from mlx_flash.layout.reachable import nbytes_in

HEADS, WIDTH = 2, 128
CACHES: dict[str, tuple[Callable[[], Any], int]] = {
    "KVCache": (KVCache, 1),
    "ConcatenateKVCache": (ConcatenateKVCache, 1),
    "QuantizedKVCache": (lambda: QuantizedKVCache(64, 4), 1),
    "RotatingKVCache": (lambda: RotatingKVCache(300, keep=4), 1),
    "ChunkedKVCache": (lambda: ChunkedKVCache(400), 1),
    "BatchKVCache": (lambda: BatchKVCache([2, 0, 1]), 3),
    "BatchRotatingKVCache": (lambda: BatchRotatingKVCache(300, [2, 0, 1]), 3),
    "CacheList": (lambda: CacheList(KVCache(), RotatingKVCache(300)), 1),
    "ArraysCache": (lambda: ArraysCache(2), 1),
}
"""For each class of mlx-lm a new entry and its number of sequences."""

WITH_TOKENS = [name for name in CACHES if name != "ArraysCache"]
MARGIN = 64 << 10  # masks, offsets, padding, and the allocator's own pages


def update(entry: Any, batch: int, num_tokens: int) -> None:
    rows = [mx.ones((batch, HEADS, num_tokens, WIDTH), mx.float16) for _ in range(2)]
    mx.eval(rows)
    for part in entry.caches if isinstance(entry, CacheList) else [entry]:
        if isinstance(part, ArraysCache):
            part[0], part[1] = rows
        else:
            part.update_and_fetch(*rows)
    mx.eval(entry.state if not isinstance(entry, CacheList) else [part.state[:2] for part in entry.caches])
    mx.synchronize()  # a GPU lets go of what it has read some time after the results are there


def rows_nbytes(batch: int, num_tokens: int) -> int:
    return 2 * batch * HEADS * num_tokens * WIDTH * 2


def row_bytes(name: str, batch: int) -> int:
    """Return what one token takes in an entry."""
    if name == "QuantizedKVCache":
        return 2 * HEADS * (WIDTH // 2 + 2 * 2 * WIDTH // 64)
    return rows_nbytes(batch, 1)


def test_every_cache_class_of_mlx_lm_is_tested() -> None:
    classes = {
        name
        for name, value in vars(stock).items()
        if inspect.isclass(value) and value.__module__ == stock.__name__ and hasattr(value, "nbytes")
    }
    assert classes - {"_BaseCache", "LRUPromptCache"} == set(CACHES)


@pytest.mark.parametrize("name", CACHES)
def test_cache_nbytes_is_what_mlx_allocates(name: str) -> None:
    create, batch = CACHES[name]
    mx.synchronize()
    before = mx.get_active_memory()
    entry = create()
    for num_tokens in (700, 1, 1):
        update(entry, batch, num_tokens)
    assert nbytes_in(entry) == pytest.approx(mx.get_active_memory() - before, abs=MARGIN)
    assert nbytes_in(entry) > 0


@pytest.mark.parametrize("name", WITH_TOKENS)
@pytest.mark.parametrize("sizes", [(255, 1, 1, 1), (100, 200, 300, 1), (400, 1, 1, 300, 1), (1, 1, 255, 600, 1, 7)])
def test_update_growth_is_what_an_update_adds(name: str, sizes: tuple[int, ...]) -> None:
    create, batch = CACHES[name]
    entry = create()
    for num_tokens in sizes:
        predicted = update_growth(entries_of([entry]), num_tokens, row_bytes(name, batch))
        held = nbytes_in(entry)
        update(entry, batch, num_tokens)
        assert predicted.added == pytest.approx(nbytes_in(entry) - held, abs=64)


@pytest.mark.parametrize("name", WITH_TOKENS)
@pytest.mark.parametrize("num_tokens", [1, 2, 300])
@pytest.mark.parametrize("length", [0, 1025])
def test_an_update_takes_no_more_memory_than_predicted(name: str, length: int, num_tokens: int) -> None:
    create, batch = CACHES[name]
    entries = [create() for _ in range(4)]
    for entry in entries if length else []:
        update(entry, batch, length - 1)
        update(entry, batch, 1)
    predicted = update_growth(entries_of(entries), num_tokens, row_bytes(name, batch))
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for entry in entries:
        update(entry, batch, num_tokens)
    scratch = 2 * rows_nbytes(batch, num_tokens)  # the rows themselves, and quantized ones
    assert mx.get_peak_memory() - before <= predicted.peak + scratch + MARGIN


@pytest.mark.parametrize("length", [0, 100, 1025])
@pytest.mark.parametrize(("num_tokens", "step"), [(2000, 64), (2000, 512), (700, 512), (130, 64)])
def test_a_window_in_parts_takes_no_more_than_predicted(length: int, num_tokens: int, step: int) -> None:
    """A long prompt takes a window and a part of it, not all of its tokens."""
    entries = [RotatingKVCache(max_size=256) for _ in range(4)]
    for entry in entries if length else []:
        update(entry, 1, length)
    predicted = update_growth(entries, num_tokens, rows_nbytes(1, 1), step)
    mx.clear_cache()
    mx.reset_peak_memory()
    before, held = mx.get_active_memory(), nbytes_in(entries)
    for start in range(0, num_tokens, step):
        for entry in entries:
            update(entry, 1, min(step, num_tokens - start))
    added = nbytes_in(entries) - held
    assert added <= predicted.added <= added + 4 * rows_nbytes(1, step)
    assert mx.get_peak_memory() - before <= predicted.peak + 2 * rows_nbytes(1, step) + MARGIN


def test_a_recurrent_state_is_replaced() -> None:
    entry = ArraysCache(2)
    assert update_growth([entry], 5) == (0, 0)
    update(entry, 1, 10)
    assert update_growth([entry], 5) == (0, nbytes_in(entry))


def test_one_entry_at_a_time_is_copied() -> None:
    entries = [KVCache() for _ in range(3)]
    for entry in entries:
        update(entry, 1, 256)
    assert update_growth(entries, 1) == (3 * rows_nbytes(1, 256), (2 + 3) * rows_nbytes(1, 256))


def test_a_cache_without_keys_counts_as_if_it_kept_all_tokens() -> None:
    class Pooled:
        pooled = mx.zeros((1, 8, WIDTH), mx.float16)

        def update_and_fetch(self, rows: mx.array) -> None:
            raise AssertionError("its own kind of rows is not known")

    entry, row = Pooled(), rows_nbytes(1, 1)
    assert update_growth([entry], 5, row) == (5 * row, nbytes_in(entry) + 5 * row)

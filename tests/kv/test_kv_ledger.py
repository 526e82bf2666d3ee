"""The ledger of keys and values counts what layers hold, and no call takes more than it says."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from kv_settings import adding
from mlx_flash.errors import FlashError
from mlx_flash.kv.kvledger import KVLedger, KVOptions, Layers
from mlx_flash.kv.kvpool import KVPool, make_caches
from mlx_flash.layout.reachable import nbytes_in

LAYERS, HEADS = 3, 16
WIDTHS = (24, 8, 24)
"""Of the layers: not all are as large."""


@pytest.fixture(autouse=True)
def little_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVOptions, "under_way_bytes", lambda self, sizes, tokens, new, slots=2: 100 * new + slots)


def rows_of(count: int, layer: int) -> mx.array:
    return mx.zeros((1, HEADS, count, WIDTHS[layer]), mx.float16)


OPTIONS = st.fixed_dictionaries(
    {
        "step": st.sampled_from([4, 16, 256]),
        "budget_bytes": st.sampled_from([None, 480_000, 1_600_000, 1 << 30]),
    }
)
NAMES = ["feed", "feed", "feed", "call", "copy", "trim", "offload", "look", "drop"]
ACTIONS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 3), st.integers(1, 90)), min_size=1, max_size=14)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(options=OPTIONS, actions=ACTIONS)
def test_ledger_counts_all_arrays_and_no_call_takes_more(
    tmp_path: Path, options: dict[str, Any], actions: list[Any]
) -> None:
    pool = KVPool(KVOptions(directory=tmp_path, **options))
    conversations = [make_caches([KVCache() for _ in range(LAYERS)], pool.options, pool)]
    try:
        for name, which, count in actions:
            caches = conversations[which % len(conversations)]
            with suppress(FlashError):  # the budget is too small for it
                act(pool, conversations, caches, name, count)
            check(pool, conversations, which, count)
    finally:
        pool.close()


def act(pool: KVPool, conversations: list[list[Any]], caches: list[Any], name: str, count: int) -> None:
    if name in ("feed", "call"):
        tokens = adding(caches, count, count, sizes_of(caches))
        if name == "call" and pool.admit(tokens, pool.options.budget_bytes or 1 << 40):
            return
        peak = pool.ledger(tokens).peak
        for i, cache in enumerate(caches):
            cache.drop_room(count)
            mx.eval(cache.update_and_fetch(rows_of(count, i), rows_of(count, i)))
            assert pool.memory_bytes <= peak
    elif name == "copy" and len(conversations) < 4:
        conversations.append(copy.deepcopy(caches))
    elif name == "drop" and len(conversations) > 1:
        conversations.remove(caches)
    elif name == "trim":
        for cache in caches:
            cache.trim(count)
    elif name == "offload" and not (victim := caches[count % LAYERS]).is_on_disk:
        victim.offload()


def sizes_of(layers: list[Any]) -> list[int]:
    return [2 * HEADS * WIDTHS[i % LAYERS] * 2 for i in range(len(layers))]


def check(pool: KVPool, conversations: list[list[Any]], which: int, count: int) -> None:
    held, tails = sum(map(nbytes_in, pool.layers)), sum(disk.tail_bytes for disk in pool.on_disk.values())
    assert pool.memory_bytes == pool.ledger().now >= held + tails + pool.ring.nbytes
    assert pool.note().reserved_bytes == held + pool.ring.nbytes
    assert pool.ledger().is_on_disk == any(entry.is_on_disk for entry in pool.layers)
    if not pool.on_disk:
        assert pool.memory_bytes == held + pool.ring.nbytes
    together = conversations[: 1 + which % len(conversations)]
    layers = [cache for caches in together for cache in caches]
    ledger = pool.ledger(adding(layers, count, max(1, count - which), sizes_of(layers)))
    assert ledger.peak >= ledger.now
    missing = [ledger.way(limit).missing for limit in (0, ledger.now, ledger.peak, ledger.peak + 50_000, 1 << 40)]
    assert missing == sorted(missing, reverse=True) and missing[-1] == 0


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("left", [100, 5990])
def test_peak_counts_the_copy_that_attention_gets_on_cuda(tmp_path: Path, num_slots: int, left: int) -> None:
    """A trimmed cache got a copy with room for all that it had, beside slots that count with what they hold."""
    pool = KVPool(KVOptions(directory=tmp_path, budget_bytes=1 << 30, copies_slots=True))
    caches = make_caches([KVCache() for _ in range(LAYERS)], pool.options, pool)
    layers, sizes = caches, sizes_of([*range(LAYERS)])
    for i, cache in enumerate(caches):
        mx.eval(cache.update_and_fetch(rows_of(6000, i), rows_of(6000, i)))
        cache.offload()
    more, new = adding(layers, 1, 1, sizes), [rows_of(1, i) for i in range(LAYERS)]
    mx.eval(new)
    for _ in range(2):
        assert not pool.admit(more, 1 << 30 if num_slots > 1 else pool.ledger(more).least_with(1))
        assert len(pool.ring.slots) == num_slots
        peak, others = pool.ledger(more).peak, mx.get_active_memory() - pool.ring.nbytes
        mx.reset_peak_memory()
        for cache, rows in zip(caches, new, strict=True):
            mx.eval(cache.update_and_fetch(rows, rows))
        tails = pool.options.step * sum(sizes)  # in NumPy's memory
        assert mx.get_peak_memory() - others + tails <= peak + 32_768  # whole pages
        for cache in caches:
            cache.trim(cache.offset - left)
        more = adding(layers, 1, 1, sizes)
    pool.close()


def test_peak_counts_the_old_buffers_of_the_layer_that_grows() -> None:
    options, layer = KVOptions(step=16), Layers(200, 10, 16)
    grown, growing = 200 * (10 + 16), layer._replace(num_new=8)
    assert KVLedger(options, [growing, layer], 8).peak == 200 * 16 + grown + 200 * 16
    assert KVLedger(options, [growing._replace(number=2)], 8).peak == 2 * grown + 200 * 16
    assert KVLedger(options, [layer._replace(num_new=6), layer], 8).peak == 2 * 200 * 16


def test_a_layer_that_grows_several_times_is_copied_when_it_is_long() -> None:
    """And its steps begin at any token."""
    layers = [Layers(200, num_new=64, number=3)]
    once, in_parts = (KVLedger(KVOptions(step=16), layers, step) for step in (64, 8))
    assert (once.peak, in_parts.peak) == (3 * 200 * 64, 3 * 200 * (64 + 15) + 200 * 64)

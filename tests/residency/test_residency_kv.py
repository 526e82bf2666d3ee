"""Caches take the memory that the plan says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from kv_settings import adding
from mlx_flash.config import FlashConfig
from mlx_flash.engine.prepare import prepare
from mlx_flash.errors import ConfigError
from mlx_flash.kv.kvpool import make_caches
from mlx_flash.residency.plan import check_kv, in_memory, ledger_of, on_disk
from mlx_flash.residency.sizes import ModelSizes, measure
from models import LLAMA, save

HEADS, WIDTH = 2, 32
ROW = 2 * HEADS * WIDTH * 2
CONTEXT, STEP = 300, 16


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> ModelSizes:
    """Sizes of a model with six layers of keys and values."""
    directory = save(tmp_path_factory.mktemp("llama"), LLAMA)
    found = measure(prepare(directory, FlashConfig()).layout, {})
    return replace(found, cache=replace(found.cache, rows=(ROW,) * 6))


@pytest.fixture(autouse=True)
def little_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_flash.kv.kvledger.KVOptions.under_way_bytes", lambda *_: 4096)


def test_more_room_leaves_less_on_disk(sizes: ModelSizes) -> None:
    config = FlashConfig(kv_cache="disk", kv_step=STEP)
    ledger = ledger_of(sizes, config, STEP)
    whole = in_memory(ledger, CONTEXT).nbytes
    shares = [on_disk(ledger, CONTEXT, room) for room in range(0, 2 * whole, whole // 20)]
    limits = [share.limit or 0 for share in shares]
    numbers = [share.num_on_disk for share in shares]
    assert limits == sorted(limits) and numbers == sorted(numbers, reverse=True)
    assert limits[0] == ledger.least_rows(CONTEXT, STEP)
    assert numbers[0] == 6 and numbers[-1] == 0 and len(set(numbers)) > 3
    assert [share.disk_bytes for share in shares] == [number * ROW * CONTEXT for number in numbers]
    assert max(share.disk_bytes for share in shares) == 6 * ROW * CONTEXT


@settings(max_examples=15, deadline=None)
@given(times=st.floats(1, 4), chunk=st.integers(1, STEP))
def test_caches_stay_within_their_share(
    sizes: ModelSizes, tmp_path_factory: pytest.TempPathFactory, times: float, chunk: int
) -> None:
    config = FlashConfig(kv_cache="disk", kv_step=STEP, kv_directory=str(tmp_path_factory.mktemp("kv")))
    ledger = ledger_of(sizes, config, STEP)
    room = round(times * ledger.least_rows(CONTEXT, STEP))
    share = on_disk(ledger, CONTEXT, room)
    assert share.options is not None and share.limit is not None
    caches = make_caches([KVCache() for _ in sizes.cache.rows], share.options)
    pool, most = caches[0].pool, 0
    for start in range(0, CONTEXT, chunk):
        rows = mx.ones((1, HEADS, min(chunk, CONTEXT - start), WIDTH), mx.float16)
        assert not pool.admit(adding(caches, rows.shape[2], rows.shape[2], ROW), share.limit)
        for cache in caches:
            mx.eval(cache.update_and_fetch(rows, rows))
            most = max(most, pool.memory_bytes)
    assert most <= share.limit <= max(room, ledger.least_rows(CONTEXT, STEP))
    assert len(pool.on_disk) <= share.num_on_disk
    assert pool.on_disk or share.num_on_disk <= 3  # the plan counts slots that take all of their memory, and copies
    assert pool.note().disk_bytes <= share.disk_bytes
    pool.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_cache": "stock", "kv_ram_gb": 1}, "nothing goes to disk"),
        ({"kv_cache": "disk", "ssd_write_gb_per_day": 0}, "no keys and values can go to disk"),
        ({"kv_cache": "disk", "kv_max_tokens": 1000, "kv_ram_gb": 1}, "nothing goes to disk"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_kv(FlashConfig(**change))

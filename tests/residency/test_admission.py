"""Admission to the server, and the check before a call, count every cache of mlx-lm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    BatchKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_flash import FlashConfig, FlashLLM, RefusedError
from mlx_flash.compat.caches import CACHE_STEP
from mlx_flash.engine.call import Lane, need, parse_call
from mlx_flash.kv.kvledger import KVOptions
from mlx_flash.layout.reachable import arrays_in
from mlx_flash.loading import load_model
from mlx_flash.memory.footprint import footprint
from mlx_flash.residency.plan import ResidencyPlan, alone_bytes, decide, together_bytes
from mlx_flash.residency.sizes import ActivationSizes
from models import LLAMA, save

MORE_GB = 0.3 if mx.default_device() == mx.cpu else 1.5
"""Room for a model that stays in memory, beside the process. A GPU's process grows when it runs."""

batch_bytes = partial(together_bytes, batching="stock")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> FlashLLM:
    directory = tmp_path_factory.mktemp("model")
    save(directory, {**LLAMA}, bits=None)
    model, _ = load_model(directory, FlashConfig(ram_budget_gb=footprint() / 1e9 + MORE_GB, telemetry=False))
    return model


@pytest.fixture
def plan(model: FlashLLM) -> ResidencyPlan:
    return model.plan


def filled(entry: object, rows: int, tokens: int) -> object:
    keys = mx.zeros((rows, 4, tokens, 32))
    entry.update_and_fetch(keys, keys)  # type: ignore[attr-defined]
    return entry


def test_exact_batches_are_not_padded(plan: ResidencyPlan) -> None:
    lengths, plan = [8000, 100, 100, 100], replace(plan, prefill_step_size=16)
    exact, stock = (together_bytes(plan, lengths, batching) for batching in ("exact", "stock"))
    assert exact < stock / 2
    assert together_bytes(plan, lengths, "exact") > together_bytes(plan, lengths[:3], "exact")
    most = next(n for n in range(1000, 1 << 24, 1000) if together_bytes(plan, [n, 100], "stock") > plan.room_bytes)
    assert decide(plan, 80, 20, [most], may_batch=True, batching="stock") == "wait"
    assert decide(plan, 80, 20, [most], may_batch=True, batching="auto") == "batch"


def test_decisions(plan: ResidencyPlan) -> None:
    assert decide(plan, 100, 20, [], may_batch=True, batching="stock") == "batch"
    most = next(n for n in range(256, 1 << 24, 256) if batch_bytes(plan, [n]) > plan.room_bytes) - 256
    assert decide(plan, most - 20, 20, [], may_batch=True, batching="stock") == "batch"
    assert decide(plan, 100, 20, [most], may_batch=True, batching="stock") == "wait"
    assert decide(plan, 100, 20, [], may_batch=False, batching="stock") == "alone"
    assert decide(plan, 100, 20, [20], may_batch=False, batching="stock") == "wait"
    with pytest.raises(
        RefusedError, match=r"at most 20 need [\d.]+ MB .* budget is [\d.]+ MB.* --ram-budget-gb"
    ) as caught:
        decide(plan, 1 << 24, 20, [], may_batch=True, batching="stock")
    assert caught.value.status == 413


def test_requests_that_wait_hold_their_logits(plan: ResidencyPlan) -> None:
    """Those of the last token, and their log-probabilities."""
    logits = plan.activations.logits_per_token
    larger = replace(plan, activations=replace(plan.activations, logits_per_token=logits + 1000))
    one, three = (together_bytes(larger, [100] * n, "exact") - together_bytes(plan, [100] * n, "exact") for n in (1, 3))
    assert three - one == 2 * 2 * 1000


@pytest.mark.parametrize("may_batch", [True, False])
def test_a_request_may_need_all_the_room(plan: ResidencyPlan, may_batch: bool) -> None:
    needed = together_bytes(plan, [120], "exact") if may_batch else alone_bytes(plan, 120)
    exact = replace(plan, budget_bytes=plan.budget_bytes - plan.room_bytes + needed)
    less = replace(exact, budget_bytes=exact.budget_bytes - 1)
    assert exact.room_bytes == needed
    assert decide(exact, 100, 20, [], may_batch=may_batch, batching="auto") == ("batch" if may_batch else "alone")
    if may_batch:
        assert decide(less, 100, 20, [], may_batch=True, batching="auto") == "alone"
    else:
        with pytest.raises(RefusedError):
            decide(less, 100, 20, [], may_batch=False, batching="auto")


NOTHING = ActivationSizes(0, 0, 0, 0, 0)


def on_disk(plan: ResidencyPlan, **changes: Any) -> ResidencyPlan:
    """Return the plan with keys and values on disk."""
    options = KVOptions(step=16, budget_bytes=0)
    return replace(plan, kv=replace(plan.kv, options=options, num_on_disk=1), **changes)


def with_mlx_lm_caches(plan: ResidencyPlan) -> ResidencyPlan:
    """Return the plan with the caches of :func:`filled`, and with nothing but these."""
    row, num_layers = plan.cache.largest_row * 4 // LLAMA["num_key_value_heads"], LLAMA["num_hidden_layers"]
    cache = replace(plan.cache, rows=(row,) * num_layers, token_bytes=row * num_layers)
    return replace(plan, activations=NOTHING, cache=cache, kv=replace(plan.kv, options=None))


@pytest.mark.parametrize("num_rows", [3, 5])
def test_rows_are_there_twice_while_a_batch_joins_another(plan: ResidencyPlan, num_rows: int) -> None:
    """Layer by layer, the rows of a request and those of others become one array; the others stay meanwhile."""
    lean, more = with_mlx_lm_caches(plan), num_rows - 1
    row = lean.cache.rows[0]
    lean = replace(lean, cache=replace(lean.cache, rows=(row,), token_bytes=row, largest_row=row))
    mx.synchronize()
    before = mx.get_active_memory()
    one: Any = filled(BatchKVCache([0]), 1, 512 + CACHE_STEP)
    others: Any = filled(BatchKVCache([0] * more), more, 512 + CACHE_STEP - 1)
    mx.eval(arrays_in([one, others]))
    mx.reset_peak_memory()
    one.extend(others)
    mx.eval(arrays_in(one))
    needed = batch_bytes(lean, [512] * num_rows)
    assert needed / 1.3 < mx.get_peak_memory() - before <= needed


def test_a_request_alone_has_one_layer_in_memory(plan: ResidencyPlan) -> None:
    """With keys and values on disk, in a single slot."""
    lean = on_disk(plan, activations=NOTHING)
    more = alone_bytes(lean, 120_000) - alone_bytes(lean, 60_000)
    assert 60_000 * lean.cache.largest_row <= more < 1.1 * 60_000 * lean.cache.largest_row
    short, long = (replace(lean, prefill_step_size=step) for step in (1, 2048))
    assert alone_bytes(short, 9000) == alone_bytes(long, 9000)


def test_each_request_on_disk_has_last_pages_and_what_never_goes_there(plan: ResidencyPlan) -> None:
    """Slots are for the longest."""
    cache = replace(plan.cache, token_bytes=plan.cache.token_bytes + 10)
    lean = on_disk(plan, activations=NOTHING, cache=cache)
    one, two = (together_bytes(lean, lengths, "exact") for lengths in ([90_000], [90_000, 60_000]))
    more = 16 * sum(cache.rows) + lean.ledger.others.nbytes(60_000)
    assert more <= two - one < 1.1 * more
    assert together_bytes(lean, [60_000, 90_000], "exact") == two
    in_memory = replace(lean, kv=replace(lean.kv, num_on_disk=0))  # where plans have room for all
    assert together_bytes(in_memory, [90_000], "exact") >= 90_000 * cache.token_bytes


def test_a_request_alone_takes_what_it_was_admitted_for(model: FlashLLM, plan: ResidencyPlan) -> None:
    """Token by token, beyond a step of its caches: the largest layer is copied when it grows."""
    cache = make_prompt_cache(model)
    before = mx.get_active_memory()
    for _ in range(5):
        mx.eval(model(mx.arange(CACHE_STEP)[None], cache=cache))
    mx.synchronize()
    mx.reset_peak_memory()
    for number in range(3):
        mx.eval(model(mx.array([[number]]), cache=cache))
    needed = alone_bytes(plan, 5 * CACHE_STEP + 3)
    assert needed / 1.5 < mx.get_peak_memory() - before <= needed


def test_the_smallest_budget_has_room_for_the_planned_context(plan: ResidencyPlan) -> None:
    smallest, prompt = replace(plan, budget_bytes=plan.peak_bytes), plan.context_length - 20
    assert decide(smallest, prompt, 20, [], may_batch=False, batching="auto") == "alone"
    assert plan.room_bytes - smallest.room_bytes == plan.budget_bytes - plan.peak_bytes > 0


@pytest.mark.parametrize(
    ("make", "num_new"),
    [(KVCache, 1), (KVCache, 16), (lambda: RotatingKVCache(4096), 1), (lambda: RotatingKVCache(900), 16)],
    ids=["token", "tokens", "window", "full window"],
)
def test_copy_of_a_layer_that_grows_is_within_the_budget(tmp_path: Path, make: Callable[[], Any], num_new: int) -> None:
    """mlx-lm's caches copy the tokens of a layer when they grow, here 2 MB beside the arrays that stay."""
    little = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}  # to compute
    save(tmp_path, LLAMA | {"num_key_value_heads": 4, "head_dim": 64} | little, bits=None)
    settings = FlashConfig(ram_budget_gb=footprint() / 1e9 + MORE_GB, kv_cache="stock", telemetry=False)
    with load_model(tmp_path, settings)[0] as model:
        cache, tokens = [make() for _ in range(5)], mx.zeros((1, num_new), mx.int32)
        mx.eval(model(mx.zeros((1, 1024), mx.int32), cache=cache))
        needed = need(model.plan, [Lane(parse_call((tokens, cache), {}))])
        model.plan = replace(model.plan, budget_bytes=needed.total)
        mx.reset_peak_memory()
        mx.eval(model(tokens, cache=cache))
        assert needed.process + mx.get_peak_memory() <= model.plan.budget_bytes

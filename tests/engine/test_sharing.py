"""The parts of a prompt that share a pass take the memory that is counted for them."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_flash
from mlx_flash import BudgetError, ClosedError, ConfigError, FlashConfig, FlashLLM, load_model
from mlx_flash.config import KVMode
from mlx_flash.engine.need import need
from mlx_flash.engine.prepare import prepare
from mlx_flash.engine.sharing import waiting_bytes
from models import LLAMA, save
from streamed import streamed_whole
from zoo import configuration

CONTEXT, STEP, NUM_PARTS = 1024, 4, 10
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
MODEL = LLAMA | SHAPE | {"head_dim": 64, "num_hidden_layers": 2, "vocab_size": 16000}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"), MODEL)


def streamed_head(directory: Path, monkeypatch: pytest.MonkeyPatch) -> FlashLLM:
    """Return a model whose layers are in memory, and whose head is streamed."""
    monkeypatch.setattr("mlx_flash.residency.machine.footprint", lambda: 100_000_000)
    prepared = prepare(directory, FlashConfig(ram_budget_gb="min"))
    for more in range(0, 6_000_000, 250_000):
        config = FlashConfig(ram_budget_gb=(prepared.plan.minimum_bytes + more) / 1e9, lend_reserves=False)
        model = load_model(directory, config)[0]
        if model.plan.streaming.heads and not model.plan.streaming.layers and not model.plan.streaming.cut:
            return model
        model.close()
    raise AssertionError("no budget streams the head alone")


def peak_of_parts(model: FlashLLM) -> tuple[int, int, int]:
    """Return the passes of a prompt in parts after a long context, the arrays' peak above it, and what is counted."""
    with model:
        model.start()
        model.plan = replace(model.plan, budget_bytes=model.plan.budget_bytes + 500_000_000)
        cache = model.make_cache()
        tokens = mx.zeros((1, STEP * NUM_PARTS), mx.int32)
        model.advance([model.row(mx.zeros((1, CONTEXT), mx.int32), cache, CONTEXT, wants_logits=False)])
        model.advance([model.row(tokens[:, :STEP], cache, STEP, wants_logits=False)])
        mx.eval([entry.state for entry in cache])  # it grows by a step now, and not while the peak is taken
        row = model.row(tokens, cache, STEP, wants_logits=False)
        counted = waiting_bytes(model.plan, [row.left])[-1] + need(model.plan, [row.lane()]).activations
        num_passes = model.counters.num_passes
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        model.advance([row])
        assert row.error is None and row.is_done
        return model.counters.num_passes - num_passes, mx.get_peak_memory() - before, counted


@pytest.mark.skipif(mx.default_device() == mx.gpu, reason="a head that is not cut into tiles is never streamed alone")
def test_parts_leave_nothing_behind_in_layers_that_are_in_memory(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits that nobody wants referred to the keys and values of the last layer, which each part then copied."""
    num_passes, peak, _ = peak_of_parts(streamed_head(directory, monkeypatch))
    layer_bytes = 2 * 4 * 64 * 4 * CONTEXT
    assert num_passes == 1 and peak < layer_bytes / 4


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_copies_of_keys_and_values_are_counted(directory: Path, cut: int) -> None:
    num_passes, peak, counted = peak_of_parts(streamed_whole(directory, cut=cut, context_length=4096))
    assert num_passes == 1 and peak <= counted


@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "gemma3n", "mamba2", "qwen3_next", "deepseek_v3", "afm7", "gemma4", "iquestloopcoder"]
)
def test_parts_of_every_kind_of_model_take_no_more_than_is_counted(tmp_path: Path, name: str) -> None:
    """Between layers, where what is counted is little more than the hidden states."""
    with streamed_whole(save(tmp_path, configuration(name), mx.float32), context_length=1024) as model:
        model.start()
        model.plan = plan = replace(model.plan, budget_bytes=model.plan.budget_bytes + 500_000_000)
        num_parts = 8
        tokens = mx.arange(num_parts * 32)[None] % 300
        model.advance([model.row(tokens[:, :64], model.make_cache(), 32, wants_logits=False)])  # needs no order
        row = model.row(tokens, model.make_cache(), 32, wants_logits=False)
        lane, waiting = row.lane(num_parts), waiting_bytes(plan, [row.left])[-1]
        needed = need(plan, [lane])
        num_passes = model.counters.num_passes
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        model.advance([row])
        assert row.error is None and model.counters.num_passes == num_passes + 1
        assert mx.get_peak_memory() - before <= waiting + needed.activations + needed.growth + needed.kv_growth
        most = plan.activations.waiting_bytes((num_parts - 1) * 32)
        assert waiting < most or plan.activations.held.has_keys


@pytest.mark.parametrize("kv_cache", [None, "preallocated", "stock"])
def test_calls_that_nothing_has_waited_for_are_counted(directory: Path, kv_cache: KVMode | None) -> None:
    """MLX computes them later, together with those after them."""
    context, num_calls = 256, 12
    room = num_calls // 3 * context * 2 * 2 * 4 * 64 * 4  # of the keys and values of some of the calls
    settings: dict[str, Any] = {"kv_cache": kv_cache, "context_length": context, "ssd_write_gb_per_day": 0.0}
    with load_model(directory, FlashConfig(ram_budget_gb=2.0, **settings))[0] as model:
        model.start()
        plan, before = model.plan, mx.get_active_memory()
        assert not plan.streaming.num_units
        model.plan = replace(plan, budget_bytes=plan.ledger.process + before + room)
        mx.reset_peak_memory()
        caches, outputs = list[Any](), list[mx.array]()
        with pytest.raises(BudgetError):
            for number in range(num_calls):
                caches.append(model.make_cache())
                outputs.append(model(mx.full((1, 1), number), cache=caches[-1])[:, -1, :8])
        assert outputs
        mx.eval(outputs)
        assert mx.get_peak_memory() - before <= room


@pytest.mark.parametrize("ram_budget_gb", [2.0, "min"])
def test_caches_of_two_models_are_refused_where_they_are_layers_of_one(directory: Path, ram_budget_gb: Any) -> None:
    """Their memory is not counted together: it ended with a KeyError."""
    settings = FlashConfig(ram_budget_gb=ram_budget_gb, context_length=64)
    tokens = mx.array([[1, 2, 3]])
    with load_model(directory, settings)[0] as one, load_model(directory, settings)[0] as other:
        mixed = [*one.make_cache()[:1], *other.make_cache()[1:]]
        with pytest.raises(ConfigError, match="are of 2 models"):
            one(tokens, cache=mixed)
        rows = [one.row(tokens, cache, 2048) for cache in (mixed, one.make_cache(), other.make_cache())]
        while not all(row.is_done for row in rows):
            one.advance(rows)
        assert isinstance(rows[0].error, ConfigError)
        assert [len(row.outputs) for row in rows[1:]] == [1, 1]


def test_a_cache_that_was_closed_costs_its_own_row_alone(directory: Path) -> None:
    settings = FlashConfig(ram_budget_gb=2.0, context_length=64)
    with load_model(directory, settings)[0] as closed:
        cache = closed.make_cache()
    with load_model(directory, settings)[0] as model:
        rows = [model.row(mx.array([[1, 2, 3]]), each, 2048) for each in (cache, model.make_cache())]
        while not all(row.is_done for row in rows):
            model.advance(rows)
        assert isinstance(rows[0].error, ClosedError) and len(rows[1].outputs) == 1


def test_dropped_cache_that_owes_a_token_frees_its_memory(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The cache is part of a reference cycle, and its memory is needed before the garbage collector runs by itself."""
    prompt = mx.arange(200)
    with streamed_whole(directory, speculation=False, context_length=512) as model:
        model.start()
        fresh = need(model.plan, [model.row(prompt[None], model.make_cache(), 256).lane()])
        room = fresh.total + fresh.kv_growth
        gc.disable()
        try:
            tokens = []
            for _ in range(3):
                model.plan = replace(model.plan, budget_bytes=room + fresh.kv_growth // 2)
                cache = model.make_cache()
                steps = mlx_flash.generate_step(prompt, model, max_tokens=4, prefill_step_size=256, prompt_cache=cache)
                tokens.append([next(steps)[0], next(steps)[0]])
                steps.close()
                del steps, cache
        finally:
            gc.enable()
    assert tokens[0] == tokens[1] == tokens[2] and "of a prompt on the budget has room" not in caplog.text

"""The state that is told is the state that is."""

from __future__ import annotations

import gc
import json
import time
import weakref
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

import zoo
from faulty import threads_of_models
from mlx_flash import FlashConfig, FlashLLM, load_model
from mlx_flash.engine import passes
from mlx_flash.engine.lifecycle import Status
from mlx_flash.engine.passes import PassCounters
from mlx_flash.engine.prepare import prepare
from mlx_flash.experts.pool import ExpertStats
from mlx_flash.telemetry import find
from models import LLAMA, PREFILL_AND_DECODE, run, save
from monitored import runtime as runtime  # a fixture: engines of other programs publish elsewhere
from saved_models import model_fixture
from streamed import streamed_whole, wait_for_reads
from waiting import eventually
from zoo.weights import VARIANTS
from zoo.weights import save as save_variant

directory = model_fixture(LLAMA, mx.bfloat16)


def status_of(model: FlashLLM, counters: PassCounters | None = None) -> Status:
    assert model.engine is not None
    model.engine.kv = None
    return Status("tiny", model.engine, counters or PassCounters(), model.layout)


def states(told: dict[str, Any]) -> dict[str, str]:
    return {unit["name"]: unit["state"] for unit in told["units"]}


def test_layers_go_from_waiting_to_done(directory: Path) -> None:
    counters = PassCounters()
    with streamed_whole(directory, num_slots=2, tile_rows=1000) as model:
        assert model.engine is not None
        told, stream = status_of(model, counters), model.engine.stream
        layers = [f"model.layers.{i}" for i in range(5)]
        wait_for_reads(model)
        assert [states(told.collect())[name] for name in layers] == ["resident"] * 2 + ["waiting"] * 3
        counters.begin(1, 1, 1)
        stream.acquire(0)
        assert states(told.collect())[layers[0]] == "computing"
        stream.release(0)
        wait_for_reads(model)
        assert [states(told.collect())[name] for name in layers] == ["done"] + ["resident"] * 2 + ["waiting"] * 2
        counters.end()
        counters.begin(1, 1, 1)
        assert states(told.collect())[layers[0]] == "waiting"
        assert stream.stats.held_seconds > 0


def test_a_head_in_tiles_is_one_unit(directory: Path) -> None:
    counters = PassCounters()
    with streamed_whole(directory, tile_rows=192) as model:
        assert model.engine is not None
        told, stream = status_of(model, counters), model.engine.stream
        tiles = [i for i, unit in enumerate(stream.units) if unit.name.startswith("lm_head[")]
        assert len(tiles) == 6 or mx.default_device() == mx.gpu
        heads = [unit for unit in told.collect()["units"] if unit["kind"] == "head"]
        assert [(unit["name"], unit["state"]) for unit in heads] == [("lm_head", "waiting")]
        assert heads[0]["bytes"] == heads[0]["streamed_bytes"] == 1000 * LLAMA["hidden_size"] * 2
        counters.begin(1, 1, 1)
        for i in tiles:
            stream.acquire(i)
            assert states(told.collect())["lm_head"] == "computing"
            stream.release(i)
        wait_for_reads(model)


def test_bytes_are_the_plans(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The model is smaller than what the size of this process varies by.
    monkeypatch.setattr("mlx_flash.residency.machine.footprint", lambda: 100_000_000)
    least = prepare(directory, FlashConfig(ram_budget_gb="min", context_length=256)).plan.minimum_bytes
    model, _ = load_model(directory, FlashConfig(ram_budget_gb=(least + 2_000_000) / 1e9, context_length=256))
    with model:
        told = status_of(model).collect()
        units = told["units"]
        assert [unit["name"] for unit in units] == [*(f"model.layers.{i}" for i in range(5)), "lm_head"]
        assert sum(unit["streamed_bytes"] for unit in units) == model.plan.streaming.read_bytes
        assert sum(unit["bytes"] for unit in units) == sum(
            u.nbytes for u in [*model.layout.layers, *model.layout.heads]
        )
        assert {unit["name"] for unit in units if unit["state"] == "pinned"} == {
            unit["name"] for unit in units if not unit["streamed_bytes"]
        }
        assert told["plan"]["budget_bytes"] == model.plan.budget_bytes
        assert told["model"] == {"name": "tiny", "bytes": model.plan.model_bytes}


def test_memory_of_another_model_is_not_an_idle_ones(directory: Path, tmp_path: Path) -> None:
    """The first of three models stays idle while the others are loaded and called."""
    other = save(tmp_path / "other", LLAMA | {"hidden_size": 2 * LLAMA["hidden_size"]}, mx.bfloat16)
    config = FlashConfig(ram_budget_gb=4, context_length=256)
    with (
        load_model(directory, config)[0],
        load_model(other, config)[0] as second,
        load_model(other, config)[0] as third,
    ):
        for num_called, model in enumerate((second, third), 1):
            cache = make_prompt_cache(model)
            mx.eval(model(mx.array([[1, 2, 3]]), cache=cache))
            for _ in range(100):  # the idle one tells of the others a little later
                published = wait_for_calls([0, 1, num_called - 1])
                if published[0]["others"] >= 1.9 * second.plan.model_bytes:
                    break
                time.sleep(0.05)
            tokens = [memory["kv_and_activations"] for memory in published]
            assert tokens[0] == 0 < tokens[num_called]
            weights = [memory["others"] for memory in published]
            assert weights[0] >= 1.9 * second.plan.model_bytes > weights[1] > second.plan.model_bytes


def wait_for_calls(numbers: list[int]) -> list[dict[str, Any]]:
    """Return the published memory of each model, once each has ended so many calls."""
    for _ in range(100):
        found = sorted(find(), key=lambda published: published.number)
        if [published.state["passes"]["num_passes"] for published in found] == numbers:
            return [published.state["memory"] for published in found]
        time.sleep(0.05)
    raise AssertionError(f"not {numbers}")


def test_counters_of_passes() -> None:
    """A prompt counts towards its speed once its evaluation is over, and not if generated tokens shared its pass."""
    counters = PassCounters()
    for num_tokens, batch_size, num_decoding in [(14, 2, 0), (2, 2, 2), (2, 2, 2)]:
        began = time.perf_counter()
        counters.begin(num_tokens, batch_size, num_decoding)
        assert counters.began is not None and counters.began >= began
        counters.end()
        assert counters.began is None and counters.last_ended >= counters.last_began
        assert counters.num_prompt_tokens == (0 if num_decoding == 0 else 14)
    assert (counters.num_passes, counters.num_tokens_in, counters.num_tokens_out) == (3, 18, 4)
    assert 0 < counters.decode_seconds < counters.pass_seconds
    before = counters.decode_seconds
    counters.begin(103, 4, 3)
    assert counters.num_decoding == 3
    counters.end()
    assert (counters.num_tokens_in, counters.num_tokens_out, counters.num_sequences) == (121, 7, 10)
    assert counters.decode_seconds - before == pytest.approx(counters.last_seconds) and counters.last_seconds > 0
    counters.begin(4, 4, 4)
    counters.end(failed=True)
    counters.end()
    assert (counters.num_passes, counters.num_failed, counters.num_tokens_in, counters.num_tokens_out) == (4, 1, 121, 7)
    assert counters.began is None and counters.num_prompt_tokens == 14


def test_lazy_calls_count_the_time_of_their_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of a model that is in memory returns before MLX computes: its work is done before the next call."""
    counters, now = PassCounters(), [100.0]
    monkeypatch.setattr(passes, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    for num_tokens, gap in [(1000, 0.05), (1, 0.02), (1, 0.02), (1, 0.04), (1000, 0.0)]:
        counters.begin(num_tokens, 1, int(num_tokens == 1))
        counters.end()
        now[0] += gap
    assert counters.prompt_gap_seconds == pytest.approx(0.05)
    assert counters.decode_gap_seconds == pytest.approx(0.04)
    counters.last_ended = counters.last_began = counters.last_ended - 100
    before = counters.prompt_gap_seconds
    counters.begin(1, 1, 1)
    assert counters.prompt_gap_seconds == before, "100 s of idle time count"


def test_a_model_publishes_its_calls(directory: Path) -> None:
    with streamed_whole(directory, telemetry=True) as model:
        run(model, PREFILL_AND_DECODE)
        (told,) = eventually(lambda: [found for found in find() if found.state["passes"]["num_passes"] == 5])
        passes = told.state["passes"]
        assert passes["num_tokens_in"] == sum(map(len, PREFILL_AND_DECODE)) and passes["num_tokens_out"] == 3
        assert passes["began"] is None and passes["num_failed"] == 0
        with pytest.raises(IndexError):
            model(mx.array([[LLAMA["vocab_size"]]]))
        (told,) = eventually(lambda: [found for found in find() if found.state["passes"]["num_failed"] == 1])
        assert told.state["passes"]["num_tokens_in"] == passes["num_tokens_in"]
    assert find() == []


def test_publishing_does_not_keep_a_model_alive(directory: Path) -> None:
    model = streamed_whole(directory, telemetry=True)
    run(model, [[1]])
    assert len(eventually(find)) == 1
    engine = weakref.ref(model.engine)
    gc.collect()
    gc.disable()  # its memory does not wait for Python's collector of cycles
    try:
        del model
        assert eventually(lambda: not find() and not threads_of_models() and engine() is None)
    finally:
        gc.enable()


# --- experts ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers with eight experts each, two of them a token."""
    path = tmp_path_factory.mktemp("mixture")
    save_variant(path, zoo.configuration("qwen3_moe"), VARIANTS["fp32"])
    return path


def test_experts_are_told(mixture: Path) -> None:
    with streamed_whole(mixture, pool_slots=9) as model:
        assert model.engine is not None and model.engine.experts is not None and model.plan.pool is not None
        told, pool = status_of(model), model.engine.experts.pool
        sizes = {"num_slots": 9, "slot_bytes": model.plan.pool.slot_bytes, "num_experts": 24}
        sizes["expert_bytes"] = 3 * 128 * 64 * 4
        assert told.collect()["experts"] == {**asdict(ExpertStats()), **sizes, "num_resident": 0}
        run(model, [[1, 2, 3], [4], [5]])
        after = told.collect()["experts"]
        assert {name: after[name] for name in asdict(pool.stats)} == asdict(pool.stats)
        assert after["num_calls"] == 9 and after["num_routed"] >= 3 * 2 * 2
        assert 0 < after["num_resident"] <= 9
        assert after["read_bytes"] >= after["num_resident"] * after["expert_bytes"]
        assert json.dumps(told.collect(), allow_nan=False)
        memory, plan = told.collect()["memory"], told.collect()["plan"]
        weights = sum(plan[f"{part}_bytes"] for part in ("resident", "pinned", "slots", "pool"))
        assert memory["active"] >= plan["pool_bytes"] == 9 * model.plan.pool.slot_bytes
        assert memory["kv_and_activations"] == max(0, memory["active"] - weights - model.plan.active_bytes)
    assert told.collect()["experts"] is None  # the engine is closed
    with streamed_whole(mixture) as model:
        collected = status_of(model).collect()
        assert collected["experts"] is None and collected["plan"]["pool_bytes"] == 0

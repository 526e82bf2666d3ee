"""Where MLX records work far ahead, the intermediate results of all layers are kept only if there is room."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from mlx_flash import FlashConfig, FlashLLM, load_model
from mlx_flash.engine.call import Lane, parse_call
from mlx_flash.engine.need import layers_at_once, need
from mlx_flash.memory.footprint import footprint
from models import LLAMA, run, same_bits, save, stock
from streamed import streamed_whole

NUM_LAYERS = 5
PROMPT = [[(7 * i) % 1000 for i in range(64)], [3], [5]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"), {**LLAMA, "num_hidden_layers": NUM_LAYERS})


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with memory of its own, as far as the engine knows."""
    monkeypatch.setattr("mlx_flash.engine.engine.has_own_memory", lambda: True)
    monkeypatch.setattr("mlx_flash.streaming.layers.has_own_memory", lambda: True)
    monkeypatch.setattr("mlx_flash.streaming.stream.has_own_memory", lambda: True)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An entry for each time that results were waited for."""
    found: list[None] = []
    synchronize = mx.synchronize
    monkeypatch.setattr(mx, "synchronize", lambda *streams: (found.append(None), synchronize(*streams))[1])
    return found


def in_memory(directory: Path) -> FlashLLM:
    more = 0.3 if mx.default_device() == mx.cpu else 1.5
    return load_model(directory, FlashConfig(ram_budget_gb=footprint() / 1e9 + more, telemetry=False))[0]


@pytest.mark.usefixtures("on_gpu")
def test_layers_are_waited_for_where_results_of_all_do_not_fit(
    directory: Path, waits: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(stock(directory), PROMPT)
    monkeypatch.setattr("mlx_flash.engine.need._LITTLE_BYTES", 0)
    with in_memory(directory) as model:
        model.start()
        plan = model.plan
        assert not plan.read_bytes
        for large, room, num_waits in ((1, 0, 0), (10**6, 0, NUM_LAYERS), (10**6, 1, 2), (10**6, 4, 0)):
            layers = replace(plan.activations, per_token=plan.activations.per_token * large)
            lane = Lane(parse_call((mx.array([PROMPT[0]]), make_prompt_cache(model)), {}))
            total = need(replace(plan, activations=layers), [lane]).total
            more = 32 * layers.per_token + room * replace(plan.ledger, activations=layers).active(
                lane.tokens
            )  # half a layer, and so many
            model.plan = replace(plan, activations=layers, budget_bytes=max(total + more, plan.budget_bytes))
            waits.clear()
            assert same_bits(run(model, PROMPT), expected)
            assert len(waits) == num_waits  # and not for the tokens after the prompt
    assert {type(layer) for layer in model.close().layers} == {llama.TransformerBlock}


@pytest.mark.usefixtures("on_gpu")
def test_streamed_layers_are_waited_for_always(directory: Path, waits: list[None]) -> None:
    with streamed_whole(directory) as model:
        model.plan = replace(model.plan, prefill_step_size=64)
        assert same_bits(run(model, PROMPT[:1]), run(stock(directory), PROMPT[:1]))
        assert len(waits) >= NUM_LAYERS
        assert not model.engine.pinned.modules


@pytest.mark.skipif(mx.default_device() == mx.gpu, reason="about other devices")
def test_layers_in_memory_stay_as_they_are_on_other_devices(directory: Path) -> None:
    with in_memory(directory) as model:
        run(model, PROMPT)
        assert not model.engine.pinned.modules


def test_scores_count_for_single_tokens_that_have_no_kernel(directory: Path) -> None:
    with in_memory(directory) as model:
        model.start()
        cache = make_prompt_cache(model)
        lane = Lane(parse_call((mx.array([[1]]), cache), {}))
        many = 10**9
        fused = replace(model.plan.activations, scores_per_pair=many, unfused_per_pair=2 * many)
        stored = replace(fused, unfused_per_pair=many)
        little, much = (need(replace(model.plan, activations=sizes), [lane]) for sizes in (fused, stored))
        assert layers_at_once(little, NUM_LAYERS) is None
        assert layers_at_once(much, NUM_LAYERS) == 1
        assert layers_at_once(much, 1) is None
        assert layers_at_once(little, NUM_LAYERS, num_calls=2) == 1


@pytest.mark.parametrize("kv_cache", ["stock", None])
def test_old_arrays_of_caches_that_grow_count(directory: Path, monkeypatch: pytest.MonkeyPatch, kv_cache: Any) -> None:
    """MLX lets go of them when their layer is computed. On a CPU that is before the next layer begins."""
    monkeypatch.setattr("mlx_flash.engine.need._LITTLE_BYTES", 0)
    settings = FlashConfig(ram_budget_gb=footprint() / 1e9 + 1.5, kv_cache=kv_cache, telemetry=False)
    with load_model(directory, settings)[0] as model:
        cache = make_prompt_cache(model)
        mx.eval(model(mx.arange(255)[None], cache=cache))
        for num_new, grows in ((1, False), (2, True)):
            lane = Lane(parse_call((mx.zeros((1, num_new), mx.int32), cache), {}))
            old = max(int(entry.nbytes) for entry in cache)
            needed = need(model.plan, [lane])
            least = needed.total + needed.kv_growth
            each = model.plan.ledger.of_a_layer(lane.tokens)
            for room, expected in (
                (0, 1),
                (each, 2 - grows),
                (each + old, 2 if grows else None),
                (5 * (each + old), None),
            ):
                plan = replace(model.plan, budget_bytes=least + room)
                assert layers_at_once(need(plan, [lane]), NUM_LAYERS) == expected

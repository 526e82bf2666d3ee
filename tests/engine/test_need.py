"""The memory that calls need: parts of a prompt that share a pass, layers that are computed at once, many logits."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

import mlx_flash
from mlx_flash import BudgetError, ClosedError, ConfigError, FlashConfig, FlashLLM, load_model
from mlx_flash.config import KVMode
from mlx_flash.engine.call import Lane, layers_at_once, need, parse_call
from mlx_flash.engine.passes import waiting_bytes
from mlx_flash.engine.prepare import prepare
from mlx_flash.memory.footprint import footprint
from models import LLAMA, run, same_bits, save, stock
from saved_models import model_fixture
from streamed import streamed_whole
from zoo import configuration
from zoo.weights import VARIANTS
from zoo.weights import save as save_variant

CONTEXT, STEP, NUM_PARTS = 1024, 4, 10
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
MODEL = LLAMA | SHAPE | {"head_dim": 64, "num_hidden_layers": 2, "vocab_size": 16000}

directory = model_fixture(MODEL)


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
    "name",
    ["llama", "gemma3", "gemma3n", "mamba2", "qwen3_next", "deepseek_v3", "afm7", "gemma4", "iquestloopcoder"],
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
        assert not waiting_bytes(plan, [row.left], most=0), "all that are left are not added up before each pass"
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


def test_a_call_keeps_no_buffers_that_grow_in_it(tmp_path: Path) -> None:
    with streamed_whole(save(tmp_path, MODEL | {"num_hidden_layers": 6}), context_length=4096) as model:
        cache, token = model.make_cache(), mx.zeros((1, 1), mx.int32)
        mx.eval(model(mx.zeros((1, CONTEXT), mx.int32), cache), token)
        needed = need(model.plan, [Lane(parse_call((token, cache), {}))])
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(model(token, cache))
        assert cache[0].keys.shape[2] > CONTEXT
        layer_bytes = 2 * 4 * 64 * 4 * CONTEXT
        assert mx.get_peak_memory() - before < needed.activations + needed.kv_growth + layer_bytes


@pytest.mark.parametrize("kv_cache", [None, "stock"])
def test_calls_that_nothing_has_waited_for_are_counted(directory: Path, kv_cache: KVMode | None) -> None:
    """MLX computes them later, together with those after them."""
    context, num_calls = 256, 12
    room = num_calls // 3 * context * 2 * 2 * 4 * 64 * 4  # of the keys and values of some of the calls
    settings: dict[str, Any] = {"kv_cache": kv_cache, "context_length": context, "ssd_write_gb_per_day": 0.0}
    with load_model(directory, FlashConfig(ram_budget_gb=2.0, **settings))[0] as model:
        model.start()
        plan, before = model.plan, mx.get_active_memory()
        assert not plan.streaming.num_units
        model.plan = replace(plan, budget_bytes=plan.process_bytes + before + room)
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
def test_a_cache_that_cannot_be_used_costs_its_own_row_alone(directory: Path, ram_budget_gb: Any) -> None:
    """Of a model that was closed, or with layers of two models, whose memory is not counted together."""
    settings = FlashConfig(ram_budget_gb=ram_budget_gb, context_length=64)
    tokens = mx.array([[1, 2, 3]])
    with load_model(directory, settings)[0] as closed:
        cache = closed.make_cache()
    with load_model(directory, settings)[0] as one, load_model(directory, settings)[0] as other:
        mixed = [*one.make_cache()[:1], *other.make_cache()[1:]]
        with pytest.raises(ConfigError, match="are of 2 models"):
            one(tokens, cache=mixed)
        rows = [one.row(tokens, each, 2048) for each in (mixed, cache, one.make_cache(), other.make_cache())]
        while not all(row.is_done for row in rows):
            one.advance(rows)
        assert isinstance(rows[0].error, ConfigError) and isinstance(rows[1].error, ClosedError)
        assert [len(row.outputs) for row in rows[2:]] == [1, 1]


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


# Where MLX records work far ahead, the intermediate results of all layers are kept only if there is room.

NUM_LAYERS = 5
PROMPT = [[(7 * i) % 1000 for i in range(64)], [3], [5]]

five_layers = model_fixture({**LLAMA, "num_hidden_layers": NUM_LAYERS})


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with memory of its own, as far as the engine knows."""
    monkeypatch.setattr("mlx_flash.engine.engine.has_own_memory", lambda: True)
    monkeypatch.setattr("mlx_flash.streaming.stream.has_own_memory", lambda: True)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An entry for each time that results were waited for."""
    found: list[None] = []
    synchronize = mx.synchronize
    monkeypatch.setattr(mx, "synchronize", lambda *streams: (found.append(None), synchronize(*streams))[1])
    return found


def in_memory(five_layers: Path) -> FlashLLM:
    more = 0.3 if mx.default_device() == mx.cpu else 1.5
    return load_model(five_layers, FlashConfig(ram_budget_gb=footprint() / 1e9 + more, telemetry=False))[0]


@pytest.mark.usefixtures("on_gpu")
def test_layers_are_waited_for_where_results_of_all_do_not_fit(
    five_layers: Path, waits: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(stock(five_layers), PROMPT)
    monkeypatch.setattr("mlx_flash.engine.call._LITTLE_BYTES", 0)
    with in_memory(five_layers) as model:
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
def test_streamed_layers_are_waited_for_always(five_layers: Path, waits: list[None]) -> None:
    with streamed_whole(five_layers) as model:
        model.plan = replace(model.plan, prefill_step_size=64)
        assert same_bits(run(model, PROMPT[:1]), run(stock(five_layers), PROMPT[:1]))
        assert len(waits) >= NUM_LAYERS
        assert not model.engine.pinned.modules


@pytest.mark.parametrize("kv_cache", ["stock", None])
def test_old_arrays_of_caches_that_grow_count(
    five_layers: Path, monkeypatch: pytest.MonkeyPatch, kv_cache: Any
) -> None:
    """MLX lets go of them when their layer is computed. On a CPU that is before the next layer begins."""
    monkeypatch.setattr("mlx_flash.engine.call._LITTLE_BYTES", 0)
    settings = FlashConfig(ram_budget_gb=footprint() / 1e9 + 1.5, kv_cache=kv_cache, telemetry=False)
    with load_model(five_layers, settings)[0] as model:
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


# The logits of many tokens in one call: in one array, which the smallest budget holds for 80 tokens.

NUM_TOKENS = 70
TOKENS = mx.array([[7 * i % 300 for i in range(NUM_TOKENS)]])


@pytest.fixture(scope="module")
def phi3small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a vocabulary of 100 352: the logits of a call take more than everything else."""
    directory = tmp_path_factory.mktemp("phi3small")
    save_variant(directory, configuration("phi3small"), VARIANTS["bf16"])
    return directory


def in_parts(model: Any, tokens: mx.array, step: int) -> mx.array:
    cache, found = make_prompt_cache(model), []
    for start in range(0, tokens.shape[1], step):
        found.append(model(tokens[:, start : start + step], cache=cache))
        mx.eval(found[-1])
    return mx.concatenate(found, axis=1)


@pytest.mark.parametrize("has_cache", [True, False])
def test_smallest_budget_holds_the_logits_of_a_call(
    phi3small: Path, has_cache: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """They take 14 MB in bf16. Twice that was asked for, and a call without a prompt cache could not be cut."""
    config = FlashConfig(ram_budget_gb="min", telemetry=False)
    with load_model(phi3small, config)[0] as model, caplog.at_level(logging.INFO, "mlx_flash"):
        got = model(TOKENS, cache=make_prompt_cache(model)) if has_cache else model(TOKENS)
        mx.eval(got)
        with pytest.raises(BudgetError, match="ask for the logits of fewer tokens at a time"):
            _ = model(mx.tile(TOKENS, (1, 10)))  # logits that nobody asks for are not computed
    step = min(map(int, re.findall(r"room for (\d+) (?:prompt )?tokens at a time", caplog.text)))
    assert mx.array_equal(got, in_parts(stock(phi3small), TOKENS, step))


@pytest.fixture
def wide(tmp_path: Path) -> Iterator[Any]:
    directory = save(tmp_path, LLAMA | {"vocab_size": 20_000, "num_hidden_layers": 2, "tie_word_embeddings": True})
    with load_model(directory, FlashConfig(ram_budget_gb=2, prefill_step_size=16, telemetry=False))[0] as model:
        model.start()
        yield model


def test_parts_of_a_call_write_their_logits_into_one_array(wide: Any) -> None:
    """They were kept apart and joined in the end, so that all were there twice."""
    tokens = mx.array([[i % 900 for i in range(100)], [i % 700 for i in range(100)]])
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    logits = wide(tokens, cache=make_prompt_cache(wide))
    mx.eval(logits)
    assert logits.shape == (2, 100, 20_000)
    assert mx.get_peak_memory() - before < 1.4 * logits.nbytes
    assert mx.array_equal(logits, in_parts(stock(wide._life.prepared.checkpoint.directory), tokens, 8))


def test_interrupted_part_is_written_again(wide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, cache = mx.array([[i % 900 for i in range(40)]]), make_prompt_cache(wide)
    mlp, calls = wide.layers[1].mlp, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(mlp, *arguments)

    original = type(mlp).__call__
    with monkeypatch.context() as patch:
        patch.setattr(type(mlp), "__call__", lambda self, *a: interrupted(*a) if self is mlp else original(self, *a))
        with pytest.raises(KeyboardInterrupt):
            wide(tokens, cache=cache)
    assert [entry.offset for entry in cache] == [16, 16]  # the parts that were computed stay
    got = wide(tokens[:, 16:], cache=cache)
    assert mx.array_equal(got, in_parts(stock(wide._life.prepared.checkpoint.directory), tokens, 16)[:, 16:])


def test_prompt_that_turns_out_to_need_an_order_leaves_no_logits_behind(tmp_path: Path) -> None:
    """The error that said so referred to itself. Until Python's collector came, the logits of the call stayed."""
    directory = save(tmp_path, configuration("deepseek_v3"))
    config = FlashConfig(ram_budget_gb="min", context_length=300, prefill_step_size=16, telemetry=False)
    gc.collect()
    gc.disable()
    try:
        with load_model(directory, config)[0] as model:
            cache = make_prompt_cache(model)
            mx.eval(model(mx.array([[7 * i % 300 for i in range(60)]]), cache=cache))
            assert model._life.passes._needs_order
            left = mx.get_active_memory()
            gc.collect()
            assert left - mx.get_active_memory() < 1000  # bytes
    finally:
        gc.enable()

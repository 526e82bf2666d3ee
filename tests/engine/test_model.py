"""A streamed model gives stock mlx-lm's bits, keeps its promises, and can be undone."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import psutil
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

import children
import mlx_flash
from faulty import threads_of_models
from mlx_flash import (
    BudgetError,
    CheckpointNotFoundError,
    ClosedError,
    ConfigError,
    FlashLLM,
    StreamedWeightsError,
    load_model,
)
from mlx_flash.engine.prepare import prepare
from models import LLAMA, NARROW_LLAMA, PREFILL_AND_DECODE, run, same_bits, save, stock
from streamed import LARGE_GB, config, streamed_whole
from waiting import eventually

MODELS = {
    "fp32": (mx.float32, None, {}),
    "bf16": (mx.bfloat16, None, {}),
    "bf16-tied": (mx.bfloat16, None, {"tie_word_embeddings": True}),
    "4bit": (mx.bfloat16, 4, {"intermediate_size": 512}),
    "4bit-tied": (mx.float32, 4, {"intermediate_size": 512, "tie_word_embeddings": True}),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Model directories by name, each written once."""

    def made(name: str) -> Path:
        (dtype, bits, changes), folder = MODELS[name], tmp_path_factory.mktemp(name)
        # An odd header length, as mlx's own writer leaves it: every tensor goes through a bounce buffer.
        return save(folder, NARROW_LLAMA | changes, dtype, bits=bits, num_shards=2, header_shift=1)

    return functools.cache(made)


@pytest.mark.parametrize("cut", [1, 2, "tiles"])
@pytest.mark.parametrize("name", MODELS)
def test_finer_cuts_equal_stock(directories: Any, name: str, cut: int | str) -> None:
    expected = run(stock(directories(name)), PREFILL_AND_DECODE)
    with streamed_whole(directories(name), tile_rows=128, cut=cut) as model:
        assert same_bits(run(model, PREFILL_AND_DECODE), expected)
        assert model.engine.stream.stats.num_unpredicted == 0
    assert same_bits(run(model.close(), PREFILL_AND_DECODE), expected)


def test_stale_weights_show(directories: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The poison works: without evaluating before release, the logits are visibly wrong."""
    expected = run(stock(directories("bf16")), PREFILL_AND_DECODE)
    monkeypatch.setattr("mlx_flash.streaming.stream.arrays_in", lambda *roots: [])
    with streamed_whole(directories("bf16")) as model:
        assert not same_bits(run(model, PREFILL_AND_DECODE), expected)


def test_a_closed_model_keeps_no_slots(directories: Any) -> None:
    """Nor does the session before a new plan, while the next one reads its weights."""
    model = streamed_whole(directories("bf16"))
    run(model, [[1, 2]])
    stream = weakref.ref(model.engine.stream)  # type: ignore[union-attr]
    model.close()
    gc.collect()
    assert stream() is None


def test_close_restores_a_plain_model(directories: Any) -> None:
    directory = directories("bf16")
    expected = run(stock(directory), PREFILL_AND_DECODE)
    descriptors = psutil.Process().num_fds()
    model, _ = load_model(directory, config())
    inner = model._model
    run(model, [[1, 2]])
    plain = model.close()
    assert plain is inner
    assert type(plain) is llama.Model
    assert {type(layer) for layer in plain.layers} == {llama.TransformerBlock}
    assert {type(module) for module in plain.modules()} == {type(module) for module in stock(directory).modules()}
    assert not any("_flash_state" in vars(module) for module in plain.modules())
    assert same_bits(run(plain, PREFILL_AND_DECODE), expected)
    assert not threads_of_models()
    with pytest.raises(ClosedError, match="load it again"):
        model(mx.array([[1]]))
    model.close()
    del plain, inner, model
    # MLX's threads let go of some a little later, and keep its own, of the lazily loaded arrays
    eventually(lambda: psutil.Process().num_fds() <= descriptors + 2)


def test_a_call_beyond_the_budget_is_refused_and_leaves_the_model_usable(directories: Any) -> None:
    directory = directories("fp32")
    expected = run(stock(directory), [[1, 2, 3]])
    with load_model(directory, config(context_length=64, prefill_step_size=16))[0] as model:
        with pytest.raises(BudgetError, match="context_length"):  # computed in parts, with a prompt cache of its own
            model(mx.array([[1] * 4000]))
        cache = make_prompt_cache(model)
        with pytest.raises(BudgetError, match="context_length"):
            model(mx.array([[1] * 40000]), cache=cache)
        assert all(entry.offset == 0 for entry in cache)
        assert same_bits(run(model, [[1, 2, 3]]), expected)


@pytest.mark.parametrize("cut", [0, "tiles"])
@pytest.mark.parametrize("name", ["bf16", "bf16-tied"])
def test_a_streamed_head_is_not_read_for_a_prompt(directories: Any, name: str, cut: int | str) -> None:
    """mlx-lm drops a prompt's logits. They take no memory then, and the head is not read."""
    directory = directories(name)
    prompt = mx.array([5, 17, 900, 3] * 20)
    (token, logprobs), *_ = list(generate_step(prompt, stock(directory), max_tokens=1, prefill_step_size=16))
    with streamed_whole(directory, cut=cut) as model:
        model.plan = replace(model.plan, prefill_step_size=16)
        (found, found_logprobs), *_ = list(generate_step(prompt, model, max_tokens=1))
        assert found == token and same_bits([found_logprobs], [logprobs])
        names = [unit.name for unit in model.engine.stream.units]
        num_tiles = sum(not unit.startswith("model.layers") for unit in names)
        num_layers = len(names) - num_tiles
        assert num_tiles > 1 or mx.default_device() == mx.gpu  # where a head is one tile
        # Five steps of the prompt in one pass, its last token, and the token that mlx-lm computes ahead.
        assert model.engine.stream.stats.num_acquired == num_layers + 2 * len(names)


def test_changed_modules_are_planned_again(directories: Any) -> None:
    """An adapter replaces modules. So does code that puts the same arrays into another module."""
    expected = run(stock(directories("bf16")), PREFILL_AND_DECODE)
    prepared = prepare(directories("bf16"), config(ram_budget_gb=LARGE_GB))
    attention = prepared.loaded.model.layers[1].self_attn
    attention.q_proj, old = nn.Linear(4, 4, bias=False), attention.q_proj
    attention.q_proj.weight = old.weight
    attention.q_proj.eval()
    with FlashLLM(prepared, config(ram_budget_gb=LARGE_GB), "changed") as model:
        assert same_bits(run(model, PREFILL_AND_DECODE), expected)
        assert model.layout is not prepared.layout


def test_memory_that_others_took_is_planned_again(directories: Any) -> None:
    settings = config(ram_budget_gb=LARGE_GB)
    prepared = prepare(directories("bf16"), settings)
    taken = mx.ones((8_000_000,), mx.uint8)
    mx.eval(taken)
    with FlashLLM(prepared, settings, "later") as model:
        model.start()
        assert model.plan.active_bytes >= prepared.plan.active_bytes + taken.nbytes
        assert model.layout is prepared.layout


def test_streaming_that_is_switched_off_is_not_asked_for(directories: Any) -> None:
    with pytest.raises(ConfigError, match="which leaves models to mlx-lm"):
        load_model(directories("bf16"), config(enabled=False))


def test_a_model_that_is_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointNotFoundError, match="no directory"):
        mlx_flash.load(str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        load_model(tmp_path / "nowhere")


def test_it_answers_like_the_model_it_wraps(directories: Any) -> None:
    with load_model(directories("bf16"), config())[0] as model:
        assert isinstance(model, nn.Module)
        assert model.model_type == "llama"
        assert model.layers is model._model.layers
        assert [name for name, _ in model.named_modules()] == [name for name, _ in model._model.named_modules()]
        assert not dict(model)
        with pytest.raises(AttributeError):
            _ = model.no_such_thing
        assert not hasattr(model, "shards_of_what")


def test_training_is_the_models_own(directories: Any) -> None:
    """Modules ask ``training`` of the model that they are given: dropout, checks before generation."""
    with load_model(directories("bf16"), config())[0] as model:
        assert not model.training and not stock(directories("bf16")).training
        assert model.train() is model and model.training
        assert all(module.training for module in model.modules())
        assert model.eval() is model and not model.training
        assert model.freeze() is model  # and not the model inside, whose calls nobody checks


def test_its_parameters_are_those_in_memory(directories: Any) -> None:
    with load_model(directories("bf16"), config())[0] as model:
        nbytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
        assert nbytes <= model.plan.pinned_bytes + model.plan.resident_bytes
        assert model.trainable_parameters() == {}


@pytest.mark.parametrize(
    "operation",
    [
        lambda model: copy.deepcopy(model),
        lambda model: pickle.dumps(model),
        lambda model: model.save_weights("never.safetensors"),
        lambda model: model.load_weights([]),
        lambda model: model.update({}),
        lambda model: model.set_dtype(mx.float16),
    ],
)
def test_what_would_take_slots_for_weights_is_refused(directories: Any, operation: Any) -> None:
    with load_model(directories("bf16"), config())[0] as model, pytest.raises(StreamedWeightsError, match="Hint"):
        operation(model)


PEAK_PROGRAM = """
import sys
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_flash import FlashConfig, load_model
from mlx_flash.memory.footprint import peak_footprint
budget = sys.argv[2] if sys.argv[2] == "min" else float(sys.argv[2])
model, _ = load_model(sys.argv[1], FlashConfig(ram_budget_gb=budget, context_length=32))
prompt = mx.array([i % 1000 for i in range(28)])
for _ in generate_step(prompt, model, max_tokens=3, prefill_step_size=model.plan.prefill_step_size):
    pass
print(model.plan.budget_bytes, model.plan.peak_bytes, peak_footprint(), model.plan.streaming.read_bytes)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is large beside what the size of a process varies by."""
    shape = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8}
    return save(tmp_path_factory.mktemp("large"), {**LLAMA, **shape}, mx.float32)


SMALL = pytest.param("0.22", marks=pytest.mark.skipif(mx.default_device() == mx.gpu, reason="less than such a process"))


@pytest.mark.parametrize("budget", ["min", SMALL])
def test_the_process_stays_within_the_budget(large: Path, budget: str) -> None:
    done = children.run("-c", PEAK_PROGRAM, large, budget, forks=False)
    assert done.returncode == 0, done.stderr.decode()
    budget_bytes, planned, peak, read = map(int, done.stdout.split())
    assert read > 0, "the budget was meant to be smaller than the model"
    assert peak <= budget_bytes
    assert planned <= budget_bytes

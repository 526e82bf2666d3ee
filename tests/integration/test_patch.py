"""The patch: what loads through mlx-lm streams, gives mlx-lm's tokens, and can be undone."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn
import mlx_lm
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten, tree_map

import children
import mlx_flash
from adapters import ADAPTERS, save_adapter
from mlx_flash import FlashConfig, FlashLLM, StreamedWeightsError, apply_flash_patch, remove_flash_patch
from mlx_flash.engine.prepare import prepare
from mlx_flash.generation import RowGenerator
from models import LLAMA, PREFILL_AND_DECODE, make_random_model, run, same_bits, save, stock
from noting import noted
from saved_models import random_model_fixture

ORIGINAL = mlx_lm.utils.load_model
PROMPT = "Tell me about the sea, and what lives in it."
SHAPE = "--layers 4 --hidden-size 256 --intermediate-size 704 --heads 8 --kv-heads 4 --vocab-size 1000"


def config(**changes: Any) -> FlashConfig:
    settings: dict[str, Any] = {"ram_budget_gb": "min", "context_length": 512, "poison_released_slots": True}
    return FlashConfig(**{**settings, **changes})


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    yield
    remove_flash_patch()
    assert mlx_lm.utils.load_model is ORIGINAL


model_dir = random_model_fixture(SHAPE, "llama")


def tokens(directory: Path, **options: Any) -> list[int]:
    model, tokenizer, *_ = mlx_lm.load(str(directory), **options)
    found = [r.token for r in mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=12)]
    if isinstance(model, FlashLLM):
        assert model.engine is not None and model.engine.stream.stats.num_acquired > 0
        model.close()
    return found


@pytest.mark.quick
def test_load_streams_and_removing_restores(model_dir: Path) -> None:
    expected = tokens(model_dir)
    apply_flash_patch(config())
    model, _, *_ = mlx_lm.load(str(model_dir))
    assert isinstance(model, FlashLLM) and model.engine is None
    assert tokens(model_dir) == expected
    remove_flash_patch()
    assert mlx_lm.utils.load_model is ORIGINAL
    plain, _, *_ = mlx_lm.load(str(model_dir))
    assert not isinstance(plain, FlashLLM)
    assert type(plain).__module__ == "mlx_lm.models.llama"
    assert all(type(layer).__mro__[0].__module__ == "mlx_lm.models.llama" for layer in plain.layers)
    assert tokens(model_dir) == expected
    model.close()


def test_batch_generate_gives_solo_runs_in_shared_passes(model_dir: Path) -> None:
    model, tokenizer, *_ = mlx_lm.load(str(model_dir))
    prompts = [tokenizer.encode(text) for text in (PROMPT, "Hello", "One two three")]
    expected = [[r.token for r in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=8)] for prompt in prompts]
    with apply_flash_patch(config()):
        streamed = mlx_lm.load(str(model_dir))[0]
        assert isinstance(streamed, FlashLLM)
        streamed.start()
        streamed.plan = replace(streamed.plan, budget_bytes=2 * streamed.plan.budget_bytes)  # for caches and copies
        first = mlx_lm.batch_generate(
            streamed, tokenizer, prompts, max_tokens=5, return_token_ids=True, return_prompt_caches=True
        )
        assert streamed.counters.num_passes == 6  # the last one completes the caches
        offsets = [cache[0].offset for cache in first.caches]
        assert offsets == [len(prompt) + 5 for prompt in prompts]
        nexts = [[tokens[5]] for tokens in expected]
        second = mlx_lm.batch_generate(
            streamed, tokenizer, nexts, prompt_caches=first.caches, max_tokens=2, return_token_ids=True
        )
        assert streamed.counters.num_passes == 8
        assert [cache[0].offset for cache in first.caches] == offsets
        streamed.close()
    for tokens, one, two in zip(expected, first.token_ids, second.token_ids, strict=True):
        assert one + tokens[5:6] + two == tokens


def test_other_makers_of_batches_get_mlx_lms_own(model_dir: Path) -> None:
    generate = importlib.import_module("mlx_lm.generate")
    original = generate.BatchGenerator
    with apply_flash_patch(config(batching="stock")):
        model, tokenizer, *_ = mlx_lm.load(str(model_dir))
        assert len(mlx_lm.batch_generate(model, tokenizer, [[5, 6], [7]], max_tokens=2).texts) == 2
        assert isinstance(model, FlashLLM) and model.counters.num_passes > 3  # no passes are shared
        generator = generate.BatchGenerator(model)
        assert generate.BatchGenerator is not original
        assert isinstance(generator, original) and not isinstance(generator, RowGenerator)
        generator.close()
        model.close()
    assert generate.BatchGenerator is original


def test_disabled_leaves_everything_as_it_was(model_dir: Path) -> None:
    apply_flash_patch(FlashConfig(enabled=False))
    assert mlx_lm.utils.load_model is ORIGINAL
    assert not isinstance(mlx_lm.load(str(model_dir))[0], FlashLLM)
    apply_flash_patch(config())
    apply_flash_patch(FlashConfig(enabled=False))
    assert mlx_lm.utils.load_model is ORIGINAL


def test_the_last_one_applied_counts_and_contexts_nest(model_dir: Path) -> None:
    def steps() -> int:
        model = mlx_lm.load(str(model_dir))[0]
        assert isinstance(model, FlashLLM)
        model.close()
        return model.plan.prefill_step_size

    with apply_flash_patch(config(prefill_step_size=16)):
        assert steps() == 16
        with apply_flash_patch(config(prefill_step_size=32)):
            assert steps() == 32
            apply_flash_patch(config(prefill_step_size=64))
            assert steps() == 64
        assert steps() == 16
    assert mlx_lm.utils.load_model is ORIGINAL


def test_another_patch_over_ours_is_not_lost(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    apply_flash_patch(config())
    calls = noted(monkeypatch, mlx_lm.utils, "load_model", lambda *args, **_: args)
    remove_flash_patch()
    assert "replaced again" in caplog.text
    assert not isinstance(mlx_lm.load(str(model_dir))[0], FlashLLM)
    apply_flash_patch(config())
    assert isinstance(mlx_lm.load(str(model_dir))[0], FlashLLM)
    assert len(calls) == 2
    remove_flash_patch()
    monkeypatch.undo()
    remove_flash_patch()


@pytest.mark.parametrize("command", ["convert --mlx-path OUT -q", "fuse --save-path OUT", "lora --train --data OUT"])
def test_what_writes_models_is_refused(model_dir: Path, tmp_path: Path, command: str) -> None:
    out = tmp_path / "out"
    name, *flags = command.replace("OUT", str(out)).split()
    model_flag = "--hf-path" if name == "convert" else "--model"
    done = children.run("-m", "mlx_flash", "exec", "--", f"mlx_lm.{name}", model_flag, model_dir, *flags)
    assert done.returncode == 1
    assert f"mlx_lm.{name} needs the model's weights to change or write them" in done.stderr.decode()
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("started", [False, True])
def test_saving_is_refused(model_dir: Path, tmp_path: Path, started: bool) -> None:
    with apply_flash_patch(config()):
        model, _, *_ = mlx_lm.load(str(model_dir))
    if started:
        model(mx.array([[1, 2]]))
    with pytest.raises(StreamedWeightsError, match="save_model"):
        mlx_lm.utils.save_model(tmp_path / "out", model)
    with pytest.raises(StreamedWeightsError, match="save_weights"):
        model.save_weights(str(tmp_path / "out.safetensors"))
    assert not list(tmp_path.rglob("*.safetensors"))
    model.close()


def test_evaluating_the_parameters_loads_nothing_that_is_streamed(model_dir: Path) -> None:
    with apply_flash_patch(config()):
        model, _, *_ = mlx_lm.load(str(model_dir))
    before = mx.get_active_memory()
    mx.eval(model.parameters())
    assert mx.get_active_memory() - before < 0.1 * model.plan.model_bytes
    model.close()


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_equal_resident(tmp_path: Path, kind: str, bits: int | None) -> None:
    base = save(tmp_path / "base", {**LLAMA, "intermediate_size": 512}, mx.float32 if bits else mx.bfloat16, bits=bits)
    adapter = save_adapter(tmp_path / "adapter", base, kind, 3)
    resident = mlx_lm.utils.load_adapters(stock(base), str(adapter))
    resident.eval()
    expected = run(resident, PREFILL_AND_DECODE)
    assert not same_bits(run(stock(base), PREFILL_AND_DECODE), expected)
    with apply_flash_patch(config()):
        model, _ = mlx_lm.utils.load_model(base)
        model = mlx_lm.utils.load_adapters(model, str(adapter))
    assert isinstance(model, FlashLLM)
    assert same_bits(run(model, PREFILL_AND_DECODE), expected)
    assert model.plan.streaming.read_bytes > 0
    model.close()
    with mlx_flash.load_model(base, config(), adapter_path=str(adapter))[0] as model:
        assert same_bits(run(model, PREFILL_AND_DECODE), expected)


def test_a_full_fine_tune_replaces_weights(tmp_path: Path) -> None:
    """Its weights come from the adapter's file, where the engine cannot stream them from: they stay in memory."""
    base, other = save(tmp_path / "base", LLAMA), save(tmp_path / "other", {**LLAMA, "rope_theta": 1e4})
    changed = tree_map(lambda a: a * 1.5, stock(other).layers[1].parameters())
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    named = {f"model.layers.1.{name}": array for name, array in tree_flatten(changed)}
    mx.save_safetensors(str(adapter / "adapters.safetensors"), named)
    (adapter / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "full"}))
    resident = mlx_lm.utils.load_adapters(stock(base), str(adapter))
    expected = run(resident, PREFILL_AND_DECODE)
    with mlx_flash.load_model(base, config(), adapter_path=str(adapter))[0] as model:
        assert same_bits(run(model, PREFILL_AND_DECODE), expected)


def test_adapters_come_before_the_first_call(tmp_path: Path) -> None:
    base = save(tmp_path / "base", LLAMA)
    adapter = save_adapter(tmp_path / "adapter", base, "lora", 2)
    with mlx_flash.load_model(base, config())[0] as model, pytest.raises(StreamedWeightsError, match="Hint"):
        mlx_lm.utils.load_adapters(model, str(adapter))


def test_a_model_and_its_draft_share_the_budget(model_dir: Path, tmp_path: Path) -> None:
    draft_dir = tmp_path / "draft"
    shape = SHAPE.replace("--layers 4", "--layers 1")
    make_random_model(draft_dir, *shape.split())

    def speculate(**options: Any) -> list[int]:
        model, tokenizer, *_ = mlx_lm.load(str(model_dir))
        draft, _, *_ = mlx_lm.load(str(draft_dir))
        responses = mlx_lm.stream_generate(model, tokenizer, PROMPT, draft_model=draft, max_tokens=12, **options)
        found = [response.token for response in responses]
        if isinstance(model, FlashLLM):
            assert isinstance(draft, FlashLLM)
            assert model.engine is not None and draft.engine is not None
            assert model.plan.streaming.read_bytes > 0
            model.close()
            draft.close()
        return found

    expected = speculate()
    enough = prepare(model_dir, config()).plan.minimum_bytes / 1e9 + 0.012
    with apply_flash_patch(config(ram_budget_gb=enough)):
        assert speculate() == expected


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_dtype_is_set_before_the_first_call(bits: int | None, dtype: mx.Dtype, tmp_path: Path) -> None:
    """The one that weights have leaves them on disk. A streamed model is an instance of the class of mlx-lm."""
    base = save(tmp_path / "base", LLAMA, mx.bfloat16, bits=bits)
    resident = stock(base)
    resident.set_dtype(dtype)
    with apply_flash_patch(config(ram_budget_gb="min" if dtype == mx.bfloat16 else 2.0)):
        model = mlx_lm.utils.load_model(base)[0]
    assert isinstance(model, type(resident)) and type(model) is FlashLLM and not isinstance(model, mlx.nn.Linear)
    model.set_dtype(dtype)
    with model:
        assert same_bits(run(model, PREFILL_AND_DECODE), run(resident, PREFILL_AND_DECODE))
        assert (model.plan.streaming.read_bytes > 0) == (dtype == mx.bfloat16)
        with pytest.raises(StreamedWeightsError, match="Hint"):
            model.set_dtype(mx.float32)

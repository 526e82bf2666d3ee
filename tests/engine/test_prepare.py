"""Errors before anything is loaded: they name the file, and say what to do."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm import utils as mlx_lm_utils

import mlx_flash
from mlx_flash import BudgetError, CheckpointError, CheckpointNotFoundError, FlashConfig, apply_flash_patch
from mlx_flash.engine import prepare as preparing
from mlx_flash.engine.prepare import load_tokenizer, prepare, resolve
from mlx_flash.memory.driver import has_own_memory
from mlx_flash.memory.footprint import footprint
from mlx_flash.residency import machine
from models import LLAMA, PREFILL_AND_DECODE, QWEN3_MOE, run, same_bits, save, stock
from noting import noted
from streamed import config

CONFIG = FlashConfig(ram_budget_gb=1, context_length=256)


@pytest.mark.parametrize("place", ["model.gguf", "folder/model-Q4_K_M.gguf"])
def test_gguf_files_are_named(tmp_path: Path, place: str) -> None:
    file = tmp_path / place
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"GGUF" + bytes(100))
    asked = file if file.parent == tmp_path else file.parent
    for call in (lambda: mlx_flash.load(str(asked)), lambda: mlx_flash.load_model(asked), lambda: resolve(str(asked))):
        with pytest.raises(CheckpointError, match=f"{file} is a GGUF file.*Hint: .*safetensors"):
            call()


def test_gguf_files_beside_a_model_do_not_matter(tmp_path: Path) -> None:
    directory = save(tmp_path / "model", LLAMA, mx.bfloat16)
    (directory / "model.gguf").write_bytes(b"GGUF")
    assert prepare(resolve(str(directory)), CONFIG).plan.model_bytes


def test_a_file_instead_of_a_folder_is_named(tmp_path: Path) -> None:
    file = save(tmp_path / "model", LLAMA, mx.bfloat16) / "model.safetensors"
    with pytest.raises(CheckpointError, match=rf"{file} is a file\. Hint: name the folder"):
        mlx_flash.load(str(file))
    with pytest.raises(CheckpointError, match=rf"{file} is a file\."):
        mlx_flash.load_model(file)


def test_missing_folders_are_not_looked_for_on_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mlx_flash.compat.loaders.download", lambda *_: pytest.fail("asked for a download"))
    for path in ("/no/such/model", "./model", "../model", "~/model", "a/b/c"):
        shown = repr(os.path.expanduser(path))  # noqa: PTH111 Path takes "./" away
        with pytest.raises(CheckpointNotFoundError, match=f"no directory {shown}. Hint: check the path"):
            resolve(path)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    directory = save(tmp_path / "model", LLAMA, mx.bfloat16)
    with pytest.raises(CheckpointError, match=f"tokenizer of {directory}, which holds no tokenizer files. Hint: copy"):
        mlx_flash.load(str(directory))
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"tokenizer of {directory}, which holds tokenizer.json"):
        load_tokenizer(directory)


@pytest.mark.skipif(mx.default_device() == mx.gpu, reason="GPU back ends multiply by experts of any dtype")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_mixtures_that_the_back_end_cannot_compute_are_refused(tmp_path: Path, dtype: mx.Dtype) -> None:
    directory = save(tmp_path / "model", QWEN3_MOE, dtype)
    found = rf"float32 only; model\.layers\..*weight of {directory} is {str(dtype)[9:]}. Hint: convert"
    with pytest.raises(CheckpointError, match=found):
        mlx_flash.load_model(directory, CONFIG)
    with apply_flash_patch(CONFIG), pytest.raises(CheckpointError, match=found):
        mlx_lm_utils.load_model(directory)


@pytest.mark.parametrize("shape", [
    LLAMA | {"hidden_size": 256, "intermediate_size": 4096, "num_hidden_layers": 2},
    QWEN3_MOE | {"hidden_size": 256, "moe_intermediate_size": 384},
], ids=lambda shape: str(shape["model_type"]))  # fmt: skip
def test_weights_of_a_narrower_type_than_their_input(tmp_path: Path, shape: dict[str, Any]) -> None:
    """MLX copies bf16 weights in fp32 behind one fp32 layer. The CPU back end computes such experts, too."""
    shard = save(tmp_path / "model", shape, mx.bfloat16) / "model.safetensors"
    weights = mx.load(str(shard))
    name = "model.layers.0.self_attn.q_proj.weight"
    mx.save_safetensors(str(shard), {**weights, name: weights[name].astype(mx.float32)}, {"format": "mlx"})
    del weights
    expected = run(stock(shard.parent), PREFILL_AND_DECODE)
    with mlx_flash.load_model(shard.parent, config())[0] as model:
        model.start()
        reserved, before = model.plan.reserved_bytes, mx.get_active_memory()
        mx.reset_peak_memory()
        assert same_bits(run(model, PREFILL_AND_DECODE), expected)
        assert mx.get_peak_memory() - before < reserved


@pytest.mark.skipif(has_own_memory(), reason="arrays are in the memory of the GPU")
def test_memory_that_others_freed_goes_back_before_a_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside it, loading peaked above the smallest budget."""
    directory = save(tmp_path / "model", LLAMA)
    found = noted(monkeypatch, preparing, "read_checkpoint", lambda _: footprint())
    limit = mx.set_cache_limit(1 << 30)
    try:
        mx.eval(mx.zeros((64 << 20,), mx.uint8))  # MLX keeps the buffer
        before = footprint()
        prepare(directory, CONFIG)
    finally:
        mx.set_cache_limit(limit)
    assert found[0] < before - (60 << 20)


def test_what_a_first_model_loads_is_not_counted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's libraries and kernels: some hundred MB, that every model of the process uses."""
    monkeypatch.setitem(machine.RUNTIME_BYTES, machine._back_end(), 640_000_000)
    monkeypatch.setattr(machine.Machine, "has_run", False)
    directory, config = save(tmp_path, LLAMA, mx.bfloat16), replace(CONFIG, ram_budget_gb=4)
    first, waiting = (prepare(directory, config).machine.runtime_bytes for _ in range(2))
    assert first == waiting == 640_000_000
    with mlx_flash.load_model(directory, config)[0] as model:
        assert prepare(directory, config).machine.runtime_bytes == first  # nothing was computed yet
        model(mx.array([[1]]))
        assert prepare(directory, config).machine.runtime_bytes == machine.RUNTIME_BYTES_AGAIN < first


def test_refused_model_leaves_no_garbage(tmp_path: Path) -> None:
    directory = save(tmp_path / "model", LLAMA)

    def num_modules() -> int:
        return sum(isinstance(each, nn.Module) for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = num_modules()
        with pytest.raises(BudgetError):
            prepare(directory, FlashConfig(ram_budget_gb=0.01))
        assert num_modules() == before
    finally:
        gc.enable()

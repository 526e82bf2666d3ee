"""Damaged adapters, and adapters of other programs and models."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import utils as mlx_lm_utils

import mlx_flash
from adapters import save_adapter
from mlx_flash import FlashConfig
from mlx_flash.engine.lifecycle import ModelManager
from mlx_flash.errors import CheckpointError
from mlx_flash.layout.load import CONFIG_NAME, WEIGHTS_NAME, check_adapter
from models import LLAMA
from saved_models import model_fixture

Damage = Callable[[Path], object]

base = model_fixture(LLAMA, name="base")


def of_settings(change: dict[str, Any]) -> Damage:
    def damage(folder: Path) -> None:
        config = json.loads((folder / CONFIG_NAME).read_text()) | change
        (folder / CONFIG_NAME).write_text(json.dumps(config))

    return damage


def of_parameters(**change: Any) -> Damage:
    return of_settings({"lora_parameters": {"rank": 4, "scale": 10.0, "dropout": 0.0, **change}})


def of_config(content: str) -> Damage:
    return lambda folder: (folder / CONFIG_NAME).write_text(content)


def truncate(folder: Path, nbytes: int) -> None:
    os.truncate(folder / WEIGHTS_NAME, nbytes)


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def change_weights(folder: Path, change: Callable[[dict[str, mx.array]], dict[str, mx.array]]) -> None:
    weights = mx.load(str(folder / WEIGHTS_NAME))
    assert isinstance(weights, dict)
    mx.eval(weights)
    mx.save_safetensors(str(folder / WEIGHTS_NAME), change(weights))


def without_first(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    return dict(sorted(weights.items())[1:])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (of_config("{not"), f"{CONFIG_NAME} is not JSON"),
        (of_config("[" * 100_000), f"{CONFIG_NAME} is not JSON"),
        (of_config("null"), f"{CONFIG_NAME} is no JSON object"),
        (of_config('{"peft_type": "LORA", "r": 8}'), "adapter of PEFT"),
        (of_config('{"num_layers": 2}'), "cannot apply this adapter .AttributeError"),
        (of_settings({"num_layers": None}), "cannot apply this adapter .TypeError"),
        (of_parameters(rank="4"), "cannot apply this adapter .TypeError"),
        (of_parameters(scale=float("nan")), "scale must be a finite number, found nan"),
        (of_parameters(scale=None), "scale must be a finite number, found None"),
        (of_parameters(keys=5), "cannot apply this adapter .TypeError"),
        (of_parameters(rank=5), r"cannot apply this adapter .*shape.*and 27 other tensors"),
        (lambda folder: (folder / CONFIG_NAME).unlink(), f"{CONFIG_NAME}: no such file"),
        (lambda folder: (folder / WEIGHTS_NAME).unlink(), f"{WEIGHTS_NAME}: no such file"),
        (lambda folder: replace_by_fifo(folder / CONFIG_NAME), f"{CONFIG_NAME}: .*FIFO"),
        (lambda folder: replace_by_fifo(folder / WEIGHTS_NAME), f"{WEIGHTS_NAME}: .*FIFO"),
        (lambda folder: truncate(folder, 0), f"{WEIGHTS_NAME}: .*truncated"),
        (lambda folder: truncate(folder, 8000), f"{WEIGHTS_NAME}: tensor .*truncated"),
        (lambda folder: change_weights(folder, without_first), "has no tensor .*lora_a', but its counterpart"),
    ],
)
def test_a_damaged_adapter_is_refused_with_its_file(tmp_path: Path, base: Path, damage: Damage, words: str) -> None:
    adapter = save_adapter(tmp_path / "adapter", base, "lora", 2)
    damage(adapter)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}.*{words}.*Hint"):
        mlx_flash.load_model(base, FlashConfig(ram_budget_gb=1), adapter_path=str(adapter))
    assert ModelManager.of_process().budget_bytes == 0  # the model that got no adapter is no model any more


def test_a_full_fine_tune_may_have_some_tensors_of_a_pair(tmp_path: Path) -> None:
    (tmp_path / CONFIG_NAME).write_text('{"fine_tune_type": "full"}')
    mx.save_safetensors(str(tmp_path / WEIGHTS_NAME), {"layers.0.lora_a": mx.zeros((1,))})
    check_adapter(tmp_path)


def test_half_of_a_pair_is_refused_where_mlx_lm_applies_the_adapter(tmp_path: Path, base: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", base, "lora", 2)
    change_weights(adapter, without_first)
    with mlx_flash.apply_flash_patch(FlashConfig(ram_budget_gb=1)):
        model = mlx_lm_utils.load_model(base)[0]
    with model, pytest.raises(CheckpointError, match="its counterpart"):
        mlx_lm_utils.load_adapters(model, str(adapter))

"""An index of shards is not read, as mlx-lm does not read it; it only names the files of missing parameters."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest

from mlx_flash import FlashConfig, load_model
from mlx_flash.engine.prepare import prepare
from mlx_flash.errors import CheckpointError, IndexFileError
from models import LLAMA, PREFILL_AND_DECODE, QWEN3_MOE, run, same_bits, save, stock

INDEX = "model.safetensors.index.json"
STALE = json.dumps({"weight_map": dict.fromkeys("ab", "model-00001-of-00002.safetensors")})


TOWER = json.dumps({"weight_map": {"vision.weight": "vision_tower.safetensors"}})
FORMS: dict[str, Callable[[Path], object]] = {
    "stale": lambda path: path.write_text(STALE),
    "empty": Path.touch,
    "no JSON": lambda path: path.write_bytes(b"\xff["),
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "vision tower that is absent": lambda path: path.write_text(TOWER),
    "outside": lambda path: path.write_text('{"weight_map": {"a": "../../etc/passwd"}}'),
}


@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
def test_a_complete_checkpoint_is_loaded_whatever_its_index_says(form: str, tmp_path: Path) -> None:
    directory = save(tmp_path, LLAMA | {"num_hidden_layers": 2}, num_shards=2)
    FORMS[form](directory / INDEX)
    expected = run(stock(directory), PREFILL_AND_DECODE)
    config = FlashConfig(ram_budget_gb=2.0, telemetry=False)
    assert prepare(directory, config, writes=False).plan.model_bytes > 0
    with load_model(directory, config)[0] as model:
        assert same_bits(run(model, PREFILL_AND_DECODE), expected)


@pytest.mark.parametrize("shape", [LLAMA, QWEN3_MOE], ids=["dense", "mixture"])
def test_the_index_names_the_shards_of_missing_parameters(shape: dict[str, object], tmp_path: Path) -> None:
    directory = save(tmp_path, dict(shape), num_shards=3)
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    unprintable = {"d": "\x1b[2J", "e": 5}
    (directory / INDEX).write_text(json.dumps({"weight_map": dict(zip("abc", names, strict=True)) | unprintable}))
    (directory / names[1]).unlink()
    with pytest.raises(IndexFileError, match=rf"no tensor for .*names {names[1]} \(1 files\).*incomplete"):
        prepare(directory, FlashConfig(ram_budget_gb=2.0))
    (directory / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"no tensor for \d+ of the model's parameters, such as '.*Hint"):
        prepare(directory, FlashConfig(ram_budget_gb=2.0))


def test_a_tensor_that_sanitize_lacks_is_missing(tmp_path: Path) -> None:
    directory = save(tmp_path, QWEN3_MOE)
    stacked = cast(dict[str, mx.array], mx.load(str(directory / "model.safetensors")))
    single = {
        name.replace("switch_mlp", f"experts.{i}"): expert
        for name, array in stacked.items()
        for i, expert in enumerate(array if "switch_mlp" in name else [array])
    }
    del single["model.layers.1.mlp.experts.3.up_proj.weight"]
    mx.save_safetensors(str(directory / "model.safetensors"), single, {"format": "pt"})
    (directory / INDEX).write_text(STALE)
    with pytest.raises(IndexFileError, match=r"such as 'model.layers.1.mlp.experts.3.up_proj.weight': the index names"):
        prepare(directory, FlashConfig(ram_budget_gb=2.0))

"""Where parameters come from is found by identity, never guessed from names."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_flash.errors import CheckpointError
from mlx_flash.layout import units
from mlx_flash.layout.load import Sources, load_config, load_lazily
from mlx_flash.layout.parts import ModelLayout
from mlx_flash.layout.reachable import arrays_in
from mlx_flash.layout.units import make_layout
from mlx_flash.memory.footprint import footprint
from mlx_flash.storage.safetensors import MAX_METADATA_BYTES, read_checkpoint
from models import LLAMA, QWEN3_MOE, run, same_bits, save, stock
from streamed import nbytes_of
from zoo import configuration


def layout_of(directory: Path) -> tuple[nn.Module, ModelLayout]:
    loaded = load_lazily(directory, read_checkpoint(directory))
    return loaded.model, make_layout(loaded)


def test_every_array_of_the_model_is_somewhere_once(tmp_path: Path) -> None:
    directory = save(tmp_path, LLAMA)
    model, layout = layout_of(directory)
    parameters = [p for unit in layout.units for p in [*unit.large, *unit.small]] + layout.resident
    names = [parameter.name for parameter in parameters]
    assert len(names) == len(set(names))
    assert {name for name, _ in tree_flatten(model.parameters())} <= set(names)
    assert all(parameter.array.ndim > 1 for unit in layout.units for parameter in unit.large)
    assert nbytes_of(layout) >= read_checkpoint(directory).nbytes


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_table_is_known_to_serve_as_head(tmp_path: Path, tied: bool) -> None:
    _, layout = layout_of(save(tmp_path, {**LLAMA, "tie_word_embeddings": tied}))
    assert layout.tied == ({"model.embed_tokens"} if tied else set())
    assert [unit.name for unit in layout.heads] == ([] if tied else ["lm_head"])
    assert [unit.name for unit in layout.embeddings] == ["model.embed_tokens"]


def test_uncalled_layer_streams_its_called_children(tmp_path: Path) -> None:
    config = configuration("iquestloopcoder")
    _, layout = layout_of(save(tmp_path, config))
    assert {unit.name for unit in layout.layers if unit.name.startswith("model.layers.0.")} == {
        "model.layers.0.mlp",
        *(f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"),
    }
    assert any(parameter.name == "model.layers.0.input_layernorm.weight" for parameter in layout.resident)


def test_layers_are_cut_finer_and_finer(tmp_path: Path) -> None:
    _, layout = layout_of(save(tmp_path, LLAMA))
    halves, linears = layout.finer
    assert [unit.name for unit in halves[:3]] == [
        "model.layers.0.self_attn",
        "model.layers.0.mlp",
        "model.layers.1.self_attn",
    ]
    assert [unit.name.rsplit(".", 1)[-1] for unit in linears[:7]] == [
        f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
    ]
    for cut in layout.finer:
        assert [p for unit in cut for p in unit.large] != []
        assert {id(p) for unit in cut for p in unit.large} == {id(p) for unit in layout.layers for p in unit.large}


def test_a_module_whose_weight_is_used_without_calling_it_is_not_cut_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = llama.MLP.__call__

    def reaches_in(self: Any, x: mx.array) -> mx.array:
        return original(self, x) + (x @ self.gate_proj.weight.T)[..., :1]

    monkeypatch.setattr(llama.MLP, "__call__", reaches_in)
    _, layout = layout_of(save(tmp_path, LLAMA))
    assert "model.layers.0.mlp" in {unit.name for unit in layout.finer[-1]}
    assert "model.layers.0.self_attn.q_proj" in {unit.name for unit in layout.finer[-1]}


def test_a_rehearsal_reads_nothing_and_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    original = llama.MLP.__call__

    def compiles(self: Any, x: mx.array) -> mx.array:
        if "_compiled" not in vars(self):
            self._compiled = mx.compile(lambda y: original(self, y))
        seen.append(np.array(x.sum()))  # looks at numbers while it runs
        return self._compiled(x)

    monkeypatch.setattr(llama.MLP, "__call__", compiles)
    directory = save(tmp_path, LLAMA)
    expected = run(stock(directory), [[1, 2, 3]])
    mx.clear_cache()
    before = mx.get_active_memory()
    model, layout = layout_of(directory)
    assert mx.get_active_memory() - before < 100_000 < nbytes_of(layout)
    assert type(model) is llama.Model
    assert not any("_compiled" in vars(layer.mlp) for layer in model.layers)
    assert len(seen) > len(model.layers)
    assert same_bits(run(model, [[1, 2, 3]]), expected)


@pytest.mark.parametrize(("function", "number"), [("swap_class", 2), ("restore_class", 1)])
def test_an_interrupted_rehearsal_leaves_other_models_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, number: int
) -> None:
    """All mixtures of mlx-lm share one activation, the default of an argument."""
    directory = save(tmp_path, QWEN3_MOE)
    expected = run(stock(directory), [[1, 2, 3]])
    original, seen = getattr(units, function), []

    def interrupted(module: nn.Module, *state: Any) -> None:
        seen.extend([module] if isinstance(module, SwitchGLU) else [])
        if len(seen) == number:
            raise KeyboardInterrupt
        original(module, *state)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(units, function, interrupted)
        layout_of(directory)
    assert same_bits(run(stock(directory), [[1, 2, 3]]), expected)
    layout_of(directory)


@pytest.mark.parametrize(
    "name",
    ["llama", "gemma3_text", "mamba2", "deepseek_v3", "deepseek_v32", "falcon_h1", "qwen3_next", "gpt2", "nanbeige"],
)
def test_the_size_of_the_cache_is_known_before_there_is_one(tmp_path: Path, name: str) -> None:
    model, layout = layout_of(save(tmp_path, configuration(name)))
    cache = make_prompt_cache(model)
    num_tokens = 0
    for _ in range(3):
        num_tokens += 256
        assert num_tokens <= getattr(model.args, "n_positions", num_tokens)  # MLX reads memory beyond a table
        model(mx.array([[5] * 256]), cache=cache)
        arrays = {id(array): array.nbytes for entry in cache for array in arrays_in(entry)}
        assert sum(arrays.values()) <= layout.cache.nbytes(num_tokens)
    if name in ("llama", "gpt2", "nanbeige"):
        assert sum(arrays.values()) == layout.cache.nbytes(num_tokens)


def test_a_model_without_layers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save(tmp_path, LLAMA)
    monkeypatch.delattr(llama.Model, "layers")
    with pytest.raises(CheckpointError, match="has no 'layers'"):
        layout_of(directory)


def test_config_has_a_largest_size_and_other_files_are_not_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.touch()
    os.truncate(path, MAX_METADATA_BYTES + 1)
    with pytest.raises(CheckpointError, match=r"config\.json: it has 64000001 bytes, at most 64000000 are allowed"):
        load_config(tmp_path)
    path.write_text('{"model_type": "llama"}')
    (tmp_path / "old.json").symlink_to(tmp_path / "nothing")
    (tmp_path / "folder.json").mkdir()
    assert load_config(tmp_path)["model_type"] == "llama"


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layers"])
@pytest.mark.parametrize("section", [None, "text_config"])
def test_more_layers_than_tensors_are_refused_before_they_are_made(
    tmp_path: Path, key: str, section: str | None
) -> None:
    directory = save(tmp_path, LLAMA)
    config = json.loads((directory / "config.json").read_text())
    changed = {key: 10**6}
    (directory / "config.json").write_text(json.dumps({**config, **({section: changed} if section else changed)}))
    began, before = time.process_time(), footprint()
    with pytest.raises(CheckpointError, match=rf"config.json: {key} is 1000000, but the checkpoint has \d+ tensors"):
        load_lazily(directory, read_checkpoint(directory))
    assert time.process_time() - began < 1 and footprint() - before < 10_000_000


def test_some_rows_of_every_expert_are_ranges_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    mx.save_safetensors(str(path), {"experts": mx.arange(48, dtype=mx.float32).reshape(3, 4, 4)})
    weights = mx.load(str(path))
    assert isinstance(weights, dict)
    sources = Sources(read_checkpoint(tmp_path))
    with sources.watching(weights):
        upper = mx.contiguous(mx.split(weights["experts"], 2, axis=1)[1])
        beside = mx.concatenate([weights["experts"]] * 2, axis=1)
        rows = weights["experts"].reshape(12, 4)
    records = sources.of(upper)
    data = path.read_bytes()
    assert len(records) == 3
    assert not sources.of(beside), "its bytes are interleaved"
    assert not sources.of(rows), "they are no rows of the tensor"
    assert b"".join(data[r.offset : r.end] for r in records) == bytes(memoryview(cast(Any, upper)))


def test_an_array_that_is_changed_in_place_is_computed(tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {name: mx.ones((4, 4)) for name in "abcd"})
    weights = mx.load(str(tmp_path / "model.safetensors"))
    assert isinstance(weights, dict)
    sources = Sources(read_checkpoint(tmp_path))
    with sources.watching(weights):
        weights["a"] /= 2
        weights["b"] += 1
        weights["c"][0] = 3
    assert [bool(sources.of(weights[name])) for name in "abcd"] == [False, False, False, True]
    assert weights["a"].tolist() == [[0.5] * 4] * 4

"""Where parameters come from is found by identity, never guessed from names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from mlx_flash.checkpoint.layout import ModelLayout, load_lazily, make_layout
from mlx_flash.checkpoint.safetensors import read_checkpoint
from mlx_flash.errors import CheckpointError
from models import GEMMA3, LLAMA, MAMBA2, save, stock


def layout_of(directory: Path) -> tuple[nn.Module, ModelLayout]:
    loaded = load_lazily(directory)
    return loaded.model, make_layout(loaded, read_checkpoint(directory))


@pytest.mark.parametrize("config", [LLAMA, GEMMA3, MAMBA2], ids=lambda c: c["model_type"])
@pytest.mark.parametrize("bits", [None, 4])
def test_direct_sources_hold_the_parameters_bytes(tmp_path: Path, config: dict[str, Any], bits: int | None) -> None:
    directory = save(tmp_path, config, mx.float16, bits=bits, num_shards=3)
    expected = dict(tree_flatten(stock(directory).parameters()))
    _, layout = layout_of(directory)
    large = [parameter for unit in layout.units for parameter in unit.large]
    assert len(layout.layers) == config["num_hidden_layers"]
    for parameter in large:
        assert parameter.record is not None
        extent = parameter.record.extent
        data = extent.path.read_bytes()[extent.offset : extent.end]
        assert data == bytes(memoryview(expected[parameter.name]).cast("B")), parameter.name


def test_every_array_of_the_model_is_somewhere_once(tmp_path: Path) -> None:
    directory = save(tmp_path, LLAMA)
    model, layout = layout_of(directory)
    parameters = [p for unit in layout.units for p in [*unit.large, *unit.small]] + layout.resident
    names = [parameter.name for parameter in parameters]
    assert len(names) == len(set(names))
    assert {name for name, _ in tree_flatten(model.parameters())} <= set(names)
    assert layout.nbytes >= read_checkpoint(directory).nbytes


def test_the_model_is_plain_afterwards(tmp_path: Path) -> None:
    model, _ = layout_of(save(tmp_path, LLAMA))
    assert type(model) is llama.Model


def test_what_sanitize_computes_is_derived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter of the same name, shape and dtype as a tensor, but shifted by one on the way."""
    directory = save(tmp_path, LLAMA)

    def sanitize(self: nn.Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        name = "model.layers.1.mlp.up_proj.weight"
        return {**weights, name: weights[name] + 1}

    monkeypatch.setattr(llama.Model, "sanitize", sanitize)
    _, layout = layout_of(directory)
    derived = [p.name for unit in layout.layers for p in unit.small if p.record is None and p.array.ndim > 1]
    assert derived == ["model.layers.1.mlp.up_proj.weight"]


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_table_is_known_to_serve_as_head(tmp_path: Path, tied: bool) -> None:
    _, layout = layout_of(save(tmp_path, {**LLAMA, "tie_word_embeddings": tied}))
    assert layout.head_of_embedding is tied
    assert [unit.name for unit in layout.heads] == ([] if tied else ["lm_head"])
    assert [unit.name for unit in layout.embeddings] == ["model.embed_tokens"]


def test_norms_and_tables_of_constants_are_not_streamed(tmp_path: Path) -> None:
    _, layout = layout_of(save(tmp_path, LLAMA))
    small = {parameter.name.rsplit(".", 2)[-2] for unit in layout.layers for parameter in unit.small}
    assert small >= {"input_layernorm", "post_attention_layernorm"}
    assert all(parameter.array.ndim > 1 for unit in layout.units for parameter in unit.large)


def test_of_layers_that_are_not_called_the_linears_are_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save(tmp_path, LLAMA)
    monkeypatch.delattr(llama.TransformerBlock, "__call__")
    _, layout = layout_of(directory)
    assert layout.layers == []
    assert len(layout.heads) == 7 * LLAMA["num_hidden_layers"] + 1
    assert any(parameter.name == "model.layers.0.input_layernorm.weight" for parameter in layout.resident)


def test_a_model_without_layers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save(tmp_path, LLAMA)
    monkeypatch.delattr(llama.Model, "layers")
    with pytest.raises(CheckpointError, match="has no 'layers'"):
        layout_of(directory)

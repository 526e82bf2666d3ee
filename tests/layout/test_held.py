"""What a call holds at a unit is measured without weights, once for each kind of model."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import mlx.core as mx
import pytest

from mlx_flash import FlashConfig
from mlx_flash.engine.prepare import prepare
from mlx_flash.layout import units as held
from mlx_flash.layout.parts import Held
from models import GEMMA3, LLAMA, MAMBA2, QWEN3_MOE, save
from zoo import configuration

HIDDEN = LLAMA["hidden_size"] * 4
"""Bytes of a hidden state in fp32."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def found(directory: Path) -> Held:
    return prepare(directory, FlashConfig()).layout.held


def test_a_call_holds_hidden_states_between_layers_and_more_inside(tmp_path: Path) -> None:
    layers, blocks, products = found(save(tmp_path / "model", LLAMA, mx.float32)).per_token
    # The mask and the like take a few bytes.
    assert HIDDEN <= layers < HIDDEN + 64
    # The MLP's input, the attention's result, and the two hidden states that it is added to.
    assert 4 * HIDDEN <= blocks < 4 * HIDDEN + 64
    # That, and the two inner results of an MLP, or one and what was computed from it.
    inner = LLAMA["intermediate_size"] * 4
    assert 3 * HIDDEN + inner <= products <= 4 * HIDDEN + 2 * inner


def test_it_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = found(save(tmp_path / "model", LLAMA))
    monkeypatch.setattr(held, "_measured", lambda *_: Held((7, 7, 7)))
    assert found(tmp_path / "model") == first
    entries = json.loads(held.RESULTS.file.read_text())
    held.RESULTS.file.write_text(json.dumps({key: {**entry, "per_token": ["much"]} for key, entry in entries.items()}))
    assert found(tmp_path / "model") == Held((7, 7, 7))


def test_a_model_that_cannot_be_tried_is_counted_as_its_widest_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save(tmp_path / "model", LLAMA)
    monkeypatch.setattr(held, "_try", Mock(side_effect=RuntimeError("no compiler")))
    plan = prepare(directory, FlashConfig()).plan
    assert plan.activations.held == Held()
    assert plan.activations.held_bytes(16, 100, 0) == plan.activations.waiting_bytes(16)


def test_keys_that_layers_are_given_are_copied_for_each_part(tmp_path: Path) -> None:
    """AFM's last layers use the keys and values of another one, which a part that waits for them refers to."""
    assert found(save(tmp_path / "model", configuration("afm7"))).has_keys
    for name, config in (("llama", LLAMA), ("gemma3", GEMMA3), ("mamba2", MAMBA2), ("mixture", QWEN3_MOE)):
        tried = found(save(tmp_path / name, config))
        layers, *finer = tried.per_token
        assert layers > 0 and all(more >= layers for more in finer) and not tried.has_keys

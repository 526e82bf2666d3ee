"""Tests of the script that makes a larger model of the same function."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

import mlx_flash
from children import ROOT
from mlx_flash.compat.generation import stock_generate_step
from models import LLAMA, same_bits, save, script, stock
from streamed import config

SMALL = {**LLAMA, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 96, "vocab_size": 300}
PAIR = ROOT / "examples" / "pair"
PROMPT = [5, 17, 290, 3, 42, 64, 99, 5, 17]
Found = list[tuple[int, mx.array]]


@pytest.fixture
def grow_model() -> ModuleType:
    return script("grow_model")


def answer(model: Any) -> Found:
    return list(stock_generate_step(mx.array(PROMPT), model, max_tokens=8))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_added_layers_change_no_bit(grow_model: ModuleType, tmp_path: Path, dtype: mx.Dtype) -> None:
    small = save(tmp_path / "small", SMALL, dtype)
    assert grow_model.main([str(small), str(tmp_path / "large"), "--layers", "7"]) == 0
    expected = answer(stock(small))
    with mlx_flash.load_model(tmp_path / "large", config(ram_budget_gb="min"))[0] as model:
        found = list(mlx_flash.generate_step(mx.array(PROMPT), model, max_tokens=8))
        assert len(model.layers) == 7
    assert [token for token, _ in found] == [token for token, _ in expected]
    assert same_bits([logprobs for _, logprobs in found], [logprobs for _, logprobs in expected])


@pytest.mark.parametrize(("width", "tied"), [(4, True), (16, False)])
def test_wider_model_computes_the_same_function(grow_model: ModuleType, tmp_path: Path, width: int, tied: bool) -> None:
    small = save(tmp_path / "small", {**SMALL, "tie_word_embeddings": tied}, mx.float32)
    large = tmp_path / "large"
    grow_model.main([str(small), str(large), "--layers=4", f"--width={width}"])
    made = json.loads((large / "config.json").read_text())
    assert (made["hidden_size"], made["num_attention_heads"], made["num_hidden_layers"]) == (
        32 * width,
        SMALL["num_attention_heads"] * width,
        4,
    )
    expected, found = answer(stock(small)), answer(stock(large))
    assert [token for token, _ in found] == [token for token, _ in expected]
    for (_, one), (_, other) in zip(expected, found, strict=True):
        assert mx.abs(one - other).max().item() < 1e-4


def test_demo_builds_a_model_that_writes_words(tmp_path: Path) -> None:
    script("demo").build(tmp_path / "demo", 0.1)
    small, tokenizer = mlx_lm.load(str(PAIR / "target"))[:2]
    expected = mlx_lm.generate(small, tokenizer, "The default value is", max_tokens=8)
    assert sum(file.stat().st_size for file in (tmp_path / "demo").glob("model*.safetensors")) > 1e8
    with mlx_flash.load(tmp_path / "demo", config(ram_budget_gb="min"))[0] as model:
        assert mlx_flash.generate(model, tokenizer, "The default value is", max_tokens=8) == expected

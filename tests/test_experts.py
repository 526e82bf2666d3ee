"""Experts that are read one by one give stock mlx-lm's bits, at any size of the pool."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zoo
from test_model import streamed_whole
from zoo.compare import LONGEST_CALL, find_difference, trace
from zoo.weights import VARIANTS, save

from models import stock

ARCHITECTURES = [
    ("mixtral", "fp32"),
    ("qwen3_moe", "fp32"),
    ("qwen3_next", "4bit"),
    ("deepseek_v3", "fp32"),
    ("gpt_oss", "mxfp4"),
    ("granitemoe", "4bit"),
    ("olmoe", "fp32"),
    ("llama4", "fp32"),
    ("glm4_moe", "8bit"),
    ("nemotron_h", "fp32"),
    ("kimi_linear", "fp32"),
    ("gemma4_text:experts", "fp32"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Model directories and what stock mlx-lm computes, by (name, variant)."""
    found: dict[tuple[str, str], tuple[Path, list[Any]]] = {}

    def get(name: str, variant: str) -> tuple[Path, list[Any]]:
        if (name, variant) not in found:
            directory = tmp_path_factory.mktemp("experts")
            save(directory, zoo.configuration(name), VARIANTS[variant])
            found[name, variant] = directory, trace(stock(directory))
        return found[name, variant]

    return get


@pytest.mark.parametrize(("pool_slots", "exact_rows"), [(0, True), (0, False), (9, True), (14, False), (999, True)])
@pytest.mark.parametrize(("name", "variant"), ARCHITECTURES)
def test_experts_stream_exactly(made: Any, name: str, variant: str, pool_slots: int, exact_rows: bool) -> None:
    directory, expected = made(name, variant)
    with streamed_whole(directory, pool_slots=pool_slots, exact_rows=exact_rows) as model:
        model.plan = replace(model.plan, prefill_step_size=LONGEST_CALL)
        assert not find_difference(expected, trace(model))
        stats = model.engine.experts.pool.stats
        print(stats)
        assert stats.num_calls

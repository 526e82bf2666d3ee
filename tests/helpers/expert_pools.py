from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zoo
from mlx_flash import FlashLLM
from mlx_flash.experts.pool import ABSENT, ExpertPool
from mlx_flash.layout.parts import ModelLayout
from mlx_flash.layout.units import trunk_of
from mlx_flash.memory.driver import has_own_memory
from mlx_flash.residency.plan import ResidencyPlan, Streaming
from models import QWEN3_MOE, stock
from streamed import carried_out, pool_with, prepared_for, streamed_whole
from zoo.compare import trace
from zoo.weights import VARIANTS, save

ARCHITECTURES = [
    ("mixtral", "fp32"),
    ("qwen3_next", "4bit-fp32"),
    ("deepseek_v3", "8bit"),
    ("llama4", "fp32"),
    ("nemotron_h", "fp32"),
]
"""Mixtures beside those of `test_zoo`, which run through pools of every size there."""


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


QUANTIZED = QWEN3_MOE | ({"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64} if has_own_memory() else {})
"""MLX's CUDA kernel for 4 bits reads past the end of matrices of at most 128 columns, and may end the process."""

PROMPT = [(37 * i + i * i) % 1000 for i in range(40)]

CALLS: list[list[Any]] = [
    [[PROMPT], [[12]], [[319]], [[5, 6, 7]], [[0]]],
    [[PROMPT, PROMPT[::-1]], [[12], [7]], [[1], [290]], [[6, 2, 200], [8, 8, 30]]],
    [[[256, 1, 9]], [[77]]],
]
"""Generations: of one sequence and of two, calls of more than 64 indices, which mlx-lm sorts, and of fewer."""


def pooled(plan: ResidencyPlan, layout: ModelLayout, pool_slots: int, trunk: str = "resident") -> ResidencyPlan:
    """A plan for experts one by one, with the trunk in memory, or all of it but one layer."""
    streaming, pool = Streaming(), pool_with(layout, pool_slots)
    if trunk == "mixed":
        unit = trunk_of(layout).layers[1]
        layers = ((unit.name, tuple(p.name for p in unit.large)),)
        streaming = Streaming(layers, num_units=1, num_slots=1, slot_bytes=unit.nbytes + 1_000_000)
    return replace(plan, streaming=streaming, pool=pool, prefill_step_size=2048, budget_bytes=10**11)


def with_pool(
    directory: Path, pool_slots: int, trunk: str = "resident", *, exact_rows: bool = True, **settings: Any
) -> FlashLLM:
    """A model whose experts are read one by one, whatever the planner would do."""
    if trunk == "streamed":
        model = streamed_whole(directory, pool_slots=pool_slots, exact_rows=exact_rows, **settings)
        model.plan = replace(model.plan, prefill_step_size=2048, budget_bytes=10**11)
        return model
    prepared = prepared_for(directory, exact_rows, **settings)
    return carried_out(prepared, pooled(prepared.plan, prepared.layout, pool_slots, trunk), **settings)


def pool_of(model: FlashLLM) -> ExpertPool:
    assert model.engine is not None and model.engine.experts is not None
    return model.engine.experts.pool


def check_slots(pool: ExpertPool) -> None:
    """Every slot is free or has one expert."""
    taken = [int(slot) for table in pool.slot_of for slot in table if slot != ABSENT]
    assert sorted([*taken, *pool._free]) == list(range(pool.slots.num_slots))
    assert pool.num_usable == pool.slots.num_slots

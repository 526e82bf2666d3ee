from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from mlx_flash.config import GB, FlashConfig
from mlx_flash.layout.parts import CacheSizes
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT
from mlx_flash.residency.machine import Machine
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.residency.planner import make_plan
from mlx_flash.residency.sizes import (
    ActivationSizes,
    ExpertSizes,
    ModelSizes,
    TensorSize,
    UnitSize,
)
from mlx_flash.storage.placement import padded_bytes
from mlx_flash.storage.probe import DiskProfile

MB = 1_000_000

MIB = 1 << 20

LLAMA_LAYER = tuple(n * MIB for n in (8, 2, 2, 8, 23, 23, 23))

FIXED = FlashConfig(context_length=1024, prefill_step_size=64)


def some(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Settings of a property: the same examples on every run, and no limit on the time of one."""
    return settings(max_examples=examples, deadline=None, derandomize=True)


def make_unit(name: str, sizes: Sequence[int], num_rows: int | None = None) -> UnitSize:
    tensors = [TensorSize(f"{name}.{i}.weight", nbytes, padded_bytes(nbytes)) for i, nbytes in enumerate(sizes)]
    return UnitSize(name, tuple(tensors), num_rows)


def make_model(
    layers: Sequence[Sequence[int]] = (LLAMA_LAYER,) * 24,
    head: tuple[int, int] | None = (32000, 4096),
    table: tuple[int, int] | None = (32000, 4096),
    *,
    tied: bool = False,
    copies: bool = False,
) -> ModelSizes:
    """A model from the sizes of its layers' tensors and (rows, bytes of a row) of its head and table."""
    rows = max(entry[0] for entry in (head, table, (1, 1)) if entry)
    tables = () if table is None else (replace(make_unit("embed", [math.prod(table)], table[0]), is_tied=tied),)
    return ModelSizes(
        layers=tuple(make_unit(f"layers.{i}", sizes) for i, sizes in enumerate(layers)),
        heads=() if head is None else (make_unit("lm_head", [math.prod(head)], head[0]),),
        tables=tables,
        resident_bytes=MB,
        copies=copies,
        cache=CacheSizes(token_bytes=1700 * len(layers)),
        activations=ActivationSizes(
            per_token=100_000,
            scores_per_pair=192,
            unfused_per_pair=192,
            logits_per_token=4 * rows,
            embedding_per_token=8192,
        ),
    )


def make_machine(**changes: Any) -> Machine:
    machine = Machine(
        total_memory=10**15,
        available_memory=10**14,
        base_bytes=180 * MB,
        active_bytes=0,
        runtime_bytes=16 * MB,
        disk=DiskProfile(bytes_per_second=2e9, read_size=4 * MIB, queue_depth=4, direct=True),
        compute_bytes_per_second=8e9,
        barrier_seconds=1e-4,
        has_buffer_cache=False,
        exact_tiles=True,
    )
    return replace(machine, **changes)


def with_budget(config: FlashConfig, nbytes: int) -> FlashConfig:
    """The settings with a budget of so many bytes, or the next number of bytes that a float of GB stands for."""
    gigabytes = nbytes / GB
    while int(gigabytes * GB) < nbytes:
        gigabytes = math.nextafter(gigabytes, math.inf)
    return replace(config, ram_budget_gb=gigabytes)


def minimum_of(sizes: ModelSizes, config: FlashConfig, machine: Machine) -> int:
    return make_plan(sizes, replace(config, ram_budget_gb="min"), machine).minimum_bytes


def everything(sizes: ModelSizes, config: FlashConfig, machine: Machine) -> ResidencyPlan:
    """The plan when memory does not matter."""
    return make_plan(sizes, replace(config, ram_budget_gb=10**6), machine)


tensor_bytes = st.integers(70_000, 60_000_000)

unit_bytes = st.lists(tensor_bytes, min_size=1, max_size=7)

alike = st.builds(lambda sizes, count: [sizes] * count, unit_bytes, st.integers(1, 40))

unlike = st.lists(unit_bytes, min_size=1, max_size=12)

rows = st.sampled_from([1, 63, 64, 65, 1000, 32000, 50_257, 151_936])


@st.composite
def row_units(draw: Any, name: str) -> UnitSize:
    """A head or table: plain, or packed with its scales and biases."""
    count, row = draw(rows), draw(st.integers(1, 256)) * 32
    packed = draw(st.booleans())
    return make_unit(name, [count * row, count * row // 8, count * row // 8] if packed else [count * row], count)


@st.composite
def models(draw: Any) -> ModelSizes:
    layers = [make_unit(f"layers.{i}", sizes) for i, sizes in enumerate(draw(alike | unlike))]
    heads = draw(st.lists(row_units("lm_head"), max_size=1))
    tables = draw(st.lists(row_units("embed"), max_size=1))
    return ModelSizes(
        layers=tuple(layers),
        copies=draw(st.booleans()),
        heads=tuple(heads),
        tables=tuple(replace(unit, is_tied=draw(st.booleans())) for unit in tables),
        resident_bytes=draw(st.integers(0, 50 * MB)),
        cache=CacheSizes(
            constant_bytes=draw(st.integers(0, 4_000_000)),
            token_bytes=draw(st.integers(0, 400_000)),
            call_bytes=draw(st.integers(0, 50_000)),
        ),
        activations=ActivationSizes(
            per_token=draw(st.integers(0, 500_000)),
            scores_per_pair=draw(st.sampled_from([0, 96, 384])),
            unfused_per_pair=384,
            logits_per_token=4 * max([unit.num_rows or 0 for unit in [*heads, *tables]], default=0),
            embedding_per_token=draw(st.integers(0, 32_768)),
        ),
    )


machines = st.builds(
    make_machine,
    base_bytes=st.integers(10 * MB, 600 * MB),
    runtime_bytes=st.integers(0, 64 * MB),
    disk=st.builds(
        DiskProfile,
        bytes_per_second=st.sampled_from([3e8, 2e9, 7e9]),
        read_size=st.sampled_from([2 * MIB, 16 * MIB]),
        queue_depth=st.integers(1, 8),
        direct=st.booleans(),
    ),
    compute_bytes_per_second=st.sampled_from([1e9, 8e9, 4e11]),
    barrier_seconds=st.sampled_from([1e-5, 5e-4]),
    has_buffer_cache=st.booleans(),
    exact_tiles=st.booleans(),
)

configs = st.builds(
    FlashConfig,
    context_length=st.none() | st.integers(1, 20_000),
    prefill_step_size=st.none() | st.integers(1, 5000),
    num_slots=st.none() | st.integers(1, 6),
)

shares = st.floats(0, 1.2)

QWEN_EXPERT = (1_200_000, 1_200_000, 1_200_000)
"""Matrices of one expert."""


def make_mixture(
    num_layers: int = 24,
    num_experts: int = 64,
    top_k: int = 4,
    expert: Sequence[int] = QWEN_EXPERT,
    attention: Sequence[int] = (8 * MIB, 2 * MIB, 2 * MIB, 8 * MIB),
    *,
    num_dense: int = 0,
    copies: bool = False,
    **kinds: Any,
) -> ModelSizes:
    """A model whose layers, after the first few, have experts; its trunk is cut into single tensors too."""
    trunk = make_model([attention] * num_layers, **kinds)
    trunk = replace(trunk, finer=(tuple(part for unit in trunk.layers for part in tensors_of(unit)),))
    num_sparse = num_layers - num_dense
    slot_bytes = padded_bytes(sum(expert)) + DIRECT_ALIGNMENT
    stage_bytes = padded_bytes(num_experts * max(expert)) + DIRECT_ALIGNMENT
    experts = ExpertSizes(
        num_experts=(num_experts,) * num_sparse,
        slot_bytes=slot_bytes,
        least_slots=max(-(-stage_bytes // slot_bytes), top_k),
        nbytes=num_sparse * num_experts * sum(expert),
        token_bytes=num_sparse * top_k * sum(expert),
    )
    stack = [num_experts * nbytes for nbytes in expert]
    idle = (num_experts - top_k) * sum(expert)
    layers = [
        unit if i < num_dense else replace(make_unit(unit.name, [*attention, *stack]), idle_bytes=idle)
        for i, unit in enumerate(trunk.layers)
    ]
    finer = tuple(part for unit in layers for part in tensors_of(unit))
    return replace(trunk, layers=tuple(layers), finer=(finer,), trunk=replace(trunk, experts=experts, copies=copies))


def tensors_of(unit: UnitSize) -> list[UnitSize]:
    """A unit cut into its tensors; those of experts, the last ones, share what is idle."""
    total = sum(tensor.nbytes for tensor in unit.tensors[-3:])
    idle = [0] * (len(unit.tensors) - 3) + [unit.idle_bytes * tensor.nbytes // total for tensor in unit.tensors[-3:]]
    return [
        UnitSize(tensor.name.removesuffix(".weight"), (tensor,), idle_bytes=nbytes)
        for tensor, nbytes in zip(unit.tensors, idle, strict=True)
    ]

"""Experts that are read one by one give stock mlx-lm's bits, at any size of the pool."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_lm.utils
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear
from mlx_lm.tuner.lora import LoRASwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers

import mlx_flash
from disks import Disk
from expert_pools import ARCHITECTURES, CALLS, PROMPT, QUANTIZED, check_slots, pool_of, pooled, with_pool
from expert_pools import made as made  # a fixture
from mlx_flash import ReadError, enginethread
from mlx_flash.engine.prepare import prepare
from mlx_flash.experts.expertlayers import Experts as ModelExperts
from mlx_flash.experts.slots import ABSENT
from mlx_flash.layout.parts import ModelLayout
from mlx_flash.layout.units import make_layout
from mlx_flash.residency.planner import make_plan
from mlx_flash.storage.ranges import RangeReader
from models import MIXTRAL, QWEN3_MOE, run, same_bits, stock
from models import save as save_tiny
from streamed import config, streamed_whole
from zoo.compare import LONGEST_CALL, TURNS, find_difference, only, trace

POOLS = [(0, True), (0, False), (14, False), (9, True), (999, True), (999, False)]
"""Slots of the pool (the fewest, some, all), and whether rows are exact. Architectures take turns at three of them."""


@pytest.mark.parametrize(("number", "architecture"), list(enumerate(ARCHITECTURES)))
def test_experts_stream_exactly(made: Any, number: int, architecture: tuple[str, str]) -> None:
    """The pools of an architecture take turns at the two halves of the generations."""
    directory, expected = made(*architecture)
    for i, (pool_slots, exact_rows) in enumerate(POOLS[number % 2 :: 2], number):
        with streamed_whole(directory, pool_slots=pool_slots, exact_rows=exact_rows) as model:
            model.plan = replace(model.plan, prefill_step_size=LONGEST_CALL)
            turn = TURNS[i % 2]
            assert not find_difference(only(turn, expected), trace(model, numbers=turn)), (pool_slots, exact_rows)
            assert model.engine.experts.pool.stats.num_calls


CONFIGS: dict[str, tuple[dict[str, Any], mx.Dtype, int | None]] = {
    "qwen3_moe": (QWEN3_MOE, mx.float32, None),
    "qwen3_moe-4bit": (QUANTIZED, mx.bfloat16, 4),
    "mixtral": (MIXTRAL, mx.float32, None),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directories of tiny models and what stock mlx-lm computes, by name."""
    found: dict[str, tuple[Path, list[Any]]] = {}

    def get(name: str) -> tuple[Path, list[Any]]:
        if name not in found:
            config, dtype, bits = CONFIGS[name]
            directory = save_tiny(tmp_path_factory.mktemp(name), config, dtype, bits=bits, header_shift=1)
            found[name] = directory, trace(stock(directory), CALLS)
        return found[name]

    return get


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes every plan one with a pool of so many slots, and the rest in memory."""

    def plan(pool_slots: int) -> None:
        layouts: list[ModelLayout] = []

        def spy(loaded: Any) -> ModelLayout:
            layouts.append(make_layout(loaded))
            return layouts[-1]

        monkeypatch.setattr("mlx_flash.engine.prepare.make_layout", spy)
        monkeypatch.setattr(
            "mlx_flash.engine.prepare.make_plan", lambda *args: pooled(make_plan(*args), layouts[-1], pool_slots)
        )

    return plan


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


ONE_WAY, OTHER_WAY = [(0, True), (11, False), (999, True)], [(0, False), (11, True), (999, False)]
"""Slots of the pool, and whether rows are exact."""


@pytest.mark.parametrize(
    ("name", "trunk", "pool_slots", "exact_rows"),
    [
        *(("qwen3_moe", "resident", *pool) for pool in ONE_WAY),
        *(("qwen3_moe-4bit", "streamed", *pool) for pool in OTHER_WAY),
        *(("mixtral", "mixed", *pool) for pool in ONE_WAY + OTHER_WAY),
    ],
)
def test_any_pool_gives_stock_bits(tiny: Any, name: str, trunk: str, pool_slots: int, exact_rows: bool) -> None:
    directory, expected = tiny(name)
    exact_rows = exact_rows and mx.default_device() == mx.cpu
    with with_pool(directory, pool_slots, trunk, exact_rows=exact_rows) as model:
        pool = pool_of(model)
        assert not find_difference(expected, trace(model, CALLS))
        assert not find_difference(expected, trace(model, CALLS))
        check_slots(pool)
        if pool.slots.num_slots < 20:
            assert pool.stats.num_evicted > 0
        num_experts = model.layout.experts[0].num_experts
        assert (pool.stats.num_full > 0) == (not exact_rows or pool.slots.num_slots < num_experts)
        if pool_slots:
            assert 0 < pool.stats.num_hits < pool.stats.num_routed
        stack = model.layout.experts[0].unit.module
    closed = trace(model.close(), CALLS[-1:])
    assert closed and not find_difference(expected[-len(closed) :], closed)
    assert type(stack) is SwitchGLU


def test_unknown_expert_is_an_index_error(tiny: Any) -> None:
    directory, expected = tiny("qwen3_moe")
    with with_pool(directory, 8) as model:
        module = model.layout.experts[1].unit.module
        for indices in ([[0, 16]], [[-1, 3]]):
            with pytest.raises(IndexError, match=r"layers\.1\.mlp\.switch_mlp' was asked for experts .*: it has 16"):
                module(mx.zeros((1, 64)), mx.array(indices))
        assert not find_difference(expected, trace(model, CALLS))


def test_stale_experts_show(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The poison works: when what was needed before is not evaluated before its slot goes, the logits are wrong."""
    directory, _ = tiny("qwen3_moe")
    x, indices = mx.ones((1, 64)), mx.array([[3, 4]])
    right = stock(directory).layers[0].mlp.switch_mlp(x, indices)
    mx.eval(x, indices, right)
    for works in (True, False):
        if not works:
            monkeypatch.setattr(ModelExperts, "_evaluate_pending", lambda self, *others: mx.eval(others))
            monkeypatch.setattr(mx, "async_eval", lambda *arrays: None)  # else it is computed in time, by chance
        with with_pool(directory, 0) as model:
            module, other = (stack.unit.module for stack in model.layout.experts[:2])

            def compute(module: Any = module, other: Any = other) -> mx.array:
                late: mx.array = module(x, indices)
                for expert in range(0, 16, 2):
                    mx.eval(other(x, mx.array([[expert, expert + 1]])))
                mx.eval(late)
                return late

            model.start()
            assert same_bits([enginethread.run(compute)], [right]) == works


@pytest.mark.parametrize(("name", "pool_slots"), [("qwen3_moe", 4), ("qwen3_moe-4bit", 20)])
def test_adapters_of_experts_equal_resident(
    tiny: Any, tmp_path: Path, planned: Callable[[int], None], name: str, pool_slots: int
) -> None:
    directory, plain = tiny(name)
    keys = [f"mlp.switch_mlp.{projection}" for projection in ("gate_proj", "down_proj")]
    parameters = {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": [*keys, "self_attn.q_proj"]}
    resident = stock(directory)
    linear_to_lora_layers(resident, 2, parameters)
    mx.random.seed(3)
    leaves = {k: 0.1 * mx.random.normal(v.shape) for k, v in tree_flatten(resident.parameters()) if ".lora_" in k}
    assert any("switch_mlp" in key for key in leaves)
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), leaves)
    settings = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    resident = mlx_lm.utils.load_adapters(stock(directory), str(tmp_path))
    resident.eval()
    expected = trace(resident, CALLS)
    assert find_difference(plain, expected)
    planned(pool_slots)
    with mlx_flash.load_model(directory, config(), adapter_path=str(tmp_path))[0] as model:
        assert not find_difference(expected, trace(model, CALLS))
        small = [[p.name for p in stack.unit.small] for stack in model.layout.experts]
        assert [len([name for name in names if ".lora_" in name]) for names in small] == [0, 4, 4]
        assert pool_of(model).stats.num_calls > 0
        lora = model.layers[2].mlp.switch_mlp.gate_proj
    assert not find_difference(expected, trace(model.close(), CALLS))
    assert type(lora) is LoRASwitchLinear and type(lora.linear) in (SwitchLinear, QuantizedSwitchLinear)


FAULTS = [(7, True), (24, True), (24, False)]
"""Slots of the pool, and whether a prompt's experts go through it too."""


@pytest.mark.parametrize(("pool_slots", "exact_rows"), FAULTS)
def test_disk_error_names_the_tensor_and_later_calls_work(
    tiny: Any, disk: Disk, pool_slots: int, exact_rows: bool
) -> None:
    directory, _ = tiny("qwen3_moe")
    named = r"'model\.layers\.\d\.mlp\.switch_mlp\..*_proj\.weight' .* offset \d+.*/model\.safetensors: Input/output"
    chunks = ([3], [4], PROMPT, [5])
    expected = run(stock(directory), chunks)
    with with_pool(directory, pool_slots, exact_rows=exact_rows) as model:
        for failing in (chunks, [PROMPT], chunks):
            pool_of(model).drop_unread(0, range(16))
            for expert in np.flatnonzero(pool_of(model).slot_of[0] != ABSENT).tolist():
                pool_of(model).leave((0, expert))
            disk.is_broken = True
            for _ in range(2):
                with pytest.raises(ReadError, match=named):
                    run(model, failing)
                check_slots(pool_of(model))
            disk.is_broken = False
            assert same_bits(run(model, chunks), expected)
            check_slots(pool_of(model))


@pytest.mark.parametrize("shape", [(1,), (), (96,)])
def test_stack_with_a_shared_array_is_read_whole(tiny: Any, shape: tuple[int, ...]) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = mx.full(shape, 0.5)

        def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
            return nn.silu(gate) * x * self.scale

    directory, _ = tiny("qwen3_moe")
    loaded = prepare(directory, config()).loaded
    loaded.model.layers[1].mlp.switch_mlp.activation = Scaled()
    names = [stack.unit.name for stack in make_layout(loaded).experts]
    assert names == ["model.layers.0.mlp.switch_mlp", "model.layers.2.mlp.switch_mlp"]


@pytest.mark.parametrize("pool_slots", [None, 9])
def test_bounce_buffers_are_used_where_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool_slots: int | None
) -> None:
    """As on CUDA, where a disk must not write beside what is computed from."""
    directory = save_tiny(tmp_path / "model", QWEN3_MOE)
    expected = trace(stock(directory), CALLS[2:])
    in_place: list[bool] = []
    read = RangeReader._read_direct

    def spy(self: RangeReader, wanted: Any, target: memoryview) -> None:
        in_place.append(not isinstance(target.obj, mmap.mmap))
        read(self, wanted, target)

    monkeypatch.setattr(RangeReader, "_read_direct", spy)
    for arrival in ("in place", "bounced"):
        monkeypatch.setattr("mlx_flash.residency.machine.way_of_reading", lambda found=arrival: found)
        in_place.clear()
        with streamed_whole(directory, pool_slots=pool_slots) as model:
            assert not find_difference(expected, trace(model, CALLS[2:]))
        assert in_place and any(in_place) == (arrival == "in place")

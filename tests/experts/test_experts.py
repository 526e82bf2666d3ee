"""Experts that are read one by one give stock mlx-lm's bits, at any size of the pool."""

from __future__ import annotations

import gc
import json
import weakref
from functools import partial, partialmethod
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_lm.utils
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear
from mlx_lm.tuner.lora import LoRASwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers

import mlx_flash
from expert_pools import ARCHITECTURES, CALLS, PROMPT, QUANTIZED, check_slots, pool_of, pooled, with_pool
from expert_pools import made as made  # a fixture
from faulty import Disk
from mlx_flash import ReadError, enginethread
from mlx_flash.commands.verify import ByteCheck
from mlx_flash.engine.prepare import prepare
from mlx_flash.experts import expertlayers
from mlx_flash.experts.expertlayers import PooledStacks
from mlx_flash.experts.pool import ABSENT, READS_PAST_CACHE
from mlx_flash.layout.parts import ModelLayout
from mlx_flash.layout.units import make_layout
from mlx_flash.memory.arena import Arena, SlotArena, StackArena
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT
from mlx_flash.residency.planner import make_plan
from models import MIXTRAL, QWEN3_MOE, run, same_bits, stock
from models import save as save_tiny
from noting import noted
from saved_models import model_fixture
from streamed import config, streamed_whole
from zoo.compare import TURNS, difference_in, find_difference, trace

POOLS = [(0, True), (0, False), (14, False), (9, True), (999, True), (999, False)]
"""Slots of the pool (the fewest, some, all), and whether rows are exact. Architectures take turns at three of them."""


@pytest.fixture
def in_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A back end that computes with contiguous stacks only."""
    real = PooledStacks.__init__

    def init(self: PooledStacks, *args: Any) -> None:
        real(self, *args)
        if isinstance(self.pool.slots, SlotArena):
            self.takes_slots = [False] * len(self.takes_slots)

    monkeypatch.setattr(PooledStacks, "__init__", init)


@pytest.mark.parametrize(("number", "architecture"), list(enumerate(ARCHITECTURES)))
def test_experts_stream_exactly(made: Any, number: int, architecture: tuple[str, str], request: Any) -> None:
    """The pools of an architecture take turns at the two halves of the generations."""
    directory, expected = made(*architecture)
    for i, (pool_slots, exact_rows) in enumerate(POOLS[number % 2 :: 2], number):
        with streamed_whole(directory, pool_slots=pool_slots, exact_rows=exact_rows) as model:
            assert not difference_in(model, expected, TURNS[i % 2]), (pool_slots, exact_rows)
            assert model.engine.experts.pool.stats.num_calls
    request.getfixturevalue("in_stacks")
    for pool_slots, turn in zip((9, 999), TURNS, strict=True):
        with streamed_whole(directory, pool_slots=pool_slots, exact_rows=False) as model:
            assert not difference_in(model, expected, turn), f"{pool_slots} slots in stacks"
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
        assert pool._reads_past_cache == (READS_PAST_CACHE if exact_rows else 0)
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


def test_what_needs_an_expert_is_computed_before_its_slot_goes(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot is poisoned then. Usually a result is computed early, by chance."""
    directory, _ = tiny("qwen3_moe")
    x, indices = mx.ones((1, 64)), mx.array([[3, 4]])
    right = stock(directory).layers[0].mlp.switch_mlp(x, indices)
    mx.eval(x, indices, right)
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: None)
    with with_pool(directory, 0) as model:
        module, other = (stack.unit.module for stack in model.layout.experts[:2])

        def compute() -> mx.array:
            late: mx.array = module(x, indices)
            for expert in range(0, 16, 2):
                mx.eval(other(x, mx.array([[expert, expert + 1]])))
            mx.eval(late)
            return late

        model.start()
        assert same_bits([enginethread.run(compute)], [right])


@pytest.mark.parametrize(("name", "pool_slots"), [("qwen3_moe", 4), ("qwen3_moe-4bit", 20)])
def test_adapters_of_experts_equal_resident(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, pool_slots: int
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
    layouts: list[ModelLayout] = []  # of the model without adapters, and with them

    def laid_out(loaded: Any) -> ModelLayout:
        layouts.append(make_layout(loaded))
        return layouts[-1]

    monkeypatch.setattr("mlx_flash.engine.prepare.make_layout", laid_out)
    planned = lambda *args: pooled(make_plan(*args), layouts[-1], pool_slots)  # noqa: E731
    monkeypatch.setattr("mlx_flash.engine.prepare.make_plan", planned)
    with mlx_flash.load_model(directory, config(), adapter_path=str(tmp_path))[0] as model:
        assert not find_difference(expected, trace(model, CALLS))
        small = [[p.name for p in stack.unit.small] for stack in model.layout.experts]
        assert [len([name for name in names if ".lora_" in name]) for names in small] == [0, 4, 4]
        assert pool_of(model).stats.num_calls > 0
        lora = model.layers[2].mlp.switch_mlp.gate_proj
    assert not find_difference(expected, trace(model.close(), CALLS))
    assert type(lora) is LoRASwitchLinear and type(lora.linear) in (SwitchLinear, QuantizedSwitchLinear)


@pytest.mark.parametrize(("pool_slots", "exact_rows"), [(7, True), (24, True), (24, False)])
def test_disk_error_names_the_tensor_and_later_calls_work(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, pool_slots: int, exact_rows: bool
) -> None:
    (directory, _), disk = tiny("qwen3_moe"), Disk(monkeypatch)
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


TOKENS = [[(7 * i * i + 3 * i) % 1000] for i in range(24)]


quantized = model_fixture(QUANTIZED, mx.bfloat16, bits=4, header_shift=1)


@pytest.mark.usefixtures("in_stacks")
def test_small_calls_compute_from_stacks(quantized: Path) -> None:
    with with_pool(quantized, 24) as model:
        assert isinstance(pool_of(model).slots, StackArena)
        assert same_bits(run(model, TOKENS), run(stock(quantized), TOKENS))
        stats = pool_of(model).stats
        assert not stats.num_full and stats.num_evicted > 20 and stats.num_predicted


@pytest.mark.usefixtures("in_stacks")
@pytest.mark.parametrize("trunk", ["resident", "streamed"])
def test_stacks_of_any_size_at_any_time_change_no_bit(quantized: Path, trunk: str) -> None:
    calls = [*TOKENS[:4], TOKENS[0] * 40, *TOKENS[4:8]]
    expected = run(stock(quantized), calls)
    random, sizes = Random(3), list[int]()
    with with_pool(quantized, 24, trunk, exact_rows=False, poison_released_slots=True) as model:
        assert model.engine is not None
        lending, slots = model.engine.lending, pool_of(model).slots
        for _ in range(5):
            lending.lend(random.randrange(2 * slots.capacity * slots.pitch))
            assert lending.recallable == lending.nbytes >= (slots.num_slots - 24) * slots.pitch
            assert same_bits(run(model, calls), expected)
            wanted = random.randrange(1 + lending.recallable)
            freed = lending.recall(wanted)
            sizes.append(slots.num_slots)
            assert freed >= wanted and slots.num_slots >= 24
            assert same_bits(run(model, calls), expected)
        assert len(set(sizes)) > 2
        lending.end()
        assert slots.num_slots == 24 and not pool_of(model).num_resident


@pytest.mark.usefixtures("in_stacks")
def test_another_number_of_stacks_frees_the_memory_of_the_old_ones(quantized: Path) -> None:
    with with_pool(quantized, 24, exact_rows=False) as model:
        run(model, TOKENS)  # the copies of the stage too
        assert model.engine is not None
        lending, slots = model.engine.lending, pool_of(model).slots
        before = mx.get_active_memory()
        lending.lend(slots.capacity * slots.pitch)
        more = (slots.num_slots - 24) * slots.pitch
        assert more and abs(mx.get_active_memory() - before - more) < slots.pitch
        lending.end()
        assert abs(mx.get_active_memory() - before) < slots.pitch


@pytest.mark.usefixtures("in_stacks")
def test_stacks_that_get_no_memory_leave_the_model_as_it_began(
    quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(stock(quantized), TOKENS)
    with with_pool(quantized, 24, exact_rows=False) as model:
        assert model.engine is not None
        lending, slots = model.engine.lending, pool_of(model).slots
        lending.lend(4 * slots.pitch)
        run(model, TOKENS)

        def refuse(nbytes: int) -> Arena:
            if nbytes > 24 * slots.pitch:
                raise MemoryError
            return Arena(nbytes)

        monkeypatch.setattr("mlx_flash.memory.arena.Arena", refuse)
        with pytest.raises(MemoryError):
            lending.lend(slots.capacity * slots.pitch)
        assert slots.num_slots == 24 and not lending.nbytes
        check_slots(pool_of(model))
        assert same_bits(run(model, TOKENS), expected)


@pytest.mark.usefixtures("in_stacks")
def test_another_budget_gives_stacks_no_more_slots_than_mlx_can_count(
    quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with with_pool(quantized, 24) as model:
        most_bytes = 20 * max(pool_of(model).layers[0].widths)
    monkeypatch.setattr(expertlayers, "_MOST_ITEMS", most_bytes // 4)
    with with_pool(quantized, 24) as model:
        assert model.engine is not None
        lending, slots = model.engine.lending, pool_of(model).slots
        assert slots.num_slots == slots.capacity < 24
        assert lending.adapt(model.plan, model.plan.budget_bytes + 1) is not None
        assert not lending.nbytes
        lending.end()
        assert slots.num_slots == slots.capacity


@pytest.mark.usefixtures("in_stacks")
def test_bytes_of_stacks_are_compared_with_the_files(quantized: Path) -> None:
    with with_pool(quantized, 24) as model:
        run(model, TOKENS[:1])
        pool = pool_of(model)
        check = ByteCheck()
        assert model.engine is not None
        check.resident(model.engine, model.layout)
        assert check.nbytes and not check.wrong
        expert = int(np.flatnonzero(pool.ready(1) != ABSENT)[0])
        segments, memory = pool.reads((1, expert))
        at = segments[0].pieces[0].buffer_offset
        memory[at : at + 1][0] ^= 1
        check.resident(model.engine, model.layout)
        assert list(check.wrong) == [segments[0].pieces[0].name]


@pytest.mark.parametrize("accepts", [False, True])
def test_slots_of_a_trial_leave_before_the_pool_comes(
    quantized: Path, monkeypatch: pytest.MonkeyPatch, accepts: bool
) -> None:
    """They do not wait for Python's collector: on CUDA they would count against the budget until it comes."""
    left: list[weakref.ref[mx.array]] = []
    found: list[bool] = []

    def tried(self: PooledStacks, stacks: Any, pool: Any, takes: Any = None) -> None:
        init(self, stacks, pool, [accepts or not isinstance(pool.slots, SlotArena)] * len(stacks))

    def view(self: SlotArena, *place: Any) -> mx.array:
        array = real_view(self, *place)
        left.append(weakref.ref(array))
        return array

    def begin(own: Any, self: Any, *args: Any) -> None:
        if left:
            found.append(not any(array() is not None for array in left))
        own(self, *args)

    init, real_view = PooledStacks.__init__, SlotArena.view
    monkeypatch.setattr(PooledStacks, "__init__", tried)
    monkeypatch.setattr(SlotArena, "view", view)
    for kind in (SlotArena, StackArena):
        monkeypatch.setattr(kind, "__init__", partialmethod(partial(begin, kind.__init__)))
    gc.disable()
    try:
        with with_pool(quantized, 24) as model:
            assert isinstance(pool_of(model).slots, SlotArena if accepts else StackArena)
    finally:
        gc.enable()
    assert found == [True]


@pytest.mark.usefixtures("in_stacks")
def test_a_back_end_is_tried_with_few_slots(quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = noted(monkeypatch, expertlayers, "SlotArena", lambda num_slots, *_: num_slots)
    monkeypatch.setattr(expertlayers, "_TRIED_BYTES", 1)
    with with_pool(quantized, 24) as model:
        assert pool_of(model).slots.num_slots == 24
    assert made == [1]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.integers(1, 9), st.lists(st.integers(1, 3000), min_size=1, max_size=5), st.data())
def test_parts_are_rows_of_stacks(num_slots: int, widths: list[int], data: st.DataObject) -> None:
    pitch = -(-sum(widths) // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT + DIRECT_ALIGNMENT
    arena = StackArena(num_slots, pitch, widths)
    views = [arena.view(offset, (width,), mx.uint8) for offset, width in zip(arena.offsets, widths, strict=True)]
    places = [(slot, part) for slot in range(num_slots) for part in range(len(widths))]
    random = np.random.default_rng(num_slots)
    expected = {place: random.bytes(widths[place[1]]) for place in places}
    for slot, part in places:
        arena.part(slot, arena.offsets[part], widths[part])[:] = expected[slot, part]
    for slot, part in places:
        assert bytes(np.array(views[part][slot])) == expected[slot, part]

    nbytes = data.draw(st.integers(1, num_slots * pitch))
    num_head = arena.num_head(nbytes)
    arena.head(num_head).memory[:nbytes] = bytes(nbytes)
    for slot, part in places:
        assert slot < num_head or bytes(np.array(views[part][slot])) == expected[slot, part]

    slot = data.draw(st.integers(0, num_slots - 1))
    arena.fill(slot, 255)
    assert all(bytes(np.array(view[slot])) == b"\xff" * len(view[slot]) for view in views)

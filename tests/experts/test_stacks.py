"""Pools whose slots are rows of stacks, for kernels that take no gaps between experts."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_pools import ARCHITECTURES, QUANTIZED, pool_of, with_pool
from expert_pools import made as made  # a fixture
from mlx_flash.commands.verify import ByteCheck
from mlx_flash.experts import pooledstacks
from mlx_flash.experts.pooledstacks import PooledStacks
from mlx_flash.memory.arena import SlotArena
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT
from mlx_flash.memory.stacks import StackArena
from models import run, same_bits, stock
from models import save as save_tiny
from streamed import streamed_whole
from zoo.compare import LONGEST_CALL, TURNS, find_difference, only, trace

TOKENS = [[(7 * i * i + 3 * i) % 1000] for i in range(24)]


@pytest.fixture
def in_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A back end that computes with contiguous stacks only."""
    real = PooledStacks.__init__

    def init(self: PooledStacks, *args: Any) -> None:
        real(self, *args)
        if isinstance(self.pool.slots, SlotArena):
            self.takes_slots = [False] * len(self.takes_slots)

    monkeypatch.setattr(PooledStacks, "__init__", init)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("quantized"), QUANTIZED, mx.bfloat16, bits=4, header_shift=1)


@pytest.mark.usefixtures("in_stacks")
@pytest.mark.parametrize(("pool_slots", "numbers"), [(9, TURNS[0]), (999, TURNS[1])])
@pytest.mark.parametrize(("name", "variant"), ARCHITECTURES)
def test_experts_in_stacks_stream_exactly(
    made: Any, name: str, variant: str, pool_slots: int, numbers: Sequence[int]
) -> None:
    directory, expected = made(name, variant)
    with streamed_whole(directory, pool_slots=pool_slots, exact_rows=False) as model:
        model.plan = replace(model.plan, prefill_step_size=LONGEST_CALL)
        assert not find_difference(only(numbers, expected), trace(model, numbers=numbers))
        assert model.engine.experts.pool.stats.num_calls


@pytest.mark.usefixtures("in_stacks")
def test_small_calls_compute_from_stacks(quantized: Path) -> None:
    with with_pool(quantized, 24) as model:
        assert isinstance(pool_of(model).slots, StackArena)
        assert same_bits(run(model, TOKENS), run(stock(quantized), TOKENS))
        stats = pool_of(model).stats
        assert not stats.num_full and stats.num_evicted > 20 and stats.num_predicted


@pytest.mark.usefixtures("in_stacks")
def test_bytes_of_stacks_are_compared_with_the_files(quantized: Path) -> None:
    with with_pool(quantized, 24) as model:
        run(model, TOKENS[:1])
        pool = pool_of(model)
        check = ByteCheck()
        assert model.engine is not None
        check.resident(model.engine, model.layout)
        assert check.nbytes and not check.wrong
        expert = int(np.flatnonzero(pool.ready(1))[0])
        segments, memory = pool.reads((1, expert))
        memory[segments[0].pieces[0].buffer_offset] ^= 1
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

    def arena(kind: Any, *args: Any) -> Any:
        if left:
            found.append(not any(array() is not None for array in left))
        return kind(*args)

    init, real_view = PooledStacks.__init__, SlotArena.view
    monkeypatch.setattr(PooledStacks, "__init__", tried)
    monkeypatch.setattr(SlotArena, "view", view)
    monkeypatch.setattr(pooledstacks, "SlotArena", partial(arena, SlotArena))
    monkeypatch.setattr(pooledstacks, "StackArena", partial(arena, StackArena))
    gc.disable()
    try:
        with with_pool(quantized, 24) as model:
            assert isinstance(pool_of(model).slots, SlotArena if accepts else StackArena)
    finally:
        gc.enable()
    assert found == [True]


@pytest.mark.usefixtures("in_stacks")
def test_a_back_end_is_tried_with_few_slots(quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def arena(num_slots: int, *others: Any) -> SlotArena:
        made.append(num_slots)
        return SlotArena(num_slots, *others)

    monkeypatch.setattr(pooledstacks, "SlotArena", arena)
    monkeypatch.setattr(pooledstacks, "_TRIED_BYTES", 1)
    with with_pool(quantized, 24) as model:
        assert pool_of(model).slots.num_slots == 24
    assert made == [1]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.integers(1, 9), st.lists(st.integers(1, 3000), min_size=1, max_size=5), st.data())
def test_parts_are_rows_of_stacks(num_slots: int, widths: list[int], data: st.DataObject) -> None:
    pitch = -(-sum(widths) // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT + DIRECT_ALIGNMENT
    arena = StackArena(num_slots, pitch, widths)
    views = [arena.view(start, (width,), mx.uint8) for start, width in zip(arena.starts, widths, strict=True)]
    places = [(slot, part) for slot in range(num_slots) for part in range(len(widths))]
    random = np.random.default_rng(num_slots)
    expected = {place: random.bytes(widths[place[1]]) for place in places}
    for slot, part in places:
        arena.part(slot, arena.starts[part], widths[part])[:] = expected[slot, part]
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

"""Stacks of experts at their full shape: each expert is read once, in the order of its file, and nothing is lost."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import switch_layers

from expert_pools import check_slots, pool_of, with_pool
from mlx_flash import FlashLLM
from mlx_flash.experts.expertlayers import rows_in_place
from mlx_flash.experts.pool import ABSENT
from mlx_flash.storage.placement import Segment, place
from mlx_flash.storage.prefetcher import BackgroundPrefetcher
from mlx_flash.storage.safetensors import TensorRecord
from models import QWEN3_MOE, same_bits, stock
from noting import noted
from saved_models import model_fixture

NUM_EXPERTS, TOP_K = 16, 2

directory = model_fixture(QWEN3_MOE)


@pytest.fixture(scope="module")
def stacks(directory: Path) -> list[Any]:
    """Those of the stock model."""
    return [layer.mlp.switch_mlp for layer in stock(directory).layers]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "file"
    path.write_bytes(np.random.default_rng(5).bytes(400_000))
    return path


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    start=st.sampled_from([0, 4096, 4098, 12345]),
    sizes=st.lists(st.sampled_from([64, 1000, 4096, 9000]), min_size=1, max_size=3),
    num_rows=st.integers(1, 7),
    apart=st.booleans(),
    alignment=st.sampled_from([1, 16]),
    direct=st.booleans(),
    data=st.data(),
)
def test_rows_are_placed_as_in_the_whole_stack(
    file: Path, start: int, sizes: list[int], num_rows: int, apart: bool, alignment: int, direct: bool, data: Any
) -> None:
    """Stacks of rows that follow each other, or row after row of all stacks."""
    strides = [sum(sizes) if apart else nbytes for nbytes in sizes]
    steps = sizes if apart else [num_rows * nbytes for nbytes in sizes]
    firsts = accumulate(steps[:-1], initial=start)
    rows = [
        [TensorRecord(f"{i}.{k}", "U8", (nbytes,), file, at + k * stride, nbytes) for k in range(num_rows)]
        for i, (at, stride, nbytes) in enumerate(zip(firsts, strides, sizes, strict=True))
    ]
    wanted = sorted(data.draw(st.sets(st.integers(0, num_rows - 1))))
    placement = place(rows, alignment)
    segments = rows_in_place(placement, rows, wanted)
    assert [segment.offset for segment in segments] == sorted(segment.offset for segment in segments)
    pieces = [piece for segment in segments for piece in segment.pieces]
    assert sorted(piece.name for piece in pieces) == sorted(f"{i}.{k}" for i in range(len(sizes)) for k in wanted)
    buffer = memoryview(mmap.mmap(-1, max(1, placement.nbytes)))
    reader = BackgroundPrefetcher([file], direct=direct)
    reader.submit(segments, buffer).wait()
    assert reader.stats.nbytes == len(wanted) * sum(sizes)
    reader.close()
    whole = file.read_bytes()
    for offset, records in zip(placement.offsets, rows, strict=True):
        for k in wanted:
            at = offset + k * records[k].nbytes
            assert bytes(buffer[at : at + records[k].nbytes]) == whole[records[k].offset : records[k].end]


def spy_on(model: FlashLLM, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Segment]]:
    """The reads that are asked for from now on."""
    assert model.engine is not None
    return noted(monkeypatch, model.engine.reader, "submit", lambda segments, *_, **__: segments)


def routing(num_tokens: int, seed: int = 0) -> mx.array:
    """Experts of tokens, some of them far more often than others."""
    skewed = np.random.default_rng(seed).zipf(1.4, (num_tokens, TOP_K)) - 1
    return mx.array(np.minimum(skewed, NUM_EXPERTS - 1).astype(np.uint32))


@pytest.mark.parametrize("pool_slots", [0, 12, 24, 48])
def test_prompt_reads_each_expert_once_in_file_order(
    directory: Path, stacks: list[Any], monkeypatch: pytest.MonkeyPatch, pool_slots: int
) -> None:
    with with_pool(directory, pool_slots, exact_rows=False) as model:
        pool = pool_of(model)
        asked = spy_on(model, monkeypatch)
        x = mx.random.normal((50, 64))
        for layer, seed in ((0, 1), (1, 2), (2, 3), (0, 4)):
            indices = routing(50, seed)
            present = {int(expert) for expert in np.flatnonzero(pool.slot_of[layer] != ABSENT)}
            asked.clear()
            before = pool.stats.read_bytes
            found = model.layout.experts[layer].unit.module(x, indices)
            assert same_bits([found], [stacks[layer](x, indices)])
            needed = set(np.unique(np.array(indices)).tolist())
            rows = [(piece.name, piece.offset) for segments in asked for s in segments for piece in s.pieces]
            assert len(rows) == len(set(rows)) == 3 * len(needed - present)
            for segments in asked:
                offsets = [segment.offset for segment in segments]
                assert offsets == sorted(offsets)
            assert len(asked) == 3
            nbytes = sum(piece.nbytes for segments in asked for s in segments for piece in s.pieces)
            assert pool.stats.read_bytes - before == nbytes
            check_slots(pool)
        assert pool.stats.num_full == pool.stats.num_calls == 4


@pytest.mark.parametrize("exact_rows", [True, False])
def test_prompt_leaves_its_hottest_experts_in_the_pool(
    directory: Path, monkeypatch: pytest.MonkeyPatch, exact_rows: bool
) -> None:
    with with_pool(directory, 36, exact_rows=exact_rows) as model:
        hottest = []
        for layer, stack in enumerate(model.layout.experts):
            indices = routing(60, layer)
            mx.eval(stack.unit.module(mx.random.normal((60, 64)), indices))
            hottest.append(np.argsort(-np.bincount(np.array(indices).ravel(), minlength=NUM_EXPERTS))[:4])
        asked = spy_on(model, monkeypatch)
        hits = pool_of(model).stats.num_hits
        for stack, experts in zip(model.layout.experts, hottest, strict=True):
            mx.eval(stack.unit.module(mx.random.normal((2, 64)), mx.array(experts.reshape(2, 2))))
        assert not asked
        assert pool_of(model).stats.num_hits - hits == 3 * 4


def test_matrices_called_in_another_order_and_twice(
    directory: Path, stacks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reversed_call(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        x, idx, inverse = switch_layers._gather_sort(mx.expand_dims(x, (-2, -3)), indices)
        gate = self.gate_proj(x, idx, sorted_indices=True)
        gate = self.gate_proj(x, idx, sorted_indices=True)
        x = self.down_proj(self.activation(self.up_proj(x, idx, sorted_indices=True), gate), idx, sorted_indices=True)
        return switch_layers._scatter_unsort(x, inverse, indices.shape).squeeze(-2)

    x, indices = mx.random.normal((50, 64)), routing(50)
    expected = [stack(x, indices) for stack in stacks]
    mx.eval(expected)
    for pool_slots in (0, 48):
        with with_pool(directory, pool_slots, exact_rows=False) as model:
            with monkeypatch.context() as patch:
                patch.setattr(switch_layers.SwitchGLU, "__call__", reversed_call)
                for _ in range(2):
                    found = [stack.unit.module(x, indices) for stack in model.layout.experts]
                    assert same_bits(found, expected)
            check_slots(pool_of(model))
            few = [stack.unit.module(x[:9], indices[:9]) for stack in model.layout.experts]
            assert same_bits(few, [stack(x[:9], indices[:9]) for stack in stacks])

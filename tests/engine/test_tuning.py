"""Trials of other ways of reading."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from expert_pools import pooled
from mlx_flash import load_model
from mlx_flash.engine import session, tuning
from mlx_flash.engine.prepare import prepare
from mlx_flash.engine.tuning import ReadTuner
from mlx_flash.storage.ranges import RangeReader, Way
from models import LLAMA, QWEN3_MOE, run, same_bits, save, stock
from streamed import config

WAYS = [Way(4 << 20), Way(4 << 20, direct=False), Way(2 << 20)]


class Disk:
    """Passes whose time depends on the way of reading."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = dict(zip(WAYS, seconds, strict=True))
        self.used: list[Way] = []
        self.tuner = ReadTuner(lambda: WAYS, self.used.append)

    def run(self, num_passes: int, factor: float = 1.0) -> None:
        for _ in range(num_passes):
            self.tuner.begin(may_try=True)
            self.tuner.end(self.seconds[self.used[-1]] * factor, 0.0, 1)


@given(st.permutations([1.0, 1.2, 1.5]))
def test_the_fastest_way_is_found_and_kept(seconds: list[float]) -> None:
    disk = Disk(seconds)
    disk.run(120)
    assert disk.tuner.way == WAYS[seconds.index(1.0)]


@given(st.integers(0, 99))
def test_passes_that_differ_by_chance_or_by_a_trend_change_nothing(seed: int) -> None:
    rng, disk = np.random.default_rng(seed), Disk([1.0, 1.0, 1.0])
    for i in range(400):
        disk.run(1, (1 + i / 400) * rng.uniform(0.98, 1.02))
    assert disk.tuner.way == WAYS[0]


def test_trials_become_rare_until_the_disk_changes() -> None:
    disk = Disk([1.0, 1.3, 1.3])
    disk.run(1000)
    assert [i for i, way in enumerate(disk.used) if way != WAYS[0]] == [2, 3, 36, 69, 134, 199, 328, 457, 714, 971]
    disk.seconds[WAYS[1]] = 0.5
    disk.run(600)
    assert disk.tuner.way == WAYS[1]


def test_lost_trials_take_a_pass_each() -> None:
    disk = Disk([1.0, 3.0, 3.0])
    disk.run(36)
    assert [i for i, way in enumerate(disk.used) if way != WAYS[0]] == [2, 3]
    disk.run(64)
    assert sum(way != WAYS[0] for way in disk.used) == 4


@pytest.mark.parametrize("best", [1, 2])
def test_the_best_way_is_found_in_the_first_passes(best: int) -> None:
    disk = Disk([1.0, 1.0, 1.0])
    disk.seconds[WAYS[best]] = 0.7
    disk.run(7)
    assert disk.tuner.way == WAYS[best]
    disk.run(200)
    assert disk.tuner.way == WAYS[best]


def test_a_slow_first_pass_decides_nothing() -> None:
    disk = Disk([1.0, 1.0, 1.0])
    disk.run(2, 3.0)
    disk.run(300)
    assert disk.tuner.way == WAYS[0]


def test_a_trial_that_waits_too_long_is_given_up_within_its_pass() -> None:
    disk = Disk([1.0, 1.0, 1.0])
    for _ in range(2):  # which wait a fifth of their time
        disk.tuner.begin(may_try=True)
        disk.tuner.waited(0.5)
        disk.tuner.end(1.0, 0.2, 1)
    disk.tuner.begin(may_try=True)
    disk.tuner.waited(0.25)  # 0.9 s, the time to win in, without 0.8 of the computing: 0.26 s
    assert disk.used[-1] == WAYS[1]
    disk.tuner.waited(0.27)
    assert disk.used[-1] == WAYS[0]
    disk.tuner.end(0.5, 0.27, 1)  # how fast the rest was says nothing of the other way
    disk.tuner.begin(may_try=True)
    assert disk.used[-1] == WAYS[2]


def test_passes_of_another_kind_begin_a_trial_anew() -> None:
    disk = Disk([1.0, 0.5, 0.5])
    disk.run(2)
    for _ in range(20):  # calls of one and of two sequences in turn
        disk.run(1)
        disk.tuner.begin(may_try=True)
        disk.tuner.end(9.0, 0.0, 2)
    assert disk.tuner.way == WAYS[0]
    disk.run(30)
    assert disk.tuner.way != WAYS[0]


@given(st.lists(st.sampled_from(["decode", "shared", "failed"]), min_size=200, max_size=300))
def test_only_passes_that_are_compared_read_in_another_way(kinds: list[str]) -> None:
    disk = Disk([1.0, 1.3, 1.3])
    for kind in kinds:
        if kind == "decode":
            disk.run(1)
        else:  # whose time is not told
            disk.tuner.begin(may_try=False)
            assert disk.used[-1] == disk.tuner.way == WAYS[0]


def test_sequences_that_share_passes_are_read_in_the_usual_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_FIRST_TRIALS", 0)  # whose result depends on the disk
    directory = save(tmp_path / "model", LLAMA, mx.float32)
    with load_model(directory, config(io="auto", ram_budget_gb="min", num_slots=2))[0] as model:
        model.start()
        assert model.engine is not None
        usual, used = model.engine.reader.way, set()
        run(model, [[i] for i in range(1 + tuning._TRIAL_PASSES)])  # from now on a trial is due
        model.plan = replace(model.plan, budget_bytes=10**10)
        caches = [make_prompt_cache(model) for _ in range(2)]
        for number in range(20):
            rows = [model.row(mx.array([[number]]), cache, 2048) for cache in caches]
            before = model.counters.num_passes
            model.advance(rows)
            assert model.counters.num_passes == before + 1
            used.add(model.engine.reader.way)
        assert used == {usual}


@pytest.mark.parametrize("io", ["auto", "direct"])
def test_a_model_reads_through_the_page_cache_where_direct_reads_are_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, io: Any
) -> None:
    def slow(self: RangeReader, *args: Any) -> None:
        time.sleep(0.01)
        real(self, *args)

    real = RangeReader._read_direct
    monkeypatch.setattr(RangeReader, "_read_direct", slow)
    monkeypatch.setattr("mlx_flash.engine.session._spare_memory", lambda budget: 0)
    monkeypatch.setattr(tuning, "_PASSES_BETWEEN", 1)
    directory = save(tmp_path / "model", LLAMA, mx.float32)
    tokens = [[i] for i in range(16)]
    with load_model(directory, config(io=io, ram_budget_gb="min", num_slots=2))[0] as model:
        assert same_bits(run(model, tokens), run(stock(directory), tokens))
        assert model.engine is not None
        reader = model.engine.reader
        assert reader.is_direct and reader.way.direct == (io == "direct")


def test_a_model_copies_less_from_the_page_cache_where_that_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(self: RangeReader, *args: Any) -> None:
        time.sleep(0.01)
        real(self, *args)

    real = RangeReader._read_buffered
    monkeypatch.setattr(RangeReader, "_read_buffered", slow)
    monkeypatch.setattr("mlx_flash.engine.session._spare_memory", lambda budget: 1 << 40)
    directory = save(tmp_path / "model", LLAMA, mx.float32)
    tokens = [[i] for i in range(12)]
    with load_model(directory, config(io="auto", ram_budget_gb="min", num_slots=2))[0] as model:
        assert same_bits(run(model, tokens), run(stock(directory), tokens))
        assert model.engine is not None
        assert model.engine.reader.cached.share == 1
        assert model.engine.reader.way.cached < 1


@pytest.mark.parametrize("settings", [{}, {"queue_depth": 8}, {"io": "direct"}])
def test_few_threads_read_experts_that_the_page_cache_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    flash, planned = config(**{"io": "auto", **settings}), (1 << 20, 8)
    prepared = prepare(save(tmp_path / "model", QWEN3_MOE, mx.float32), flash)
    plan = pooled(prepared.plan, prepared.layout, 6, "resident")
    prepared = replace(prepared, plan=replace(plan, read_size=planned[0], queue_depth=planned[1]))
    for room, expected in ((1 << 40, planned if settings else (2 << 20, 4)), (0, planned)):
        monkeypatch.setattr(session, "_spare_memory", lambda budget, room=room: room)
        reader = session._reader(prepared, flash)
        reader.close()
        assert (reader.read_size, reader.queue_depth) == expected


def test_reads_of_cached_experts_take_no_more_memory() -> None:
    assert session.cached_reads(4 << 20, 8) == (4 << 20, 4)
    assert session.cached_reads(1 << 20, 4) == (1 << 20, 4)

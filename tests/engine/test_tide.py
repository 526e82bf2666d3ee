"""The budget that follows the machine's free memory: it falls at once, rises late, and does not swing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, count
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

import children
from mlx_flash import FlashConfig, load_model
from mlx_flash import telemetry as facts
from mlx_flash.engine.lifecycle import CALM_SECONDS, DEADBAND, HIGH_PRESSURE, ModelManager, Watcher
from mlx_flash.memory import footprint as footprint_module
from mlx_flash.memory.footprint import MemoryReading, darwin_reading, read_memory
from mlx_flash.memory.pagecache import linux_pressure
from mlx_flash.monitor.frames import budget_change
from mlx_flash.telemetry import budget_of
from models import LLAMA, same_bits, save
from waiting import eventually

GB = 10**9
TOTAL = 16 * GB

free = st.integers(0, TOTAL)
pressures = st.sampled_from([0.0, 0.0, 0.0, 0.05, 0.5])


class FakeManager:
    """A manager whose models take any budget above the least."""

    def __init__(self, budget: int, least_budget: int = 0) -> None:
        self.budget_bytes, self.least_budget = budget, least_budget
        self.changes: list[int] = []

    def set_ram_budget(self, ram_budget_gb: float, reason: str) -> None:
        self.budget_bytes = round(ram_budget_gb * GB)
        self.changes.append(self.budget_bytes)


def watched(
    manager: FakeManager, look: Callable[[], MemoryReading], times: Iterable[int], share: float = 1.0
) -> Iterator[int]:
    """Yield each second of some that a watcher looks at. The process holds a share of its budget."""
    now = 0
    watcher = Watcher(manager, look, lambda: int(share * manager.budget_bytes), lambda: float(now))
    for now in times:
        watcher.look()
        yield now


@settings(max_examples=150, deadline=None)
@given(start=st.integers(1, TOTAL), looks=st.lists(st.tuples(free, pressures, st.integers(1, 40)), max_size=60))
def test_it_falls_at_once_and_rises_after_a_calm_period(start: int, looks: list[tuple[int, float, int]]) -> None:
    manager, readings = FakeManager(start), iter([MemoryReading(TOTAL, *given) for *given, _ in looks])
    rooms, changes, before, last = list[tuple[int, int]](), list[int](), start, MemoryReading(TOTAL, 0)

    def look() -> MemoryReading:
        nonlocal last
        last = next(readings)
        rooms.append((0, last.room(before // 2)))
        return last

    for now in watched(manager, look, accumulate(seconds for *_, seconds in looks), 0.5):
        rooms[-1], budget = (now, rooms[-1][1]), manager.budget_bytes
        if rooms[-1][1] < before * (1 - DEADBAND):
            assert budget <= rooms[-1][1]
        if budget > before:
            assert last.pressure < HIGH_PRESSURE and budget > before * (1 + DEADBAND)
            assert all(budget <= room for at, room in rooms if at > now - CALM_SECONDS)
            assert all(now - at >= CALM_SECONDS for at in changes[-1:])
        changes += [now] * (budget != before)
        before = budget


@given(available=free, budget=st.integers(1, TOTAL))
def test_a_machine_that_does_not_change_ends_the_changes(available: int, budget: int) -> None:
    """The process holds its budget; the rest is what others leave."""
    manager = FakeManager(budget)
    seconds = watched(manager, lambda: MemoryReading(TOTAL, max(0, available - manager.budget_bytes)), range(1, 300))
    assert len({manager.budget_bytes for second in seconds if second >= 200}) == 1


def test_pressure_lowers_the_budget_in_steps() -> None:
    manager = FakeManager(8 * GB)
    list(watched(manager, lambda: MemoryReading(TOTAL, TOTAL, 0.5), range(1, 32)))
    assert manager.changes[0] == 7.2 * GB and len(manager.changes) == 4 and min(manager.changes) > 5 * GB


def beside(manager: FakeManager, hog: Callable[[int], int], seconds: int) -> list[int]:
    """Return the budget after each second on a machine where another program holds some memory."""
    clock = count()
    look = lambda: MemoryReading(TOTAL, TOTAL - hog(next(clock)) - manager.budget_bytes)  # noqa: E731
    return [manager.budget_bytes for _ in watched(manager, look, range(seconds))]


def test_a_hog_is_answered_at_once_and_does_not_swing_the_budget() -> None:
    for period in (1, 50):  # it comes and goes
        manager = FakeManager(12 * GB)
        budgets = beside(manager, lambda now, period=period: 6 * GB * (now // period % 2), 600)
        assert len(manager.changes) == 1 and budgets[-1] == pytest.approx(16 * GB - 6 * GB - 1.6 * GB)
    manager = FakeManager(12 * GB)
    budgets = beside(manager, lambda now: 8 * GB if 10 <= now < 100 else 0, 200)
    assert budgets[9] == 12 * GB and budgets[10] == pytest.approx(6.4 * GB) == budgets[99]
    assert budgets[-1] == pytest.approx(12.8 * GB) and len(manager.changes) == 2
    assert budgets.index(budgets[-1], 100) <= 100 + CALM_SECONDS + 1
    manager = FakeManager(4 * GB, least_budget=GB)
    assert beside(manager, lambda now: TOTAL - manager.budget_bytes, 5)[-1] == GB == min(manager.changes)


def test_it_rises_to_the_least_room_of_each_calm_period() -> None:
    rooms = [*([8 * GB, 6 * GB] * 31), *[int(6.2 * GB)] * 70, *[10 * GB] * 62]
    manager, readings = FakeManager(4 * GB), iter(rooms)
    budgets = [manager.budget_bytes for _ in watched(manager, lambda: seen(next(readings)), range(len(rooms)), 0)]
    assert manager.changes == [6 * GB, 10 * GB] and budgets[131] == 6 * GB


def seen(room: int) -> MemoryReading:
    """Return a look at a machine with so much room for a process that holds nothing."""
    return MemoryReading(TOTAL, room + TOTAL // 10)


def test_pressure_of_linux(tmp_path: Path) -> None:
    text = "some avg10={} avg60=0.00 avg300=0.00 total=1\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=1\n"
    for name, value in (("a", "1.50"), ("b", "12.00")):
        (tmp_path / name).write_text(text.format(value))
    assert linux_pressure([tmp_path / "a", tmp_path / "b", tmp_path / "missing"]) == pytest.approx(0.12)
    assert linux_pressure([tmp_path / "missing"]) == 0.0


def test_memory_of_a_mac() -> None:
    values = {
        "hw.memsize": TOTAL,
        "hw.pagesize": 16384,
        "vm.page_free_count": 1000,
        "vm.page_purgeable_count": 200,
        "vm.page_pageable_external_count": 30,
    }
    for level, pressure in ((1, 0.0), (2, 0.3), (4, 1.0)):
        reading = darwin_reading((values | {"kern.memorystatus_vm_pressure_level": level}).__getitem__)
        assert reading == MemoryReading(TOTAL, 1230 * 16384, pressure)


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_container_is_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    group = groups / "box" if version == 2 else groups / "memory" / "box"
    for folder in (proc, group):
        folder.mkdir(parents=True)
    (proc / "cgroup").write_text("0::/box\n" if version == 2 else "4:memory:/box\n0::/\n")
    (group / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text("3000000\n")
    (group / "memory.stat").write_text("anon 1000000\ntotal_rss 1000000\n")
    monkeypatch.setattr(footprint_module, "_PROC", proc)
    monkeypatch.setattr(footprint_module, "_CGROUPS", groups)
    monkeypatch.setattr("mlx_flash.memory.footprint.PRESSURE", tmp_path / "none")
    if version == 2:
        (group / "memory.pressure").write_text("some avg10=20.00 avg60=0.00 avg300=0.00 total=1\n")
    assert read_memory() == MemoryReading(3_000_000, 2_000_000, 0.2 if version == 2 else 0.0)


def test_a_budget_of_auto_follows_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save(tmp_path, LLAMA, mx.float32)
    room = [math.inf]
    monkeypatch.setattr(MemoryReading, "room", lambda self, held: int(min(room[0], 10 * GB)))
    monkeypatch.setattr("mlx_flash.engine.lifecycle.INTERVAL_SECONDS", 0.02)
    manager = ModelManager.of_process()
    with load_model(saved, FlashConfig(ram_budget_gb="auto"))[0] as model:
        assert model.plan.budget_bytes == 10 * GB
        expected = model(mx.array([[1, 2, 3]]), cache=make_prompt_cache(model))
        mx.eval(expected)
        room[0] = 0
        eventually(lambda: manager.budget_bytes == manager.least_budget)
        assert same_bits([model(mx.array([[1, 2, 3]]), cache=make_prompt_cache(model))], [expected])
        assert model.plan.streaming.num_slots > 0
        told = manager.telemetry()
        assert told["is_auto"] and told["bytes"] == manager.budget_bytes
        assert told["changes"][-1]["before"] == 10 * GB and told["changes"][-1]["reason"] == "others need memory"
    eventually(lambda: manager._watcher is not None and not manager._watcher.is_watching)


WATCHED_IN_A_CHILD = """
import os
from mlx_flash.engine.lifecycle import ModelManager, Watcher

class Manager(ModelManager):
    budget_bytes = 1

Watcher.look = lambda watcher: None
manager = Manager()
manager.watch()
before = manager._watcher
child = os.fork()
manager.watch()
print(manager._watcher is before, manager._watcher.is_watching, flush=True)
if not child:
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_forked_child_has_a_watcher_of_its_own() -> None:
    found = children.run("-c", WATCHED_IN_A_CHILD)
    assert sorted(found.stdout.splitlines()) == [b"False True", b"True True"], found.stderr


def test_the_monitor_shows_the_last_change() -> None:
    change = {"at": time.time() - 12, "before": 4e9, "after": 3.1e9, "reason": "others need memory"}
    state = {"plan": {"budget_bytes": 4e9}, "budget": {"bytes": 3.1e9, "changes": [{}, change]}}
    assert budget_change(state) == "4.00 GB to 3.10 GB 12.0 s ago: others need memory"
    assert budget_of(facts.read(state)) == 3.1e9
    assert not budget_change({**state, "budget": {"changes": []}})

"""What the pool says is in a slot is there, whatever is asked of it in whatever order, and is read once."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from faulty import Disk
from mlx_flash.errors import ClosedError, ReadError
from mlx_flash.experts.pool import ABSENT, Bytes, ExpertPool, PoolLayer
from mlx_flash.memory.arena import SlotArena
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT
from mlx_flash.storage import prefetcher as prefetcher_module
from mlx_flash.storage.placement import place_rows
from mlx_flash.storage.prefetcher import BackgroundPrefetcher
from mlx_flash.storage.safetensors import TensorRecord
from mlx_flash.streaming.stream import POISON
from noting import noted

Experts = list[tuple[int, int]]

STACKED, SINGLE = range(2)
NUM_EXPERTS = (6, 5, 4)
SIZES = ((4096, 8192), (3000, 500, 1100), (700, 5001))
"""Bytes of each tensor of an expert, in each layer."""
CAPACITY = 9
NUM_KEPT = 33
"""Bytes of each expert of the second layer that are in memory always."""


class Checkpoint:
    """A file with three layers of experts: stacks whose rows are whole pages, experts one by one, odd stacks."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "model.safetensors"
        self.path.write_bytes(np.random.default_rng(1).bytes(200_000))
        self.data = self.path.read_bytes()
        self.kept: Bytes = np.arange(NUM_EXPERTS[SINGLE] * NUM_KEPT, dtype=np.uint8).reshape(-1, NUM_KEPT)
        starts = list(accumulate((n * sum(sizes) for n, sizes in zip(NUM_EXPERTS, SIZES, strict=True)), initial=0))
        self.rows = [self._rows(layer, 2 * DIRECT_ALIGNMENT + start) for layer, start in enumerate(starts[:-1])]
        self.layers = []
        for layer, rows in enumerate(self.rows):
            placements = place_rows(rows)
            kept = [(placements.nbytes, self.kept)] if layer == SINGLE else []
            self.layers.append(PoolLayer(placements, kept, sum(SIZES[layer])))

    def _rows(self, layer: int, start: int) -> list[list[TensorRecord]]:
        sizes, count = SIZES[layer], NUM_EXPERTS[layer]
        found = []
        for expert in range(count):
            if layer == SINGLE:
                offsets = [start + expert * sum(sizes) + before for before in accumulate(sizes[:-1], initial=0)]
            else:
                stacks = accumulate((count * nbytes for nbytes in sizes[:-1]), initial=0)
                offsets = [start + stack + expert * nbytes for stack, nbytes in zip(stacks, sizes, strict=True)]
            found.append([self._record(layer, expert, *place) for place in zip(offsets, sizes, strict=True)])
        return found

    def _record(self, layer: int, expert: int, offset: int, nbytes: int) -> TensorRecord:
        return TensorRecord(f"layers.{layer}.experts.{expert}", "U8", (nbytes,), self.path, offset, nbytes)

    def pool(self, num_slots: int, reader: BackgroundPrefetcher, reads_past_cache: int = 0) -> ExpertPool:
        pitch = max(layer.placements.nbytes for layer in self.layers) + 2 * DIRECT_ALIGNMENT
        slots = SlotArena(num_slots, pitch, CAPACITY)
        return ExpertPool(slots, self.layers, reader, poison=True, reads_past_cache=reads_past_cache)

    def expected(self, layer: int, expert: int) -> list[bytes]:
        """The tensors of an expert, and what is in memory always of it."""
        read = [self.data[record.offset : record.end] for record in self.rows[layer][expert]]
        return read + ([self.kept[expert].tobytes()] if layer == SINGLE else [])

    def found(self, pool: ExpertPool, layer: int, expert: int) -> list[bytes]:
        memory = pool.slots.memory(int(pool.slot_of[layer][expert]))
        offsets = [*self.layers[layer].placements.offsets, *(at for at, _ in self.layers[layer].kept)]
        sizes = map(len, self.expected(layer, expert))
        return [bytes(memory[at : at + nbytes]) for at, nbytes in zip(offsets, sizes, strict=False)]

    def fill(self, pool: ExpertPool, layer: int, expert: int) -> None:
        """As the stage does."""
        memory = pool.slots.memory(int(pool.slot_of[layer][expert]))
        for at, part in zip(self.layers[layer].placements.offsets, self.expected(layer, expert), strict=False):
            memory[at : at + len(part)] = part


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp("experts"))


@pytest.fixture
def reader(checkpoint: Checkpoint) -> Iterator[BackgroundPrefetcher]:
    opened = BackgroundPrefetcher([checkpoint.path])
    yield opened
    opened.close()


def resident(pool: ExpertPool) -> Experts:
    tables = enumerate(pool.slot_of)
    return [(layer, int(expert)) for layer, table in tables for expert in np.flatnonzero(table != ABSENT)]


def numbers(experts: Sequence[int]) -> Any:
    return np.array(experts, np.int64)


def in_flight(pool: ExpertPool) -> set[tuple[int, int]]:
    return {(layer, expert) for layer, tickets in enumerate(pool._in_flight) for expert in tickets}


def bring(pool: ExpertPool, layer: int, *experts: int) -> None:
    pool.wait(layer, pool.request(layer, [*experts]))


LAYERS = st.integers(0, 2)
SOME = st.lists(st.integers(0, 5), max_size=6, unique=True)


class Calls(RuleBasedStateMachine):
    """Calls a pool in any order that its users may."""

    checkpoint: Checkpoint

    @initialize(num_slots=st.integers(1, 8))
    def make(self, num_slots: int) -> None:
        self.reader = BackgroundPrefetcher([self.checkpoint.path])
        self.pool = self.checkpoint.pool(num_slots, self.reader)
        self.used: set[int] = set()
        self.cleared: set[int] = set()
        self.held: dict[tuple[int, int], int] = {}
        self.most_bytes = 0

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.close()
            self.reader.close()

    def note_reads(self, before: Experts) -> None:
        self.most_bytes += sum(sum(SIZES[layer]) for layer, _ in set(resident(self.pool)) - set(before))

    def slots(self, layer: int, experts: Sequence[int]) -> dict[tuple[int, int], int]:
        return {(layer, expert): int(self.pool.slot_of[layer][expert]) for expert in experts}

    @rule(layer=LAYERS, experts=SOME, likely=SOME, most=st.integers(0, 4), waits=st.booleans())
    def call(self, layer: int, experts: list[int], likely: list[int], most: int, waits: bool) -> None:
        experts = [e for e in experts if e < NUM_EXPERTS[layer]][: self.pool.num_usable]
        following = (layer + 1) % 3
        likely = [e for e in likely if e < NUM_EXPERTS[following]]
        self.held = {}
        before, hits = resident(self.pool), self.pool.stats.num_hits
        if experts:
            self.pool.use(layer, numbers(experts), numbers([1] * len(experts)), 1)
        late = self.pool.request(layer, experts)
        assert self.pool.stats.num_hits - hits == len(set(before) & {(layer, expert) for expert in experts})
        self.held = self.slots(layer, experts)
        assert set(late) <= set(experts)
        assert ABSENT not in self.held.values()
        self.note_reads(before)
        before, predicted = resident(self.pool), self.pool.stats.num_predicted
        self.pool.read_ahead(following, likely, most)
        new = set(resident(self.pool)) - set(before)
        assert len(new) == self.pool.stats.num_predicted - predicted <= most
        assert {layer for layer, _ in new} <= {following}
        self.note_reads(before)
        if waits:
            self.pool.wait(layer, late)
            for expert in experts:
                assert self.checkpoint.found(self.pool, layer, expert) == self.checkpoint.expected(layer, expert)

    @rule(layer=LAYERS, experts=SOME, needed=SOME, fails=st.booleans())
    def adopt(self, layer: int, experts: list[int], needed: list[int], fails: bool) -> None:
        needed = [e for e in needed if e < NUM_EXPERTS[layer]]
        before = resident(self.pool)
        kept = self.slots(layer, [expert for _, expert in before if (layer, expert) in before and expert in needed])
        absent = [e for e in experts if e < NUM_EXPERTS[layer] and (layer, e) not in before]
        found = self.pool.adopt(layer, absent, self.pool.spared(layer, needed))
        assert list(found) == absent[: len(found)]
        assert found == {expert: int(self.pool.slot_of[layer][expert]) for expert in found}
        assert self.slots(layer, [expert for _, expert in kept]) == kept
        if fails:
            for expert in found:
                self.pool.leave((layer, expert))
        else:
            for expert in found:
                self.checkpoint.fill(self.pool, layer, expert)

    @rule(layer=LAYERS, experts=SOME)
    def drop_unread(self, layer: int, experts: list[int]) -> None:
        self.held = {}
        experts = [e for e in experts if e < NUM_EXPERTS[layer]]
        self.pool.drop_unread(layer, experts)
        assert not {(layer, expert) for expert in experts} & in_flight(self.pool)

    @precondition(lambda self: not self.cleared)
    @rule(share=st.floats(0.1, 1))
    def clear_head(self, share: float) -> None:
        self.held = {}
        num_slots = max(1, int(share * self.pool.slots.num_slots))
        self.pool.clear_head(num_slots)
        self.cleared = set(range(num_slots))

    @precondition(lambda self: self.cleared)
    @rule()
    def restore_head(self) -> None:
        self.pool.restore_head()
        self.cleared = set()

    @precondition(lambda self: self.pool.slots.can_resize and not self.cleared)
    @rule(num_slots=st.integers(1, CAPACITY))
    def resize(self, num_slots: int) -> None:
        self.held = {}
        before, uses = self.slots_by_use(), len(resident(self.pool))
        self.pool.resize(num_slots)
        self.used = {slot for slot in self.used if slot < num_slots}
        after = self.slots_by_use()
        assert set(after) <= set(before) and len(resident(self.pool)) <= min(num_slots, uses)
        if not in_flight(self.pool) and len(before) == uses:  # nothing was in flight: those used most have stayed
            assert sorted(after.values()) == sorted(before.values())[max(0, uses - num_slots) :]

    def slots_by_use(self) -> dict[tuple[int, int], float]:
        there = set(resident(self.pool)) - in_flight(self.pool)
        return {(layer, expert): float(self.pool._uses._sums[layer][expert]) for layer, expert in there}

    @invariant()
    def every_slot_has_one_use(self) -> None:
        if hasattr(self, "pool"):
            taken = [int(self.pool.slot_of[layer][expert]) for layer, expert in resident(self.pool)]
            uses = [*taken, *self.pool._free, *self.cleared]
            assert sorted(uses) == list(range(self.pool.slots.num_slots))
            assert self.pool.num_resident == len(taken) <= self.pool.num_usable
            self.used |= set(taken)
            for slot in self.used - set(taken):
                assert set(bytes(self.pool.slots.memory(slot))) == {POISON}

    @invariant()
    def what_is_there_is_right(self) -> None:
        if hasattr(self, "pool"):
            for layer, expert in set(resident(self.pool)) - in_flight(self.pool):
                assert self.checkpoint.found(self.pool, layer, expert) == self.checkpoint.expected(layer, expert)

    @invariant()
    def experts_are_ready_while_they_have_slots_and_are_not_in_flight(self) -> None:
        if hasattr(self, "pool"):
            ready = [
                (layer, expert) for layer, expert in resident(self.pool) if self.pool._ready[layer][expert] != ABSENT
            ]
            assert set(ready) == set(resident(self.pool)) - in_flight(self.pool)
            for slots, table in zip(self.pool._ready, self.pool.slot_of, strict=True):
                assert all((slots == ABSENT) | (slots == table))

    @rule(layer=LAYERS)
    def look(self, layer: int) -> None:
        """What a call begins with changes as reads end, but not what the call has of it."""
        before = self.pool.ready(layer)
        kept = before.copy()
        self.pool.wait(layer, [expert for of, expert in in_flight(self.pool) if of == layer])
        assert all(before == kept) and all(self.pool.ready(layer) == self.pool.slot_of[layer])

    @invariant()
    def nothing_is_read_twice(self) -> None:
        if hasattr(self, "pool"):
            assert self.reader.stats.nbytes <= self.most_bytes

    @invariant()
    def held_experts_stay(self) -> None:
        if hasattr(self, "pool"):
            for (layer, expert), slot in self.held.items():
                assert self.pool.slot_of[layer][expert] == slot


def test_calls_in_any_order(checkpoint: Checkpoint) -> None:
    Calls.checkpoint = checkpoint
    run_state_machine_as_test(
        Calls, settings=settings(max_examples=40, stateful_step_count=25, deadline=None, derandomize=True)
    )


@pytest.fixture
def started(reader: BackgroundPrefetcher, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict[str, Any]]]:
    """The reads from now on: where each begins in its file, and its options."""
    return noted(monkeypatch, reader, "start", lambda reads, *_, **options: (reads.segments[0].offset, options))


def test_misses_are_read_in_file_order(
    checkpoint: Checkpoint, reader: BackgroundPrefetcher, started: list[tuple[int, dict[str, Any]]]
) -> None:
    bring(checkpoint.pool(6, reader), STACKED, 4, 0, 5, 2)
    offsets = [offset for offset, _ in started]
    assert offsets == sorted(offsets) and len(offsets) == 4
    expected = {"caching": "shared", "urgent": True, "num_threads": None}
    assert all(options == expected for _, options in started)


def test_an_expert_is_cached_when_it_was_read_often(
    checkpoint: Checkpoint, reader: BackgroundPrefetcher, started: list[tuple[int, dict[str, Any]]]
) -> None:
    pool = checkpoint.pool(1, reader, reads_past_cache=2)
    for expert in (0, 1, 0, 0, 1, 0, 1, 2):
        bring(pool, STACKED, expert)
        assert checkpoint.found(pool, STACKED, expert) == checkpoint.expected(STACKED, expert)
    expected = ["none", "none", "none", "none", "shared", "shared", "none"]  # the second 0 0 is one read
    assert [options["caching"] for _, options in started] == expected


def test_limit_of_predicted_experts_holds_over_all_layers(checkpoint: Checkpoint, reader: BackgroundPrefetcher) -> None:
    pool = checkpoint.pool(8, reader)
    pool.read_ahead(0, [5, 3, 1], 2)
    assert resident(pool) == [(0, 3), (0, 5)]
    pool.read_ahead(1, [0, 1], 3)
    assert resident(pool) == [(0, 3), (0, 5), (1, 0)]
    bring(pool, 0, 3, 4)
    assert (pool.stats.num_predicted, pool.stats.num_predicted_right, pool.stats.num_hits) == (3, 1, 1)
    pool.read_ahead(1, [0, 1, 2], 3)
    assert [expert for layer, expert in resident(pool) if layer == 1] == [0, 1, 2]


def test_more_used_experts_evict_less_used_ones(checkpoint: Checkpoint, reader: BackgroundPrefetcher) -> None:
    pool = checkpoint.pool(2, reader)
    pool.use(0, numbers([0, 1]), numbers([9, 1]), 10)
    bring(pool, 0, 0, 1)
    pool.use(1, numbers([2, 3, 4]), numbers([5, 4, 1]), 10)
    pool.clear_head(0)
    found = pool.adopt(1, [2, 3, 4], pool.spared(1, [2, 3, 4]))
    assert list(found) == [2]
    assert resident(pool) == [(0, 0), (1, 2)]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_failing_reads_fail_one_call_only(
    checkpoint: Checkpoint, reader: BackgroundPrefetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that fail later than the first one."""
    pool, first, real, broken = checkpoint.pool(6, reader), checkpoint.rows[STACKED][0][0].offset, os.preadv, [True]

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if any(broken):
            time.sleep(0.1 * (offset != first))
            raise OSError(errno.EACCES, "not now")
        return real(fd, buffers, offset)

    monkeypatch.setattr(prefetcher_module.os, "preadv", preadv)
    with pytest.raises(ReadError, match="not now"):
        bring(pool, 0, 0, 1, 2)
    broken.clear()
    bring(pool, 0, 0, 1, 2)
    assert all(checkpoint.found(pool, 0, expert) == checkpoint.expected(0, expert) for expert in range(3))


def test_arrived_experts_are_used_before_late_ones(
    checkpoint: Checkpoint, reader: BackgroundPrefetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, slow = checkpoint.pool(6, reader), checkpoint.rows[STACKED][2][1]
    gate, real = threading.Event(), os.preadv

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if slow.offset <= offset < slow.end:
            gate.wait(20)
        return real(fd, buffers, offset)

    monkeypatch.setattr(prefetcher_module.os, "preadv", preadv)
    left = pool.request(0, [0, 1, 2])
    while len(left) > 1:
        came = pool.wait_any(0, left)
        assert came and all(checkpoint.found(pool, 0, expert) == checkpoint.expected(0, expert) for expert in came)
        left = [expert for expert in left if expert not in came]
    assert left == [2] and in_flight(pool) == {(0, 2)}
    assert pool.wait_any(0, [2, 0]) == [0]
    gate.set()
    pool.wait(0, left)
    assert pool.wait_any(0, [0, 2]) == [0, 2]
    assert checkpoint.found(pool, 0, 2) == checkpoint.expected(0, 2)


def test_failed_prediction_is_read_again(checkpoint: Checkpoint, reader: BackgroundPrefetcher, disk: Disk) -> None:
    pool = checkpoint.pool(6, reader)
    disk.is_broken = True
    pool.read_ahead(1, [0, 1], 4)
    pool.read_ahead(2, [3], 4)
    for tickets in pool._in_flight:
        for ticket in tickets.values():
            with pytest.raises(ReadError):
                ticket.wait()
    disk.is_broken = False
    bring(pool, 0, 0, 1)
    bring(pool, 1, 0)
    assert checkpoint.found(pool, 1, 0) == checkpoint.expected(1, 0)
    pool.drop_unread(1, [0, 1])
    assert (1, 0) in resident(pool) and (1, 1) not in resident(pool)
    bring(pool, 0, 2, 3, 4)  # (2, 3) never came, and gives way
    bring(pool, 2, 3)
    assert checkpoint.found(pool, 2, 3) == checkpoint.expected(2, 3)


def test_close_with_expert_reads_in_flight(checkpoint: Checkpoint, disk: Disk) -> None:
    reader = BackgroundPrefetcher([checkpoint.path])
    pool = checkpoint.pool(6, reader)
    disk.gate.clear()
    pool.request(0, [0, 1])
    pool.read_ahead(1, [0], 4)
    pool.read_ahead(2, [0, 1], 4)
    closing = threading.Thread(target=pool.close)
    closing.start()
    disk.gate.set()
    closing.join(20)
    assert not closing.is_alive()
    for slot in range(6):
        pool.slots.fill(slot, POISON)
    reader.close()
    assert all(set(bytes(pool.slots.memory(slot))) == {POISON} for slot in range(6))
    with pytest.raises(ClosedError):
        bring(pool, 0, 3)
    assert resident(pool).count((0, 3)) == 0

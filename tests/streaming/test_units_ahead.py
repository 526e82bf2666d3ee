"""A unit may begin before the one before it is computed, whose slot is not refilled meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, make_prompt_cache

import mlx_flash
from expert_pools import with_pool
from mlx_flash import FlashLLM, ReadError, enginethread
from mlx_flash.compat.arrays import address_of, memory_of
from mlx_flash.engine import passes
from mlx_flash.engine.call import Lane, Need, need
from mlx_flash.layout.swap import swap_class
from mlx_flash.memory.driver import has_own_memory
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.storage.prefetcher import Ticket
from mlx_flash.streaming.stream import POISON, StreamedLayer, unit_states
from models import GEMMA3, LLAMA, MAMBA2, QWEN3_MOE, save, stock
from streamed import failing_once, streamed_on_disk, streamed_whole
from streams import FakeReader, FakeTicket, make_stream

LITTLE = {"num_hidden_layers": 3, "vocab_size": 300}
PROMPT = mx.array([5, 17, 290, 3, 42])


@settings(deadline=None, max_examples=150)
@given(
    num_units=st.integers(1, 9),
    num_slots=st.integers(1, 4),
    calls=st.lists(st.tuples(st.integers(0, 8), st.booleans(), st.booleans()), max_size=60),
)
def test_a_slot_keeps_its_weights_until_they_are_used(
    num_units: int, num_slots: int, calls: list[tuple[int, bool, bool]]
) -> None:
    stream, reader, _ = make_stream(num_units, num_slots)
    waiting: dict[int, int] = {}

    def computed(number: int, unit: int) -> None:
        assert waiting.pop(number) == unit
        assert stream.units[unit].slot.arena.memory[0] == unit

    for number, (call, is_ahead, reader.is_quick) in enumerate(calls):
        unit = call % num_units
        stream.acquire(unit)
        assert stream.units[unit].slot.arena.memory[0] == unit
        assert {slot.unit.number for slot in stream._slots if slot.held and slot.unit} <= {unit, *waiting.values()}
        if is_ahead:
            waiting[number] = unit
            stream.release(unit, partial(computed, number, unit))
            assert [*waiting] == [number]
        else:
            stream.release(unit)
            assert not waiting
            assert stream.units[unit].slot.arena.memory[0] == POISON
    stream.release_computed()
    assert not waiting and not stream.holds_units
    stream.close()


def test_the_next_unit_is_acquired_first_only_if_its_weights_come_meanwhile() -> None:
    for is_quick in (False, True):
        stream, reader, _ = make_stream(4, 2)
        events: list[str] = []
        reader.is_quick = is_quick
        stream.acquire(0)
        stream.release(0, partial(events.append, "computed"))
        stream.acquire(1)
        assert events == ([] if is_quick else ["computed"])
        assert unit_states(stream, 0.0)[:2] == (["computing", "resident"] if is_quick else ["done", "computing"])
        stream.release(1)
        assert events == ["computed"]
        assert unit_states(stream, 0.0)[:2] == ["done", "done"]


def test_held_seconds_of_units_that_overlap_are_counted_once() -> None:
    stream, reader, _ = make_stream(4, 4)
    reader.is_quick = True
    with patch("mlx_flash.streaming.stream.time.perf_counter", iter(range(100)).__next__):
        for unit in (0, 1, 2):  # a clock that goes on by one each time it is read
            stream.acquire(unit)
            stream.release(unit, lambda: None)
        stream.release_computed()
        end = stream.units[2].released_at
    assert stream.stats.held_seconds == end


class SlowReads(FakeTicket):
    """Reads that take 30 ms each, on a clock that moves only while something is waited for."""

    now = 0.0

    def __init__(self, reader: FakeReader, unit: int, buffer: memoryview) -> None:
        self.end = max([self.now, *(each.end for each in reader.in_flight)]) + 0.03  # type: ignore[attr-defined]
        super().__init__(reader, unit, buffer)

    def done_by(self, moment: float) -> bool:
        SlowReads.now = max(self.now, min(self.end, moment))
        return self.now >= self.end

    def done(self) -> bool:
        return self.now >= self.end

    def wait(self) -> float:
        self.done_by(math.inf)
        return super().wait()


def test_slots_are_released_early_again_after_a_delay() -> None:
    with patch("streams.FakeTicket", SlowReads), patch("mlx_flash.streaming.stream.time.perf_counter", clock):
        stream, _, _ = make_stream(4, 2)
        stream.computes_ahead = True
        held = []
        for number in range(40):
            before = stream.stats.held_seconds
            for unit in range(4):
                stream.acquire(unit)
                stream.release(unit, partial(wait_until, SlowReads.now + (0.06 if number == 3 else 0.005)))
            stream.release_computed()
            held.append(stream.stats.held_seconds - before)
    assert held[2] == pytest.approx(4 * 0.005)
    assert held[4] > held[2]
    assert held[-1] == pytest.approx(held[2])


def clock() -> float:
    return SlowReads.now


def wait_until(moment: float) -> None:
    SlowReads.now = max(SlowReads.now, moment)


class Attention(nn.Module):
    """A layer that adds rows to its cache."""

    def __call__(self, x: mx.array, cache: KVCache) -> mx.array:
        rows = mx.zeros((1, 2, 4, 8))
        return cache.update_and_fetch(rows, rows)[0] + x[0, 0]


def test_a_unit_adds_to_its_cache_in_place_while_its_input_is_computed() -> None:
    enginethread.run(add_to_a_cache)


def add_to_a_cache() -> None:
    stream, _, _ = make_stream(2, 2)
    stream.computes_ahead = True
    cache, rows = KVCache(), mx.zeros((1, 2, 4, 8))
    cache.update_and_fetch(rows, rows)
    mx.eval(cache.state)
    places = [address_of(memory_of(each)) for each in (cache.keys, cache.values)]
    attention = Attention()
    swap_class(attention, StreamedLayer, (0, stream, Attention, "__call__"))
    x = mx.full((1500, 1500), 1e-3)
    for _ in range(10):
        x = x @ x
    attention(x, cache)
    stream.release_computed()
    assert [address_of(memory_of(each)) for each in (cache.keys, cache.values)] == places
    stream.close()


def test_a_failed_computation_leaves_its_slot_to_the_recovery() -> None:
    """And the other slots to their units."""
    stream, _, _ = make_stream(3, 3)
    for unit in range(3):
        stream.acquire(unit)
        stream.release(unit)
    stream.acquire(0)
    stream.release(0, raise_error)
    with pytest.raises(RuntimeError):
        stream.acquire(1)
    assert stream.holds_units
    stream.recover()
    assert not stream.holds_units and [unit.is_in_slot for unit in stream.units] == [False, True, True]
    stream.acquire(0)
    stream.release(0)


def raise_error() -> None:
    raise RuntimeError


@contextmanager
def recorded(model: FlashLLM, *, is_quick: bool) -> Iterator[list[str]]:
    """Yield what happens to units: their numbers as they are acquired, "ahead" or "computed" as they are released.

    Reads end before the unit before theirs is computed, or not.
    """
    model.start()
    stream, events = model.engine.stream, list[str]()  # type: ignore[union-attr]
    acquire, release, done_by = stream.acquire, stream.release, Ticket.done_by

    def acquiring(index: int, inputs: Sequence[mx.array] = ()) -> None:
        events.append(str(index))
        acquire(index, inputs)

    def releasing(index: int, wait: Callable[[], None] | None = None) -> None:
        events.append("computed" if wait is None else "ahead")
        release(index, wait)

    def ended(ticket: Ticket, moment: float) -> bool:
        return is_quick and done_by(ticket, math.inf)

    with (
        patch.object(stream, "acquire", acquiring),
        patch.object(stream, "release", releasing),
        patch.object(Ticket, "done_by", ended),
    ):
        yield events


def opened(name: str, folder: Path) -> FlashLLM:
    if name == "on disk":
        return streamed_on_disk(folder, speculation=False)
    return (
        with_pool(folder, 6, "streamed", speculation=False)
        if name == "pool of experts"
        else streamed_whole(folder, tile_rows=128, speculation=False)
    )


KINDS: dict[str, dict[str, Any]] = {"dense": LLAMA, "sliding window": GEMMA3, "recurrent": MAMBA2, "mixture": QWEN3_MOE}
KINDS |= {"on disk": LLAMA, "pool of experts": QWEN3_MOE}


@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_those_of_mlx_lm(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path / "model", KINDS[name] | LITTLE, mx.float32)
    expected = [token for token, _ in mlx_flash.generate_step(PROMPT, stock(folder), max_tokens=12)]
    with opened(name, folder) as model:
        for is_quick in (True, False):
            with recorded(model, is_quick=is_quick) as events:
                steps = mlx_flash.generate_step(PROMPT, model, max_tokens=12)
                tokens = [next(steps)[0]]
                assert "ahead" not in events[: events.index("computed") + 1]  # a prompt of several tokens
                tokens += [token for token, _ in steps]
                stream = model.engine.stream  # type: ignore[union-attr]
                assert not stream.holds_units and not stream.computes_ahead
            assert tokens == expected
            assert ("ahead" in events) == (name not in ("on disk", "pool of experts") and not has_own_memory())


def test_a_token_for_which_caches_grow_is_computed_unit_by_unit(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", LLAMA | LITTLE, mx.float32)
    with streamed_whole(folder, speculation=False) as model, recorded(model, is_quick=True) as events:
        steps = mlx_flash.generate_step(mx.arange(250), model, max_tokens=12)
        next(steps)
        found = []
        for _ in steps:
            found.append("ahead" in events)
            events.clear()
    assert found.count(False) == (1 if not has_own_memory() else len(found))


@pytest.mark.skipif(has_own_memory(), reason="no unit is ahead")
def test_without_room_for_two_layers_units_are_computed_one_by_one(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", LLAMA | LITTLE, mx.float32)
    with streamed_whole(folder, speculation=False) as model, recorded(model, is_quick=True) as events:
        steps = mlx_flash.generate_step(PROMPT, model, max_tokens=12)
        next(steps), next(steps)
        for missing in (0, 1):

            def short(plan: ResidencyPlan, lanes: list[Lane], waiting: int, missing: int = missing) -> Need:
                found = need(plan, lanes, waiting)
                of_a_layer = plan.ledger.of_a_layer(lanes[0].tokens)
                return replace(found, plan=replace(plan, budget_bytes=found.total + of_a_layer - missing))

            with patch.object(passes, "need", short):
                events.clear()
                next(steps)
            assert ("ahead" in events) == (not missing)


def test_an_interrupted_pass_waits_for_what_it_has_begun(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", LLAMA | LITTLE, mx.float32)
    model, cache = streamed_whole(folder), make_prompt_cache(reference := stock(folder))
    with model, recorded(model, is_quick=True) as events:
        own = model.make_cache()
        for each, its in ((model, own), (reference, cache)):
            mx.eval(each(PROMPT[None], cache=its))
        stream = model.engine.stream  # type: ignore[union-attr]
        for number in range(1, len(stream.units)):
            with failing_once(model, number), pytest.raises(ReadError):
                mx.eval(model(mx.array([[7]]), cache=own))
            assert not stream.holds_units
        assert mx.array_equal(model(mx.array([[7]]), cache=own), reference(mx.array([[7]]), cache=cache))
    assert "ahead" in events or has_own_memory()

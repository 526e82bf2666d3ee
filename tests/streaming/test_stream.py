"""The ring never shows a unit another unit's weights, whatever is called in whatever order."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_flash.errors import ClosedError, ReadError
from mlx_flash.streaming.stream import take_turns
from streams import make_stream


@settings(deadline=None, max_examples=60)
@given(num_units=st.integers(1, 9), num_slots=st.integers(1, 4), num_passes=st.integers(2, 5))
def test_a_cycle_is_predicted_and_every_byte_read_once(num_units: int, num_slots: int, num_passes: int) -> None:
    stream, reader, _ = make_stream(num_units, num_slots)
    for _ in range(num_passes):
        for unit in range(num_units):
            stream.acquire(unit)
            stream.release(unit)
    assert stream.stats.num_unpredicted == 0
    assert reader.num_started == num_passes * num_units + min(num_slots, num_units)


@given(num_units=st.integers(0, 60), num_slots=st.integers(1, 6))
def test_neighbours_are_in_different_slots(num_units: int, num_slots: int) -> None:
    turns = take_turns(num_units, num_slots)
    assert len(turns) == num_units
    assert set(turns) == set(range(min(num_units, num_slots)))
    if num_units >= (num_slots - 1) ** 2 + num_slots:
        for distance in range(1, num_slots - 1):
            assert all(turns[i] != turns[(i + distance) % num_units] for i in range(num_units))


def test_another_order_is_learned_in_one_pass() -> None:
    order = [0, 1, 3, 4, 2]  # in the order of the units, three of them would be read on demand in every pass
    stream, _, _ = make_stream(5, 2)
    unpredicted = []
    for _ in range(5):
        before = stream.stats.num_unpredicted
        for unit in order:
            stream.acquire(unit)
            stream.release(unit)
        unpredicted.append(stream.stats.num_unpredicted - before)
    assert unpredicted == [2, 1, 0, 0, 0]  # the second pass begins with what the first one began to read


def test_nothing_writes_to_a_slot_after_the_end() -> None:
    stream, reader, _ = make_stream(5, 2)
    stream.acquire(3)
    assert len(reader.in_flight) == 1  # unit 0 waits in the other slot; that of unit 1 was given to unit 3
    stream.close()
    assert not reader.in_flight


def test_a_failed_read_surfaces_at_acquire_and_can_be_tried_again() -> None:
    stream, reader, arenas = make_stream(4, 2)
    stream.units[0].slot.ticket.wait = Mock(side_effect=ReadError("read ahead"))  # the disk works again since
    stream.acquire(0)
    assert arenas[0].memory[0] == 0 and reader.num_started == 3
    stream.release(0)
    reader.failing.add(1)
    for _ in range(2):
        with pytest.raises(ReadError, match="unit 1"):
            stream.acquire(1)
    reader.failing.clear()
    stream.acquire(1)
    assert arenas[1].memory[0] == 1


def test_a_read_that_cannot_be_started_is_not_taken_for_done() -> None:
    stream, reader, arenas = make_stream(4, 1)
    stream.acquire(0)
    start, reader.start = reader.start, raise_closed  # type: ignore[assignment, method-assign]
    with pytest.raises(ClosedError):
        stream.release(0)
    reader.start = start  # type: ignore[method-assign]
    stream.acquire(1)
    assert arenas[0].memory[0] == 1


def raise_closed(*args: Any, **options: Any) -> None:
    raise ClosedError

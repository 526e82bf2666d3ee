"""Slots, and the arrays that are views of them, are the same memory."""

from __future__ import annotations

import errno
import gc
import math
import mmap
import os
import time
from itertools import count
from typing import NoReturn

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_flash.forks import wait_for_finalizers
from mlx_flash.memory.arena import HUGE_PAGE, Arena, SlotArena, active_memory, commits_lazily, use_huge_pages
from mlx_flash.memory.footprint import footprint, total_memory
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT

DTYPES = [mx.uint8, mx.bfloat16, mx.float32, mx.uint32]


def address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def fill_randomly(arena: SlotArena, seed: int) -> None:
    random = np.random.default_rng(seed)
    for slot in range(arena.num_slots):
        memory = arena.memory(slot)
        memory[:] = random.bytes(len(memory))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    num_slots=st.integers(1, 6),
    num_pages=st.integers(2, 4),
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(1, 9), max_size=3),
    start=st.integers(0, 3000),
)
def test_view_has_a_row_in_each_slot(
    num_slots: int, num_pages: int, dtype: mx.Dtype, shape: list[int], start: int
) -> None:
    arena = SlotArena(num_slots, num_pages * DIRECT_ALIGNMENT)
    nbytes = math.prod(shape) * dtype.size
    offset = min(start, (num_pages - 1) * DIRECT_ALIGNMENT - nbytes) // dtype.size * dtype.size
    view = arena.view(offset, shape, dtype)
    assert view.shape == (num_slots, *shape) and view.dtype == dtype
    fill_randomly(arena, start)
    for slot in range(num_slots):
        memory = arena.memory(slot)
        assert address(memory) % DIRECT_ALIGNMENT == 0
        assert len(memory) == arena.pitch - DIRECT_ALIGNMENT
        row = np.array(mx.contiguous(view[slot]).reshape(-1).view(mx.uint8))
        assert row.tobytes() == bytes(memory[offset : offset + nbytes])


@settings(deadline=None, max_examples=20, derandomize=True)
@given(num_slots=st.integers(1, 5), data=st.data())
def test_head_is_the_memory_of_the_first_slots(num_slots: int, data: st.DataObject) -> None:
    arena = SlotArena(num_slots, 2 * DIRECT_ALIGNMENT)
    num_first = data.draw(st.integers(1, num_slots))
    head = arena.head(num_first)
    assert len(head.memory) == num_first * arena.pitch - DIRECT_ALIGNMENT
    assert address(head.memory) == address(arena.memory(0))
    for slot in range(num_slots):
        arena.fill(slot, 7)
    head.fill(9)
    assert [arena.memory(slot)[0] for slot in range(num_slots)] == [9] * num_first + [7] * (num_slots - num_first)
    assert set(bytes(arena.memory(num_first))) == {7} if num_first < num_slots else True
    view = head.view(DIRECT_ALIGNMENT // 2, (3, 5), mx.float32)
    head.memory[DIRECT_ALIGNMENT // 2 :][:4] = b"\x00\x00\x80\x3f"
    assert view[0, 0].item() == 1.0


@pytest.mark.skipif(not commits_lazily(), reason="needs memory that is committed when it is written to")
@pytest.mark.usefixtures("_no_freed_buffers")
def test_slots_take_memory_when_they_are_used_and_give_it_back() -> None:
    pitch = 4 << 20
    before, active = footprint(), active_memory()
    arena = SlotArena(2, pitch, 1000)
    view = arena.view(0, (pitch // 8,), mx.float32)
    assert view.shape == (1000, pitch // 8)
    assert footprint() - before < 3 * pitch and (active_memory() - active) // pitch == 2
    arena.resize(6)
    assert (active_memory() - active) // pitch == 2  # nothing was written to the new slots
    for slot in (2, 3, 4):
        arena.touch(slot)
        arena.fill(slot, 1)
    assert footprint() - before > 2.9 * pitch and (active_memory() - active) // pitch == 5
    assert bool((view[4].view(mx.uint8) == 1).all())
    arena.resize(1)
    assert footprint() - before < 2 * pitch and (active_memory() - active) // pitch == 1
    assert not bool(view[4].any())
    del arena, view
    gc.collect()
    wait_for_finalizers()
    assert active_memory() == active
    again = SlotArena(1, pitch, 1000)
    assert not any(again.memory(0))  # the same addresses, and nothing of what was there


@pytest.mark.skipif(not commits_lazily(), reason="needs memory that is committed when it is written to")
def test_slots_of_more_experts_than_memory_holds() -> None:
    """Linux refuses a range of addresses that is larger than its memory."""
    pitch = 64 << 20
    arena = SlotArena(2, pitch, 10 * total_memory() // pitch)
    assert arena.can_resize and 2 < arena.capacity <= total_memory() // pitch
    arena.fill(1, 7)
    assert arena.memory(1)[-1] == 7


def test_slots_where_no_addresses_can_be_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    wait_for_finalizers()  # which put the maps of other tests into the list
    monkeypatch.setattr("mlx_flash.memory.arena._idle_maps", [])
    monkeypatch.setattr("mlx_flash.memory.arena.mmap.mmap", refuse)
    arena = SlotArena(2, 8 * DIRECT_ALIGNMENT, 100)
    assert arena.capacity == 2 and not arena.can_resize
    assert arena.view(0, (4,), mx.uint8).shape == (2, 4)


def _growth(memory: memoryview, at: int) -> int:
    before = footprint()
    memory[at] = 1
    return footprint() - before


def _makes_huge_pages() -> bool:
    """Return whether the system makes huge pages now. Under load its memory may be in too small pieces."""
    with mmap.mmap(-1, 16 * HUGE_PAGE) as mapped, memoryview(mapped) as memory:
        use_huge_pages(memory, at_once=False)
        return min(_growth(memory, at * HUGE_PAGE + HUGE_PAGE // 2) for at in range(1, 15)) > HUGE_PAGE // 2


@pytest.mark.skipif(not commits_lazily(), reason="needs memory that is committed when it is written to")
@pytest.mark.parametrize("seconds", [0.0, 1.0], ids=["quick pages", "slow pages"])
@pytest.mark.usefixtures("_no_freed_buffers")
def test_slots_that_are_added_keep_their_bytes(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """They get large pages if these are quick. Trying that overwrites no slot."""
    clock = count(0.0, seconds)
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    pitch = HUGE_PAGE * 3 // 4 // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
    arena, before = SlotArena(2, pitch, 60), footprint()
    arena.resize(60)
    for slot in range(60):
        arena.touch(slot)
        arena.fill(slot, slot + 1)
    assert footprint() - before < arena.committed + HUGE_PAGE
    for slot in range(60):
        assert (np.frombuffer(arena.memory(slot), np.uint8) == slot + 1).all()
    arena.resize(2)
    num_large = 0
    for slot in range(2, 60):
        arena.resize(slot + 1)
        held = footprint()
        arena.touch(slot)
        arena.memory(slot)[pitch // 2] = 1
        num_large += footprint() - held > HUGE_PAGE // 2
    assert num_large <= 20 if seconds else num_large > 20 or not _makes_huge_pages()


@pytest.mark.parametrize("seconds", [0.0, 1.0], ids=["quick pages", "slow pages"])
@pytest.mark.usefixtures("_no_freed_buffers")
def test_memory_that_is_read_once_is_committed_by_reading(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count(0.0, seconds)
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    before, nbytes = footprint(), 64 << 20
    arena = Arena(nbytes, is_read_once=True)
    numbers = arena.view(DIRECT_ALIGNMENT, (1000,), mx.float32)
    if commits_lazily():
        assert footprint() - before < nbytes // 4
        grown = [_growth(arena.memory, at) for at in range(nbytes // 2, nbytes, 4 * HUGE_PAGE)]
        if seconds:
            assert min(grown) <= HUGE_PAGE // 2  # another thread may allocate meanwhile
        else:
            assert max(grown) > HUGE_PAGE // 2 or not _makes_huge_pages()
    arena.memory[DIRECT_ALIGNMENT : DIRECT_ALIGNMENT + 4000] = np.arange(1000, dtype=np.float32).tobytes()
    assert (numbers == mx.arange(1000)).all()
    arena.fill(3)
    assert footprint() - before > nbytes * 3 // 4 and arena.memory[-1] == 3
    del arena
    gc.collect()
    assert len(set(numbers.tolist())) == 1 and numbers[0].item() != 0  # a view keeps the memory
    del numbers
    gc.collect()
    assert footprint() - before < nbytes // 4

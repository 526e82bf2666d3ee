"""Views of recurrent states, which pass to the next call when they are replaced; and caches put back after guesses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache

from mlx_flash.kv.kvledger import KVOptions
from mlx_flash.kv.kvpool import make_caches
from mlx_flash.kv.views import CacheViews, Checkpoints, SharedEntryError
from mlx_flash.layout.reachable import arrays_in


def values(cache: ArraysCache) -> list[int | None]:
    return [None if state is None else int(state.item()) for state in cache.cache]


@pytest.fixture
def entry() -> ArraysCache:
    entry = ArraysCache(2)
    entry[0], entry[1] = mx.array(1), mx.array(2)
    return entry


def test_states_pass_one_by_one(entry: ArraysCache) -> None:
    first, second, third = (views[0] for views in CacheViews([entry], [4, 4, 4]).views)
    assert isinstance(first, ArraysCache) and first.make_mask(4) is None
    first[0] = first[0] + 10
    second[0] = second[0] + 10
    with pytest.raises(SharedEntryError):
        second[1]
    first[1] = first[1] + 10
    assert int(first[1].item()) == 12  # its own, until the next call replaces it
    third[0] = third[0] + 10
    second[1] = second[1] + 10
    third[1] = third[1] + 10
    assert values(entry) == [31, 32]
    for view in (first, second):
        with pytest.raises(SharedEntryError):
            view[0]
        with pytest.raises(SharedEntryError):
            view[1] = mx.array(0)
        with pytest.raises(SharedEntryError):
            view.cache  # noqa: B018
    assert {int(array.item()) for array in arrays_in(third)} == {31, 32}


@pytest.mark.parametrize("num_kept", [0, 1, 2, 3])
@pytest.mark.parametrize("order", ["0a 0b 1a 1b 2a 2b", "0a 1a 0b 1b 2a 2b", "0a 1a 2a 0b 1b 2b"])
def test_calls_are_taken_back(entry: ArraysCache, order: str, num_kept: int) -> None:
    """To the states that the last kept call left, whenever each of them was replaced."""
    checkpoints = Checkpoints()
    views = [views[0] for views in CacheViews([entry], [1, 1, 1], checkpoints.add).views]
    for call, name in order.split():
        views[int(call)]["ab".index(name)] += 10
    checkpoints.take_back(num_kept)
    assert values(entry) == [1 + 10 * num_kept, 2 + 10 * num_kept]


def test_a_state_that_is_replaced_twice_needs_an_order(entry: ArraysCache) -> None:
    """After the observer got it."""
    views = [views[0] for views in CacheViews([entry], [1, 1], Checkpoints().add).views]
    for index in (0, 0, 1):
        views[0][index] = mx.array(5)
    with pytest.raises(SharedEntryError):
        views[0][0] = mx.array(6)
    assert values(entry) == [5, 5]


def pooled() -> Any:
    [entry] = make_caches([KVCache()], KVOptions())
    return entry


def strides(array: mx.array) -> tuple[int, ...]:
    return tuple(memoryview(array).strides or ())


@pytest.mark.parametrize("make", [KVCache, pooled], ids=["mlx-lm's", "ours"])
@pytest.mark.parametrize("kept", range(4))
def test_buffers_that_guesses_made_grow_are_cut(make: Callable[[], Any], kept: int) -> None:
    """On a GPU keys that fill their buffer gave other last bits of attention than keys that do not."""
    guessing, plain, before = make(), make(), Checkpoints()
    rows = mx.random.normal((1, 2, 260, 4))

    def add(entry: Any, start: int, stop: int) -> Any:
        return entry.update_and_fetch(rows[:, :, start:stop], rows[:, :, start:stop])

    for entry in (guessing, plain):
        add(entry, 0, 254)
    for number in range(4):
        before.add(number, guessing, guessing)
        mx.eval(add(guessing, 254 + number, 255 + number))
    before.take_back(kept)
    for number in range(kept):
        add(plain, 254 + number, 255 + number)
    assert guessing.offset == plain.offset == 254 + kept
    for ours, theirs in zip(add(guessing, 254 + kept, 255 + kept), add(plain, 254 + kept, 255 + kept), strict=True):
        mx.eval(ours, theirs)
        assert mx.array_equal(ours, theirs) and strides(ours) == strides(theirs)

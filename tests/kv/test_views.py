"""Views of recurrent states: each passes to the next call when it is replaced, before the layer is done with others."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache

from mlx_flash.kv.checkpoints import Checkpoints
from mlx_flash.kv.views import CacheViews, SharedEntryError
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


def test_states_of_a_new_cache(entry: ArraysCache) -> None:
    entry.cache = [None, None]
    first, second = (views[0] for views in CacheViews([entry], [4, 4]).views)
    assert first[0] is None
    first[0] = mx.array(1)
    with pytest.raises(SharedEntryError):
        second[1]
    assert first[1] is None and int(second[0].item()) == 1


@pytest.mark.parametrize("num_kept", [0, 1, 2, 3])
@pytest.mark.parametrize("order", ["0a 0b 1a 1b 2a 2b", "0a 1a 0b 1b 2a 2b", "0a 1a 2a 0b 1b 2b"])
def test_calls_are_taken_back(entry: ArraysCache, order: str, num_kept: int) -> None:
    """To the states that the last kept call left, whenever each of them was replaced."""
    checkpoints = Checkpoints()
    views = [views[0] for views in CacheViews([entry], [1, 1, 1], checkpoints).views]
    for call, name in order.split():
        views[int(call)]["ab".index(name)] += 10
    checkpoints.take_back(num_kept)
    assert values(entry) == [1 + 10 * num_kept, 2 + 10 * num_kept]


def test_a_state_that_is_replaced_twice_needs_an_order(entry: ArraysCache) -> None:
    """After the observer got it."""
    views = [views[0] for views in CacheViews([entry], [1, 1], Checkpoints()).views]
    for index in (0, 0, 1):
        views[0][index] = mx.array(5)
    with pytest.raises(SharedEntryError):
        views[0][0] = mx.array(6)
    assert values(entry) == [5, 5]

"""Caches that are put back after guesses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlx_flash.kv.checkpoints import Checkpoints
from mlx_flash.kv.diskcache import make_caches
from mlx_flash.kv.kvledger import KVOptions


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

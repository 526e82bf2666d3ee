"""Copies of a cache are whole, right whatever the others do, and share pages on disk."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from interrupt_points import Tracer
from kv_settings import adding, equal, little_under_way, offload_all, rows_of
from mlx_flash.kv.diskcache import make_caches
from mlx_flash.kv.kvledger import KVOptions
from mlx_flash.kv.kvpool import KVPool
from mlx_flash.layout.reachable import nbytes_in
from waiting import eventually

LAYERS = 4
TOKEN_BYTES = 2 * 2 * 32 * 2
"""Bytes of a token in a layer: keys and values of two heads of 32 numbers of 16 bits."""


__all__ = ["little_under_way"]


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., KVOptions]:
    return lambda **settings: KVOptions(directory=tmp_path / "kv", **settings)


class Conversation:
    """Caches of some layers, and mlx-lm's own, given the same."""

    def __init__(self, pool: KVPool, mine: list[Any] | None = None, theirs: list[Any] | None = None) -> None:
        self.pool = pool
        self.theirs: list[Any] = theirs or [KVCache() for _ in range(LAYERS)]
        self.mine: list[Any] = mine or make_caches(self.theirs, pool.options, pool)

    def feed(self, seed: int, length: int) -> None:
        if (limit := self.pool.budget_bytes) is not None:
            assert not self.pool.admit(adding(self.mine, length, length, TOKEN_BYTES), limit)
        for index, caches in enumerate(zip(self.mine, self.theirs, strict=True)):
            rows = rows_of(100 * seed + index, length, mx.float16), rows_of(100 * seed + index + 50, length, mx.float16)
            found = [cache.update_and_fetch(*rows) for cache in caches]
            assert equal(found[0], found[1])
        del found
        mx.synchronize()  # a GPU lets go of buffers some time after it has computed, and MLX copies them until then

    def copy(self, length: int | None = None) -> Conversation:
        """As mlx-lm's server has one: another list, cut."""
        other = Conversation(self.pool, copy.deepcopy(self.mine), copy.deepcopy(self.theirs))
        for entry in (*other.mine, *other.theirs) if length is not None else ():
            entry.trim(entry.offset - length)
        return other

    def check(self) -> None:
        for mine, theirs in zip(self.mine, self.theirs, strict=True):
            assert mine.offset == theirs.offset
            assert equal(mine.keys_and_values(), theirs.keys_and_values())


def test_copies_of_layers_on_disk_share_pages(options: Callable[..., KVOptions]) -> None:
    pool = KVPool(options(step=16))
    first = Conversation(pool)
    first.feed(0, 1000)
    offload_all(pool)
    conversations = [first, *(first.copy(length) for length in (1000, 900, 333))]
    for seed, conversation in enumerate(conversations, 1):
        conversation.feed(seed, 40)
    usage = pool.note()
    assert usage.disk_bytes == usage.written_bytes
    assert 1000 <= usage.disk_bytes / TOKEN_BYTES / LAYERS <= 1000 + 4 * 40 + 3 * 16, "and what does not fill a page"
    for conversation in conversations:
        conversation.check()
    del first, conversation, conversations[:3]
    gc.collect()
    conversations[0].feed(9, 16)
    assert pool.note().disk_bytes <= (333 + 40 + 16) * TOKEN_BYTES * LAYERS
    conversations[0].check()


@pytest.mark.parametrize("goes_to_disk", [False, True])
def test_shallow_copies_count_and_go_on_by_themselves(goes_to_disk: bool, options: Callable[..., KVOptions]) -> None:
    pool = KVPool(options(step=16))
    first = Conversation(pool)
    first.feed(0, 40)
    if goes_to_disk:
        offload_all(pool)
    second = Conversation(pool, [copy.copy(entry) for entry in first.mine], copy.deepcopy(first.theirs))
    assert {*pool.layers} == {*first.mine, *second.mine}
    third = second.copy()
    for seed, conversation in enumerate([first, second, third], 1):
        conversation.feed(seed, 20)
    for conversation in (first, second, third):
        conversation.check()


@pytest.mark.parametrize("times", [1.0, 1.6, 6.0])
def test_the_budget_holds_while_conversations_take_turns(times: float, options: Callable[..., KVOptions]) -> None:
    budget = int(times * 900 * TOKEN_BYTES * LAYERS) + 200_000
    pool = KVPool(options(step=16, budget_bytes=budget))
    first = Conversation(pool)
    first.feed(0, 600)
    conversations = [first]
    for seed in range(1, 30):
        if seed in (1, 4, 9):
            conversations.append(conversations[-1].copy(600 - 5 * seed))
            assert pool.memory_bytes <= budget
        conversations[seed % len(conversations)].feed(seed, 7)
        assert pool.memory_bytes <= budget
    for conversation in conversations:
        conversation.check()
    assert bool(pool.note().num_offloaded) == (times < 6.0)


@pytest.mark.parametrize("entry", [KVCache, lambda: QuantizedKVCache(32, 4)])
@pytest.mark.parametrize("goes_to_disk", [False, True])
def test_replaced_rows_are_not_shared(
    entry: Any, goes_to_disk: bool, options: Callable[..., KVOptions], tmp_path: Path
) -> None:
    pool = KVPool(options(step=16))
    rows = rows_of(0, 100, mx.float16)
    theirs = [entry()]
    theirs[0].update_and_fetch(rows, rows)
    copies: list[list[Any]] = [make_caches(theirs, pool.options, pool)]
    copies += [copy.deepcopy(copies[0]) for _ in range(3)]
    before = copies[0][0].keys_and_values()
    doubled = tree_map(lambda array: array + array, before)
    for caches in copies[:2]:
        caches[0].state = (*doubled, *caches[0].state[2:])
    if goes_to_disk:
        offload_all(pool)
    for caches, expected in zip(copies, (doubled, doubled, before, before), strict=True):
        assert equal(caches[0].keys_and_values(), expected)
        caches[0].state = (*before, *caches[0].state[2:])
        assert not caches[0].is_on_disk and equal(caches[0].keys_and_values(), before)
    eventually(lambda: not [*tmp_path.rglob("*.kv")])


def test_an_interrupt_leaves_a_cache_in_memory_or_on_disk(options: Callable[..., KVOptions]) -> None:
    """With all of its tokens, and all of its buffers counted. The class of the object says where they are."""
    pool, number, ends = KVPool(options(step=16)), 0, set[bool]()
    first = Conversation(pool)
    first.feed(0, 40)
    while True:
        copied = first.copy()
        strike = Tracer(number, ["kv/kvpool.py", "kv/disk.py"])
        is_struck = strike.strike(copied.mine[0].offload)
        ends.add(copied.mine[0].is_on_disk)
        assert pool.note().reserved_bytes == sum(map(nbytes_in, pool.layers)) + pool.ring.nbytes
        copied.feed(1, 3)
        copied.check()
        if not is_struck:
            break
        number += 1
    assert number > 20 and ends == {False, True}


def test_an_interrupt_leaves_tokens_on_disk_that_are_right(options: Callable[..., KVOptions]) -> None:
    pool, number, rows = KVPool(options(step=16)), 0, (rows_of(1, 30, mx.float16), rows_of(2, 30, mx.float16))
    first = Conversation(pool)
    first.feed(0, 40)
    expected = copy.deepcopy(first.theirs[0]).update_and_fetch(*rows)
    offload_all(pool)
    while True:
        layer = copy.copy(first.mine[0])
        strike = Tracer(number, ["kv/kvpool.py", "kv/disk.py"])
        is_struck = strike.strike(lambda layer=layer: (layer.update_and_fetch(*rows), layer.trim(35)))
        length = layer.offset
        assert equal(layer.keys_and_values(), [part[..., :length, :] for part in expected]), strike.where
        if not is_struck:
            break
        number += 1
    assert length == 35 and number > 100

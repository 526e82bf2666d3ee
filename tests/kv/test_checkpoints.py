"""Interrupts while guessed tokens are taken back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    trim_prompt_cache,
)

from interrupting import Strike
from mlx_flash.engine.pending import Pending
from mlx_flash.engine.pending import settle as settle_all
from mlx_flash.errors import CacheError, ReadError
from mlx_flash.kv.checkpoints import Checkpoints
from mlx_flash.kv.diskcache import make_caches
from mlx_flash.kv.options import KVOptions


def add_tokens(cache: list[KVCache], number: int) -> None:
    for entry in cache:
        entry.update_and_fetch(mx.zeros((1, 1, number, 4)), mx.zeros((1, 1, number, 4)))


def guessed() -> tuple[list[KVCache], Checkpoints]:
    """Return the entries of a cache with five tokens and three guesses, and the checkpoints before each of these."""
    cache, before = [KVCache() for _ in range(3)], Checkpoints()
    add_tokens(cache, 5)
    for number in range(3):
        for entry in cache:
            before.add(number, entry, entry)
        add_tokens(cache, 1)
    return cache, before


@pytest.mark.parametrize("difference", [-2, 1])
def test_interrupt_of_settling_leaves_a_cache_owed_or_settled(difference: int) -> None:
    """It left the entries as if nothing were owed, or as if guesses were tokens."""
    cache, before = guessed()
    uses = 0

    def settle() -> None:
        nonlocal uses
        uses += 1
        if uses == 1:
            raise KeyboardInterrupt
        before.take_back(1) if difference < 0 else add_tokens(cache, 1)

    pending = Pending(cache, difference, settle)
    pending.put()
    with pytest.raises(KeyboardInterrupt):
        pending.settle()
    assert [entry.keys.shape[1] for entry in cache] == [1, 1, 1]  # a use settles what is left
    assert [entry.offset for entry in cache] == [6 if difference < 0 else 9] * 3


@pytest.mark.parametrize("difference", [-2, 1])
@pytest.mark.parametrize("when", ["before", "after"])
def test_two_interrupts_of_settling_lose_nothing(difference: int, when: str) -> None:
    """The second one comes at any instruction of what handles the first: the next call settles the rest."""
    handlers = [Pending.settle, Pending._settle_all, Pending.lift, Pending._lift, Pending.put, Pending.mark]
    at = 0
    while True:
        cache, before = guessed()
        uses = iter(range(100))

        def settle(cache: list[KVCache] = cache, before: Checkpoints = before, uses: Iterator[int] = uses) -> None:
            is_first = next(uses) == 0
            if is_first and when == "before":
                raise KeyboardInterrupt
            if cache[0].offset != (6 if difference < 0 else 9):
                before.take_back(1) if difference < 0 else add_tokens(cache, 1)
            if is_first:
                raise KeyboardInterrupt

        pending = Pending(cache, difference, settle)
        pending.put()
        strike = Strike(handlers, at)
        with pytest.raises(KeyboardInterrupt), strike:
            pending.settle()
        with suppress(KeyboardInterrupt):  # if the second one came before the first
            settle_all(cache)
        settle_all(cache)
        assert [entry.offset for entry in cache] == [6 if difference < 0 else 9] * 3, strike.where
        assert {type(entry) for entry in cache} == {KVCache}
        assert not any("pending" in vars(entry) for entry in cache)
        if strike.where is None:
            break
        at += 1
    assert at > 100


def test_an_error_of_settling_leaves_a_cache_owed() -> None:
    """Trimmed then, it got the owed token behind what was left."""
    cache, _ = guessed()
    fails = iter([True, False])

    def settle() -> None:
        if next(fails):
            raise ReadError("a disk that was unplugged")
        add_tokens(cache, 1)

    Pending(cache, 1, settle, 7).put()
    with pytest.raises(ReadError):
        copy.deepcopy(cache)
    assert [entry.offset for entry in cache] == [9, 9, 9]
    assert trim_prompt_cache(cache, 3) == 3
    settle_all(cache)
    assert [entry.offset for entry in cache] == [6, 6, 6]


def filled(kind: Callable[[], Any], number: int) -> Any:
    """Return a cache with some tokens, of any kind that mlx-lm has."""
    entry = kind()
    for token in range(number):
        if isinstance(entry, ArraysCache):
            entry[0] = mx.full((1, 4), token)
        else:
            entry.update_and_fetch(mx.full((1, 1, 1, 64), float(token)), mx.full((1, 1, 1, 64), float(token)))
    return entry


KINDS: dict[str, Callable[[], Any]] = {
    "plain": KVCache,
    "quantized": QuantizedKVCache,
    "states": lambda: ArraysCache(1),
    "window": lambda: RotatingKVCache(8),
    "full window": lambda: RotatingKVCache(3),
    "chunked": lambda: ChunkedKVCache(16),
}


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_a_cache_that_lacks_a_token_are_mlx_lms(kind: str) -> None:
    """The size of states was an AttributeError."""
    entry, other = filled(KINDS[kind], 4), filled(KINDS[kind], 5)
    Pending([entry], 1, lambda: pytest.fail("numbers need no tokens"), 7).put()
    for name in ("size", "empty", "is_trimmable"):
        assert getattr(entry, name)() == getattr(other, name)()
    assert getattr(entry, "offset", None) == getattr(other, "offset", None)
    assert hasattr(entry, "offset") == hasattr(other, "offset")


def test_a_marked_cache_that_was_trimmed_is_refused() -> None:
    """Interrupts may leave the mark without the class that takes the owed token first."""
    cache, _ = guessed()
    Pending(cache, 1, lambda: add_tokens(cache, 1), 7).mark()
    trim_prompt_cache(cache, 2)
    for _ in range(2):
        with pytest.raises(CacheError, match="was trimmed before generate_step ended"):
            settle_all(cache)


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


@pytest.mark.parametrize("make", [KVCache, pooled])
def test_a_copy_of_a_marked_cache_is_refused(make: Callable[[], Any]) -> None:
    """An interrupt may leave the mark without the class that settles the cache before it is copied."""
    cache = [make()]
    add_tokens(cache, 1)
    Pending(cache, 1, lambda: add_tokens(cache, 1), 7).mark()
    copied, later = copy.deepcopy(cache), copy.deepcopy(cache)
    with pytest.raises(CacheError, match="lacks a token"):
        settle_all(copied)
    settle_all(cache)
    with pytest.raises(CacheError, match="lacks a token"):
        settle_all(later)
    settle_all(copy.deepcopy(cache))
    assert cache[0].offset == 2

"""Prompt caches that say more, or less, than they hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
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

from interrupt_points import Tracer
from mlx_flash.errors import CacheError, ReadError
from mlx_flash.kv.kvledger import KVOptions
from mlx_flash.kv.kvpool import make_caches
from mlx_flash.kv.owed import Debt, Owed, owed_to


def add_tokens(cache: list[Any], number: int) -> None:
    for entry in cache:
        entry.update_and_fetch(mx.zeros((1, 1, number, 64)), mx.zeros((1, 1, number, 64)))


def indebted(cache: list[Any], difference: int = 1) -> Owed:
    """Return what is owed to a cache: tokens, or guesses that it has."""
    owed = Owed(cache)

    def settle() -> None:
        owed.lift()
        if difference > 0:
            add_tokens(cache, difference)
        else:
            trim_prompt_cache(cache, -difference)

    owed.owe(Debt(difference, settle, 7))
    return owed


@pytest.mark.parametrize("difference", [-2, 1, 3])
def test_uses_settle_what_is_owed(difference: int) -> None:
    uses: list[Callable[[Any], Any]] = [
        lambda entry: entry.state,
        lambda entry: entry.keys_and_values(),
        copy.copy,
        copy.deepcopy,
        lambda entry: setattr(entry, "values", entry.values),
        lambda entry: type(entry).merge([entry]),
    ]
    for use in uses:
        cache = [KVCache() for _ in range(3)]
        add_tokens(cache, 5)
        indebted(cache, difference)
        assert [entry.offset for entry in cache] == [5 + difference] * 3 and cache[0].size() == 5 + difference
        found = use(cache[1])
        assert {type(entry) for entry in cache} == {KVCache} and [entry.offset for entry in cache] == [
            5 + difference
        ] * 3
        if isinstance(found, KVCache):
            assert type(found) is KVCache and found.keys_and_values()[0].shape[2] == found.offset == 5 + difference


@pytest.mark.parametrize("difference", [-2, 1, 3])
@pytest.mark.parametrize("num_trimmed", [1, 3, 4, 5])
def test_trimmed(difference: int, num_trimmed: int) -> None:
    cache = [KVCache() for _ in range(3)]
    add_tokens(cache, 5)
    indebted(cache, difference)
    expected = max(0, 5 + difference - num_trimmed)
    assert trim_prompt_cache(cache, num_trimmed) == 5 + difference - expected
    assert owed_to(cache) == []
    assert [entry.offset for entry in cache] == [expected] * 3


def test_an_owed_token_that_is_trimmed_is_not_computed() -> None:
    cache = [KVCache() for _ in range(3)]
    add_tokens(cache, 5)
    Owed(cache).owe(Debt(1, lambda: pytest.fail("nobody looks"), 7))
    assert trim_prompt_cache(cache, 0) == 0
    assert trim_prompt_cache(cache, 2) == 2 and [entry.offset for entry in cache] == [4] * 3


def test_an_error_of_settling_leaves_a_cache_owed() -> None:
    """Trimmed then, it got the owed token behind what was left."""
    cache, fails = [KVCache() for _ in range(3)], iter([True])
    add_tokens(cache, 8)

    def settle() -> None:
        if next(fails, False):
            raise ReadError("a disk that was unplugged")
        pytest.fail("the token was trimmed away")

    Owed(cache).owe(Debt(1, settle, 7))
    with pytest.raises(ReadError):
        copy.deepcopy(cache)
    assert [entry.offset for entry in cache] == [9, 9, 9]
    assert trim_prompt_cache(cache, 3) == 3
    assert copy.deepcopy(cache)[0].keys_and_values()[0].shape[2] == 6


def test_a_cache_of_which_some_layers_were_trimmed_is_refused() -> None:
    cache = [KVCache() for _ in range(3)]
    add_tokens(cache, 5)
    indebted(cache)
    cache[0].trim(2)
    for _ in range(2):
        with pytest.raises(CacheError, match="not all of its layers were trimmed"):
            copy.deepcopy(cache)


def test_a_cache_that_lacks_a_token_goes_to_disk(tmp_path: Path) -> None:
    """Another sequence may need the memory meanwhile."""
    cache = make_caches([KVCache() for _ in range(2)], KVOptions(directory=tmp_path))
    add_tokens(cache, 5)
    indebted(cache)
    pool = cache[0].pool
    pool.budget_bytes = 0
    pool.fit(lambda: len(cache) - len(pool.on_disk), 5)
    pool.budget_bytes = None
    assert [(entry.is_on_disk, entry.offset) for entry in cache] == [(True, 6)] * 2
    assert copy.deepcopy(cache)[0].keys_and_values()[0].shape[2] == 6


def test_an_interrupt_leaves_a_cache_right_or_owed() -> None:
    at = 0
    while True:
        cache = [KVCache() for _ in range(2)]
        add_tokens(cache, 5)
        owed, is_computed = Owed(cache), list[bool]()

        def settle(owed: Owed = owed, cache: list[Any] = cache, is_computed: list[bool] = is_computed) -> None:
            owed.lift()
            add_tokens(cache, 1)
            is_computed.append(True)

        strike = Tracer(at, ["kv/owed.py"])
        is_struck = strike.strike(lambda owed=owed, settle=settle: owed.owe(Debt(1, settle, 7)))
        says = {entry.offset for entry in cache}
        assert says == ({6} if owed_to(cache) else {5})
        assert {entry.keys_and_values()[0].shape[2] for entry in cache} == says
        assert bool(is_computed) == (says == {6})
        if not is_struck:
            break
        at += 1
    assert at > 20


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


@pytest.mark.parametrize("kind", [*KINDS, "ours"])
def test_numbers_of_a_cache_that_lacks_a_token_are_mlx_lms(kind: str) -> None:
    """The size of states was an AttributeError."""
    make = KINDS.get(kind, KVCache)
    entry, other = filled(make, 4), filled(make, 5)
    if kind == "ours":
        [entry] = make_caches([entry], KVOptions())
    Owed([entry]).owe(Debt(1, lambda: pytest.fail("numbers need no tokens"), 7))
    for name in ("size", "empty", "is_trimmable"):
        assert getattr(entry, name)() == getattr(other, name)()
    assert entry.nbytes > 0
    assert getattr(entry, "offset", None) == getattr(other, "offset", None)
    assert hasattr(entry, "offset") == hasattr(other, "offset")

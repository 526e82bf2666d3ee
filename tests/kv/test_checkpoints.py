"""Interrupts while guessed tokens are taken back."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlx_flash.engine.pending import Pending
from mlx_flash.kv import checkpoints
from mlx_flash.kv.checkpoints import Checkpoints, trim_to


def add_tokens(cache: list[KVCache], number: int) -> None:
    for entry in cache:
        entry.update_and_fetch(mx.zeros((1, 1, number, 4)), mx.zeros((1, 1, number, 4)))


def guessed() -> tuple[list[KVCache], Checkpoints]:
    """Return the entries of a cache with five tokens and three guesses, and the checkpoints before each of these."""
    cache, before = [KVCache() for _ in range(3)], Checkpoints()
    add_tokens(cache, 5)
    for number in range(3):
        for entry in cache:
            before.add(number, entry)
        add_tokens(cache, 1)
    return cache, before


def interrupt_at(numbers: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise ``KeyboardInterrupt`` before some uses of ``trim_to``."""
    count = 0

    def interrupted(entry: Any, offset: int) -> None:
        nonlocal count
        count += 1
        if count - 1 in numbers:
            raise KeyboardInterrupt
        trim_to(entry, offset)

    monkeypatch.setattr(checkpoints, "trim_to", interrupted)


@pytest.mark.parametrize("numbers", [{0}, {4}, {4, 6}, {5, 6, 7}, {1, 3, 6, 9}])
def test_interrupts_leave_no_entry_between(numbers: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one, while the first was handled, left some entries with guesses and others without."""
    cache, before = guessed()
    interrupt_at(numbers, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        before.take_back(1)
    assert [entry.offset for entry in cache] == [6, 6, 6]
    before.take_back(0)
    assert [entry.offset for entry in cache] == [5, 5, 5]


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

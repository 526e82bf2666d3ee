"""Sequences that begin with the same tokens, because one is a copy of the other."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Origin:
    """The point at which a sequence was copied."""

    __slots__ = ("holders",)

    def __init__(self) -> None:
        self.holders: weakref.WeakSet[Lineage[Any]] = weakref.WeakSet()


class Lineage(Generic[T]):
    """The sequences that share their first tokens with one, because one is a copy of the other.

    Args:
        owner: the sequence.
    """

    def __init__(self, owner: T) -> None:
        self._owner = weakref.ref(owner)
        self._ends: dict[_Origin, int] = {}

    def relatives(self) -> Iterator[tuple[T, int]]:
        """Yield other sequences, each with its number of common tokens; the largest number comes last for each."""
        for origin, end in self._ends.items():
            for other in origin.holders:
                owner = other._owner()
                if other is not self and owner is not None:
                    yield owner, min(end, other._ends[origin])

    def cut(self, length: int) -> None:
        """Record that the tokens from ``length`` on were changed or removed."""
        for origin, end in list(self._ends.items()):
            if not length:
                origin.holders.discard(self)  # first: what a holder has in common is looked up
                del self._ends[origin]
            elif end > length:
                self._ends[origin] = length

    def copy_to(self, other: Lineage[T], length: int) -> None:
        """Record that another sequence is a copy of this one, with so many tokens."""
        for origin in [origin for origin in self._ends if len(origin.holders) == 1]:
            del self._ends[origin]  # no other sequence has it any more
        if length and length not in self._ends.values():
            self._hold(_Origin(), length)
        for origin, end in self._ends.items():
            other._hold(origin, end)

    def _hold(self, origin: _Origin, end: int) -> None:
        self._ends[origin] = end
        origin.holders.add(self)

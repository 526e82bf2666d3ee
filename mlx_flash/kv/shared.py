"""Shared prefixes in memory: rows that several sequences begin with, stored once.

A sequence that is not being computed is *parked*: it is a list of immutable parts, which its copies share. Python's
reference counts free them. A lineage records how many first tokens two sequences have in common, in memory or on disk.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import mlx.core as mx

T = TypeVar("T")


class SharedRows:
    """Immutable rows of tokens.

    Args:
        arrays: ``(batch, heads, tokens, width)`` each. They may be slices of a longer buffer; they are copied.

    Attributes:
        arrays: the copies, evaluated.
        length: number of tokens.
        nbytes: bytes in memory.
    """

    __slots__ = ("arrays", "length", "nbytes")

    def __init__(self, arrays: Sequence[mx.array]) -> None:
        # with one more token behind them: a plain copy of one head would be a view, and hold the buffer
        self.arrays = [mx.concatenate([array, array[..., :1, :]], axis=2) for array in arrays]
        mx.eval(self.arrays)
        self.length = int(arrays[0].shape[2])
        self.nbytes = sum(array.nbytes for array in self.arrays)


class Part(NamedTuple):
    """The first tokens of shared rows.

    Attributes:
        rows: the rows.
        length: number of tokens.
    """

    rows: SharedRows
    length: int


Parts = tuple[Part, ...]
"""Parts of a sequence, from its beginning on."""


def num_tokens(parts: Parts) -> int:
    """Return the number of tokens of some parts."""
    return sum(part.length for part in parts)


def cut(parts: Parts, length: int) -> Parts:
    """Return the first tokens of some parts."""
    kept: list[Part] = []
    for part in parts:
        if length <= 0:
            break
        kept.append(Part(part.rows, min(part.length, length)))
        length -= part.length
    return tuple(kept)


def slices(parts: Parts, start: int, stop: int) -> list[list[mx.array]]:
    """Return for each array of a layer its pieces with the tokens from ``start`` to ``stop``, in order."""
    found: list[list[mx.array]] = [[] for _ in parts[0].rows.arrays]
    begin = 0
    for part in parts:
        first, last = max(start - begin, 0), min(stop - begin, part.length)
        if first < last:
            for pieces, array in zip(found, part.rows.arrays, strict=True):
                pieces.append(array[..., first:last, :])
        begin += part.length
    return found


def sizes(holders: Iterable[Parts]) -> dict[int, int]:
    """Return the bytes of all shared rows among some parts, each once, by identity."""
    return {id(part.rows): part.rows.nbytes for parts in holders for part in parts}


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

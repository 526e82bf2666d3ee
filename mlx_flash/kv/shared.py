"""Rows of tokens that several sequences begin with, held once, and which sequences these are.

A sequence that is not being computed is *parked*: it is a list of parts, which its copies hold too. Nobody writes to
them, and Python's own count says who still needs them. A lineage says how much two sequences have in common, wherever
their rows are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import mlx.core as mx

T = TypeVar("T")


class SharedRows:
    """Rows of tokens that do not change.

    Args:
        arrays: ``(batch, heads, tokens, width)`` each, perhaps of a longer buffer; they are copied.

    Attributes:
        arrays: the copies, evaluated.
        length: how many tokens there are.
        nbytes: what they take in memory.
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
        length: how many tokens.
    """

    rows: SharedRows
    length: int


Parts = tuple[Part, ...]
"""Parts of a sequence, from its beginning on."""


def num_tokens(parts: Parts) -> int:
    """Tokens of some parts."""
    return sum(part.length for part in parts)


def cut(parts: Parts, length: int) -> Parts:
    """The first tokens of some parts."""
    kept: list[Part] = []
    for part in parts:
        if length <= 0:
            break
        kept.append(Part(part.rows, min(part.length, length)))
        length -= part.length
    return tuple(kept)


def slices(parts: Parts, start: int, stop: int) -> list[list[mx.array]]:
    """For each array of a layer the pieces whose tokens, one after another, are those from ``start`` to ``stop``."""
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
    """Bytes of all shared rows among some parts, each counted once, by their identity."""
    return {id(part.rows): part.rows.nbytes for parts in holders for part in parts}


class _Origin:
    """A moment at which a sequence was copied."""

    __slots__ = ("holders",)

    def __init__(self) -> None:
        self.holders: weakref.WeakSet[Lineage[Any]] = weakref.WeakSet()


class Lineage(Generic[T]):
    """Of a sequence: with whom its first tokens are the same, since one of them is a copy of the other.

    Args:
        owner: the sequence.
    """

    def __init__(self, owner: T) -> None:
        self._owner = weakref.ref(owner)
        self._ends: dict[_Origin, int] = {}

    def relatives(self) -> Iterator[tuple[T, int]]:
        """Other sequences, and how many tokens they have in common with this one; the most come last for each."""
        for origin, end in self._ends.items():
            for other in origin.holders:
                owner = other._owner()
                if other is not self and owner is not None:
                    yield owner, min(end, other._ends[origin])

    def cut(self, length: int) -> None:
        """Notes that the tokens from ``length`` on are others now, or none."""
        for origin, end in list(self._ends.items()):
            if not length:
                del self._ends[origin]
                origin.holders.discard(self)
            elif end > length:
                self._ends[origin] = length

    def copy_to(self, other: Lineage[T], length: int) -> None:
        """Notes that another sequence is a copy of this one, with so many tokens."""
        for origin in [origin for origin in self._ends if len(origin.holders) == 1]:
            del self._ends[origin]  # the others are gone
        if length and length not in self._ends.values():
            self._hold(_Origin(), length)
        for origin, end in self._ends.items():
            other._hold(origin, end)

    def _hold(self, origin: _Origin, end: int) -> None:
        self._ends[origin] = end
        origin.holders.add(self)

"""Rows of tokens that several sequences begin with, held once.

A sequence that is not being computed is *parked*: it is a list of parts, which its copies hold too. Nobody writes to
them, and Python's own count says who still needs them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import mlx.core as mx


class SharedRows:
    """Rows of tokens that do not change.

    All who hold them have the same tokens before them, too.

    Args:
        arrays: ``(batch, heads, tokens, width)`` each, perhaps of a longer buffer; they are copied.

    Attributes:
        arrays: the copies, evaluated.
        nbytes: what they take in memory.
    """

    __slots__ = ("__weakref__", "arrays", "nbytes")

    def __init__(self, arrays: Sequence[mx.array]) -> None:
        # with one more token behind them: a plain copy of one head would be a view, and hold the buffer
        self.arrays = [mx.concatenate([array, array[..., :1, :]], axis=2) for array in arrays]
        mx.eval(self.arrays)
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


class Remembered:
    """Parts that a sequence was copied into a buffer from, as long as somebody else holds them.

    Args:
        parts: as they are now.
    """

    __slots__ = ("_found",)

    def __init__(self, parts: Parts = ()) -> None:
        self._found = [(weakref.ref(part.rows), part.length) for part in parts]

    @property
    def parts(self) -> Parts:
        """Those that there still are, up to the first that is gone."""
        alive: list[Part] = []
        for link, length in self._found:
            rows = link()
            if rows is None:
                break
            alive.append(Part(rows, length))
        return tuple(alive)

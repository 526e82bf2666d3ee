"""Pages: immutable rows of consecutive tokens of one layer, and their places in files and in slots.

Copies on disk share pages. Tokens that are in no page follow them: see :mod:`mlx_flash.kv.disk`. Python's reference
counts free pages, and remove files that nobody refers to.

In a slot the tokens of each head are contiguous, with room for more behind them. The file of a layer has chunks of many
pages. In a chunk the tokens of each head are contiguous too, so that reads are large.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_flash.compat.arrays import memory_of
from mlx_flash.kv.options import READ_SIZE
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, aligned_offsets, round_up
from mlx_flash.storage.placement import Piece, Segment

CHUNK_TOKENS = 8192
"""Tokens of a chunk: 2 MiB for each head of 128 numbers of 16 bits."""

RowBytes = Sequence["np.ndarray[Any, np.dtype[np.uint8]]"]
"""Rows of tokens as bytes, ``(heads, tokens, bytes)`` for each array of a layer."""


@dataclass(frozen=True, slots=True)
class Component:
    """One array of a layer's cache."""

    shape: tuple[int, int]  # (batch, heads)
    width: int  # items of a head's row
    dtype: mx.Dtype

    @property
    def heads(self) -> int:
        """Heads of all sequences."""
        return self.shape[0] * self.shape[1]

    @property
    def width_bytes(self) -> int:
        """Bytes of a head's row."""
        return self.width * int(self.dtype.size)

    def zeros(self, num_tokens: int) -> mx.array:
        """Return empty rows."""
        return mx.zeros((*self.shape, num_tokens, self.width), self.dtype)


@dataclass(frozen=True)
class RowLayout:
    """Positions of rows: of the layer's arrays, in pages of ``step`` tokens."""

    components: tuple[Component, ...]
    step: int

    @classmethod
    def of(cls, arrays: Sequence[mx.array], step: int) -> RowLayout:
        """Return the layout of arrays ``(batch, heads, tokens, width)``."""
        return _layout(step, *[(array.shape[:2], array.shape[3], array.dtype) for array in arrays])

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of a token in all arrays."""
        return sum(self.widths)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Bytes of a token in each array."""
        return tuple([component.heads * component.width_bytes for component in self.components])

    @property
    def chunk_pages(self) -> int:
        """Pages of a chunk."""
        return -(-CHUNK_TOKENS // self.step)

    @cached_property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk in a file."""
        return sum(c.heads * stride for c, stride in zip(self.components, self.strides, strict=True))

    def slot_offsets(self, capacity: int) -> list[int]:
        """Return the offset of each array in a slot for so many tokens."""
        return self._slot_places(capacity)[:-1]

    def slot_bytes(self, capacity: int) -> int:
        """Return the size of a slot for so many tokens."""
        return self._slot_places(capacity)[-1]

    def _slot_places(self, capacity: int) -> list[int]:
        return aligned_offsets([capacity * width for width in self.widths], DIRECT_ALIGNMENT)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Bytes from a head of each array to the next one, in a file."""
        tokens = self.chunk_pages * self.step
        return tuple([round_up(tokens * component.width_bytes, DIRECT_ALIGNMENT) for component in self.components])

    def file_offsets(self, page: int) -> tuple[int, ...]:
        """Return the offsets of each array's first head in the page of this number of a file."""
        chunk, within = divmod(page, self.chunk_pages)
        at, found = chunk * self.chunk_bytes, list[int]()
        for component, stride in zip(self.components, self.strides, strict=True):
            found.append(at + within * self.step * component.width_bytes)
            at += component.heads * stride
        return tuple(found)

    def to_rows(self, arrays: Sequence[mx.array]) -> RowBytes:
        """Return the bytes of arrays ``(batch, heads, tokens, width)``, which are evaluated, with the heads of all."""
        plain = [mx.contiguous(a.astype(c.dtype)) for a, c in zip(arrays, self.components, strict=True)]
        mx.eval(plain)
        return [
            np.frombuffer(memory_of(array), np.uint8).reshape(c.heads, array.shape[2], c.width_bytes)
            for array, c in zip(plain, self.components, strict=True)
        ]

    def to_arrays(self, rows: RowBytes) -> list[mx.array]:
        """Return rows as arrays ``(batch, heads, tokens, width)``, copied."""
        return [
            mx.array(part).view(c.dtype).reshape(*c.shape, part.shape[1], c.width) if part.size else c.zeros(0)
            for part, c in zip(rows, self.components, strict=True)
        ]


@lru_cache(maxsize=64)
def _layout(step: int, *components: tuple[tuple[int, int], int, mx.Dtype]) -> RowLayout:
    """Return a layout, the same object for all layers: each asks for its own with the first tokens of a prompt."""
    return RowLayout(tuple([Component(*each) for each in components]), step)


class FilePage:
    """A page of a layer's file, which is free again when nothing refers to it."""

    def __init__(self, number: int) -> None:
        self.number = number


def runs(pages: Iterable[FilePage], layout: RowLayout) -> Iterator[tuple[int, int, int]]:
    """Yield the pages that follow one another in a chunk: the index of the first, its number, and how many they are."""
    numbers = enumerate(page.number for page in pages)
    for _, group in groupby(numbers, lambda each: (each[1] - each[0], each[1] // layout.chunk_pages)):
        (index, first), *others = group
        yield index, first, 1 + len(others)


def segments(
    path: Path, pages: Sequence[FilePage], layout: RowLayout, start: int, stop: int, capacity: int, base: int = 0
) -> list[Segment]:
    """Return the reads that put the tokens ``[start, stop)`` of a sequence in a slot, which begins with ``base``."""
    found, step = list[Segment](), layout.step
    for index, page, number in runs(pages, layout):
        first, last = max(start, index * step), min(stop, (index + number) * step)
        if first < last:
            found += _segments(path, layout, page, first - index * step, last - first, capacity, first - base)
    return found


def _segments(
    path: Path, layout: RowLayout, page: int, skipped: int, length: int, capacity: int, token: int
) -> Iterator[Segment]:
    """Yield the reads of some tokens, to the place of ``token``. Heads that follow one another share a read."""
    name, group = f"KV cache, tokens from {token} on", list[Piece]()
    places = zip(
        layout.components, layout.file_offsets(page), layout.strides, layout.slot_offsets(capacity), strict=True
    )
    for component, offset, stride, target in places:
        width = component.width_bytes
        for head in range(component.heads):
            source, place = offset + head * stride + skipped * width, target + (head * capacity + token) * width
            piece = Piece(name, source, length * width, place)
            if group and (source - group[-1].end >= DIRECT_ALIGNMENT or piece.end - group[0].offset > READ_SIZE):
                yield _segment(path, group)
                group = []
            group.append(piece)
    yield _segment(path, group)


def _segment(path: Path, pieces: Sequence[Piece]) -> Segment:
    """Return a read to the places of its pieces, if they are whole pages of memory, or through a bounce buffer."""
    offset = pieces[0].offset // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
    nbytes = round_up(pieces[-1].end - offset, DIRECT_ALIGNMENT)
    numbers = (number for piece in pieces for number in (piece.offset, piece.nbytes, piece.buffer_offset))
    in_place = nbytes == sum([piece.nbytes for piece in pieces]) and not any(n % DIRECT_ALIGNMENT for n in numbers)
    is_scattered = in_place and len(pieces) > 1
    at = pieces[0].buffer_offset if in_place and not is_scattered else None
    return Segment(path, offset, nbytes, at, tuple(pieces), is_scattered)

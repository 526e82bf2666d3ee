"""Pages: immutable rows of consecutive tokens of one layer, and their places in files and in slots.

Sequences on disk share pages. Tokens that are in no page follow them: see :mod:`mlx_flash.kv.disk`. Python's reference
counts free pages, and close files that nobody refers to.

In a slot the tokens of each head are contiguous, with room for more behind them. The file of a layer has chunks of many
pages. In a chunk the tokens of each head are contiguous too, so that reads are large.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import mlx.core as mx
import numpy as np

from mlx_flash.compat.arrays import memory_of
from mlx_flash.kv.options import READ_SIZE
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, aligned_offsets, round_up
from mlx_flash.storage.placement import Piece, Segment

W = TypeVar("W")

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


def dtype_name(dtype: mx.Dtype) -> str:
    """Return the name of a type in files."""
    return str(dtype).removeprefix("mlx.core.")


def row_bytes(arrays: Sequence[mx.array]) -> RowBytes:
    """Return the bytes of evaluated, contiguous arrays as ``(heads, tokens, bytes)``, the heads of all sequences."""
    found = []
    for array in arrays:
        batch, heads, length, width = array.shape
        memory = memory_of(array)
        found.append(np.frombuffer(memory, np.uint8).reshape(batch * heads, length, width * array.itemsize))
    return found


class File(Protocol):
    """An open file with rows. A page that refers to it keeps it open."""

    @property
    def path(self) -> Path:
        """The path that it was opened at."""

    def flush(self) -> None:
        """Wait until the pages can be read. Raises: WriteError."""


@dataclass(frozen=True)  # without slots: its file refers to it weakly
class InFile:
    """Rows in a file, in which the tokens of a head follow one another."""

    file: File
    components: tuple[Component, ...]
    offsets: tuple[int, ...]  # bytes from the beginning of the file to each array's first head
    strides: tuple[int, ...]  # bytes from a head of each array to the next one

    @classmethod
    def packed(cls, file: File, components: Sequence[Component], offsets: Sequence[int], length: int) -> InFile:
        """Return rows of so many tokens whose heads follow one another."""
        strides = tuple([length * component.width_bytes for component in components])
        return cls(file, tuple(components), tuple(offsets), strides)

    def is_followed_by(self, length: int, other: InFile) -> bool:
        """Return whether other rows lie behind so many tokens of these, for every head."""
        if self.file is not other.file or self.strides != other.strides:
            return False
        ends = zip(self.offsets, self.components, strict=True)
        return other.offsets == tuple([offset + length * component.width_bytes for offset, component in ends])


@dataclass(frozen=True, slots=True)
class Page(Generic[W]):
    """The first tokens of some rows."""

    where: W  # :class:`InFile`, or what finds it
    length: int


FilePages = tuple[Page[InFile], ...]
"""Pages of a sequence, from its beginning on."""


def num_tokens(pages: Iterable[Page[W]]) -> int:
    """Return the number of tokens of some pages."""
    return sum([page.length for page in pages])


def cut(pages: Iterable[Page[W]], length: int) -> tuple[Page[W], ...]:
    """Return the first tokens of some pages."""
    kept: list[Page[W]] = []
    for page in pages:
        if length <= 0:
            break
        kept.append(page if page.length <= length else replace(page, length=length))
        length -= page.length
    return tuple(kept)


def joined(pages: Iterable[Page[InFile]]) -> Iterator[Page[InFile]]:
    """Yield pages, those that follow one another in their file as one."""
    run: Page[InFile] | None = None
    for page in pages:
        if run is None:
            run = page
        elif run.where.is_followed_by(run.length, page.where):
            run = Page(run.where, run.length + page.length)
        else:
            yield run
            run = page
    if run is not None:
        yield run


def segments(
    pages: Iterable[Page[InFile]], layout: RowLayout, start: int, stop: int, capacity: int, base: int = 0
) -> list[Segment]:
    """Return the reads that put the tokens ``[start, stop)`` of a sequence in a slot, which begins with ``base``."""
    targets, begin, found = layout.slot_offsets(capacity), 0, list[Segment]()
    for run in joined(pages):
        first, last = max(start, begin), min(stop, begin + run.length)
        if first < last:
            found += _segments(run.where, first - begin, last - first, targets, capacity, first - base)
        begin += run.length
    return found


def _segments(
    rows: InFile, skipped: int, length: int, targets: Sequence[int], capacity: int, token: int
) -> Iterator[Segment]:
    """Yield the reads of some tokens, to the place of ``token``. Heads that follow one another share a read."""
    name, group = f"KV cache, tokens from {token} on", list[Piece]()
    for component, offset, stride, target in zip(rows.components, rows.offsets, rows.strides, targets, strict=True):
        width = component.width_bytes
        for head in range(component.heads):
            source, place = offset + head * stride + skipped * width, target + (head * capacity + token) * width
            piece = Piece(name, source, length * width, place)
            if group and (source - group[-1].end >= DIRECT_ALIGNMENT or piece.end - group[0].offset > READ_SIZE):
                yield _segment(rows.file.path, group)
                group = []
            group.append(piece)
    yield _segment(rows.file.path, group)


def _segment(path: Path, pieces: Sequence[Piece]) -> Segment:
    """Return a read to the places of its pieces, if they are whole pages of memory, or through a bounce buffer."""
    offset = pieces[0].offset // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
    nbytes = round_up(pieces[-1].end - offset, DIRECT_ALIGNMENT)
    numbers = (number for piece in pieces for number in (piece.offset, piece.nbytes, piece.buffer_offset))
    in_place = nbytes == sum([piece.nbytes for piece in pieces]) and not any(n % DIRECT_ALIGNMENT for n in numbers)
    is_scattered = in_place and len(pieces) > 1
    at = pieces[0].buffer_offset if in_place and not is_scattered else None
    return Segment(path, offset, nbytes, at, tuple(pieces), is_scattered)

"""Pages: immutable rows of consecutive tokens of one layer. A page is in memory or in a file, and sequences share it.

Tokens of a sequence that are in no page follow its pages: see :mod:`mlx_flash.kv.memory` and :mod:`mlx_flash.kv.disk`.
Python's reference counts free pages in memory, and close files that nobody refers to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import mlx.core as mx

from mlx_flash.kv.layout import Component, RowLayout
from mlx_flash.kv.options import READ_SIZE
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, round_up
from mlx_flash.storage.placement import Piece, Segment

W = TypeVar("W")


class File(Protocol):
    """An open file with rows. A page that refers to it keeps it open."""

    @property
    def path(self) -> Path:
        """The path that it was opened at."""

    def flush(self) -> None:
        """Wait until the pages can be read. Raises: WriteError."""


class InMemory:
    """Rows in memory.

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


@dataclass(frozen=True, slots=True)
class InFile:
    """Rows in a file, in which the tokens of a head follow one another.

    Attributes:
        file: the file.
        components: the arrays.
        offsets: bytes from the beginning of the file to each array's first head.
        strides: bytes from a head of each array to the next one.
    """

    file: File
    components: tuple[Component, ...]
    offsets: tuple[int, ...]
    strides: tuple[int, ...]

    def is_followed_by(self, length: int, other: InFile) -> bool:
        """Return whether other rows lie behind so many tokens of these, for every head."""
        if self.file is not other.file or self.strides != other.strides:
            return False
        ends = zip(self.offsets, self.components, strict=True)
        return other.offsets == tuple([offset + length * component.width_bytes for offset, component in ends])


@dataclass(frozen=True, slots=True)
class Page(Generic[W]):
    """The first tokens of some rows.

    Attributes:
        where: the rows: :class:`InMemory` or :class:`InFile`.
        length: number of tokens.
    """

    where: W
    length: int


MemoryPages = tuple[Page[InMemory], ...]
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


def sizes(holders: Iterable[MemoryPages]) -> dict[int, int]:
    """Return the bytes of all rows among some pages, each once, by identity."""
    return {id(page.where): page.where.nbytes for pages in holders for page in pages}


def slices(pages: MemoryPages, start: int, stop: int) -> list[list[mx.array]]:
    """Return for each array of a layer its pieces with the tokens from ``start`` to ``stop``, in order."""
    found: list[list[mx.array]] = [[] for _ in pages[0].where.arrays]
    begin = 0
    for page in pages:
        first, last = max(start - begin, 0), min(stop - begin, page.length)
        if first < last:
            for pieces, array in zip(found, page.where.arrays, strict=True):
                pieces.append(array[..., first:last, :])
        begin += page.length
    return found


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
    """Return the reads that put some tokens of a sequence in a slot.

    Args:
        pages: the sequence.
        layout: layout of its rows.
        start: the first token.
        stop: the token after the last one.
        capacity: tokens that the slot has room for.
        base: the token at its beginning.
    """
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

"""Places of tensors in a buffer, and the reads that put them there.

A direct read needs file offset, memory address and length to be multiples of ``DIRECT_ALIGNMENT``. So neighbours in a
file become one *segment*, widened to whole pages, and each tensor lands at an address equal to its file offset modulo
the page. Where kernels need other addresses (mlx writes headers of any length), the segment is read into a small bounce
buffer, and its tensors are copied to aligned places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, round_up
from mlx_flash.storage.safetensors import DTYPE_SIZES, TensorRecord

T = TypeVar("T")

MERGE_GAP = DIRECT_ALIGNMENT
"""Neighbours at most this many bytes apart are read as one: the page between them is read anyway."""

COPY_ALIGNMENT = 256
"""Tensors that are copied anyway start at a multiple of this, as MLX's own GPU allocations do."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor's bytes: ``[offset, offset + nbytes)`` of the file go to ``buffer_offset``."""

    name: str
    offset: int
    nbytes: int
    buffer_offset: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


Place = tuple[int, int, int]
"""Offset of some bytes in a file, their offset in a buffer, and their number."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One contiguous range of a file, read by one or more positional reads."""

    path: Path  # the file
    offset: int  # first byte of the range, a multiple of ``DIRECT_ALIGNMENT``
    nbytes: int  # length of the range, a multiple of ``DIRECT_ALIGNMENT``; it may reach past the end of the file
    # where the range lands when it is read in place; None when its pieces go to places of their own
    buffer_offset: int | None
    pieces: tuple[Piece, ...]  # the tensors in the range, in file order
    # the pieces fill the range, and each is whole pages in the file and the buffer: one read puts all of them in their
    # places. Otherwise they are copied.
    is_scattered: bool = False

    @property
    def buffer_end(self) -> int:
        """First byte of the buffer after all that a read writes."""
        if self.buffer_offset is not None:
            return self.buffer_offset + self.nbytes
        return max([piece.buffer_offset + piece.nbytes for piece in self.pieces])

    @property
    def wanted_end(self) -> int:
        """First byte after the last piece: what a read must reach to be complete."""
        return max([piece.offset + piece.nbytes for piece in self.pieces])

    def places(self, start: int, stop: int) -> tuple[Place, ...]:
        """Return where pieces in ``[start, stop)`` of the file lie, and where they go."""
        found = []
        for piece in self.pieces:
            low, high = max(start, piece.offset), min(stop, piece.offset + piece.nbytes)
            if low < high:
                found.append((low, piece.buffer_offset + low - piece.offset, high - low))
        return tuple(found)

    def piece_at(self, offset: int) -> Piece:
        """Return the piece at an offset of the file, or the next one after it."""
        return next((piece for piece in self.pieces if offset < piece.end), self.pieces[-1])


@dataclass(frozen=True, slots=True)
class Placement:
    """A buffer's contents."""

    nbytes: int  # size of the buffer
    segments: tuple[Segment, ...]  # the reads that fill it
    offsets: tuple[int, ...]  # for each tensor, in the order given, where it starts in the buffer

    @property
    def copies(self) -> bool:
        """True if any segment goes through a bounce buffer."""
        return any(segment.buffer_offset is None for segment in self.segments)


def padded_bytes(nbytes: int) -> int:
    """Return the most bytes that a tensor takes of a buffer, wherever it lies in its file."""
    return round_up(nbytes, DIRECT_ALIGNMENT) + 2 * DIRECT_ALIGNMENT


def place(groups: Sequence[Sequence[TensorRecord]], alignment: int = 1) -> Placement:
    """Lay parameters out in one buffer. Each is made of one tensor, or of several, one after another.

    Parts that do not follow each other in a file as they do in the buffer are read through the bounce buffer.
    ``alignment`` is that of addresses that the back end's kernels need, a power of two up to a page. Addresses are
    multiples of the item size in any case. The placement has an offset for each parameter.
    """
    joined = [_joined(group) for group in groups]
    whole = [i for i, record in enumerate(joined) if record is not None]
    placed = place_rows([[record for record in joined if record is not None]], alignment)
    offsets = dict(zip(whole, placed.offsets, strict=True))
    cursor = placed.nbytes
    parts: list[tuple[TensorRecord, int]] = []
    for i in (i for i, record in enumerate(joined) if record is None):
        cursor = offsets[i] = round_up(cursor, max(alignment, COPY_ALIGNMENT))
        for record in groups[i]:
            parts.append((record, cursor))
            cursor += record.nbytes
    segments = [read_scattered([parts[i] for i in run]) for run in runs_of([record for record, _ in parts])]
    nbytes = round_up(cursor, DIRECT_ALIGNMENT)
    return Placement(nbytes, (*placed.segments(0), *segments), tuple(offsets[i] for i in range(len(groups))))


def must_copy(groups: Sequence[Sequence[TensorRecord]], alignment: int = 1) -> bool:
    """Return whether :func:`place` would read any of some parameters through a bounce buffer."""
    for group in groups:
        first, end, is_whole = group[0], group[0].offset, is_aligned(group[0], alignment)
        for record in group:
            is_whole &= record.path == first.path and record.offset == end
            end += record.nbytes
        if not is_whole and end > first.offset:
            return True
    return False


def without(placement: Placement, ranges: Sequence[range]) -> Placement:
    """Return a placement whose reads leave out the parameters at some ranges of the buffer. Offsets stay."""
    segments: list[Segment] = []
    for segment in placement.segments:
        kept = [piece for piece in segment.pieces if not any(piece.buffer_offset in at for at in ranges)]
        if len(kept) == len(segment.pieces):
            segments.append(segment)
        else:
            runs = grouped(kept, lambda left, right: right.offset - left.end <= MERGE_GAP)
            shift = None if segment.buffer_offset is None else segment.buffer_offset - segment.offset
            for run in runs:
                start = run[0].offset // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
                segments.append(read_pages(segment.path, run, None if shift is None else start + shift))
    return replace(placement, segments=tuple(segments))


def grouped(items: Iterable[T], follows: Callable[[T, T], bool]) -> Iterable[list[T]]:
    """Yield runs of items in which each follows the one before it."""
    run: list[T] = []
    for item in items:
        if run and not follows(run[-1], item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _joined(group: Sequence[TensorRecord]) -> TensorRecord | None:
    """Return tensors that follow each other in a file as one record; None when they do not."""
    first = group[0]
    if len(group) == 1:
        return first
    if False in [a.path == b.path and a.offset + a.nbytes == b.offset for a, b in pairwise(group)]:
        return None
    return replace(first, nbytes=sum(record.nbytes for record in group))


def read_in_place(records: Sequence[TensorRecord], cursor: int) -> Segment:
    """Return the read of a range of a file to ``cursor`` of the buffer, unchanged."""
    shift = cursor - records[0].offset // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
    pieces = [Piece(record.name, record.offset, record.nbytes, record.offset + shift) for record in records]
    return read_pages(records[0].path, pieces, cursor)


def read_scattered(run: Sequence[tuple[TensorRecord, int]], cursor: int | None = None) -> Segment:
    """Return the read of a range of a file whose pieces go to places of their own."""
    pieces = [Piece(record.name, record.offset, record.nbytes, at) for record, at in run]
    return read_pages(run[0][0].path, pieces, cursor)


def read_pages(path: Path, pieces: Sequence[Piece], cursor: int | None = None) -> Segment:
    """Return the read of the whole pages of a file that hold some neighbours, to ``cursor`` if it is in place."""
    start, last = pieces[0].offset // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT, pieces[-1]
    num_pages = -(-(last.offset + last.nbytes - start) // DIRECT_ALIGNMENT)  # for each expert that is read: few calls
    return Segment(path, start, num_pages * DIRECT_ALIGNMENT, cursor, tuple(pieces))


def runs_of(records: Sequence[TensorRecord]) -> Iterable[list[int]]:
    """Return groups of indices of non-empty tensors that are neighbours in one file."""
    places = [(str(record.path), record.offset, i) for i, record in enumerate(records) if record.nbytes]
    order = [i for *_, i in sorted(places)]

    def follows(left: int, right: int) -> bool:
        first, second = records[left], records[right]
        return first.path == second.path and 0 <= second.offset - first.offset - first.nbytes <= MERGE_GAP

    return grouped(order, follows)


def is_aligned(record: TensorRecord, alignment: int) -> bool:
    """Return whether a tensor can be computed with where a read of whole pages puts it."""
    return record.offset % max(alignment, DTYPE_SIZES[record.dtype]) == 0


@dataclass(frozen=True)
class PlacedRows:
    """The placements of some rows, with the same places in the buffer."""

    rows: Sequence[Sequence[TensorRecord]]
    nbytes: int
    offsets: tuple[int, ...]  # of the tensors of each row
    in_place: Sequence[tuple[list[int], int]]  # tensors that are read together, and where their pages go
    copied: Sequence[int]  # tensors that are copied

    def __len__(self) -> int:
        return len(self.rows)

    def segments(self, number: int) -> tuple[Segment, ...]:
        row = self.rows[number]
        found = [read_in_place([row[j] for j in block], cursor) for block, cursor in self.in_place]
        if self.copied:
            parts = [(row[j], self.offsets[j]) for j in self.copied]
            found += (read_scattered([parts[i] for i in run]) for run in runs_of([record for record, _ in parts]))
        return tuple(sorted(found, key=lambda segment: (str(segment.path), segment.pieces[0].offset)))

    @cached_property
    def starts(self) -> list[tuple[str, int]]:
        """For each row a key that sorts rows as their bytes lie on disk."""
        return [min([(str(record.path), record.offset) for record in row if record.nbytes]) for row in self.rows]


def place_rows(rows: Sequence[Sequence[TensorRecord]], alignment: int = 1) -> PlacedRows:
    """Lay the rows of some stacks (experts) out in slots, all in the same way, so that any slot can hold any row.

    Tensors that are neighbours in the same way in every row, as in files that store expert after expert, are one read
    per row. A block of them is read in place when it starts at the same place of a page in every row and all its
    tensors are aligned; otherwise it is copied whole. ``rows[i][j]`` is tensor ``j`` of row ``i``.

    Raises:
        ValueError: a tensor has another size or dtype in some row.
    """
    first = rows[0] if rows else ()
    kind = attrgetter("nbytes", "dtype")
    expected = [*map(kind, first)]
    for i, row in enumerate(rows):
        if (found := [*map(kind, row)]) != expected:
            raise ValueError(f"row {i} has tensors of (bytes, dtype) {found}, row 0 has {expected}")
    offsets = [0] * len(first)
    in_place: list[tuple[list[int], int]] = []
    copied: list[int] = []
    cursor = 0
    for block in _common_blocks(rows):
        starts = {row[block[0]].offset % DIRECT_ALIGNMENT for row in rows}  # where its pages begin
        if len(starts) == 1 and all(is_aligned(first[j], alignment) for j in block):
            segment = read_in_place([first[j] for j in block], cursor)
            for j, piece in zip(block, segment.pieces, strict=True):
                offsets[j] = piece.buffer_offset
            in_place.append((block, cursor))
            cursor += segment.nbytes
        else:
            copied += block
    for j in copied:
        offsets[j] = round_up(cursor, max(alignment, COPY_ALIGNMENT))
        cursor = offsets[j] + first[j].nbytes
    return PlacedRows(rows, round_up(cursor, DIRECT_ALIGNMENT), tuple(offsets), in_place, copied)


def _common_blocks(rows: Sequence[Sequence[TensorRecord]]) -> Iterable[list[int]]:
    """Yield groups of indices of non-empty tensors that are neighbours in one file, equally in every row."""

    def follows(left: int, right: int) -> bool:
        pairs = [(row[left], row[right]) for row in rows]
        gaps = {b.offset - a.offset if b.path == a.path else None for a, b in pairs}
        return len(gaps) == 1 and None not in gaps

    for run in runs_of(rows[0] if rows else ()):
        yield from grouped(run, follows)

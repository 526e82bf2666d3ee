"""Where tensors lie in a buffer, and which reads put them there.

A direct read needs file offset, memory address and length to be multiples of ``DIRECT_ALIGNMENT``. So tensors that
are neighbours in their file become one *segment*, whose range is widened to whole pages; the segment is given an
aligned place in the buffer, and every tensor in it lands at an address equal to its file offset modulo the page.
Nothing is copied. That works when the file offsets are multiples of what the kernels need; where they are not (mlx
saves safetensors with headers of any length), the segment is read into a small bounce buffer and its tensors are
copied to aligned places.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from mlx_flash.checkpoint.safetensors import Extent, TensorRecord
from mlx_flash.storage.pagecache import DIRECT_ALIGNMENT

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
        """First byte of the file after the piece."""
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Segment:
    """One contiguous range of a file, read by one or more positional reads.

    Attributes:
        path: the file.
        offset: first byte of the range, a multiple of ``DIRECT_ALIGNMENT``.
        nbytes: length of the range, a multiple of ``DIRECT_ALIGNMENT``; it may reach past the end of the file.
        buffer_offset: where the range lands when it is read in place; None when its pieces must be copied.
        pieces: the tensors in the range, in file order.
    """

    path: Path
    offset: int
    nbytes: int
    buffer_offset: int | None
    pieces: tuple[Piece, ...]

    @property
    def wanted_end(self) -> int:
        """First byte after the last piece: what a read must reach to be complete."""
        return max(piece.end for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Placement:
    """A buffer's contents.

    Attributes:
        nbytes: size of the buffer.
        segments: the reads that fill it.
        offsets: for each tensor, in the order given, where it starts in the buffer.
    """

    nbytes: int
    segments: tuple[Segment, ...]
    offsets: tuple[int, ...]

    @property
    def read_bytes(self) -> int:
        """Bytes that direct reads transfer to fill the buffer: whole pages, gaps included."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def copies(self) -> bool:
        """Whether any segment goes through a bounce buffer."""
        return any(segment.buffer_offset is None for segment in self.segments)


def padded_bytes(nbytes: int) -> int:
    """What a tensor takes of a buffer at most, wherever it lies in its file: the sum over some tensors is never less
    than the size of their :class:`Placement`."""
    return (-(-nbytes // DIRECT_ALIGNMENT) + 2) * DIRECT_ALIGNMENT


def place(records: Sequence[TensorRecord], alignment: int = 1) -> Placement:
    """Lays tensors out in one buffer.

    Args:
        records: the tensors; the same one may appear twice.
        alignment: what the back end's kernels want addresses to be multiples of, a power of two up to a page. The
            item size of each tensor is kept in any case.
    """
    cursor = 0
    segments: list[Segment] = []
    offsets = [0] * len(records)
    for run in _runs(records):
        segment, cursor = _segment([(i, records[i]) for i in run], cursor, alignment)
        segments.append(segment)
        for index, piece in zip(run, segment.pieces, strict=True):
            offsets[index] = piece.buffer_offset
    return Placement(cursor, tuple(segments), tuple(offsets))


def place_groups(groups: Sequence[Sequence[TensorRecord]], alignment: int = 1) -> Placement:
    """Lays parameters out in one buffer that are made of one tensor, or of several, one after another.

    Parts that do not follow each other in a file as they do in the buffer are read through the bounce buffer.

    Args:
        groups: the tensors of each parameter.
        alignment: as in :func:`place`.

    Returns:
        A placement with an offset for each group.
    """
    joined = [_joined(group) for group in groups]
    whole = [i for i, record in enumerate(joined) if record is not None]
    placed = place([record for record in joined if record is not None], alignment)
    offsets = dict(zip(whole, placed.offsets, strict=True))
    cursor = placed.nbytes
    parts: list[tuple[TensorRecord, int]] = []
    for i in (i for i, record in enumerate(joined) if record is None):
        cursor = offsets[i] = _round_up(cursor, max(alignment, COPY_ALIGNMENT))
        for record in groups[i]:
            parts.append((record, cursor))
            cursor += record.nbytes
    segments = [_scattered([parts[i] for i in run]) for run in _runs([record for record, _ in parts])]
    nbytes = _round_up(cursor, DIRECT_ALIGNMENT)
    return Placement(nbytes, (*placed.segments, *segments), tuple(offsets[i] for i in range(len(groups))))


def _joined(group: Sequence[TensorRecord]) -> TensorRecord | None:
    """Tensors that follow each other in a file as one; None when they do not."""
    first = group[0]
    follow = all(a.extent.path == b.extent.path and a.extent.end == b.extent.offset for a, b in pairwise(group))
    if not follow:
        return None
    extent = Extent(first.extent.path, first.extent.offset, sum(record.nbytes for record in group))
    return replace(first, extent=extent)


def _scattered(run: Sequence[tuple[TensorRecord, int]]) -> Segment:
    """A range of a file whose pieces go to places of their own."""
    start = run[0][0].extent.offset // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
    end = _round_up(run[-1][0].extent.end, DIRECT_ALIGNMENT)
    pieces = tuple(Piece(record.name, record.extent.offset, record.nbytes, at) for record, at in run)
    return Segment(run[0][0].extent.path, start, end - start, None, pieces)


def _runs(records: Sequence[TensorRecord]) -> Iterable[list[int]]:
    """Indices of the non-empty tensors, grouped into neighbours in one file."""
    order = sorted(
        (i for i, record in enumerate(records) if record.nbytes),
        key=lambda i: (str(records[i].extent.path), records[i].extent.offset),
    )
    run: list[int] = []
    for i in order:
        if run and not _neighbours(records[run[-1]], records[i]):
            yield run
            run = []
        run.append(i)
    if run:
        yield run


def _neighbours(left: TensorRecord, right: TensorRecord) -> bool:
    gap = right.extent.offset - left.extent.end
    return left.extent.path == right.extent.path and 0 <= gap <= MERGE_GAP


def _segment(run: list[tuple[int, TensorRecord]], cursor: int, alignment: int) -> tuple[Segment, int]:
    records = [record for _, record in run]
    start = records[0].extent.offset // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
    end = _round_up(records[-1].extent.end, DIRECT_ALIGNMENT)
    in_place = all(record.extent.offset % max(alignment, record.itemsize) == 0 for record in records)
    pieces = []
    place_at = cursor
    for record in records:
        at = cursor + record.extent.offset - start if in_place else _round_up(place_at, max(alignment, COPY_ALIGNMENT))
        pieces.append(Piece(record.name, record.extent.offset, record.nbytes, at))
        place_at = at + record.nbytes
    after = cursor + end - start if in_place else _round_up(place_at, DIRECT_ALIGNMENT)
    segment = Segment(records[0].extent.path, start, end - start, cursor if in_place else None, tuple(pieces))
    return segment, after


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

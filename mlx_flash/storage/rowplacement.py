"""Places of the rows of stacked tensors, such as experts, in slots that can each hold any row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, round_up
from mlx_flash.storage.placement import (
    COPY_ALIGNMENT,
    Segment,
    grouped,
    is_aligned,
    read_in_place,
    read_scattered,
    runs_of,
)
from mlx_flash.storage.safetensors import TensorRecord


@dataclass(frozen=True)
class RowPlacement:
    """The places of the tensors of one row of some stacks (an expert) in a slot, the same for every row.

    Attributes:
        nbytes: size of a slot, a multiple of ``DIRECT_ALIGNMENT``.
        offsets: where each tensor starts in the slot; its address is aligned when the slot's is to a page.
        copies: whether any read goes through a bounce buffer.
        segments: ``segments[row]``: the reads that fill a slot with that row, in file order.
    """

    nbytes: int
    offsets: tuple[int, ...]
    copies: bool
    segments: tuple[tuple[Segment, ...], ...]


def place_rows(rows: Sequence[Sequence[TensorRecord]], alignment: int = 1) -> RowPlacement:
    """Lay the rows of some stacks out in slots, all in the same way, so that any slot can hold any row.

    Tensors that are neighbours in the same way in every row, as in files that store expert after expert, are one read
    per row. A block of them is read in place when it starts at the same place of a page in every row and
    all its tensors are aligned; otherwise it is copied whole.

    Args:
        rows: ``rows[i][j]`` is tensor ``j`` of row ``i``, of the same size and dtype in every row.
        alignment: as in :func:`~mlx_flash.storage.placement.place`.

    Raises:
        ValueError: the rows are not alike.
    """
    _check_alike(rows)
    first = rows[0] if rows else ()
    offsets = [0] * len(first)
    in_place: list[tuple[list[int], int]] = []
    copied: list[int] = []
    cursor = 0
    for block in _common_blocks(rows):
        if _fits_in_place(rows, block, alignment):
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
    segments = tuple(_row_segments(row, in_place, [(j, offsets[j]) for j in copied]) for row in rows)
    return RowPlacement(round_up(cursor, DIRECT_ALIGNMENT), tuple(offsets), bool(copied), segments)


def _check_alike(rows: Sequence[Sequence[TensorRecord]]) -> None:
    expected = [(record.nbytes, record.dtype) for record in rows[0]] if rows else []
    for i, row in enumerate(rows):
        found = [(record.nbytes, record.dtype) for record in row]
        if found != expected:
            raise ValueError(f"row {i} has tensors of (bytes, dtype) {found}, row 0 has {expected}")


def _common_blocks(rows: Sequence[Sequence[TensorRecord]]) -> Iterable[list[int]]:
    """Yield groups of indices of non-empty tensors that are neighbours in one file, equally in every row."""

    def follows(left: int, right: int) -> bool:
        gap = rows[0][right].extent.offset - rows[0][left].extent.offset
        pairs = ((row[left].extent, row[right].extent) for row in rows)
        return all(b.offset - a.offset == gap and b.path == a.path for a, b in pairs)

    for run in runs_of(rows[0] if rows else ()):
        yield from grouped(run, follows)


def _fits_in_place(rows: Sequence[Sequence[TensorRecord]], block: Sequence[int], alignment: int) -> bool:
    """Return whether a block's pages can be read to the same place of a slot for every row."""
    first, *_ = starts = [row[block[0]].extent.offset % DIRECT_ALIGNMENT for row in rows]
    return all(start == first for start in starts) and all(is_aligned(rows[0][j], alignment) for j in block)


def _row_segments(
    row: Sequence[TensorRecord], in_place: Iterable[tuple[list[int], int]], copied: Iterable[tuple[int, int]]
) -> tuple[Segment, ...]:
    """Return the reads of one row: of blocks with places for their pages, and of tensors with places of their own."""
    segments = [read_in_place([row[j] for j in block], at) for block, at in in_place]
    parts = [(row[j], at) for j, at in copied]
    segments += (read_scattered([parts[i] for i in run]) for run in runs_of([record for record, _ in parts]))
    return tuple(sorted(segments, key=lambda segment: (str(segment.path), segment.pieces[0].offset)))

"""Where tensors land in a buffer: nothing overlaps, everything is aligned, every byte is read once."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT
from mlx_flash.storage.placement import (
    MERGE_GAP,
    Placement,
    padded_bytes,
    place,
    place_rows,
    without,
)
from mlx_flash.storage.safetensors import DTYPE_SIZES, TensorRecord

ALIGNMENTS = (1, 8, 16, 256, DIRECT_ALIGNMENT)
Rows = list[list[TensorRecord]]
BY_SIZE = {1: "U8", 2: "BF16", 4: "F32", 8: "I64"}


def record(name: str, offset: int, count: int, dtype: str = "U8", path: str = "a") -> TensorRecord:
    return TensorRecord(name, dtype, (count,), Path(path), offset, count * DTYPE_SIZES[dtype])


@st.composite
def tensor_records(draw: st.DrawFn) -> list[TensorRecord]:
    """Tensors of one to three files, in any order: packed, with gaps, at odd offsets, empty, some of them twice."""
    sizes = st.one_of(st.integers(0, 40), st.integers(0, 20_000), st.just(DIRECT_ALIGNMENT))
    gaps = st.one_of(st.just(0), st.integers(0, 300), st.integers(0, 3 * MERGE_GAP), st.just(MERGE_GAP))
    records = []
    for path in draw(st.sampled_from((["a"], ["a", "b"], ["b", "a", "c"]))):
        cursor = draw(st.one_of(st.integers(0, 5000), st.sampled_from((0, 8, 256, 4096, 4352))))
        only = draw(st.sampled_from((None, 1, 2, 4, 8)))
        step = draw(st.sampled_from((1, 2, 16, 256)))
        for i in range(draw(st.integers(0, 6))):
            itemsize = only or draw(st.sampled_from(tuple(BY_SIZE)))
            cursor = -(-(cursor + draw(gaps)) // step) * step
            made = record(f"{path}{i}", cursor, draw(sizes), BY_SIZE[itemsize], path)
            cursor = made.end
            records.append(made)
    if records and draw(st.booleans()):
        records += draw(st.lists(st.sampled_from(records), max_size=2))
    return draw(st.permutations(records))


def read_bytes(placement: Placement) -> int:
    return sum(segment.nbytes for segment in placement.segments)


def check(records: list[TensorRecord], alignment: int) -> Placement:
    (placement,) = check_rows([records], alignment)
    assert sum(padded_bytes(made.nbytes) for made in records) >= placement.nbytes
    needed = [max(alignment, DTYPE_SIZES[made.dtype]) for made in records if made.nbytes]
    offsets = [made.offset for made in records if made.nbytes]
    assert placement.copies == any(at % step for at, step in zip(offsets, needed, strict=True))
    return placement


def placements_of(rows: Rows, alignment: int = 1) -> list[Placement]:
    placed = place_rows(rows, alignment)
    found = [Placement(placed.nbytes, placed.segments(number), placed.offsets) for number in range(len(placed))]
    assert {placement.copies for placement in found} <= {bool(placed.copied)}
    return found


def check_rows(rows: Rows, alignment: int) -> list[Placement]:
    placements = placements_of(rows, alignment)
    assert len(placements) == len(rows)
    for row, placement in zip(rows, placements, strict=True):
        check_tensors(row, placement, alignment)
        check_pieces(row, placement)
        check_segments(placement)
        assert placement.nbytes % DIRECT_ALIGNMENT == 0
        assert placement.copies == any(segment.buffer_offset is None for segment in placement.segments)
        keys = [(str(segment.path), segment.pieces[0].offset) for segment in placement.segments]
        assert keys == sorted(keys)
    return placements


@settings(deadline=None, max_examples=150)
@given(records=tensor_records(), alignment=st.sampled_from(ALIGNMENTS), data=st.data())
def test_reads_leave_out_ranges_of_the_buffer(records: list[TensorRecord], alignment: int, data: st.DataObject) -> None:
    placement = place([[record] for record in records], alignment)
    kept = data.draw(st.lists(st.booleans(), min_size=len(records), max_size=len(records)))
    places = list(zip(records, placement.offsets, strict=True))
    left_out = [range(at, at + made.nbytes) for (made, at), is_kept in zip(places, kept, strict=True) if not is_kept]
    rest = without(placement, left_out)
    check_segments(rest)
    expected = [(made.name, at) for (made, at), is_kept in zip(places, kept, strict=True) if is_kept and made.nbytes]
    assert sorted((p.name, p.buffer_offset) for s in rest.segments for p in s.pieces) == sorted(expected)
    assert (rest.nbytes, rest.offsets) == (placement.nbytes, placement.offsets)
    assert read_bytes(rest) <= read_bytes(placement)
    assert any(kept) or not rest.segments


def check_tensors(records: list[TensorRecord], placement: Placement, alignment: int) -> None:
    assert len(placement.offsets) == len(records)
    for made, at in zip(records, placement.offsets, strict=True):
        assert at % made.itemsize == 0
        assert at % alignment == 0
        assert at + made.nbytes <= placement.nbytes
    check_disjoint([(at, at + made.nbytes) for made, at in zip(records, placement.offsets, strict=True) if made.nbytes])


def check_pieces(records: list[TensorRecord], placement: Placement) -> None:
    """The pieces are the non-empty tensors, each whole and once, at the place promised."""
    wanted = [
        (made.path, made.name, made.offset, made.nbytes, at)
        for made, at in zip(records, placement.offsets, strict=True)
        if made.nbytes
    ]
    found = [
        (segment.path, piece.name, piece.offset, piece.nbytes, piece.buffer_offset)
        for segment in placement.segments
        for piece in segment.pieces
    ]
    assert sorted(found) == sorted(wanted)


def check_segments(placement: Placement) -> None:
    owned = []
    for segment in placement.segments:
        assert segment.offset % DIRECT_ALIGNMENT == segment.nbytes % DIRECT_ALIGNMENT == 0
        end = segment.offset + segment.nbytes
        assert list(segment.pieces) == sorted(segment.pieces, key=lambda piece: piece.offset)
        check_disjoint([(piece.offset, piece.end) for piece in segment.pieces])
        assert segment.offset <= segment.pieces[0].offset < segment.offset + DIRECT_ALIGNMENT
        assert end - DIRECT_ALIGNMENT < segment.wanted_end <= end
        if segment.buffer_offset is None:
            owned += [(piece.buffer_offset, piece.buffer_offset + piece.nbytes) for piece in segment.pieces]
            continue
        assert segment.buffer_offset % DIRECT_ALIGNMENT == 0
        assert all(
            piece.buffer_offset - piece.offset == segment.buffer_offset - segment.offset for piece in segment.pieces
        )
        owned.append((segment.buffer_offset, segment.buffer_offset + segment.nbytes))
    check_disjoint(owned)
    assert all(0 <= low and high <= placement.nbytes for low, high in owned)


def check_disjoint(ranges: list[tuple[int, int]]) -> None:
    ordered = sorted(ranges)
    assert all(left[1] <= right[0] for left, right in pairwise(ordered)), ordered


@settings(max_examples=300, deadline=None)
@given(tensor_records(), st.sampled_from(ALIGNMENTS))
def test_place_lays_out_any_records(records: list[TensorRecord], alignment: int) -> None:
    check(records, alignment)


@pytest.mark.parametrize(
    ("records", "offsets", "num_reads", "copies"),
    [
        ([], (), 0, False),
        ([record("empty", 4096, 0), record("full", 4096, 10)], None, 1, False),
        ([record("b", 8192 + 64, 32, "F32"), record("a", 8192, 16, "F32")], (64, 0), 1, False),
        ([record("a", 0, 100), record("b", 100 + MERGE_GAP, 100)], None, 1, False),
        ([record("a", 0, 100), record("b", 101 + MERGE_GAP, 100)], None, 2, False),
        ([record("a", 4097, 5, "BF16")], None, 1, True),
        ([record("a", 0, 10, path="x/m"), record("b", 10, 10, path="y/m")], None, 2, False),
    ],
    ids=["none", "empty", "neighbours", "a page apart", "more than a page apart", "misaligned", "two folders"],
)
def test_neighbours_are_one_read_and_copied_only_if_they_must_be(
    records: list[TensorRecord], offsets: tuple[int, ...] | None, num_reads: int, copies: bool
) -> None:
    placement = check(records, 1)
    assert (len(placement.segments), placement.copies) == (num_reads, copies)
    assert offsets is None or placement.offsets == offsets


# --- rows of stacks --------------------------------------------------------------------


@st.composite
def stacks(draw: st.DrawFn) -> Rows:
    """The experts of a layer, in a file as converters write them: stacked, expert after expert, or anywhere."""
    num_rows = draw(st.integers(1, 5))
    sizes = st.one_of(st.integers(0, 40), st.integers(1, 9000), st.sampled_from((DIRECT_ALIGNMENT, 256, 512)))
    kinds = draw(st.lists(st.tuples(sizes, st.sampled_from(tuple(BY_SIZE))), min_size=1, max_size=5))
    start = draw(st.one_of(st.integers(0, 5000), st.sampled_from((0, 256, DIRECT_ALIGNMENT))))
    order = [(i, j) for i in range(num_rows) for j in range(len(kinds))]
    match draw(st.sampled_from(("stacked", "one after another", "rows permuted", "anywhere"))):
        case "stacked":
            order.sort(key=lambda at: (at[1], at[0]))
        case "rows permuted":
            rank = draw(st.permutations(range(num_rows)))
            order.sort(key=lambda at: (rank[at[0]], at[1]))
        case "anywhere":
            order = draw(st.permutations(order))
    step = draw(st.sampled_from((1, 16, DIRECT_ALIGNMENT)))
    gap = draw(st.sampled_from((0, 0, 24, MERGE_GAP, 2 * MERGE_GAP)))
    num_files = draw(st.integers(1, 2))
    ends = [start] * num_files
    places: dict[tuple[int, int], TensorRecord] = {}
    for at in order:
        nbytes, itemsize = kinds[at[1]]
        file = draw(st.integers(0, num_files - 1))
        offset = -(-ends[file] // step) * step
        places[at] = record(f"{at[0]}.{at[1]}", offset, nbytes, BY_SIZE[itemsize], "ab"[file])
        ends[file] = places[at].end + gap
    return [[places[i, j] for j in range(len(kinds))] for i in range(num_rows)]


def one_after_another(start: int, sizes: list[int], num_rows: int, gap: int = 0, padding: int = 0) -> Rows:
    """Experts in a file, each with all its tensors."""
    rows = []
    for i in range(num_rows):
        row = []
        for j, nbytes in enumerate(sizes):
            row.append(record(f"{i}.{j}", start, nbytes))
            start = row[-1].end + gap
        rows.append(row)
        start += padding
    return rows


def stacked(start: int, sizes: list[int], num_rows: int) -> Rows:
    """Experts in one tensor a matrix."""
    columns = []
    for j, nbytes in enumerate(sizes):
        whole = TensorRecord(f"{j}", "U8", (num_rows, nbytes), Path("a"), start, num_rows * nbytes)
        columns.append([whole.rows(i, i + 1) for i in range(num_rows)])
        start = whole.end
    return [list(row) for row in zip(*columns, strict=True)]


@settings(max_examples=300, deadline=None)
@given(stacks(), st.sampled_from(ALIGNMENTS))
def test_place_rows_lays_out_any_rows(rows: Rows, alignment: int) -> None:
    check_rows(rows, alignment)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 5000),
    st.lists(st.integers(1, 9000), min_size=1, max_size=9),
    st.sampled_from((0, 1, MERGE_GAP)),
    st.sampled_from((0, 77, 5 * MERGE_GAP)),
    st.sampled_from(ALIGNMENTS),
)
def test_experts_one_after_another_are_one_read_each(
    start: int, sizes: list[int], gap: int, padding: int, alignment: int
) -> None:
    placements = check_rows(one_after_another(start, sizes, 4, gap, padding), alignment)
    assert [len(placement.segments) for placement in placements] == [1] * 4


@pytest.mark.parametrize("start", [0, 256, DIRECT_ALIGNMENT])
def test_rows_of_whole_pages_are_read_in_place(start: int) -> None:
    sizes = [4 * DIRECT_ALIGNMENT, DIRECT_ALIGNMENT, DIRECT_ALIGNMENT] * 3
    for rows in (stacked(start, sizes, 6), one_after_another(start, sizes, 6)):
        placement = check_rows(rows, 256)[0]
        assert not placement.copies
        assert {at % DIRECT_ALIGNMENT for at in placement.offsets} == {start % DIRECT_ALIGNMENT}
    assert placement.nbytes == sum(sizes) + (DIRECT_ALIGNMENT if start % DIRECT_ALIGNMENT else 0)


def at_pages(page_of_b: int, file_of_b: str) -> Rows:
    """Two rows of two tensors, which are neighbours in the first row."""
    page = DIRECT_ALIGNMENT
    first = [record("a", 0, page), record("b", page, page)]
    return [first, [record("a", 9 * page, page), record("b", page_of_b * page, page, path=file_of_b)]]


@pytest.mark.parametrize(
    ("rows", "in_place"),
    [
        (stacked(0, [4 * DIRECT_ALIGNMENT, 3 * DIRECT_ALIGNMENT + 64, DIRECT_ALIGNMENT], 8), [True, False, True]),
        (stacked(0, [DIRECT_ALIGNMENT, 100, 100, 100], 8), [True, False]),
        (at_pages(5, "a"), [True, True]),
        (at_pages(10, "b"), [True, True]),
        (one_after_another(DIRECT_ALIGNMENT + 8, [4096, 4096], 3), [False]),
    ],
    ids=["only what must be is copied", "small neighbours", "other places", "other files", "misaligned"],
)
def test_neighbours_in_every_row_are_one_read(rows: Rows, in_place: list[bool]) -> None:
    for placement in check_rows(rows, 16):
        assert [segment.buffer_offset is not None for segment in placement.segments] == in_place


def test_unequal_rows_are_refused() -> None:
    first = [record("a", 0, 8), record("b", 8, 8)]
    for other in (first[:1], [record("a", 0, 8), record("b", 8, 9)], [record("a", 0, 8), record("b", 8, 2, "F32")]):
        with pytest.raises(ValueError, match=r"row 1 has .*row 0 has"):
            place_rows([first, other])

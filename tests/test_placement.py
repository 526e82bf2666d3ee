"""Where tensors land in a buffer: nothing overlaps, everything is aligned, every byte is read once."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_flash.checkpoint.safetensors import DTYPE_SIZES, Extent, TensorRecord
from mlx_flash.storage.pagecache import DIRECT_ALIGNMENT
from mlx_flash.storage.placement import MERGE_GAP, Placement, padded_bytes, place

ALIGNMENTS = (1, 8, 16, 256, DIRECT_ALIGNMENT)
BY_SIZE = {1: "U8", 2: "BF16", 4: "F32", 8: "I64"}


def record(name: str, offset: int, count: int, dtype: str = "U8", path: str = "a") -> TensorRecord:
    return TensorRecord(name, dtype, (count,), Extent(Path(path), offset, count * DTYPE_SIZES[dtype]))


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
            cursor = made.extent.end
            records.append(made)
    if records and draw(st.booleans()):
        records += draw(st.lists(st.sampled_from(records), max_size=2))
    return draw(st.permutations(records))


def rows_of(made: TensorRecord) -> list[TensorRecord]:
    middle = made.shape[0] // 2
    return [made.rows(0, middle), made.rows(middle, made.shape[0])]


def check(records: list[TensorRecord], alignment: int) -> Placement:
    placement = place(records, alignment)
    check_tensors(records, placement, alignment)
    check_pieces(records, placement)
    check_segments(placement)
    assert sum(padded_bytes(made.nbytes) for made in records) >= placement.nbytes
    assert placement.nbytes % DIRECT_ALIGNMENT == 0
    assert placement.read_bytes == sum(segment.nbytes for segment in placement.segments)
    assert placement.copies == any(segment.buffer_offset is None for segment in placement.segments)
    return placement


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
        (made.extent.path, made.name, made.extent.offset, made.nbytes, at)
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
def test_any_records(records: list[TensorRecord], alignment: int) -> None:
    check(records, alignment)


@settings(max_examples=50, deadline=None)
@given(tensor_records(), st.sampled_from(ALIGNMENTS))
def test_row_ranges_and_their_whole_tensor(records: list[TensorRecord], alignment: int) -> None:
    check([part for made in records for part in (made, *rows_of(made))], alignment)


def test_no_tensors_take_nothing() -> None:
    placement = check([], 16)
    assert (placement.nbytes, placement.segments, placement.offsets) == (0, (), ())


def test_empty_tensors_are_not_read() -> None:
    placement = check([record("empty", 4096, 0), record("full", 4096, 10), record("empty", 9999, 0)], 16)
    assert [piece.name for segment in placement.segments for piece in segment.pieces] == ["full"]


def test_aligned_neighbours_are_one_read_and_not_copied() -> None:
    placement = check([record("b", 8192 + 64, 32, "F32"), record("a", 8192, 16, "F32")], 16)
    assert len(placement.segments) == 1
    assert not placement.copies
    assert placement.offsets == (64, 0)
    assert placement.read_bytes == DIRECT_ALIGNMENT


@pytest.mark.parametrize(("gap", "num_reads"), [(0, 1), (MERGE_GAP, 1), (MERGE_GAP + 1, 2)])
def test_gap_up_to_which_neighbours_are_merged(gap: int, num_reads: int) -> None:
    placement = check([record("a", 0, 100), record("b", 100 + gap, 100)], 1)
    assert len(placement.segments) == num_reads


@pytest.mark.parametrize(("offset", "dtype", "alignment"), [(4096 + 8, "U8", 16), (4097, "BF16", 1), (4100, "I64", 1)])
def test_misaligned_offset_is_copied(offset: int, dtype: str, alignment: int) -> None:
    assert check([record("a", offset, 5, dtype)], alignment).copies


def test_files_of_one_name_in_two_folders_are_two_files() -> None:
    placement = check([record("a", 0, 10, path="x/m"), record("b", 10, 10, path="y/m")], 1)
    assert {segment.path for segment in placement.segments} == {Path("x/m"), Path("y/m")}


@given(st.integers(0, 1 << 40))
def test_padded_bytes_hold_the_tensor_and_a_page_on_either_side(nbytes: int) -> None:
    assert 0 <= padded_bytes(nbytes) - nbytes - 2 * DIRECT_ALIGNMENT < DIRECT_ALIGNMENT

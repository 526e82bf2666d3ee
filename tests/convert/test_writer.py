"""What the writer writes is what every safetensors reader reads, and nothing that looks whole is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_flash.convert.pack import (
    DATA_ALIGNMENT,
    CompressedPlan,
    ShardPlan,
    TensorSpec,
    aligned_order,
    copy_buffer,
    cut,
)
from mlx_flash.errors import HeaderError, ReadError, TruncatedFileError
from mlx_flash.storage.prefetcher import read_pieces
from mlx_flash.storage.safetensors import DTYPE_SIZES, TensorRecord, read_shard


def spec(name: str, dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, dtype, shape)


def content(tensor: TensorSpec) -> bytes:
    return bytes((len(tensor.name) * 31 + i * 7) % 251 for i in range(tensor.nbytes))


def pieces(tensor: TensorSpec) -> Iterator[memoryview]:
    return cut(memoryview(content(tensor)))


def plan(path: Path, tensors: Sequence[TensorSpec], *rest: Any) -> ShardPlan:
    return ShardPlan(path.name, tensors, *rest)


def write_all(path: Path, tensors: Sequence[TensorSpec], *rest: Any) -> None:
    plan(path, tensors, *rest).write(path.parent, pieces)


SPECS = st.builds(
    lambda name, dtype, shape: spec(name, dtype, *shape),
    st.text(min_size=1, max_size=20).filter(lambda name: name != "__metadata__"),
    st.sampled_from(sorted(DTYPE_SIZES)),
    st.lists(st.integers(0, 7), max_size=3),
)
SPEC_LISTS = st.lists(SPECS, max_size=12, unique_by=lambda tensor: tensor.name)
METADATA = st.none() | st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3)


def test_a_damaged_length_of_the_header_is_refused(tmp_path: Path) -> None:
    """Every reader takes the tensors from where the header ends."""
    path = tmp_path / "model.safetensors"
    write_all(path, [spec("a", "BF16", 64, 64), spec("b", "U8", 3)])
    data = path.read_bytes()
    for bit in range(64):
        length = int.from_bytes(data[:8], "little") ^ 1 << bit
        path.write_bytes(length.to_bytes(8, "little") + data[8:])
        with pytest.raises(HeaderError):
            read_shard(path)


@settings(deadline=None, max_examples=150)
@given(tensors=SPEC_LISTS, metadata=METADATA, alignment=st.sampled_from([8, 64, 4096, DATA_ALIGNMENT]))
def test_any_tensors_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: list[TensorSpec],
    metadata: dict[str, str] | None,
    alignment: int,
) -> None:
    path = tmp_path_factory.mktemp("any") / "model.safetensors"
    write_all(path, tensors, metadata, alignment)
    data = path.read_bytes()
    expected = {tensor.name: (tensor.dtype, list(tensor.shape), content(tensor)) for tensor in tensors}

    shard = read_shard(path)
    assert shard.data_offset % alignment == 0
    assert shard.metadata == (metadata or {})
    assert {*plan(path, tensors, metadata, alignment).records(path.parent)} == {*shard.tensors}
    assert {
        record.name: (record.dtype, list(record.shape), data[record.offset : record.end]) for record in shard.tensors
    } == expected

    theirs = {name: (entry["dtype"], entry["shape"], bytes(entry["data"])) for name, entry in _deserialize(data)}
    assert theirs == expected


def _deserialize(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    return cast(list[tuple[str, dict[str, Any]]], safetensors.deserialize(data))


@settings(deadline=None)
@given(tensors=SPEC_LISTS)
def test_in_aligned_order_no_tensor_is_cut_from_its_alignment(tensors: list[TensorSpec]) -> None:
    ordered = aligned_order(tensors)
    assert sorted(ordered) == sorted(tensors)
    offset, odd = 0, False
    for tensor in ordered:
        assert offset % DTYPE_SIZES[tensor.dtype] == 0
        assert odd or offset % 16 == 0
        odd = odd or tensor.nbytes % 16 != 0
        offset += tensor.nbytes
    whole = [tensor for tensor in tensors if tensor.nbytes % 16 == 0]
    assert ordered[: len(whole)] == whole


def test_a_block_that_raises_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"older")

    def stop(*_: object) -> Any:
        raise RuntimeError("stop")

    for options in ({"pieces": stop}, {"pieces": pieces, "progress": stop}, {"pieces": pieces, "check": stop}):
        with pytest.raises(RuntimeError, match="stop"):
            plan(path, [spec("a", "F32", 4)]).write(tmp_path, **cast(Any, options))
    assert path.read_bytes() == b"older"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("names", [["a", "a"], ["__metadata__"]])
def test_tensors_that_make_no_header(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(ValueError, match=f"'{names[0]}': the name is taken"):
        write_all(tmp_path / "model.safetensors", [spec(name, "U8", 1) for name in names])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("nbytes", [0, 15, 17, 32])
@pytest.mark.parametrize("compresses", [False, True])
def test_a_tensor_of_another_size_than_planned(tmp_path: Path, nbytes: int, compresses: bool) -> None:
    found = [memoryview(bytes(min(16, nbytes - start))) for start in range(0, nbytes, 16)]
    tensors = [spec("a", "F32", 4), spec("b", "F32", 4)]
    written = CompressedPlan("out", tensors, {}) if compresses else ShardPlan("out", tensors)
    with pytest.raises(ValueError, match=f"got {nbytes} of 16 bytes of 'a'"):
        written.write(tmp_path, lambda _: iter(found))
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_ends_early_or_is_gone(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(10))
    record, words = TensorRecord("a", "F32", (4,), source, 4, 16), r"read 6 of 16 bytes at offset 4, of 'a' \(16 bytes"
    with pytest.raises(TruncatedFileError, match=words):
        list(read_pieces(record, copy_buffer()))
    source.unlink()
    with pytest.raises(ReadError, match=r"cannot read 'a' .*: no such file\. Hint"):
        list(read_pieces(record, copy_buffer()))

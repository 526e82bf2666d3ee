"""What the writer writes is what every safetensors reader reads, and nothing that looks whole is not."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_flash.convert import pack as writer
from mlx_flash.convert.pack import (
    COPY_BYTES,
    DATA_ALIGNMENT,
    CompressedPlan,
    ShardPlan,
    TensorSpec,
    aligned_order,
    copy_buffer,
    cut,
)
from mlx_flash.errors import HeaderError, ReadError, TruncatedFileError, WriteError
from mlx_flash.storage.ranges import read_pieces
from mlx_flash.storage.safetensors import DTYPE_SIZES, Extent, TensorRecord, read_shard


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


def from_file(path: Path, offset: int, tensor: TensorSpec) -> Iterator[memoryview]:
    return read_pieces(TensorRecord(*tensor, Extent(path, offset, tensor.nbytes)), copy_buffer())


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
        record.name: (record.dtype, list(record.shape), data[record.extent.offset : record.extent.end])
        for record in shard.tensors
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


def test_mlx_loads_what_was_written_from_its_arrays(tmp_path: Path) -> None:
    """Every dtype that mlx has, written from the memory of its arrays."""
    path = tmp_path / "model.safetensors"
    arrays = {
        name: mx.random.randint(0, 2, (3, 5)).astype(dtype)
        for name, dtype in {
            "BOOL": mx.bool_,
            "U8": mx.uint8,
            "F16": mx.float16,
            "BF16": mx.bfloat16,
            "F32": mx.float32,
            "I64": mx.int64,
            "C64": mx.complex64,
        }.items()
    }
    arrays |= {"scalar": mx.array(2.5), "empty": mx.zeros((0, 4))}
    mx.eval(arrays)
    tensors = [
        TensorSpec(name, name if name in DTYPE_SIZES else "F32", tuple(array.shape)) for name, array in arrays.items()
    ]
    plan(path, tensors, {"format": "mlx"}).write(tmp_path, lambda t: cut(memoryview(cast(Any, arrays[t.name]))))
    loaded, metadata = cast(tuple[dict[str, mx.array], dict[str, str]], mx.load(str(path), return_metadata=True))
    assert metadata == {"format": "mlx"}
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        assert loaded[name].shape == array.shape
        assert array.size == 0 or bool(mx.array_equal(loaded[name], array))


def test_copied_and_written_tensors_take_turns_and_are_counted(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(2 * COPY_BYTES + 1000))
    copied = spec("copied", "U8", 2 * COPY_BYTES + 5)
    written = spec("written", "F32", COPY_BYTES // 4 + 1)
    sizes: list[int] = []

    def both(tensor: TensorSpec) -> Iterator[memoryview]:
        if tensor is copied:
            return from_file(source, 77, tensor)
        return cut(memoryview(bytes(range(4)) * (written.nbytes // 4)))

    ShardPlan("out", [copied, written]).write(tmp_path, both, sizes.append)
    data = (tmp_path / "out").read_bytes()
    assert data[DATA_ALIGNMENT:][: copied.nbytes] == source.read_bytes()[77:][: copied.nbytes]
    assert data[DATA_ALIGNMENT + copied.nbytes :] == bytes(range(4)) * (written.nbytes // 4)
    assert sum(sizes) == copied.nbytes + written.nbytes
    assert max(sizes) == COPY_BYTES


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = [spec("a", "F32", 4), spec("b", "F32", 4)]
    found: list[list[str]] = []

    def look() -> None:
        found.append([entry.name for entry in tmp_path.iterdir()])

    plan(path, tensors).write(tmp_path, pieces, check=look)
    assert found == [["model.safetensors.partial"]]
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


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


def test_what_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = [spec("a", "F32", 4), spec("b", "U8", 3)]
    written = plan(path, tensors, {"format": "mlx"})
    assert not written.is_written(tmp_path)
    written.write(tmp_path, pieces)
    assert written.is_written(tmp_path)
    assert not plan(path, tensors[::-1], {"format": "mlx"}).is_written(tmp_path)
    assert not plan(path, tensors).is_written(tmp_path)
    os.truncate(path, path.stat().st_size - 1)
    assert not written.is_written(tmp_path)


@pytest.mark.parametrize("names", [["a", "a"], ["__metadata__"]])
def test_tensors_that_make_no_header(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(ValueError, match=f"'{names[0]}': the name is taken"):
        write_all(tmp_path / "model.safetensors", [spec(name, "U8", 1) for name in names])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("nbytes", [0, 15, 17])
def test_a_tensor_of_another_size_than_planned(tmp_path: Path, nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"got {nbytes} of 16 bytes of 'a'"):
        plan(tmp_path / "out", [spec("a", "F32", 4), spec("b", "F32", 4)]).write(
            tmp_path, lambda _: cut(memoryview(bytes(nbytes)))
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("nbytes", [0, 15, 17, 32])
def test_compressed_tensor_of_another_size_is_refused(tmp_path: Path, nbytes: int) -> None:
    pieces = [memoryview(bytes(min(16, nbytes - start))) for start in range(0, nbytes, 16)]
    with pytest.raises(ValueError, match=f"got {nbytes} of 16 bytes of 'a'"):
        CompressedPlan("out", [spec("a", "F32", 4)], {}).write(tmp_path, lambda _: iter(pieces))
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_ends_early(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(10))
    words = r"read 6 of 16 bytes at offset 4, of 'a' \(16 bytes at offset 4\) in .*source"
    with pytest.raises(TruncatedFileError, match=words):
        ShardPlan("out", [spec("a", "F32", 4)]).write(tmp_path, lambda tensor: from_file(source, 4, tensor))
    assert list(tmp_path.iterdir()) == [source]


def test_a_source_that_is_gone(tmp_path: Path) -> None:
    words = r"cannot read 'a' .*: no such file\. Hint"
    with pytest.raises(ReadError, match=words):
        ShardPlan("out", [spec("a", "F32", 4)]).write(tmp_path, lambda tensor: from_file(tmp_path / "gone", 0, tensor))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, tensor = os.pwrite, spec("a", "U8", 3 * COPY_BYTES)

    def short(fd: int, data: memoryview, offset: int) -> int:
        if offset >= DATA_ALIGNMENT + COPY_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(writer.os, "pwrite", short)
    words = r"cannot write .*out\.partial: No space left .* Hint: make room"
    with pytest.raises(WriteError, match=words):
        write_all(tmp_path / "out", [tensor])
    assert list(tmp_path.iterdir()) == []


def test_writes_that_take_only_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, tensors = os.pwrite, [spec("a", "F32", 100), spec("b", "U8", 33)]
    monkeypatch.setattr(writer.os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:7], offset))
    write_all(tmp_path / "out", tensors)
    assert (tmp_path / "out").read_bytes()[DATA_ALIGNMENT:] == content(tensors[0]) + content(tensors[1])


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="No such file or directory"):
        write_all(tmp_path / "nowhere" / "out", [])

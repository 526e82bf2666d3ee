from __future__ import annotations

import glob
import json
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from mlx_flash.errors import CheckpointError, CheckpointNotFoundError, HeaderError
from mlx_flash.files import open_regular
from mlx_flash.storage.safetensors import (
    DTYPE_SIZES,
    MAX_HEADER_BYTES,
    Shard,
    TensorRecord,
    read_checkpoint,
    read_shard,
)

# --- helpers ---------------------------------------------------------------------------

_NAMES = {
    f"{letter}{bits}": f"{name}{bits}"
    for letter, name in (("U", "uint"), ("I", "int"), ("F", "float"))
    for bits in (8, 16, 32, 64)
    if (letter, bits) != ("F", 8)
} | {"BOOL": "bool_", "C64": "complex64"}
_NUMPY_DTYPES = {name: np.dtype(getattr(np, other)) for name, other in _NAMES.items()}
_MLX_DTYPES = {name: getattr(mx, other) for name, other in _NAMES.items() if name != "F64"} | {"BF16": mx.bfloat16}


def _entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def _write(path: Path, header: object, data: bytes = b"") -> Path:
    """Write a safetensors file; a header of bytes is written as it is."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def _bytes_of(record: TensorRecord) -> bytes:
    with record.path.open("rb") as file:
        file.seek(record.offset)
        return file.read(record.nbytes)


def _by_name(shard: Shard) -> dict[str, TensorRecord]:
    return {record.name: record for record in shard.tensors}


def _expect(error: type[CheckpointError], path: Path, *parts: str, read: Callable[[Path], object] = read_shard) -> None:
    """Expect exactly `error`, whose message holds the file's name and all `parts`."""
    with pytest.raises(error) as caught:
        read(path)
    assert type(caught.value) is error
    for part in (path.name, *parts):
        assert part in str(caught.value)


def _assert_consistent(shard: Shard) -> None:
    """Assert what every user of a shard relies on."""
    size = shard.path.stat().st_size
    end = shard.data_offset
    assert shard.nbytes == size
    for record in shard.tensors:
        assert shard.data_offset <= record.offset <= record.end <= size
        assert record.nbytes == int(np.prod(record.shape, dtype=object)) * record.itemsize
        if record.nbytes:
            assert record.offset >= end
            end = record.end


def _checkpoint(directory: Path) -> Path:
    """Write two shards, holding a, b and c, d."""
    for number, names in ((1, "ab"), (2, "cd")):
        tensors = {name: np.full(3, ord(name), np.uint8) for name in names}
        save_file(tensors, directory / f"model-0000{number}-of-00002.safetensors")
    return directory


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """A folder for examples of hypothesis, which outlive a function's tmp_path."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


# --- reading what the official writers wrote -------------------------------------------


def test_every_dtype_of_whole_bytes_has_the_size_that_safetensors_gives_it(tmp_path: Path) -> None:
    eight_bits = {"BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
    assert DTYPE_SIZES.keys() == eight_bits | _NUMPY_DTYPES.keys() | _MLX_DTYPES.keys()
    for dtype, size in DTYPE_SIZES.items():
        path = _write(tmp_path / "x.safetensors", {"x": _entry(dtype, [3], [0, 3 * size])}, bytes(3 * size))
        with safe_open(path, "np") as file:  # which refuses a file whose offsets disagree with the size
            assert list(file.keys()) == ["x"]
        assert read_shard(path).tensors[0].nbytes == 3 * size


def test_holes_and_empty_tensors_are_accepted_as_by_mlx(tmp_path: Path) -> None:
    header = {
        "a": _entry(offsets=[2, 6]),
        "empty": _entry(shape=[0, 7], offsets=[4, 4]),
        "b": _entry(offsets=[6, 10]),
    }
    path = _write(tmp_path / "x.safetensors", header, bytes(range(13)))

    shard = read_shard(path)

    _assert_consistent(shard)
    loaded = mx.load(str(path))
    for name, record in _by_name(shard).items():
        assert _bytes_of(record) == bytes(loaded[name].flatten().tolist())


def test_only_the_header_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 5 * 2**30
    path = _write(tmp_path / "x.safetensors", {"x": _entry(shape=[size], offsets=[0, size])})
    header_end = path.stat().st_size
    os.truncate(path, header_end + size)
    copies = []

    def recording_open(path: Path) -> int:
        fd = open_regular(path)
        copies.append(os.dup(fd))  # shares its position
        return fd

    monkeypatch.setattr("mlx_flash.storage.safetensors.open_regular", recording_open)
    assert read_shard(path).tensors[0].nbytes == size
    assert [os.lseek(fd, 0, os.SEEK_CUR) for fd in copies] == [header_end]
    for fd in copies:
        os.close(fd)


# --- records ---------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_rows_are_numpy_rows(scratch: Path, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    start = data.draw(st.integers(0, shape[0]))
    stop = data.draw(st.integers(start, shape[0]))
    values = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    save_file({"before": np.zeros(3, np.int32), "x": values}, scratch / "rows.safetensors")
    record = _by_name(read_shard(scratch / "rows.safetensors"))["x"]

    rows = record.rows(start, stop)

    assert (rows.name, rows.dtype, rows.shape) == ("x", "I32", (stop - start, *shape[1:]))
    assert _bytes_of(rows) == values[start:stop].tobytes()
    assert rows.rows(0, stop - start) == rows
    for wrong in ((0, shape[0] + 1), (-1, 0), (stop + 1, stop)):
        with pytest.raises(ValueError, match=f"rows {wrong[0]} to {wrong[1]} of 'x', which has {shape[0]}"):
            record.rows(*wrong)


# --- files that are refused ------------------------------------------------------------


def test_missing_files_and_folders(tmp_path: Path) -> None:
    assert issubclass(CheckpointNotFoundError, FileNotFoundError)
    file = _write(tmp_path / "x.safetensors", {})
    for path in (tmp_path / "gone", file / "y.safetensors"):
        _expect(CheckpointNotFoundError, path, "no such file", "Hint")
    for path in (tmp_path / "gone", file):
        _expect(CheckpointNotFoundError, path, "no such folder", "Hint", read=read_checkpoint)
    (tmp_path / "folder.safetensors").mkdir()
    _expect(CheckpointError, tmp_path / "folder.safetensors", "Is a directory")


@pytest.mark.parametrize("function", ["mlx_flash.storage.safetensors.open_regular", "pathlib.Path.iterdir"])
def test_refusal_of_the_system_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    _write(tmp_path / "model.safetensors", {})
    monkeypatch.setattr(function, Mock(side_effect=PermissionError(13, "Permission denied")))
    path, kind = (tmp_path, "folder") if "iterdir" in function else (tmp_path / "model.safetensors", "file")
    words = (f"cannot read this {kind}: Permission denied", "Hint: check its permissions")
    _expect(CheckpointError, path, *words, read=read_checkpoint if kind == "folder" else read_shard)


_SIZE = "first 8 bytes promise a header of {} bytes"
_KEYS = (
    b'{"x":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"x":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}',
    b'{"x":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}',
    b'{"__metadata__":{"format":"pt","format":"mlx"}}',
)
BAD_FILES = [
    *((bytes(count), (f"read {count} of 8 bytes", "truncated", "Hint: download it again")) for count in (0, 1, 7)),
    (struct.pack("<Q", 1000) + b'{"x"', ("read 4 of 1000 bytes of the header", "truncated", "Hint: download it again")),
    (b"version https://git-lfs.github.com/spec/v1\n", (str(MAX_HEADER_BYTES), "no safetensors file", "Git LFS")),
    (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", (_SIZE.format(MAX_HEADER_BYTES + 1), "no safetensors file")),
    (struct.pack("<Q", MAX_HEADER_BYTES) + b"{}", (f"read 2 of {MAX_HEADER_BYTES} bytes",)),
]
BAD_HEADERS = [
    *((raw, "must start with '{'") for raw in (b"", b" {}", b"[]", b"null", b"\xef\xbb\xbf{}")),
    *((raw, "the header") for raw in (b'{"\xff": 1}', b'{"x": ', b"{} {}", b"{}\0", b'{"x":' * 200_000)),
    (b'{"x":' + b"9" * 5000 + b"}", "the header"),
    *((raw, f"duplicate key '{key}'") for raw, key in zip(_KEYS, ("x", "dtype", "format"), strict=True)),
    *(
        ({"__metadata__": metadata}, "__metadata__")
        for metadata in ([], "", 0, False, {"format": 1}, {"format": None}, {"a": {}})
    ),
]
BAD_ENTRIES = [
    *(
        (entry, ("exactly dtype",))
        for entry in (None, [], "U8", {}, {"dtype": "U8", "shape": [4]}, {**_entry(), "strides": [1]})
    ),
    *((_entry(dtype), ("exactly dtype", "BF16")) for dtype in ("F4", "F6_E2M3", "f32", "", None, 8, ["U8"], {})),
    *(
        (_entry(shape=shape), ("exactly dtype", "all sizes from 0 to 2**63 - 1"))
        for shape in (None, 4, "4", {"0": 4}, [4.0], ["4"], [-4], [-2, -2], [True, 4], [None], [[4]], [2**63])
    ),
    *(
        (_entry("F32", shape, [0, 0]), ("takes", "span 0"))
        for shape in ([2**62, 2], [2**32, 2**32], [2**61, 2, 2], [2**62, 2**62, 0], [0, 2**62, 2**62], [10] * 50)
    ),
    (_entry("U8", [2**62, 2], [0, 2**63 - 1]), (f"takes {2**63} bytes",)),
    (_entry("U8", [2**63 - 1], [0, 2**63 - 1]), ("truncated",)),
    (_entry(shape=[0], offsets=[9, 9]), ("truncated",)),
    *(
        (_entry(offsets=offsets), ("exactly dtype", "two data_offsets"))
        for offsets in (None, 4, [], [4], [0, 4, 8], [0.0, 4.0], ["0", "4"], [-4, 0], [False, 4], [0, 2**63], {"0": 4})
    ),
    *((_entry(offsets=offsets), ("takes 4 bytes", str(offsets))) for offsets in ([0, 3], [0, 5], [0, 0], [4, 0])),
]


def test_wrong_headers_and_entries_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for content, words in BAD_FILES:
        path.write_bytes(content)
        _expect(HeaderError, path, *words)
    for header, word in BAD_HEADERS:
        _expect(HeaderError, _write(path, header, b"0"), word)
    for entry, parts in BAD_ENTRIES:
        _expect(HeaderError, _write(path, {"layer.weight": entry}, bytes(8)), "'layer.weight'", *parts)


def test_truncated_data_and_overlapping_tensors(tmp_path: Path) -> None:
    header = {"whole": _entry(offsets=[0, 4]), "cut": _entry(offsets=[4, 8])}
    path = _write(tmp_path / "x.safetensors", header, bytes(7))
    size = path.stat().st_size
    words = f"needs {size + 1} bytes of file, found {size}: the file is truncated"
    _expect(HeaderError, path, "'cut'", words, "download it again")
    for other in ([3, 7], [0, 4], [1, 5]):
        header = {"first": _entry(), "second": _entry(offsets=other), "empty": _entry(shape=[0], offsets=[3, 3])}
        _expect(HeaderError, _write(path, header, bytes(8)), "'first'", "'second'", "inside")


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_file_is_read_consistently_or_refused(scratch: Path, data: st.DataObject) -> None:
    header = {"__metadata__": {"format": "mlx"}, "a": _entry("F16", [2, 3], [0, 12]), "b": _entry("U8", [4], [12, 16])}
    path = _write(scratch / "damaged.safetensors", header, bytes(16))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        shard = read_shard(path)
    except CheckpointError as error:
        assert path.name in str(error)
    else:
        _assert_consistent(shard)


# --- folders ---------------------------------------------------------------------------


def test_checkpoint_joins_its_shards(tmp_path: Path) -> None:
    _checkpoint(tmp_path)
    save_file({"ignored": np.zeros(1)}, tmp_path / "adapters.safetensors")

    checkpoint = read_checkpoint(tmp_path)

    assert checkpoint.directory == tmp_path
    assert [str(shard.path) for shard in checkpoint.shards] == glob.glob(str(tmp_path / "model*.safetensors"))  # noqa: PTH207
    assert {name: _bytes_of(record) for name, record in checkpoint.tensors.items()} == {
        name: name.encode() * 3 for name in "abcd"
    }
    assert checkpoint.nbytes == 12


class _Args:
    @staticmethod
    def from_dict(_: dict[str, object]) -> None:
        return None


class _Model(nn.Module):
    """The smallest model that mlx-lm can load."""

    def __init__(self, _: None) -> None:
        super().__init__()
        self.w = mx.zeros(3, dtype=mx.uint8)


@pytest.mark.parametrize("reverse", [False, True])
def test_later_shard_wins_as_in_mlx_lm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reverse: bool) -> None:
    for number in (1, 2):
        save_file({"w": np.full(3, number, np.uint8)}, tmp_path / f"model-{number}.safetensors")
    (tmp_path / "config.json").write_text("{}")
    real_glob = glob.glob
    # The order of a folder's files is the file system's choice.
    monkeypatch.setattr(glob, "glob", lambda pattern: sorted(real_glob(pattern), reverse=reverse))

    checkpoint = read_checkpoint(tmp_path)

    model, _ = mlx_lm.utils.load_model(tmp_path, get_model_classes=lambda config: (_Model, _Args))
    assert list(_bytes_of(checkpoint.tensors["w"])) == model.w.tolist() == [1 if reverse else 2] * 3
    assert checkpoint.nbytes == 3


def test_folder_without_shards(tmp_path: Path) -> None:
    _expect(CheckpointNotFoundError, tmp_path, "no model*.safetensors", "[]", "Hint", read=read_checkpoint)
    for name in ("config.json", "weights.npz", *(f"x{i}" for i in range(50))):
        (tmp_path / name).touch()
    _expect(CheckpointNotFoundError, tmp_path, "config.json", "weights.npz", "...", read=read_checkpoint)
    with pytest.raises(CheckpointNotFoundError, match=r"^.{0,400}$"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("neighbour", [None, "m1"])
def test_folder_that_glob_reads_as_a_pattern(tmp_path: Path, neighbour: str | None) -> None:
    # mlx-lm does not escape the folder: it would load nothing, or the neighbour's weights.
    for name in filter(None, ("m[1]", neighbour)):
        (tmp_path / name).mkdir()
        _checkpoint(tmp_path / name)
    _expect(CheckpointNotFoundError, tmp_path / "m[1]", "pattern", "Hint: rename", read=read_checkpoint)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["FIFO", "endless"])
def test_shard_must_be_a_regular_file(tmp_path: Path, make: Callable[[Path], object]) -> None:
    path = tmp_path / "model.safetensors"
    make(path)
    _expect(CheckpointError, path, "not a regular file", "Hint: download it again")

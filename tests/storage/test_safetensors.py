from __future__ import annotations

import dataclasses
import glob
import json
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
    Extent,
    Shard,
    TensorRecord,
    read_checkpoint,
    read_shard,
)

# --- helpers ---------------------------------------------------------------------------

_NUMPY_DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "I16": np.int16,
    "U16": np.uint16,
    "F16": np.float16,
    "I32": np.int32,
    "U32": np.uint32,
    "F32": np.float32,
    "I64": np.int64,
    "U64": np.uint64,
    "F64": np.float64,
    "C64": np.complex64,
}
_MLX_DTYPES = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "I16": mx.int16,
    "U16": mx.uint16,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "I32": mx.int32,
    "U32": mx.uint32,
    "F32": mx.float32,
    "I64": mx.int64,
    "U64": mx.uint64,
    "C64": mx.complex64,
}


def _entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def _write(path: Path, header: object, data: bytes = b"") -> Path:
    """Write a safetensors file; a header of bytes is written as it is."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def _bytes_of(record: TensorRecord) -> bytes:
    with record.extent.path.open("rb") as file:
        file.seek(record.extent.offset)
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
        assert shard.data_offset <= record.extent.offset <= record.extent.end <= size
        assert record.nbytes == int(np.prod(record.shape, dtype=object)) * record.itemsize
        if record.nbytes:
            assert record.extent.offset >= end
            end = record.extent.end


def _refuse(error: OSError) -> Callable[..., Any]:
    def refusing(*_: object, **__: object) -> Any:
        raise error

    return refusing


def _checkpoint(directory: Path, weight_map: object = None) -> Path:
    """Write two shards, holding a, b and c, d, and an index if there is a weight map."""
    for number, names in ((1, "ab"), (2, "cd")):
        tensors = {name: np.full(3, ord(name), np.uint8) for name in names}
        save_file(tensors, directory / f"model-0000{number}-of-00002.safetensors")
    if weight_map is not None:
        _index(directory).write_text(json.dumps({"metadata": {"total_size": 12}, "weight_map": weight_map}))
    return directory


def _index(directory: Path) -> Path:
    return directory / "model.safetensors.index.json"


_GOOD_MAP = {
    "a": "model-00001-of-00002.safetensors",
    "b": "model-00001-of-00002.safetensors",
    "c": "model-00002-of-00002.safetensors",
    "d": "model-00002-of-00002.safetensors",
}


@st.composite
def _tables(draw: st.DrawFn) -> dict[str, np.ndarray]:
    names = draw(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=6, unique=True))
    table = {}
    for name in names:
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        dtype = np.dtype(draw(st.sampled_from(list(_NUMPY_DTYPES.values()))))
        nbytes = int(np.prod(shape)) * dtype.itemsize
        raw = draw(st.binary(min_size=nbytes, max_size=nbytes))
        # Booleans other than 0 and 1 have no meaning.
        raw = bytes(byte & 1 for byte in raw) if dtype == np.bool_ else raw
        table[name] = np.frombuffer(raw, dtype).reshape(shape)
    table.pop("__metadata__", None)
    return table


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """A folder for examples of hypothesis, which outlive a function's tmp_path."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


# --- reading what the official writers wrote -------------------------------------------


@pytest.mark.parametrize("dtype", _NUMPY_DTYPES)
def test_reads_what_safetensors_writes(tmp_path: Path, dtype: str) -> None:
    values = np.arange(24).astype(_NUMPY_DTYPES[dtype]).reshape(2, 3, 4)
    save_file({"x": values}, tmp_path / "x.safetensors", metadata={"format": "np"})

    shard = read_shard(tmp_path / "x.safetensors")

    (record,) = shard.tensors
    assert (record.name, record.dtype, record.shape) == ("x", dtype, (2, 3, 4))
    assert (record.itemsize, record.nbytes) == (values.itemsize, values.nbytes)
    assert _bytes_of(record) == values.tobytes()
    assert shard.metadata == {"format": "np"}


@pytest.mark.parametrize("dtype", _MLX_DTYPES)
def test_reads_what_mlx_writes(tmp_path: Path, dtype: str) -> None:
    values = mx.arange(6).astype(_MLX_DTYPES[dtype]).reshape(2, 3)
    mx.save_safetensors(str(tmp_path / "x.safetensors"), {"x": values, "scalar": mx.array(1, dtype=_MLX_DTYPES[dtype])})

    records = _by_name(read_shard(tmp_path / "x.safetensors"))

    assert {record.dtype for record in records.values()} == {dtype}
    assert (records["x"].shape, records["scalar"].shape) == ((2, 3), ())
    assert records["x"].itemsize == _MLX_DTYPES[dtype].size
    assert _bytes_of(records["x"]) == bytes(memoryview(values.view(mx.uint8)))


def test_every_dtype_of_whole_bytes_is_known() -> None:
    eight_bits = {"BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
    assert DTYPE_SIZES.keys() == eight_bits | _NUMPY_DTYPES.keys() | _MLX_DTYPES.keys()


@pytest.mark.parametrize("dtype", DTYPE_SIZES)
def test_every_dtype_has_the_size_that_safetensors_gives_it(tmp_path: Path, dtype: str) -> None:
    # safe_open refuses a file whose offsets disagree with the dtype's size.
    nbytes = 3 * DTYPE_SIZES[dtype]
    path = _write(tmp_path / "x.safetensors", {"x": _entry(dtype, [3], [0, nbytes])}, bytes(nbytes))
    with safe_open(path, "np") as file:
        assert list(file.keys()) == ["x"]
    assert read_shard(path).tensors[0].nbytes == nbytes


@settings(max_examples=60, deadline=None)
@given(table=_tables())
def test_any_table_of_tensors_is_read_back(scratch: Path, table: dict[str, np.ndarray]) -> None:
    path = scratch / "table.safetensors"
    save_file(table, path)

    shard = read_shard(path)

    _assert_consistent(shard)
    records = _by_name(shard)
    assert records.keys() == table.keys()
    for name, values in table.items():
        assert _NUMPY_DTYPES[records[name].dtype] == values.dtype
        assert records[name].shape == values.shape
        assert _bytes_of(records[name]) == values.tobytes()


def test_tensors_are_in_file_order_whatever_the_header_order(tmp_path: Path) -> None:
    header = {"z": _entry(offsets=[8, 12]), "a": _entry(offsets=[4, 8]), "m": _entry(offsets=[0, 4])}
    shard = read_shard(_write(tmp_path / "x.safetensors", header, bytes(12)))
    assert [record.name for record in shard.tensors] == ["m", "a", "z"]


def test_shard_describes_its_file(tmp_path: Path) -> None:
    raw = json.dumps({"x": _entry()}).encode() + b"   "
    path = _write(tmp_path / "x.safetensors", raw, bytes(4))
    shard = read_shard(path)
    assert shard.path == path
    assert shard.nbytes == path.stat().st_size == 8 + len(raw) + 4
    assert shard.data_offset == 8 + len(raw)
    assert shard.metadata == {}


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


def test_a_header_without_tensors_is_accepted(tmp_path: Path) -> None:
    assert read_shard(_write(tmp_path / "x.safetensors", {})).tensors == ()


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


def test_five_thousand_tensors_parse_fast(tmp_path: Path) -> None:
    header = {
        f"model.layers.{i}.self_attn.q_proj.weight": _entry("BF16", [4, 8], [64 * i, 64 * (i + 1)]) for i in range(5000)
    }
    path = _write(tmp_path / "x.safetensors", header, bytes(64 * 5000))
    timings = []
    for _ in range(5):
        start = time.process_time()
        assert len(read_shard(path).tensors) == 5000
        timings.append(time.process_time() - start)
    assert min(timings) < 0.2


# --- records ---------------------------------------------------------------------------


def test_extent_end_is_exclusive() -> None:
    assert Extent(Path("x"), 10, 5).end == 15


def test_records_cannot_be_changed(tmp_path: Path) -> None:
    record = read_shard(_write(tmp_path / "x.safetensors", {"x": _entry()}, bytes(4))).tensors[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.dtype = "I8"  # type: ignore[misc]


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


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 5), (3, 2), (5, 5)])
def test_rows_out_of_range_are_refused(start: int, stop: int) -> None:
    record = TensorRecord("layer.weight", "U8", (4, 2), Extent(Path("x"), 0, 8))
    with pytest.raises(ValueError, match=f"rows {start}:{stop} of tensor 'layer.weight'.* 0:4"):
        record.rows(start, stop)


def test_rows_of_a_scalar_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'scale'.*0-d"):
        TensorRecord("scale", "F32", (), Extent(Path("x"), 0, 4)).rows(0, 1)


# --- files that are refused ------------------------------------------------------------


def test_missing_file(tmp_path: Path) -> None:
    _expect(CheckpointNotFoundError, tmp_path / "gone.safetensors", "no such file", "Hint")
    _write(tmp_path / "x.safetensors", {})
    _expect(CheckpointNotFoundError, tmp_path / "x.safetensors" / "y.safetensors", "no such file")


def test_missing_file_is_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_shard(tmp_path / "gone.safetensors")


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path / "x.safetensors", {})
    if os.geteuid() == 0:
        # Permissions do not stop root.
        monkeypatch.setattr(
            "mlx_flash.storage.safetensors.open_regular", _refuse(PermissionError(13, "Permission denied", str(path)))
        )
    else:
        path.chmod(0)
    _expect(CheckpointError, path, "Permission denied", "Hint: check its permissions")


def test_folder_in_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").mkdir()
    _expect(CheckpointError, tmp_path / "x.safetensors", "Is a directory")


@pytest.mark.parametrize("count", [0, 1, 7])
def test_file_shorter_than_the_header_length(tmp_path: Path, count: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes(count))
    _expect(HeaderError, path, f"read {count} of 8 bytes", "truncated", "Hint: download it again")


def test_header_longer_than_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 1000) + b'{"x"')
    _expect(HeaderError, path, "read 4 of 1000 bytes of the header", "truncated", "Hint: download it again")


def test_header_longer_than_the_format_allows(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    _expect(HeaderError, path, str(MAX_HEADER_BYTES), "no safetensors file", "Git LFS")
    path.write_bytes(struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}")
    _expect(HeaderError, path, str(MAX_HEADER_BYTES + 1), "no safetensors file")
    path.write_bytes(struct.pack("<Q", MAX_HEADER_BYTES) + b"{}")
    _expect(HeaderError, path, f"read 2 of {MAX_HEADER_BYTES} bytes")


@pytest.mark.parametrize("raw", [b"", b" {}", b"[]", b"null", b"\xef\xbb\xbf{}"])
def test_header_must_start_with_a_brace(tmp_path: Path, raw: bytes) -> None:
    _expect(HeaderError, _write(tmp_path / "x.safetensors", raw), "must start with '{'")


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b'{"\xff": 1}', id="not UTF-8"),
        pytest.param(b'{"x": ', id="unfinished"),
        pytest.param(b"{} {}", id="two values"),
        pytest.param(b"{}\0", id="trailing zero byte"),
        pytest.param(b'{"x":' * 200_000, id="nested too deep"),
        pytest.param(b'{"x":' + b"9" * 5000 + b"}", id="number of 5000 digits"),
    ],
)
def test_header_must_be_json(tmp_path: Path, raw: bytes) -> None:
    _expect(HeaderError, _write(tmp_path / "x.safetensors", raw), "the header")


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        (
            b'{"x":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"x":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}',
            "x",
        ),
        (b'{"x":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}', "dtype"),
        (b'{"__metadata__":{"format":"pt","format":"mlx"}}', "format"),
    ],
)
def test_duplicate_keys(tmp_path: Path, raw: bytes, key: str) -> None:
    _expect(HeaderError, _write(tmp_path / "x.safetensors", raw, b"0"), f"duplicate key '{key}'")


@pytest.mark.parametrize("metadata", [[], "", 0, False, {"format": 1}, {"format": None}, {"a": {}}])
def test_metadata_must_map_strings_to_strings(tmp_path: Path, metadata: object) -> None:
    _expect(HeaderError, _write(tmp_path / "x.safetensors", {"__metadata__": metadata}), "__metadata__")


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        "U8",
        {},
        {"dtype": "U8", "shape": [4]},
        {"dtype": "U8", "data_offsets": [0, 4]},
        {"shape": [4], "data_offsets": [0, 4]},
        {**_entry(), "strides": [1]},
    ],
)
def test_entry_must_hold_exactly_three_keys(tmp_path: Path, entry: object) -> None:
    path = _write(tmp_path / "x.safetensors", {"layer.weight": entry}, bytes(4))
    _expect(HeaderError, path, "'layer.weight'", "exactly dtype, shape and data_offsets")


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2", "f32", "", None, 8, ["U8"], {}])
def test_unknown_dtype(tmp_path: Path, dtype: object) -> None:
    path = _write(tmp_path / "x.safetensors", {"layer.weight": _entry(dtype)}, bytes(4))
    _expect(HeaderError, path, "'layer.weight'", f"unknown dtype {dtype!r}", "BF16")


@pytest.mark.parametrize(
    "shape", [None, 4, "4", {"0": 4}, [4.0], ["4"], [-4], [-2, -2], [True, 4], [None], [[4]], [2**63]]
)
def test_wrong_shape(tmp_path: Path, shape: object) -> None:
    path = _write(tmp_path / "x.safetensors", {"layer.weight": _entry(shape=shape)}, bytes(4))
    _expect(HeaderError, path, "'layer.weight'", "shape must be")


@pytest.mark.parametrize(
    "shape", [[2**62, 2], [2**32, 2**32], [2**61, 2, 2], [2**62, 2**62, 0], [0, 2**62, 2**62], [10] * 50]
)
def test_shape_that_overflows(tmp_path: Path, shape: list[int]) -> None:
    path = _write(tmp_path / "x.safetensors", {"layer.weight": _entry("F32", shape, [0, 0])})
    _expect(HeaderError, path, "'layer.weight'", "more than 2**63 - 1 bytes")


@pytest.mark.parametrize(
    "offsets", [None, 4, [], [4], [0, 4, 8], [0.0, 4.0], ["0", "4"], [-4, 0], [False, 4], [0, 2**63], {"0": 4}]
)
def test_wrong_offsets(tmp_path: Path, offsets: object) -> None:
    path = _write(tmp_path / "x.safetensors", {"layer.weight": _entry(offsets=offsets)}, bytes(4))
    _expect(HeaderError, path, "'layer.weight'", "data_offsets must be")


def test_largest_size_that_fits_in_63_bits(tmp_path: Path) -> None:
    largest = 2**63 - 1
    path = _write(tmp_path / "x.safetensors", {"x": _entry("U8", [largest], [0, largest])})
    _expect(HeaderError, path, "'x'", "truncated")
    path = _write(tmp_path / "x.safetensors", {"x": _entry("U8", [2**62, 2], [0, largest])})
    _expect(HeaderError, path, "'x'", "more than 2**63 - 1 bytes")


def test_bool_offset_is_no_int(tmp_path: Path) -> None:
    path = _write(tmp_path / "x.safetensors", {"x": _entry(shape=[1], offsets=[False, True])}, bytes(1))
    _expect(HeaderError, path, "'x'", "[False, True]")


@pytest.mark.parametrize("offsets", [[0, 3], [0, 5], [0, 0], [4, 0]])
def test_offsets_must_span_the_shape(tmp_path: Path, offsets: list[int]) -> None:
    path = _write(tmp_path / "x.safetensors", {"layer.weight": _entry(offsets=offsets)}, bytes(8))
    _expect(HeaderError, path, "'layer.weight'", "takes 4 bytes", str(offsets))


def test_truncated_data(tmp_path: Path) -> None:
    header = {"whole": _entry(offsets=[0, 4]), "cut": _entry(offsets=[4, 8])}
    path = _write(tmp_path / "x.safetensors", header, bytes(7))
    size = path.stat().st_size
    _expect(
        HeaderError, path, "'cut'", f"needs {size + 1} bytes of file, found {size}", "truncated", "download it again"
    )


def test_empty_tensor_behind_the_end(tmp_path: Path) -> None:
    path = _write(tmp_path / "x.safetensors", {"x": _entry(shape=[0], offsets=[3, 3])}, bytes(2))
    _expect(HeaderError, path, "'x'", "truncated")


@pytest.mark.parametrize("other", [[3, 7], [0, 4], [1, 5]])
def test_overlapping_tensors(tmp_path: Path, other: list[int]) -> None:
    header = {"first": _entry(), "second": _entry(offsets=other), "empty": _entry(shape=[0], offsets=[3, 3])}
    path = _write(tmp_path / "x.safetensors", header, bytes(8))
    _expect(HeaderError, path, "'first'", "'second'", "inside")


def _check_read(path: Path) -> None:
    """Check that a file is read consistently, or refused."""
    try:
        shard = read_shard(path)
    except CheckpointError as error:
        assert path.name in str(error)
    else:
        _assert_consistent(shard)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_file_is_read_consistently_or_refused(scratch: Path, data: st.DataObject) -> None:
    header = {"__metadata__": {"format": "mlx"}, "a": _entry("F16", [2, 3], [0, 12]), "b": _entry("U8", [4], [12, 16])}
    path = _write(scratch / "damaged.safetensors", header, bytes(16))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    _check_read(path)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["U8", "BF16"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(
    dtype=st.sampled_from(["U8", "BF16"]) | _JSON,
    shape=st.lists(st.integers(0, 3), max_size=2) | _JSON,
    offsets=st.tuples(st.just(0), st.integers(0, 6)) | _JSON,
    metadata=st.just({}) | _JSON,
)
def test_any_json_entry_is_read_consistently_or_refused(
    scratch: Path, dtype: object, shape: object, offsets: object, metadata: object
) -> None:
    header = {"__metadata__": metadata, "x": _entry(dtype, shape, offsets)}
    path = _write(scratch / "json.safetensors", header, bytes(4))
    _check_read(path)


# --- folders ---------------------------------------------------------------------------


def test_checkpoint_joins_its_shards(tmp_path: Path) -> None:
    _checkpoint(tmp_path, _GOOD_MAP)
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


def test_links_into_a_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    _checkpoint(blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    _index(snapshot).write_text(json.dumps({"weight_map": _GOOD_MAP}))
    assert read_checkpoint(snapshot).tensors.keys() == set("abcd")


def test_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(_checkpoint(tmp_path, _GOOD_MAP))
    assert read_checkpoint(Path(".")).nbytes == 12  # noqa: PTH201


def test_missing_folder(tmp_path: Path) -> None:
    _expect(CheckpointNotFoundError, tmp_path / "gone", "no such folder", "Hint", read=read_checkpoint)
    file = _write(tmp_path / "model.safetensors", {})
    _expect(CheckpointNotFoundError, file, "no such folder", read=read_checkpoint)


def test_unreadable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "iterdir", _refuse(PermissionError(13, "Permission denied")))
    _expect(CheckpointError, tmp_path, "folder", "Permission denied", "Hint", read=read_checkpoint)


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


def test_a_bad_shard_is_named(tmp_path: Path) -> None:
    _checkpoint(tmp_path)
    bad = tmp_path / "model-00002-of-00002.safetensors"
    os.truncate(bad, bad.stat().st_size - 1)
    with pytest.raises(HeaderError, match=r"model-00002-of-00002\.safetensors.*truncated"):
        read_checkpoint(tmp_path)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [_fifo, _endless])
def test_shard_must_be_a_regular_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "model.safetensors"
    make(path)
    _expect(CheckpointError, path, "not a regular file", "Hint: download it again")

"""Blocks decode to the bytes that were encoded, one by one, and anything else is refused."""

from __future__ import annotations

import json
import mmap
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakedriver import FakeDriver
from mlx_flash.convert.pack import CompressedPlan, TensorSpec, cut
from mlx_flash.errors import HeaderError, ReadError
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT
from mlx_flash.storage import blocks as codec
from mlx_flash.storage.blocks import (
    BlockTable,
    CodecError,
    Compression,
    Decoder,
    Encoder,
    blocks_of,
)
from mlx_flash.storage.placement import place
from mlx_flash.storage.prefetcher import BackgroundPrefetcher, Caching
from mlx_flash.storage.safetensors import CODED, Shard, TensorRecord, identity_of, make_head, read_shard

# --- the codec -------------------------------------------------------------------------


@given(st.sampled_from([2, 4]), st.binary(min_size=1, max_size=500), st.integers(1, 300))
def test_any_bytes_come_back(itemsize: int, seed: bytes, repeats: int) -> None:
    data = (seed * repeats)[: len(seed) * repeats // itemsize * itemsize]
    if not data:
        return
    coded = Encoder().encode(data, itemsize)
    target = bytearray(len(data))
    Decoder().decode(memoryview(coded), memoryview(target), itemsize)
    assert target == data
    for nbytes in {len(data) - itemsize, len(data) + itemsize} - {0}:
        with pytest.raises(CodecError, match=f"{len(data)} bytes"):
            Decoder().decode(memoryview(coded), memoryview(bytearray(nbytes)), itemsize)


def normal(num_items: int, seed: int = 0) -> bytes:
    """Return normal numbers in bfloat16."""
    values = np.random.default_rng(seed).standard_normal(num_items, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def test_compression_pays_on_slow_disks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "num_cores", lambda: 2)
    slow, fast = (Compression(2 / 3, 2e9, disk, 3e9, True) for disk in (0.3e9, 6e9))
    assert slow.gain == pytest.approx(1.5)
    assert slow.pays
    assert fast.gain < 1  # the processor is the limit, and decodes beside it
    assert not fast.pays
    monkeypatch.setattr(codec, "num_cores", lambda: 1)
    assert Compression(2 / 3, 2e9, 1e9, 3e9, True).gain == pytest.approx(1 / (1 / 2 + 1 / 3))
    monkeypatch.setattr(codec, "num_cores", lambda: 4)
    for disk, shares_cores, speed in ((1e9, True, 2e9), (9e9, True, 3e9), (9e9, False, 4e9)):
        assert Compression(0.5, 1e9, disk, 3e9, shares_cores).weight_bytes_per_second == speed


# --- the table -------------------------------------------------------------------------

_TENSORS = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 60), st.integers(1, 200)), min_size=1, max_size=6)


def make_table(tensors: list[tuple[int, int, int]]) -> tuple[BlockTable, int]:
    """Return the table of tensors of (bytes, block, run), from offset 100 on, and their end."""
    start, blocks = 100, []
    for nbytes, block, run in tensors:
        blocks += blocks_of(start, nbytes, 1, block, run)
        start += nbytes
    return BlockTable(blocks, range(1, len(blocks) + 1), 4096), start


@given(_TENSORS, st.integers(1, 150), st.data())
def test_a_range_needs_the_blocks_around_it_and_cuts_leave_them_whole(
    tensors: list[tuple[int, int, int]], step: int, data: st.DataObject
) -> None:
    table, end = make_table(tensors)
    start = data.draw(st.integers(100, end - 1))
    stop = data.draw(st.integers(start + 1, end))
    needed = [i for i in range(len(table)) if table.starts[i] < stop and table.ends[i] > start]
    assert list(table.around(start, stop)) == needed
    assert table.span(start, stop) == (table.offsets[needed[0]], sum(i + 1 for i in needed))
    cuts = list(table.cuts(start, stop, step))
    assert cuts[0] == start and cuts == sorted(set(cuts)) and cuts[-1] < stop
    assert {*cuts[1:]} <= {*table.starts, *table.ends}
    longest = max(step, *(b - a for a, b in zip(table.starts, table.ends, strict=True)))
    assert all(right - left <= longest for left, right in pairwise([*cuts, stop]))


# --- files -----------------------------------------------------------------------------

SPECS = [
    TensorSpec("matrix", "BF16", (1500, 256)),
    TensorSpec("experts", "F32", (5, 96, 32)),
    TensorSpec("odd", "F16", (2049,)),
]


CONTENTS = {spec.name: normal(spec.nbytes // 2, i) for i, spec in enumerate(SPECS)}


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    """Three tensors in a compressed file."""
    plan = CompressedPlan("compressed-00001-of-00001.safetensors", SPECS, {"format": "mlx"})
    plan.write(tmp_path, lambda spec: cut(memoryview(CONTENTS[spec.name])))
    assert plan.is_written(tmp_path)
    return read_shard(tmp_path / plan.name)


def read(
    shard: Shard,
    records: Sequence[TensorRecord],
    caching: Caching = "shared",
    **options: object,
) -> list[bytes]:
    """Read some records with the reader's threads."""
    assert shard.blocks is not None
    placement = place([[record] for record in records], 16)
    buffer = memoryview(mmap.mmap(-1, placement.nbytes))
    known = replace(shard, identity=identity_of(shard.path))
    reader = BackgroundPrefetcher([shard.path], shards=[known], **options)  # type: ignore[arg-type]
    try:
        reader.submit(placement.segments, buffer, caching=caching).wait()
        assert reader.stats.nbytes == sum(record.nbytes for record in records)
    finally:
        reader.close()
    return [bytes(buffer[at : at + r.nbytes]) for at, r in zip(placement.offsets, records, strict=True)]


@pytest.mark.parametrize("mode", ["direct", "buffered", "bounced", "driver", "cached", "kept"])
@pytest.mark.parametrize("read_size", [DIRECT_ALIGNMENT, 600_000, 4 << 20])
def test_tensors_rows_and_experts_are_read_alone(
    shard: Shard, mode: str, read_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver()
    monkeypatch.setattr("mlx_flash.memory.driver.load_driver", lambda: driver)
    tensors = {record.name: record for record in shard.tensors}
    options: dict[str, object] = {"read_size": read_size, "direct": mode != "buffered"}
    options |= {"arrival": {"bounced": "bounced", "driver": "copied by the driver"}.get(mode, "in place")}
    options |= {"room": lambda: 1 << 40} if mode == "cached" else {}
    matrix, experts = tensors["matrix"], tensors["experts"]
    parts = [(matrix, 3, 4), (matrix, 500, 777), (matrix, 1100, 1500), (experts, 2, 3), (experts, 4, 5)]
    for records, expected in (
        (list(tensors.values()), [CONTENTS[name] for name in tensors]),
        *(
            ([t.rows(a, b)], [CONTENTS[t.name][t.nbytes // t.shape[0] * a :][: t.rows(a, b).nbytes]])
            for t, a, b in parts
        ),
    ):
        assert read(shard, records, "kept" if mode == "kept" else "shared", **options) == expected
    assert bool(driver.num_copies) == (mode == "driver")


def test_rows_of_one_block_decode_it_once(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt needs many of them."""
    decoded: list[object] = []
    decode = Decoder.decode
    monkeypatch.setattr(Decoder, "decode", lambda *given: (decoded.append(given), decode(*given))[1])
    matrix, rows = next(record for record in shard.tensors if record.name == "matrix"), (3, 5, 9)
    found = read(shard, [matrix.rows(row, row + 1) for row in rows], "kept", queue_depth=1)
    assert found == [CONTENTS["matrix"][row * 512 : row * 512 + 512] for row in rows]
    assert len(decoded) == 1


def test_each_expert_begins_a_block(shard: Shard) -> None:
    table = shard.blocks
    assert table is not None
    experts = next(record for record in shard.tensors if record.name == "experts")
    for i in range(5):
        row = experts.rows(i, i + 1)
        assert table.starts[table.around(row.offset, row.end).start] == row.offset


def test_a_damaged_block_is_named(shard: Shard) -> None:
    table = shard.blocks
    assert table is not None
    whole = shard.path.read_bytes()
    matrix, experts = (next(r for r in shard.tensors if r.name == name) for name in ("matrix", "experts"))
    number = table.around(matrix.offset, matrix.end).start
    for at in (table.offsets[number], table.offsets[number] + 20, table.offsets[number + 1] - 1):
        shard.path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        words = rf"'matrix' in .*{shard.path.name}: a block .* at offset {table.offsets[number]} is"
        with pytest.raises(ReadError, match=words):
            read(shard, [matrix])
        assert read(shard, [experts]) == [CONTENTS["experts"]]


def test_damaged_files_are_refused(shard: Shard) -> None:
    whole, table = shard.path.read_bytes(), shard.blocks
    assert table is not None
    for nbytes in (0, 10, 50, table.offsets[0], len(whole) - 1):
        shard.path.write_bytes(whole[:nbytes])
        with pytest.raises(HeaderError):
            read_shard(shard.path)
    size = str(table.offsets[1] - table.offsets[0]).encode()
    shard.path.write_bytes(whole.replace(size, size[:-1] + b"%d" % (9 - int(size[-1:]))))
    with pytest.raises(HeaderError, match="cannot have the blocks"):
        read_shard(shard.path)
    shard.path.write_bytes(whole.replace(CODED.encode(), b"mlx-flask", 1))
    with pytest.raises(HeaderError, match="holds no header"):
        read_shard(shard.path)
    shard.path.write_bytes(whole.replace(b"experts", b"expirts", 1))
    with pytest.raises(HeaderError, match=r"other tensors|cannot have"):
        read_shard(shard.path)


HUGE = {"matrix": {"dtype": "BF16", "shape": [1 << 40], "data_offsets": [0, 2 << 40]}}


def test_heads_that_promise_what_cannot_be_are_refused(tmp_path: Path) -> None:
    """A file may come from anywhere."""
    path = tmp_path / "compressed-00001-of-00001.safetensors"
    coded = {"matrix": {"dtype": "U8", "shape": [300], "data_offsets": [0, 300]}}
    divided = ([0, 1], [1 << 30] * 2, [4, 0], [2, 2], "x", [512 << 10, 4, 300, 0], [4, 4, 1e9], [4, 4, True, 299])
    for blocks in ({}, 3, *({"matrix": found} for found in divided)):
        for header in (HUGE, {}, 3, {"matrix": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}):
            about = json.dumps({"header": header, "blocks": blocks})
            for text in (about, "[]", "{"):
                path.write_bytes(make_head({"__metadata__": {CODED: text}, **coded}) + bytes(300))
                with pytest.raises(HeaderError):
                    read_shard(path)

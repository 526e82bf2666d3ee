"""Pages of a KV cache on disk: written once, read where they belong, removed; errors say where."""

from __future__ import annotations

import copy
import errno
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from mlx_flash.errors import TruncatedFileError, WriteError
from mlx_flash.kv.disk import CHUNK_TOKENS, Component, DiskRows, LayerFile, PageReader, RowLayout, WriteBehind, segments
from mlx_flash.kv.kvledger import WRITE_BEHIND_BYTES, KVOptions
from mlx_flash.kv.kvpool import KVPool, make_caches
from mlx_flash.memory.arena import Arena, commits_lazily
from mlx_flash.memory.footprint import footprint, release_freed_memory

WIDE = RowLayout((Component((1, 2), 128, mx.float16), Component((1, 3), 64, mx.float32)), 64)
NARROW = RowLayout((Component((1, 2), 3, mx.float16), Component((1, 1), 2, mx.float32)), 5)
"""The pages of the first are read in place, those of the second by way of a bounce buffer."""


def on_disk(tmp_path: Path) -> tuple[KVPool, list[Any]]:
    pool = KVPool(KVOptions(step=16, directory=tmp_path / "kv", always_on_disk=True))
    caches = make_caches([KVCache() for _ in range(3)], pool.options, pool)
    feed(caches, 100)
    return pool, caches


def feed(caches: list[Any], num_tokens: int) -> None:
    for cache in caches:
        rows = mx.ones((1, 2, num_tokens, 128), mx.float16)
        mx.eval(cache.update_and_fetch(rows, rows))


Make = Callable[[RowLayout], LayerFile]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    reader, writer = PageReader(read_size=1 << 16), WriteBehind()
    yield lambda layout: LayerFile(tmp_path / f"{os.urandom(4).hex()}.kv", layout, reader, writer)
    writer.close()
    reader.close()


def begun(file: LayerFile) -> DiskRows:
    rows = DiskRows(lambda _: file)
    rows.begin(file.layout)
    return rows


def random_rows(layout: RowLayout, num_tokens: int, seed: int = 0) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, (c.heads, num_tokens, c.width_bytes), np.uint8) for c in layout.components]


def read(rows: DiskRows, capacity: int | None = None) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    """All rows, as a slot would have them; what is not theirs must still be as it was."""
    capacity = capacity or max(rows.length, 1)
    arena = Arena(max(rows.layout.slot_bytes(capacity), 1))
    arena.fill(0xEE)
    rows.settle()
    rows.file.reader.submit(
        segments(rows.file.path, rows.pages, rows.layout, 0, rows.paged_tokens, capacity), arena.memory
    ).wait()
    everything = np.frombuffer(arena.memory, np.uint8)
    found = []
    for component, at, tail in zip(rows.layout.components, rows.layout.slot_offsets(capacity), rows.tail, strict=True):
        nbytes = component.heads * capacity * component.width_bytes
        whole = everything[at : at + nbytes].reshape(component.heads, capacity, component.width_bytes)
        assert (whole[:, rows.paged_tokens :] == 0xEE).all()
        found.append(np.concatenate([whole[:, : rows.paged_tokens], tail], axis=1))
    return found


def equal(left: Any, right: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("layout", [WIDE, NARROW], ids=["in place", "bounced"])
@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["append", "truncate", "fork"]), st.integers(1, 300))),
)
def test_rows_equal_what_was_appended(
    layout: RowLayout, steps: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    reader, writer = PageReader(), WriteBehind()
    path = tmp_path_factory.mktemp("pages") / "layer.kv"
    rows = begun(LayerFile(path, layout, reader, writer))
    expected = random_rows(layout, 0)
    forks: list[tuple[DiskRows, Any]] = []
    for seed, (what, number) in enumerate(steps):
        if what == "append":
            new = random_rows(layout, number, seed)
            rows.append(new)
            expected = [np.concatenate([old, more], axis=1) for old, more in zip(expected, new, strict=True)]
            for part in new:
                part[:] = 0  # bytes are copied
        elif what == "truncate":
            rows.truncate(rows.length * number // 300)
            expected = [old[:, : rows.length] for old in expected]
        elif what == "fork":
            forks.append((rows.fork(), expected))
        assert equal(read(rows, rows.length // layout.step * layout.step + 3 * layout.step), expected)
        some = slice(rows.length * number // 400, rows.length * number // 300)
        assert equal(rows.read(some.start, some.stop), [old[:, some] for old in expected])
    assert all(equal(read(other), old) for other, old in forks)
    writer.close()
    reader.close()


def test_rows_are_right_where_pages_of_memory_are_large(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Macs have 16 KiB."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("mlx_flash.") and hasattr(module, "DIRECT_ALIGNMENT"):
            monkeypatch.setattr(module, "DIRECT_ALIGNMENT", 16384)
    layout = RowLayout(WIDE.components, 256)
    rows, expected = begun(make(layout)), random_rows(layout, 700)
    rows.append(expected)
    assert equal(read(rows, 1024), expected)


def test_pages_are_written_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: written.append(len(data)) or pwrite(fd, data, at))
    rows = begun(make(WIDE))
    for seed in range(200):
        rows.append(random_rows(WIDE, 1, seed))
    rows.settle()
    assert sum(written) == 3 * 64 * WIDE.token_bytes
    assert len(written) == 3 * 5  # one write a page and head


def test_reads_are_large_and_in_place(make: Make) -> None:
    file = make(RowLayout((Component((1, 2), 128, mx.float16),), 256))
    pages = file.allocate(2 * CHUNK_TOKENS // 256)
    found = segments(file.path, pages, file.layout, 0, 2 * CHUNK_TOKENS, 2 * CHUNK_TOKENS)
    assert [segment.nbytes for segment in found] == [CHUNK_TOKENS * 256] * 4
    assert all(segment.buffer_offset is not None for segment in found)


def test_free_pages_are_reused(make: Make) -> None:
    file = make(WIDE)
    rows = begun(file)
    rows.append(random_rows(WIDE, 640))
    other = rows.fork()
    rows.truncate(128)
    assert file.nbytes == 640 * WIDE.token_bytes
    del other
    gc.collect()
    rows.append(random_rows(WIDE, 512, 1))
    assert [page.number for page in rows.pages] == [*range(10)]
    rows.settle()
    assert file.path.stat().st_size <= WIDE.chunk_bytes


def test_what_one_sequence_has_lost_ends_no_call_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, caches = on_disk(tmp_path)
    feed(caches, 1)
    others = copy.deepcopy(caches)
    for each in (others, caches):  # so that the last layer of the others reads the first one of these ahead
        feed(each, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", Mock(side_effect=OSError(errno.ENOSPC, "full")))
        with pytest.raises(WriteError, match="full"):
            for _ in range(5):
                feed(caches, 16)
    with pytest.raises(WriteError, match="full"):  # what was lost stays lost
        for _ in range(5):
            feed(caches, 16)
    feed(others, 40)
    pool.close()


def test_a_truncated_file_raises(tmp_path: Path) -> None:
    pool, caches = on_disk(tmp_path)
    path = caches[0].disk.file.path
    caches[0].disk.settle()
    os.truncate(path, 4096)
    with pytest.raises(
        TruncatedFileError, match=r"read \d+ of \d+ bytes at offset \d+.*layer-0\.kv.*fresh prompt cache"
    ):
        feed(caches, 1)
    pool.close()


def test_writing_is_bounded(make: Make) -> None:
    rows, expected = begun(make(WIDE)), random_rows(WIDE, 64 * 9)
    rows.file._writer.limit_bytes = 64 * WIDE.token_bytes
    for start in range(0, 64 * 9, 64):
        rows.append([part[:, start : start + 64] for part in expected])
        assert rows.file._writer.queued_bytes <= 2 * 64 * WIDE.token_bytes
    assert equal(read(rows), expected)


def make_holes() -> list[np.ndarray]:
    """Leaves holes in the heap larger than a slot: what is allocated in them is not the system's when it is freed."""
    largest = np.ones(31 << 20, np.uint8)
    del largest  # glibc puts arrays of up to this size on the heap from now on
    holes = [np.ones(12 << 20, np.uint8) for _ in range(20)]
    top = [np.ones(1 << 20, np.uint8) for _ in range(3)]
    holes.clear()
    return top


@pytest.mark.usefixtures("_no_freed_buffers")
def test_a_slot_takes_the_counted_memory(tmp_path: Path) -> None:
    """On large pages, too; and no more when it is released."""
    if not commits_lazily():
        pytest.skip("arrays take all of their memory here")
    tokens = 18432
    caches = make_caches([KVCache() for _ in range(3)], KVOptions(directory=tmp_path))
    pool = caches[0].pool
    rows = mx.random.normal((1, 4, tokens, 64))
    for cache in caches:
        mx.eval(cache.update_and_fetch(rows, rows))
        cache.offload()
    top = make_holes()
    for cache in caches:
        cache.keys_and_values()
    counted = pool.ring.nbytes
    pool.ring.slots[1].wait()
    release_freed_memory()
    before = footprint()
    pool.ring.release()
    assert 0.9 * counted < before - footprint() < counted + (1 << 20)
    pool.close()
    del top


@pytest.mark.usefixtures("_no_freed_buffers")
def test_offloaded_layers_leave_the_counted_memory(tmp_path: Path) -> None:
    """But for what may have waited to be written."""
    if not commits_lazily():
        pytest.skip("arrays take all of their memory here")
    top = make_holes()
    caches = make_caches([KVCache() for _ in range(8)], KVOptions(directory=tmp_path))
    pool = caches[0].pool
    for cache in caches:
        mx.eval(cache.update_and_fetch(mx.ones((1, 4, 8192, 64)), mx.zeros((1, 4, 8192, 64))))
    release_freed_memory()
    before, counted = footprint(), pool.memory_bytes
    pool.budget_bytes = counted // 2
    pool.fit(lambda: pool.memory_bytes, 8192)
    gone = counted - pool.memory_bytes
    assert len(pool.on_disk) > 4 and gone > 2 * WRITE_BEHIND_BYTES
    for disk in pool.on_disk.values():
        disk.settle()
    assert before - footprint() > gone - WRITE_BEHIND_BYTES
    pool.close()
    del top

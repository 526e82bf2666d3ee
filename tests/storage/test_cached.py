"""Free memory outside the budget keeps a part of the files in the page cache."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT
from mlx_flash.storage.prefetcher import (
    CACHED_BLOCK_BYTES,
    REFRESH_SECONDS,
    BackgroundPrefetcher,
    CachedShare,
    RangeReader,
)
from models import QWEN3_MOE, run, same_bits, stock
from models import save as save_tiny
from noting import noted
from reading import Load, packed, write_file
from streamed import streamed_whole

FILE = Path("model.safetensors")
NUM_BLOCKS = 1000


def changed(cached: CachedShare, nbytes: float) -> float:
    """Return the share on a machine with so much free memory."""
    cached.room = lambda: int(nbytes)
    cached.refresh()
    return cached.share


def held(cached: CachedShare) -> set[int]:
    return {i for i in range(NUM_BLOCKS) if cached.holds(FILE, i * CACHED_BLOCK_BYTES)}


@given(st.floats(0, 2), st.floats(0, 2))
def test_blocks_fit_the_room_and_a_smaller_share_is_part_of_a_larger_one(first: float, second: float) -> None:
    cached, found = CachedShare(10**9, int), {}
    for share in sorted((first, second), reverse=True):
        found[share] = held(cached) if changed(cached, share * 1e9) else set()
        assert cached.share <= min(share, 1) and len(found[share]) <= cached.share * NUM_BLOCKS + 3
    assert found[min(found)] <= found[max(found)]


@given(st.integers(1, 15))
def test_blocks_are_spread_over_the_file(sixteenths: int) -> None:
    cached = CachedShare(10**9, int)
    changed(cached, sixteenths / 16 * 1e9)
    blocks = held(cached)
    for start in range(0, NUM_BLOCKS, 100):
        number = sum(start <= block < start + 100 for block in blocks)
        assert abs(number - 100 * sixteenths / 16) < 6


def test_share_falls_at_once_and_rises_in_steps() -> None:
    cached = CachedShare(1600, int)
    assert changed(cached, 800) == 0.5
    assert changed(cached, 890) == 0.5
    assert changed(cached, 901) == 0.5625
    assert changed(cached, 899) == 899 / 1600
    assert changed(cached, 1e9) == 1
    assert changed(cached, -5) == 0 and not held(cached)


def test_the_machine_is_looked_at_again_only_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room, clock = [10**9], [100.0]
    load = Load(packed(write_file(tmp_path / "file", DIRECT_ALIGNMENT), 0, [DIRECT_ALIGNMENT]))
    monkeypatch.setattr("mlx_flash.storage.prefetcher.time.monotonic", lambda: clock[0])
    with closing(BackgroundPrefetcher([tmp_path / "file"], room=lambda: room[0])) as reader:
        load.check(reader)
        room[0] = 0
        load.check(reader)
        assert reader.cached.share == 1
        clock[0] += REFRESH_SECONDS
        load.check(reader)
        assert reader.cached.share == 0


def test_pinned_weights_leave_free_memory_to_streamed_ones() -> None:
    cached = CachedShare(1600, int)
    cached.leave_out(800)
    assert changed(cached, 400) == 0.5
    assert cached.file_bytes == 400
    cached.leave_out(800)
    assert changed(cached, 400) == 1
    assert cached.file_bytes <= 1, "nothing is read"


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("io", ["auto", "direct"])
def test_model_reads_the_share_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, io: str
) -> None:
    directory = save_tiny(tmp_path, QWEN3_MOE, mx.bfloat16, bits=4)
    monkeypatch.setattr("mlx_flash.storage.prefetcher.CACHED_BLOCK_BYTES", DIRECT_ALIGNMENT)
    nbytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    monkeypatch.setattr("mlx_flash.engine.engine._spare_memory", lambda budget: int(share * nbytes))
    with streamed_whole(directory, io=io) as model:
        reads = noted(monkeypatch, RangeReader, "read", lambda *args: args[-1])
        assert same_bits(run(model, [[1, 2], [3], [4]]), run(stock(directory), [[1, 2], [3], [4]]))
        assert model.engine is not None
        stats = model.engine.reader.stats
        assert abs(model.engine.reader.cached.file_bytes / nbytes - (share if io == "auto" else 0)) < 0.01
    expected = share if io == "auto" else 0
    assert abs(stats.cached_bytes / stats.nbytes - expected) < 0.25
    assert all(reads) == (expected == 1)  # rows of embeddings are kept in any case

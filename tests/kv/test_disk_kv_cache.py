"""``DiskKVCache`` as users construct it, compared with mlx-lm's ``KVCache``."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlx_flash import DiskKVCache
from mlx_flash.errors import ConfigError, WriteError
from mlx_flash.kv.kvledger import KVOptions
from mlx_flash.kv.kvpool import make_caches
from waiting import eventually

LENGTHS = (300, 1, 1, 255, 700, 1, 40)


def rows_of(seed: int, num_tokens: int) -> mx.array:
    return mx.random.normal((2, 3, num_tokens, 32), key=mx.random.key(seed)).astype(mx.bfloat16)


def feed(cache: KVCache, seed: int, num_tokens: int) -> list[mx.array]:
    found = cache.update_and_fetch(rows_of(seed, num_tokens), rows_of(seed + 1, num_tokens))
    return [mx.contiguous(array) for array in found]


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_cuda_gets_buffers_of_mlx_lms_sizes(is_on_disk: bool, tmp_path: Path) -> None:
    """Also from copies of caches that were shortened, as those that the server keeps."""
    options = KVOptions(directory=tmp_path, always_on_disk=is_on_disk, copies_slots=True)
    caches = [make_caches([KVCache()], options)[0], KVCache()]
    for seed, num_tokens in enumerate(LENGTHS):
        rows = rows_of(seed, num_tokens).astype(mx.float32)
        found = [cache.update_and_fetch(rows, rows + 1) for cache in caches]
        assert len({tokens_of_buffer(array) for pair in found for array in pair}) == 1
        assert all(mx.array_equal(*pair) for pair in zip(*found, strict=True))
        if seed % 2:
            assert len({cache.trim(3) for cache in caches}) == 1
        else:
            caches[0].shorten()
            assert is_on_disk or caches[0].nbytes == 2 * caches[0].offset * rows[..., :1, :].nbytes
            caches = [copy.deepcopy(cache) for cache in caches]


def tokens_of_buffer(rows: Any) -> int:
    """Return for how many tokens the buffer of some rows has room, ``(batch, heads, tokens, width)``."""
    mx.eval(rows)
    strides = memoryview(rows).strides
    return strides[1] // strides[2]


def test_its_tokens_are_on_disk(tmp_path: Path) -> None:
    mine, theirs = DiskKVCache(directory=tmp_path), KVCache()
    for seed, num_tokens in enumerate(LENGTHS):
        mx.eval(feed(mine, seed, num_tokens), feed(theirs, seed, num_tokens))
    assert mine.is_on_disk
    assert mine.pool.note().disk_bytes == sum(LENGTHS) // 256 * 256 * 2 * 2 * 3 * 32 * 2
    assert mine.nbytes == 256 * 2 * 2 * 3 * 32 * 2 < theirs.nbytes
    for _ in range(2):  # a state that is set goes there, too
        assert all(map(mx.array_equal, mine.state[:2], theirs.keys_and_values()))
        mine.state = theirs.state
        assert mine.is_on_disk and not mine.empty()
    mine.__init__(directory=tmp_path)  # type: ignore[misc] # as mlx-lm's, it is empty then
    assert mine.is_on_disk and mine.empty() and mine.pool.layers == [mine]
    gc.collect()
    eventually(lambda: not [*tmp_path.rglob("*.kv")])  # a file goes with its tokens


def test_arguments_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_tokens is 100: .*RotatingKVCache"):
        DiskKVCache(max_tokens=100)
    (tmp_path / "file").write_text("")
    cache = DiskKVCache(directory=tmp_path / "file")
    with pytest.raises(WriteError, match="cannot make a folder for the KV cache"):
        feed(cache, 0, 10)

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_flash.kv.diskcache import make_caches
from mlx_flash.kv.kvpool import KVPool
from mlx_flash.kv.options import KVOptions


def on_disk(tmp_path: Path, num_tokens: int = 100, layers: int = 3) -> tuple[KVPool, list[Any]]:
    pool = KVPool(KVOptions(step=16, directory=tmp_path / "kv"))
    caches = make_caches([KVCache() for _ in range(layers)], pool.options, pool)
    feed(caches, num_tokens)
    for cache in caches:
        cache.rows.offload()
    return pool, caches


def feed(caches: list[Any], num_tokens: int) -> None:
    for cache in caches:
        rows = mx.ones((1, 2, num_tokens, 128), mx.float16)
        mx.eval(cache.update_and_fetch(rows, rows))

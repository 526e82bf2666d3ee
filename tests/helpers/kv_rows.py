from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_flash.kv.kvpool import Adding, KVPool, LayerRows


def offload_all(pool: KVPool) -> None:
    """Sends every layer that has tokens to disk, as a budget would."""
    for rows in list(pool.layers):
        if rows not in pool.on_disk and rows.memory.length:
            rows.offload()


def rows_of(seed: int, num_tokens: int, dtype: mx.Dtype, heads: int = 2, width: int = 32) -> mx.array:
    """Keys or values as attention has them: not contiguous."""
    rows = mx.random.normal((1, num_tokens, heads, width), key=mx.random.key(seed)).astype(dtype)
    return rows.transpose(0, 2, 1, 3)


def equal(left: Any, right: Any) -> bool:
    """Return whether trees of arrays are equal bit for bit."""
    pairs = zip(tree_flatten(left), tree_flatten(right), strict=True)
    return all(
        a.shape == b.shape and a.dtype == b.dtype and bool(mx.array_equal(bits(a), bits(b))) for (_, a), (_, b) in pairs
    )


def same(left: Sequence[tuple[int, mx.array]], right: Sequence[tuple[int, mx.array]]) -> bool:
    """Return whether tokens, and what they were sampled from, are equal bit for bit, and finite."""
    tokens = [token for token, _ in left] == [token for token, _ in right]
    mine, theirs = ([logprobs for _, logprobs in each] for each in (left, right))
    return tokens and equal(mine, theirs) and all(bool(mx.isfinite(array).all()) for array in mine)


def bits(array: mx.array) -> mx.array:
    return mx.contiguous(array).view(mx.uint8)


def address(array: mx.array) -> int:
    return int(np.frombuffer(memoryview(array), np.uint8).ctypes.data)  # type: ignore[arg-type]


def adding(layers: Iterable[LayerRows], num_new: int, step: int, nbytes: Sequence[int] | int = 0) -> Adding:
    """Return so many tokens for each layer; ``nbytes`` are of a token, of all layers or of each."""
    layers = list(layers)
    sizes = [nbytes] * len(layers) if isinstance(nbytes, int) else nbytes
    return Adding({rows: (num_new, size) for rows, size in zip(layers, sizes, strict=True)}, step)

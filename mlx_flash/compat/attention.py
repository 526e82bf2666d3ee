"""MLX's attention, observed while a model is called.

Models look ``mx.fast.scaled_dot_product_attention`` up when they run, so that it can be replaced in its module.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_flash.compat.require import require

require(mx.fast, "scaled_dot_product_attention")
_replacing = threading.Lock()


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The kind of a call of attention."""

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    dtype: mx.Dtype
    mask: str | tuple[mx.Dtype, tuple[int, ...]] | None = None
    has_sinks: bool = False

    @property
    def has_own_scores(self) -> bool:
        """True if the mask differs by head or sequence: the model computed a part of the scores, or cut the tokens."""
        return isinstance(self.mask, tuple) and max(self.mask[1], default=1) > 1


@contextmanager
def observed_attention() -> Iterator[list[AttentionCall]]:
    """Yield a list of the calls that this thread makes in the block."""
    calls: list[AttentionCall] = []
    thread = threading.get_ident()

    def observed(q: mx.array, k: mx.array, v: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        if threading.get_ident() == thread:
            mask, sinks = kwargs.get("mask"), kwargs.get("sinks")
            kind = (mask.dtype, tuple(mask.shape[:-2])) if isinstance(mask, mx.array) else mask
            sizes = (q.shape[1], k.shape[1], k.shape[-1], v.shape[-1])
            calls.append(AttentionCall(*sizes, q.dtype, kind, sinks is not None))
        return stock(q, k, v, *args, **kwargs)

    with _replacing:
        stock = mx.fast.scaled_dot_product_attention
        mx.fast.scaled_dot_product_attention = observed
        try:
            yield calls
        finally:
            mx.fast.scaled_dot_product_attention = stock

"""The memory that attention takes for its scores, found by trying.

A back end's fused kernels store none, but have them for some head sizes, masks and lengths only. Elsewhere scores are
stored once or several times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache

import mlx.core as mx

from mlx_flash.compat.attention import AttentionCall
from mlx_flash.compat.require import installed
from mlx_flash.storage.probe import Measurements

RESULTS = Measurements("attention.json")

_NUM_TRIALS = 2
"""Trials of a figure that later runs use too. The larger one counts."""

_TOKENS, _CONTEXT = 16, 256
"""Size of the trial: more new tokens than kernels for decoding take, and little memory for keys."""

_BUSY = 256
"""Rows and columns of a product that takes longer than MLX takes to record a trial (some ms on the CPU back end)."""

_MARGIN = 1.25
"""The allocator leaves holes between arrays that grow with the context."""

_UNFUSED_COPIES, _MASK_BYTES = 3, 2
"""Scores that attention without MLX's kernel holds, before and after the mask and their softmax; and two masks."""


def bytes_per_pair(calls: Iterable[AttentionCall]) -> int:
    """Return the bytes for each pair of a new token and a token in context, for the call that takes most.

    Calls with scores of the model's own are not tried: see :func:`unfused_bytes_per_pair`.
    """
    tried = (_remembered_or_tried(call) for call in set(calls) if not call.has_own_scores)
    return math.ceil(_MARGIN * max(tried, default=0.0))


def unfused_bytes_per_pair(num_heads: int, itemsize: int) -> int:
    """Return the bytes for each pair where a model computes scores itself, or with quantized keys."""
    return _UNFUSED_COPIES * num_heads * itemsize + _MASK_BYTES


@cache
def _remembered_or_tried(call: AttentionCall) -> float:
    """Return the bytes for each pair that a call takes: what a run before this one found, or a trial does.

    Only on the CPU, where a trial takes 20 ms. On a GPU it also loads kernels, whose memory plans have to count.
    """
    if mx.default_device() != mx.cpu:
        return _tried(call)
    key = f"mlx {installed('mlx')}: {call}"
    match RESULTS.load().get(key):
        case {"bytes_per_pair": float(found)} if 0 <= found < math.inf:
            return found
    found = max(_tried(call) for _ in range(_NUM_TRIALS))
    RESULTS.save(key, {"bytes_per_pair": found})
    return found


def _tried(call: AttentionCall) -> float:
    """Return the bytes for each pair that a call takes with zeros. Resets MLX's peak of active memory."""
    queries = mx.zeros((1, call.num_heads, _TOKENS, call.key_size), call.dtype)
    keys = mx.zeros((1, call.num_kv_heads, _CONTEXT, call.key_size), call.dtype)
    values = mx.zeros((1, call.num_kv_heads, _CONTEXT, call.value_size), call.dtype)
    sinks = mx.zeros((call.num_heads,), call.dtype) if call.has_sinks else None
    factor = mx.zeros((_BUSY, _BUSY), mx.float32)
    mx.eval(queries, keys, values, factor, *([] if sinks is None else [sinks]))
    mx.synchronize()

    # Arrays that MLX lets go of while it still allocates would make the figure smaller, so it is kept busy meanwhile.
    busy = factor @ factor
    mx.async_eval(busy)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mask: str | mx.array | None
    if isinstance(call.mask, tuple):
        dtype, leading = call.mask
        mask = mx.zeros((*leading, _TOKENS, _CONTEXT), dtype)
    else:
        mask = call.mask
    found = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=1.0, mask=mask, sinks=sinks)
    mx.eval(found)
    return max(0, mx.get_peak_memory() - before - found.nbytes) / (_TOKENS * _CONTEXT)

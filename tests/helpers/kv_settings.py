"""Settings and contents of the caches of keys and values of tiny models."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_flash import FlashConfig
from mlx_flash.engine.prepare import prepare
from mlx_flash.kv.kvpool import Adding, KVPool, PooledCache
from mlx_flash.residency.plan import ledger_of
from mlx_flash.residency.sizes import measure
from models import LLAMA

CONTEXT = 220

STEP = 64

SMALL = LLAMA | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}

FORMS: dict[str, dict[str, Any]] = {
    "open": {},
    "disk": {"kv_cache": "disk", "kv_step": 16},
    "disk, wide pages": {"kv_cache": "disk", "kv_step": 64},
}


def settings(directory: Path, form: str = "disk", times: float = 1.0, **changes: Any) -> FlashConfig:
    """With ``disk`` so many times the share that is just enough with every layer there."""
    common = {"ram_budget_gb": 4, "context_length": CONTEXT, "prefill_step_size": STEP, "poison_released_slots": True}
    config = FlashConfig(**{**common, **FORMS[form], **changes})
    if "disk" not in form:
        return config
    return replace(config, kv_ram_gb=(times * least_share(directory, config) + 1) / 1e9)


@functools.cache
def least_share(directory: Path, config: FlashConfig) -> int:
    """Return the share that is just enough with every layer on disk."""
    sizes = measure(prepare(directory, config).layout, {})
    context = config.context_length or 0
    ledger = ledger_of(sizes, config, config.prefill_step_size or 1)
    return ledger.least_rows(context, ledger.step)


@pytest.fixture(autouse=True)
def little_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers of reads and writes are larger than the caches of tiny models: these would never leave memory."""
    monkeypatch.setattr("mlx_flash.kv.kvledger.KVOptions.under_way_bytes", lambda *_: 4096)


def offload_all(pool: KVPool) -> None:
    """Sends every layer that has tokens to disk, as a budget would."""
    for entry in pool.layers:
        if not entry.is_on_disk and entry.offset:
            entry.offload()


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


def adding(layers: Iterable[PooledCache], num_new: int, step: int, nbytes: Sequence[int] | int = 0) -> Adding:
    """Return so many tokens for each layer; ``nbytes`` are of a token, of all layers or of each."""
    layers = list(layers)
    sizes = [nbytes] * len(layers) if isinstance(nbytes, int) else nbytes
    return Adding({entry: (num_new, size) for entry, size in zip(layers, sizes, strict=True)}, step)

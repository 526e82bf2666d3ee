"""Memory of attention scores: observed in the model, tried with MLX, and compared with what calls take."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from mlx_flash.compat.attention import AttentionCall, observed_attention
from mlx_flash.engine.prepare import prepare
from mlx_flash.residency.attention import bytes_per_pair
from mlx_flash.residency.sizes import CACHE_STEP, ActivationSizes
from models import save, stock
from test_model import config
from zoo import configuration

NUM_TOKENS = 64
SHORT, LONG = 272, 1040
"""Contexts. The caches have room for the call's tokens in both."""

FUSED = ("llama", "qwen3", "qwen3_next")
OWN = ("gemma2", "deepseek_v3", "gpt_oss")
"""Scores of its own, a mask that has a part of them, and attention sinks."""


def sizes_of(directory: Path) -> ActivationSizes:
    return prepare(directory, config()).plan.activations


def seen_per_pair(directory: Path, *, quantized: bool = False) -> float:
    """Return the bytes that a call of mlx-lm's model takes more for each pair of a new token and one in context."""
    model, peaks = stock(directory), []
    for context in (SHORT, LONG):
        cache = make_prompt_cache(model)
        if quantized:
            cache = [QuantizedKVCache(group_size=32) for _ in cache]
        for start in range(0, context, CACHE_STEP):
            mx.eval(model(mx.zeros((1, min(CACHE_STEP, context - start)), mx.int32), cache=cache))
        tokens = mx.zeros((1, NUM_TOKENS), mx.int32)
        mx.eval(tokens, [entry.state for entry in cache])
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(model(tokens, cache=cache))
        peaks.append(mx.get_peak_memory() - before)
    return (peaks[1] - peaks[0]) / (LONG - SHORT) / NUM_TOKENS


@pytest.mark.parametrize("name", [*FUSED, *OWN])
def test_scores_take_no_more_than_planned(name: str, tmp_path: Path) -> None:
    directory = save(tmp_path / name, configuration(name))
    sizes = sizes_of(directory)
    seen = seen_per_pair(directory)
    assert 0.25 * sizes.scores_per_pair < seen <= sizes.scores_per_pair
    if name in FUSED:
        assert sizes.scores_per_pair < sizes.unfused_per_pair


def test_scores_of_quantized_keys_take_no_more_than_planned(tmp_path: Path) -> None:
    directory = save(tmp_path / "llama", configuration("llama"))
    assert seen_per_pair(directory, quantized=True) <= sizes_of(directory).unfused_per_pair


def test_more_scores_are_stored_with_sinks() -> None:
    plain = AttentionCall(8, 2, 64, 64, mx.float32, "causal")
    with_sinks = AttentionCall(8, 2, 64, 64, mx.float32, "causal", has_sinks=True)
    assert bytes_per_pair([]) == 0
    assert bytes_per_pair([plain, with_sinks]) == bytes_per_pair([with_sinks]) > bytes_per_pair([plain])


def test_observing_leaves_attention_as_it_was() -> None:
    before, q = mx.fast.scaled_dot_product_attention, mx.ones((1, 4, 2, 8))
    mask = mx.zeros((1, 4, 2, 2))
    with pytest.raises(ValueError, match="stop"), observed_attention() as calls:
        mx.fast.scaled_dot_product_attention(q, q[:, :2], q[:, :2, :, :4], scale=1.0, mask=mask)
        raise ValueError("stop")
    assert calls == [AttentionCall(4, 2, 8, 4, mx.float32, (mx.float32, (1, 4)))] and calls[0].has_own_scores
    assert bytes_per_pair(calls) == 0  # not tried
    assert mx.fast.scaled_dot_product_attention is before

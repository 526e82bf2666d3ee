"""Memory of attention scores: observed in the model, tried with MLX, and compared with what calls take."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from mlx_flash.compat.arrays import AttentionCall, observed_attention
from mlx_flash.compat.caches import CACHE_STEP
from mlx_flash.engine import passes
from mlx_flash.engine.prepare import prepare
from mlx_flash.memory.driver import has_own_memory
from mlx_flash.residency import sizes
from mlx_flash.residency.sizes import RESULTS, ActivationSizes, bytes_per_pair
from mlx_flash.streaming.stream import PinnedLayers
from models import save, stock
from noting import noted
from streamed import config, streamed_whole
from zoo import configuration

NUM_TOKENS = 64
SHORT, LONG, LONGER = 272, 528, 1040
"""Contexts. The caches have room for the call's tokens in all."""

FUSED = ("llama", "qwen3", "qwen3_next")
KEEPS_MORE = pytest.mark.skipif(has_own_memory(), reason="a loop over tokens keeps more than scores take, now and then")
OWN = ("gemma2", "deepseek_v3", "gpt_oss")
"""Scores of its own, a mask that has a part of them, and attention sinks."""


def sizes_of(directory: Path) -> ActivationSizes:
    return prepare(directory, config()).plan.activations


def seen_per_pair(directory: Path, long: int = LONG, *, quantized: bool = False) -> float:
    """Return the bytes that a call of mlx-lm's model takes more for each pair of a new token and one in context.

    A freed buffer that is used again may be two pages larger than what is asked for: let MLX keep none.
    """
    model, peaks = stock(directory), []
    if has_own_memory():  # as where memory is short: else the scores of all layers are kept
        pinned = PinnedLayers()
        pinned.modules += model.layers
        pinned.compute_at_once(1)
    for context in (SHORT, long):
        filled = _filled(model, context, quantized=quantized)
        tokens, found = mx.zeros((1, NUM_TOKENS), mx.int32), []
        for _ in range(12):  # another thread frees arrays, in some of them before others are made: the most counts
            cache = [_copied(entry) for entry in filled]
            mx.eval(tokens, [entry.state for entry in cache])
            mx.synchronize()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            mx.eval(model(tokens, cache=cache))
            found.append(mx.get_peak_memory() - before)
        peaks.append(max(found))
    return (peaks[1] - peaks[0]) / (long - SHORT) / NUM_TOKENS


def _filled(model: Any, context: int, *, quantized: bool) -> list[Any]:
    cache = [QuantizedKVCache(group_size=32) for _ in model.layers] if quantized else make_prompt_cache(model)
    for start in range(0, context, CACHE_STEP):
        mx.eval(model(mx.zeros((1, min(CACHE_STEP, context - start)), mx.int32), cache=cache))
    return cache


def _copied(entry: Any) -> Any:
    """Return a cache with memory of its own, so that a call may change it in place."""
    copied = copy.copy(entry)
    vars(copied).update(tree_map(lambda leaf: leaf + 0 if isinstance(leaf, mx.array) else leaf, vars(entry)))
    return copied


@pytest.mark.usefixtures("_no_freed_buffers")
@pytest.mark.parametrize("name", [*FUSED[:2], pytest.param(FUSED[2], marks=KEEPS_MORE), *OWN])
def test_scores_take_no_more_than_planned(name: str, tmp_path: Path) -> None:
    directory = save(tmp_path / name, configuration(name))
    sizes = sizes_of(directory)
    # A loop over the call's tokens takes more than the scores of a short context.
    # Both peaks depend on a thread that frees arrays, so a call may show too little: it is looked at up to four times.
    seen, least = [seen_per_pair(directory, LONGER if name == FUSED[2] else LONG)], 0.25 * sizes.scores_per_pair
    while seen[-1] <= least and len(seen) < 4:
        seen.append(seen_per_pair(directory, LONGER if name == FUSED[2] else LONG))
    assert least < seen[-1] and max(seen) <= sizes.scores_per_pair
    if name in FUSED:
        assert sizes.scores_per_pair < sizes.unfused_per_pair


@pytest.mark.usefixtures("_no_freed_buffers")
@pytest.mark.skipif(has_own_memory(), reason="MLX has no CUDA kernel for these keys")
def test_scores_of_quantized_keys_take_no_more_than_planned(tmp_path: Path) -> None:
    directory = save(tmp_path / "llama", configuration("llama"))
    assert seen_per_pair(directory, quantized=True) <= sizes_of(directory).unfused_per_pair


@pytest.mark.usefixtures("_no_freed_buffers")
@pytest.mark.skipif(has_own_memory(), reason="MLX has no CUDA kernel for these keys")
@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("is_own", [True, False])
def test_a_token_with_many_quantized_keys_takes_no_more_than_counted(
    tmp_path: Path, bits: int | None, is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save(tmp_path / "llama", configuration("llama"))
    checked = noted(monkeypatch, passes, "make_room", lambda need, *_, **__: need.activations + need.waiting)
    with streamed_whole(directory, speculation=False) as model:
        model.start()
        model.plan = replace(model.plan, budget_bytes=10**10, prefill_step_size=512)
        cache = model.make_cache() if is_own else make_prompt_cache(stock(directory))
        mx.eval(model(mx.zeros((1, 2000), mx.int32), cache=cache))
        if bits is not None:
            cache = [entry.to_quantized(32, bits) for entry in cache]
        for _ in range(4):
            mx.eval([entry.state for entry in cache])
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            mx.eval(model(mx.array([[7]]), cache=cache))
            peak = mx.get_peak_memory() - before
    assert 0 < peak <= checked[-1]


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Start with an empty cache folder, and return what forgets the trials of this process."""
    if mx.default_device() != mx.cpu:
        pytest.skip("trials on a GPU are not remembered")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sizes._remembered_or_tried.cache_clear()
    yield sizes._remembered_or_tried.cache_clear
    sizes._remembered_or_tried.cache_clear()


@pytest.mark.parametrize("entry", ["many", -1.0, float("nan"), float("inf"), None])
def test_a_remembered_result_that_makes_no_sense_is_tried_again(entry: object, new_process: Callable[[], None]) -> None:
    call = AttentionCall(8, 2, 64, 64, mx.float32, "causal")
    found = bytes_per_pair([call])
    (key,) = RESULTS.load()
    RESULTS.save(key, {"bytes_per_pair": entry})
    new_process()
    assert bytes_per_pair([call]) == found


def test_observing_leaves_attention_as_it_was() -> None:
    before, q = mx.fast.scaled_dot_product_attention, mx.ones((1, 4, 2, 8))
    mask = mx.zeros((1, 4, 2, 2))
    with pytest.raises(ValueError, match="stop"), observed_attention() as calls:
        mx.fast.scaled_dot_product_attention(q, q[:, :2], q[:, :2, :, :4], scale=1.0, mask=mask)
        raise ValueError("stop")
    assert calls == [AttentionCall(4, 2, 8, 4, mx.float32, (mx.float32, (1, 4)))] and calls[0].has_own_scores
    assert bytes_per_pair(calls) == 0  # not tried
    assert mx.fast.scaled_dot_product_attention is before

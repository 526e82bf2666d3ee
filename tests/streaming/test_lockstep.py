"""Calls that share a pass over the weights give the bits of calls one after another."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import replace
from importlib import import_module
from typing import Any, cast
from unittest.mock import patch

import mlx.core as mx
import pytest
from greenlet import getcurrent, greenlet
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import LlamaModel

import mlx_flash
from batches import alone, check_equal
from mlx_flash import FlashLLM, apply_flash_patch, remove_flash_patch
from mlx_flash.compat.generation import stock_generate_step, stock_speculative_generate_step
from mlx_flash.errors import ReadError
from mlx_flash.generation import speculative_generate_step
from models import same_bits, stock
from shared_passes import PROMPT, STEP, Directories
from shared_passes import directories as directories  # a fixture
from streamed import config, streamed_whole


def test_an_error_that_is_kept_keeps_no_greenlet(directories: Directories) -> None:
    """The greenlet of a thread must not outlive it: Python's garbage collector would crash."""
    kept: list[Exception] = []
    hubs: list[weakref.ref[greenlet]] = []

    def fail() -> None:
        hubs.append(weakref.ref(getcurrent()))
        with streamed_whole(directories("llama")) as model:
            stream = model.engine.stream  # type: ignore[union-attr]
            with patch.object(stream, "acquire", side_effect=ReadError("a disk that was unplugged")):
                try:
                    next(mlx_flash.generate_step(mx.array(PROMPT), model, prefill_step_size=STEP))
                except ReadError as error:
                    kept.append(error)

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    deadline = time.monotonic() + 5
    while hubs[0]() is not None and time.monotonic() < deadline:
        time.sleep(0.001)  # the main thread removes it soon
    assert kept and hubs[0]() is None


def _with_step(model: FlashLLM, step: int) -> Any:
    return replace(model.plan, prefill_step_size=step, budget_bytes=2 * model.plan.budget_bytes)


@pytest.mark.parametrize("length", [1, 23, len(PROMPT)])
def test_first_token_takes_one_pass_and_every_other_one_more(directories: Directories, length: int) -> None:
    with streamed_whole(directories("llama"), speculation=False) as model:
        model.plan = replace(model.plan, prefill_step_size=STEP, budget_bytes=10**10)
        passes = []
        prompt = mx.array([(7 * i) % 300 for i in range(length)])
        for _ in mlx_flash.generate_step(prompt, model, max_tokens=4):
            passes.append(model.counters.num_passes)
        assert passes == [1, 2, 3, 4]
        assert model.counters.num_passes == 4


def test_a_long_call_of_mlx_lm_takes_one_pass(directories: Directories) -> None:
    with streamed_whole(directories("llama")) as model:
        model.plan = _with_step(model, STEP)
        tokens = mx.array([PROMPT])
        expected = stock(directories("llama"))
        theirs, ours = make_prompt_cache(expected), make_prompt_cache(model)
        parts = [expected(tokens[:, i : i + STEP], cache=theirs) for i in range(0, len(PROMPT), STEP)]
        assert same_bits([model(tokens, cache=ours)], [mx.concatenate(parts, axis=1)])
        assert model.counters.num_passes == 1


def test_a_failed_token_is_not_computed_again(directories: Directories, monkeypatch: pytest.MonkeyPatch) -> None:
    with streamed_whole(directories("llama")) as model:
        steps = mlx_flash.generate_step(mx.array([1, 2]), model, prompt_cache=make_prompt_cache(model))
        next(steps)
        calls: list[int] = []

        def failing(index: int) -> None:
            calls.append(index)
            raise ReadError("a disk that was unplugged")

        monkeypatch.setattr(model.engine.stream, "acquire", failing)  # type: ignore[union-attr]
        with pytest.raises(ReadError, match="unplugged"):
            next(steps)
        assert len(calls) == 1


def test_a_model_that_uses_an_entry_again_is_computed_in_order(
    directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that share keys and values would see those of later parts."""

    def forward(self: Any, inputs: mx.array, cache: Any = None, input_embeddings: Any = None) -> mx.array:
        h = self.embed_tokens(inputs)
        mask = create_attention_mask(h, cache[0])
        for layer, entry in zip(self.layers, cache, strict=True):
            h = layer(h, mask, cache=entry) + cache[0].keys[:, :, : cache[0].offset].mean()
        return cast(mx.array, self.norm(h))

    monkeypatch.setattr(LlamaModel, "__call__", forward)
    options = {"max_tokens": 6, "prefill_step_size": STEP}
    expected = list(stock_generate_step(mx.array(PROMPT), stock(directories("llama")), **options))
    with streamed_whole(directories("llama")) as model:
        for _ in range(2):
            got = list(mlx_flash.generate_step(mx.array(PROMPT), model, max_tokens=6, prefill_step_size=STEP))
            check_equal(got, expected)
        assert model._life.passes.group._needs_order


def test_the_patch_replaces_mlx_lms_loop_and_puts_it_back() -> None:
    def steps() -> tuple[Any, Any]:
        module = import_module("mlx_lm.generate")
        return module.generate_step, module.speculative_generate_step

    with apply_flash_patch(config()):
        assert steps() == (mlx_flash.generate_step, speculative_generate_step)
    stock_steps = (stock_generate_step, stock_speculative_generate_step)
    assert steps() == stock_steps
    remove_flash_patch()
    assert steps() == stock_steps


def test_other_models_and_options_are_left_to_mlx_lm(directories: Directories) -> None:
    expected = alone(directories("llama"), PROMPT, 6, kv_bits=8, kv_group_size=32, prefill_step_size=2048)
    with streamed_whole(directories("llama")) as model:
        options: dict[str, Any] = {"max_tokens": 6, "kv_bits": 8, "kv_group_size": 32}
        check_equal(list(mlx_flash.generate_step(mx.array(PROMPT), model, **options)), expected)
        with pytest.raises(TypeError, match="max_token"):
            mlx_flash.generate_step(mx.array(PROMPT), model, max_token=6)
    got = list(mlx_flash.generate_step(mx.array(PROMPT), stock(directories("llama")), max_tokens=6))
    check_equal(got, alone(directories("llama"), PROMPT, 6, prefill_step_size=2048))

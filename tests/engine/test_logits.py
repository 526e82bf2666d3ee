"""The logits of many tokens in one call: in one array, which the smallest budget holds for 80 tokens."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_flash import BudgetError, FlashConfig, load_model
from models import LLAMA, save, stock
from zoo import configuration
from zoo.weights import VARIANTS
from zoo.weights import save as save_variant

NUM_TOKENS = 70
TOKENS = mx.array([[7 * i % 300 for i in range(NUM_TOKENS)]])


@pytest.fixture(scope="module")
def phi3small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a vocabulary of 100 352: the logits of a call take more than everything else."""
    directory = tmp_path_factory.mktemp("phi3small")
    save_variant(directory, configuration("phi3small"), VARIANTS["bf16"])
    return directory


def in_parts(model: Any, tokens: mx.array, step: int) -> mx.array:
    cache, found = make_prompt_cache(model), []
    for start in range(0, tokens.shape[1], step):
        found.append(model(tokens[:, start : start + step], cache=cache))
        mx.eval(found[-1])
    return mx.concatenate(found, axis=1)


@pytest.mark.parametrize("has_cache", [True, False])
def test_smallest_budget_holds_the_logits_of_a_call(
    phi3small: Path, has_cache: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """They take 14 MB in bf16. Twice that was asked for, and a call without a prompt cache could not be cut."""
    config = FlashConfig(ram_budget_gb="min", telemetry=False)
    with load_model(phi3small, config)[0] as model, caplog.at_level(logging.INFO, "mlx_flash"):
        got = model(TOKENS, cache=make_prompt_cache(model)) if has_cache else model(TOKENS)
        mx.eval(got)
        with pytest.raises(BudgetError, match="ask for the logits of fewer tokens at a time"):
            _ = model(mx.tile(TOKENS, (1, 10)))  # logits that nobody asks for are not computed
    step = min(map(int, re.findall(r"room for (\d+) (?:prompt )?tokens at a time", caplog.text)))
    assert mx.array_equal(got, in_parts(stock(phi3small), TOKENS, step))


@pytest.fixture
def wide(tmp_path: Path) -> Iterator[Any]:
    directory = save(tmp_path, LLAMA | {"vocab_size": 20_000, "num_hidden_layers": 2, "tie_word_embeddings": True})
    with load_model(directory, FlashConfig(ram_budget_gb=2, prefill_step_size=16, telemetry=False))[0] as model:
        model.start()
        yield model


def test_parts_of_a_call_write_their_logits_into_one_array(wide: Any) -> None:
    """They were kept apart and joined in the end, so that all were there twice."""
    tokens = mx.array([[i % 900 for i in range(100)], [i % 700 for i in range(100)]])
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    logits = wide(tokens, cache=make_prompt_cache(wide))
    mx.eval(logits)
    assert logits.shape == (2, 100, 20_000)
    assert mx.get_peak_memory() - before < 1.4 * logits.nbytes
    assert mx.array_equal(logits, in_parts(stock(wide._life.prepared.checkpoint.directory), tokens, 8))


def test_interrupted_part_is_written_again(wide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, cache = mx.array([[i % 900 for i in range(40)]]), make_prompt_cache(wide)
    mlp, calls = wide.layers[1].mlp, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(mlp, *arguments)

    original = type(mlp).__call__
    with monkeypatch.context() as patch:
        patch.setattr(type(mlp), "__call__", lambda self, *a: interrupted(*a) if self is mlp else original(self, *a))
        with pytest.raises(KeyboardInterrupt):
            wide(tokens, cache=cache)
    assert [entry.offset for entry in cache] == [16, 16]  # the parts that were computed stay
    got = wide(tokens[:, 16:], cache=cache)
    assert mx.array_equal(got, in_parts(stock(wide._life.prepared.checkpoint.directory), tokens, 16)[:, 16:])


def test_prompt_that_turns_out_to_need_an_order_leaves_no_logits_behind(tmp_path: Path) -> None:
    """The error that said so referred to itself. Until Python's collector came, the logits of the call stayed."""
    directory = save(tmp_path, configuration("deepseek_v3"))
    config = FlashConfig(ram_budget_gb="min", context_length=300, prefill_step_size=16, telemetry=False)
    gc.collect()
    gc.disable()
    try:
        with load_model(directory, config)[0] as model:
            cache = make_prompt_cache(model)
            mx.eval(model(mx.array([[7 * i % 300 for i in range(60)]]), cache=cache))
            assert model._life.passes.group._needs_order
            left = mx.get_active_memory()
            gc.collect()
            assert left - mx.get_active_memory() < 1000  # bytes
    finally:
        gc.enable()

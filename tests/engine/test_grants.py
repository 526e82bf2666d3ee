"""Grants: prompts in new caches, and tokens after them, that are computed without a sum over layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

import mlx_flash
from mlx_flash import FlashLLM, load_model
from mlx_flash.engine.headroom import fits_surely
from mlx_flash.engine.row import Row
from models import GEMMA3, LLAMA, same_bits, saved_once, stock
from streamed import LARGE_GB, config


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return saved_once(lambda name: tmp_path_factory.mktemp(name), {"dense": LLAMA, "windows": GEMMA3})


@pytest.fixture(scope="module")
def model(saved: Callable[[str], Path]) -> Iterator[FlashLLM]:
    options = config(ram_budget_gb=LARGE_GB, speculation=False, context_length=1024)
    with load_model(saved("dense"), options)[0] as model:
        model.start()
        yield model


def row_of(model: FlashLLM, num_tokens: int, cache: list[Any] | None = None, **options: Any) -> Row:
    tokens = mx.array([[7 * i % 999 for i in range(num_tokens)]])
    return model.row(tokens, make_prompt_cache(model) if cache is None else cache, 2048, **options)


def is_granted(model: FlashLLM, row: Row, budget_bytes: int | None = None) -> bool:
    """Return whether a row would be computed without a check of all layers. If so, its caches are prepared."""
    plan = model.plan if budget_bytes is None else replace(model.plan, budget_bytes=budget_bytes)
    return model._life.passes.grants.undo_if_granted(plan, row) is not None


@given(num_tokens=st.integers(3, 700), margin=st.integers(0, 30_000_000))
@settings(max_examples=60)
def test_what_is_granted_surely_fits(model: FlashLLM, num_tokens: int, margin: int) -> None:
    budget = model.plan.ledger.process + mx.get_active_memory() + margin
    row = row_of(model, num_tokens)
    granted = is_granted(model, row, budget)
    plan, num_layers = replace(model.plan, budget_bytes=budget), len(model._life.passes._session.engine.pinned.modules)
    if granted:
        assert fits_surely(plan, row_of(model, num_tokens).lane(2), num_layers)
    assert not is_granted(model, row_of(model, num_tokens), budget - margin)
    assert is_granted(model, row_of(model, num_tokens))


@pytest.mark.parametrize("num_tokens", [3, 64, 65, 255, 256, 257, 258, 513])
def test_granted_prompts_have_the_bits_of_mlx_lm(
    saved: Callable[[str], Path], model: FlashLLM, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the last token of the prompt, or the first one after it, makes buffers grow."""
    prompt = mx.array([7 * i % 999 for i in range(num_tokens)])
    granted: list[int] = []
    run_granted = type(model._life.passes)._run_granted

    def counted(passes: Any, plan: Any, row: Row) -> bool:
        num_left = 0 if row.is_done else row.num_left
        found = run_granted(passes, plan, row)
        granted.extend([num_left] * found)
        return found

    monkeypatch.setattr(type(model._life.passes), "_run_granted", counted)
    found = list(mlx_flash.generate_step(prompt, model, max_tokens=4))
    expected = list(generate_step(prompt, stock(saved("dense")), max_tokens=4))
    assert granted[0] == num_tokens and 1 in granted
    assert [token for token, _ in found] == [token for token, _ in expected]
    assert same_bits([one for _, one in found], [other for _, other in expected])


def test_only_prompts_in_new_caches_are_granted(saved: Callable[[str], Path], model: FlashLLM) -> None:
    used = make_prompt_cache(model)
    assert is_granted(model, row_of(model, 5, used))
    model(mx.array([[1, 2, 3]]), cache=used)
    one, other = make_prompt_cache(model), make_prompt_cache(model)
    logits = row_of(model, 5)
    logits.left[0].wants_logits = True
    parts = model.row(mx.array([[*range(9)]]), make_prompt_cache(model), 3)
    assert len(parts.left) > 2
    refused = {
        "tokens are there": row_of(model, 5, used),
        "of two lists": row_of(model, 5, [one[0], *other[1:]]),
        "mlx-lm's own": row_of(model, 5, make_prompt_cache(model._model)),
        "several parts": parts,
        "logits of all tokens": logits,
        "tokens were there": row_of(model, 5, used) if used[0].trim(3) and [e.trim(3) for e in used[1:]] else None,
    }
    for reason, row in refused.items():
        assert row is not None and not is_granted(model, row), reason
    with load_model(saved("windows"), config(ram_budget_gb=LARGE_GB))[0] as windows:
        windows.start()
        assert not is_granted(windows, row_of(windows, 5))
    with load_model(saved("dense"), config(ram_budget_gb=LARGE_GB, kv_max_tokens=1024))[0] as forgetful:
        forgetful.start()
        assert not is_granted(forgetful, row_of(forgetful, 5))


def test_room_is_counted_as_the_cache_grows(saved: Callable[[str], Path], model: FlashLLM) -> None:
    """A cache of another model with the same layers has that one's settings: its first buffers may be much larger."""
    options = config(ram_budget_gb=LARGE_GB, kv_cache="preallocated", context_length=50_000)
    with load_model(saved("dense"), options)[0] as other:
        caches = [make_prompt_cache(each) for each in (model, other)]
        budget = model.plan.ledger.process + mx.get_active_memory() + 20_000_000
        granted = [is_granted(model, row_of(model, 5, cache), budget) for cache in caches]
    assert granted == [True, False]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
@pytest.mark.parametrize("number", [0, 2])
def test_a_granted_prompt_that_fails_leaves_its_cache_empty(
    model: FlashLLM, error: type[BaseException], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, cache = mx.array([5, 17, 290, 3, 42]), make_prompt_cache(model)
    expected = [token for token, _ in mlx_flash.generate_step(prompt, model, max_tokens=3)]
    update, calls = type(cache[0]).update_and_fetch, 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number + 1:
            raise error
        return update(*args)

    with monkeypatch.context() as patch:
        patch.setattr(type(cache[0]), "update_and_fetch", failing)
        with pytest.raises(error):
            list(mlx_flash.generate_step(prompt, model, max_tokens=3, prompt_cache=cache))
    assert [entry.offset for entry in cache] == [0] * len(cache)
    found = mlx_flash.generate_step(prompt, model, max_tokens=3, prompt_cache=cache)
    assert [token for token, _ in found] == expected


def test_memory_of_prompts_that_were_granted_is_published(saved: Callable[[str], Path]) -> None:
    with load_model(saved("dense"), config(ram_budget_gb=LARGE_GB))[0] as model:
        cache = make_prompt_cache(model)
        list(mlx_flash.generate_step(mx.array([5, 17, 290]), model, max_tokens=2, prompt_cache=cache))
        assert model.kv is not None
        assert model.kv.usage.memory_bytes == sum(entry.nbytes for entry in cache) > 0
        assert model.kv.usage.reserved_bytes == model.kv.usage.memory_bytes

"""What an interrupt cuts in two is undone, or refuses: never another bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache
from mlx_lm.models.mamba2 import Mamba2Block

from mlx_flash import CacheError, WriteError, load_model
from mlx_flash.engine import passes
from mlx_flash.engine.call import parse_call
from mlx_flash.engine.passes import Undo
from mlx_flash.kv.checkpoints import trim_all_to
from models import LLAMA, MAMBA2, computed, run, same_bits, save, stock
from saved_models import model_fixture
from streamed import config, streamed_whole

SMALL = LLAMA | {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 300}


directory = model_fixture(SMALL)


def test_a_cache_that_cannot_be_put_back_refuses_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "model", MAMBA2 | {"num_hidden_layers": 2, "vocab_size": 300}, mx.float32)
    with streamed_whole(folder) as model:
        cache = make_prompt_cache(model)
        computed(model, mx.array([[5, 17, 290]]), cache)
        with monkeypatch.context() as patch:
            patch.setattr(Mamba2Block, "__call__", interrupted(Mamba2Block.__call__, 2))
            with pytest.raises(KeyboardInterrupt):
                model(mx.array([[7]]), cache=cache)
        words = "interrupted or failed .* ArraysCache .*Hint: start again with a fresh prompt cache"
        uses: list[Callable[[], Any]] = [
            lambda: model(mx.array([[7]]), cache=cache),
            lambda: computed(model, mx.array([[7, 8]]), cache),
            lambda: copy.deepcopy(cache)[0][0],
            lambda: save_prompt_cache(str(tmp_path / "cache.safetensors"), cache),
        ]
        for use in uses:
            with pytest.raises(CacheError, match=words):
                use()
        assert same_bits(run(model, [[5, 17], [9]]), run(stock(folder), [[5, 17], [9]]))


def test_a_cache_whose_putting_back_was_interrupted_refuses(directory: Path) -> None:
    with load_model(directory, config())[0] as model:
        cache = make_prompt_cache(model)
        computed(model, mx.array([[1, 2, 3, 4]]), cache)
        call = parse_call((mx.array([[5]]), cache), {})
        undo = Undo([call])
        undo()
        assert [entry.offset for entry in cache] == [4] * len(cache)
        cache[-1].trim(2)  # as the prefix cache does, until it has put its rows back
        undo()
        with pytest.raises(CacheError):
            model(mx.array([[5]]), cache=cache)


def test_a_cache_that_cannot_be_put_back_costs_its_own_row_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trim(cache: list[Any], offsets: list[int]) -> None:
        if cache[0] is caches[0][0]:
            raise WriteError("the disk is full")
        trim_all_to(cache, offsets)

    def overflow(*_: Any) -> Any:
        raise ValueError("too large")

    with streamed_whole(directory) as model:
        model.plan = replace(model.plan, budget_bytes=10**11)
        caches = [make_prompt_cache(model) for _ in range(2)]
        for cache in caches:
            computed(model, mx.array([[1, 2, 3]]), cache)
        rows = [model.row(mx.array([[5]]), cache, 2048) for cache in caches]
        with monkeypatch.context() as patch:
            patch.setattr(passes, "trim_all_to", trim)
            caches[0][1].update_and_fetch = overflow
            model.advance(rows)
        assert isinstance(rows[0].error, ValueError) and rows[1].error is None
        assert same_bits([rows[1].outputs[-1]], run(stock(directory), [[1, 2, 3], [5]])[1:])
        with pytest.raises(CacheError, match="cannot be put back"):
            model(mx.array([[5]]), cache=caches[0])


def interrupted(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Return a function that is interrupted after a call."""
    calls = iter(range(1, 1 << 30))

    def call(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        if next(calls) == number:
            raise KeyboardInterrupt
        return result

    return call

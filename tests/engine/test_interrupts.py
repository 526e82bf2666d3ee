"""What an interrupt cuts in two is undone, or refuses: never another bit."""

from __future__ import annotations

import copy
import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache
from mlx_lm.models.mamba2 import Mamba2Block

from expert_pools import with_pool
from interrupting import CHANGES, CHUNKS, Strike, Victim, outcomes
from mlx_flash import CacheError, FlashLLM, WriteError, load_model
from mlx_flash.engine import passes
from mlx_flash.engine.call import parse_call
from mlx_flash.engine.passes import Undo
from mlx_flash.kv.checkpoints import trim_all_to
from mlx_flash.memory.arena import Arena
from models import GEMMA3, LLAMA, MAMBA2, QWEN3_MOE, computed, guessed, run, same_bits, save, stock
from streamed import config, streamed_on_disk, streamed_whole
from threads import threads_of_models

CALLS = [[1, 2, 3]]
SMALL = LLAMA | {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 300}
"""Little to compute: a test of loans computes hundreds of passes."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"), SMALL, mx.float32)


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[mx.array]:
    return run(stock(directory), CALLS)


def test_a_model_that_a_reader_thread_frees(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's collector frees it in whatever thread allocates memory, also in one that the end waits for."""
    real, freed = os.preadv, threading.Event()

    def preadv(*args: Any) -> int:
        if not freed.is_set() and threading.current_thread().name.startswith("mlx-flash-reader"):
            freed.set()
            gc.enable()
            gc.collect()
        return real(*args)

    model: Any = streamed_whole(directory)
    model.start()
    run(model, CALLS)
    assert model.engine is not None
    reader, unit, arena = model.engine.reader, model.engine.stream.units[0], Arena(1 << 20)
    gc.collect()
    gc.disable()
    try:
        vars(model)["itself"] = model
        del model
        monkeypatch.setattr(os, "preadv", preadv)
        reader.start(unit.reads, arena.memory)
        assert freed.wait(10)
        end = time.monotonic() + 10
        while threads_of_models():
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        gc.enable()


LITTLE = {"num_hidden_layers": 2, "vocab_size": 300}
KINDS: dict[str, dict[str, Any]] = {
    "dense": LLAMA | LITTLE,
    "on disk": LLAMA | LITTLE,
    "sliding window": GEMMA3 | LITTLE | {"num_hidden_layers": 3},
    "recurrent": MAMBA2 | LITTLE,
    "mixture": QWEN3_MOE | LITTLE,
}


def opened(name: str, folder: Path) -> FlashLLM:
    if name == "on disk":
        return streamed_on_disk(folder, cut=2)
    return with_pool(folder, 6) if name == "mixture" else streamed_whole(folder, tile_rows=10**9)


@pytest.mark.parametrize("name", KINDS)
def test_interrupts_of_passes(tmp_path: Path, name: str) -> None:
    """Some of the instructions in the thread that waits."""
    folder = save(tmp_path / "model", KINDS[name], mx.float32)
    with opened(name, folder) as model:
        model.start()
        model.plan = replace(model.plan, budget_bytes=10**11, prefill_step_size=2048)
        victim = Victim(model, stock(folder))
        for change in CHANGES:
            strike = Strike(None, None)
            outcomes(victim, change, strike.run)
            for at in range(0, strike.count, strike.count // 5):
                strike = Strike(None, at)
                found = outcomes(victim, change, strike.run)
                assert set(found) <= {"right", "refused"}, (change, at, strike.where)
                assert "refused" not in found or name in ("sliding window", "recurrent")


@pytest.mark.parametrize("name", KINDS)
def test_interrupts_while_guesses_are_taken_back(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path / "model", KINDS[name], mx.float32)
    with opened(name, folder) as model:
        model.start()
        model.plan = replace(model.plan, budget_bytes=10**11)
        victim, found, at = Victim(model, stock(folder)), [], 0
        while True:
            cache = victim.filled()
            rows = guessed(model, [7, 8, 8], cache)
            strike = Strike(None, at)
            is_over = not strike.run(lambda rows=rows: rows.keep(2))
            found.append(victim.goes_on(cache, [*CHUNKS, [7], [8], [8]]))
            assert found[-1] == "right", strike.where
            if is_over:
                break
            at += 11
        assert len(found) > 5


def test_a_cache_that_cannot_be_put_back_refuses_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "model", KINDS["recurrent"], mx.float32)
    with streamed_whole(folder) as model:
        victim = Victim(model, stock(folder))
        cache = victim.filled()
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
        assert victim.is_right()


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


@pytest.mark.parametrize("is_short", [False, True])
def test_a_token_that_is_taken_back_leaves_all_layers_alike(directory: Path, is_short: bool) -> None:
    """A cache of which a layer lacks tokens refuses every use."""
    with load_model(directory, config())[0] as model:
        cache = make_prompt_cache(model)
        computed(model, mx.array([[1, 2, 3, 4]]), cache)
        for entry in cache[:1]:  # where the token that failed came to
            entry.update_and_fetch(*(mx.zeros((1, LLAMA["num_key_value_heads"], 1, 16)) for _ in range(2)))
        if is_short:
            cache[-1].trim(2)
        passes._trim(cache, [4] * len(cache))
        if is_short:
            with pytest.raises(CacheError):
                model(mx.array([[5]]), cache=cache)
        else:
            assert [entry.offset for entry in cache] == [4] * len(cache)
            assert same_bits([model(mx.array([[5]]), cache=cache)], run(stock(directory), [[1, 2, 3, 4], [5]])[1:])


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

"""Models that are loaded, called and closed in different threads, and collected in one of their own."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import pytest
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

import children
import fused
import mlx_flash
import models
from adapters import save_adapter
from faulty import threads_of_models
from mlx_flash import FlashConfig, apply_flash_patch
from mlx_flash.convert import derived
from mlx_flash.kv.kvpool import DiskKVCache
from mlx_flash.storage.prefetcher import RangeReader

T = TypeVar("T")
CHUNKS = [[5, 17, 900, 3, 42, 64], [12], [999]]
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS: dict[str, dict[str, Any]] = {
    "private constants": models.NARROW_LLAMA
    | {"rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 8192}},
    "mixture": models.QWEN3_MOE,
}


GENERATES = """
import importlib, os, sys, threading
from pathlib import Path
import mlx.core as mx
from mlx_lm import utils
import mlx_flash
from mlx_flash import FlashConfig, apply_flash_patch
folder, way = Path(sys.argv[1]), sys.argv[2]
if way == "patched":
    apply_flash_patch(FlashConfig(ram_budget_gb=4.0, telemetry=False))
if way == "streamed":
    model = mlx_flash.load_model(folder, FlashConfig(ram_budget_gb="min", context_length=256))[0]
else:
    model = utils.load_model(folder)[0]
step = mlx_flash.generate_step if way == "streamed" else importlib.import_module("mlx_lm.generate").generate_step
counts = []
for _ in range(20):
    thread = threading.Thread(target=lambda: list(step(mx.array([1, 2, 3]), model, max_tokens=3)))
    thread.start()
    thread.join()
    counts.append(len(os.listdir("/proc/self/task")))
if way != "stock":
    model.close()
print(counts[0], counts[-1], len(os.listdir("/proc/self/task")))
"""


def in_thread(work: Callable[..., T], *args: Any) -> T:
    """Return the result of some work in a thread of its own."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work(*args))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def call(model: Any, chunk: list[int], cache: list[Any]) -> mx.array:
    logits: mx.array = model(mx.array([chunk]), cache=cache)
    mx.eval(logits)  # and not the cache, as mlx-lm's loop
    return logits


def settings(budget: Any = "min", **options: Any) -> FlashConfig:
    return FlashConfig(ram_budget_gb=budget, telemetry=False, **options)


@pytest.mark.parametrize("is_patched", [True, False], ids=["patched", "loaded"])
@pytest.mark.parametrize("kind", MODELS)
def test_each_step_in_a_thread_of_its_own(kind: str, is_patched: bool, tmp_path: Path) -> None:
    directory = models.save(tmp_path / "model", MODELS[kind])
    expected = models.run(models.stock(directory), CHUNKS)
    for flash in (settings(), settings(4.0)):
        with apply_flash_patch(flash) if is_patched else nullcontext():
            load = mlx_lm_utils.load_model if is_patched else partial(mlx_flash.load_model, config=flash)
            model: Any = in_thread(load, directory)[0]
        cache = in_thread(make_prompt_cache, model)
        for chunk, logits in zip(CHUNKS, expected, strict=True):
            for each in (in_thread(copy.deepcopy, cache), cache):
                assert models.same_bits([in_thread(call, model, chunk, each)], [logits])
        assert models.same_bits(in_thread(models.run, in_thread(model.close), CHUNKS), expected)


def test_a_copy_in_another_thread_waits_for_the_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = models.save(tmp_path / "model", models.NARROW_LLAMA)
    add, copies = DiskKVCache.update_and_fetch, list[Any]()
    with mlx_flash.load_model(directory, settings())[0] as model:
        cache = make_prompt_cache(model)
        call(model, CHUNKS[0], cache)
        thread = threading.Thread(target=lambda: copies.append(copy.deepcopy(cache)))

        def add_and_copy(entry: DiskKVCache, *arrays: mx.array) -> tuple[mx.array, mx.array]:
            found = add(entry, *arrays)
            if entry is cache[0]:
                thread.start()
                thread.join(0.2)
            return found

        monkeypatch.setattr(DiskKVCache, "update_and_fetch", add_and_copy)
        call(model, CHUNKS[1], cache)
        thread.join()
        assert [entry.offset for entry in copies[0]] == [len(CHUNKS[0]) + len(CHUNKS[1])] * len(cache)
        monkeypatch.undo()
        assert models.same_bits([call(model, CHUNKS[2], copies[0])], [call(model, CHUNKS[2], cache)])


def test_adapters_may_be_applied_in_another_thread(tmp_path: Path) -> None:
    base = models.save(tmp_path / "base", models.NARROW_LLAMA)
    adapter = str(save_adapter(tmp_path / "adapter", base, "dora", 3))
    expected = models.run(mlx_lm_utils.load_adapters(models.stock(base), adapter), CHUNKS)
    with apply_flash_patch(settings()):
        model = in_thread(mlx_lm_utils.load_model, base)[0]
        in_thread(mlx_lm_utils.load_adapters, model, adapter)
    assert models.same_bits(in_thread(models.run, model, CHUNKS), expected)
    lazily = in_thread(model.close)
    assert models.same_bits(in_thread(models.run, lazily, CHUNKS), expected)


@pytest.mark.parametrize("cache_gb", [0.0, 1.0], ids=["in memory", "in a copy"])
def test_parameters_that_loading_computes(cache_gb: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.Model, "sanitize", fused.sanitize)
    monkeypatch.setattr(derived, "LEAST_BYTES", 1)
    directory = fused.save_fused(tmp_path / "model", fused.SMALL)
    expected = models.run(models.stock(directory), CHUNKS)
    for _ in range(2):  # the second time there is a copy
        model = in_thread(mlx_flash.load_model, directory, settings(derived_cache_gb=cache_gb))[0]
        assert models.same_bits(in_thread(models.run, model, CHUNKS), expected)
        lazily = in_thread(model.close)
        assert models.same_bits(in_thread(models.run, lazily, CHUNKS), expected)


def test_models_are_loaded_and_called_side_by_side(tmp_path: Path) -> None:
    """Each model has streams of its own: MLX does not serialize two threads on one."""
    directory = models.save(tmp_path / "model", models.NARROW_LLAMA)
    expected = models.run(models.stock(directory), CHUNKS)

    def work(seed: int) -> bool:
        mx.random.seed(seed)
        model = mlx_flash.load_model(directory, settings(4.0))[0]
        drawn = mx.random.uniform(shape=(4,)).tolist()
        return models.same_bits(models.run(model.close(), CHUNKS), expected) and len(drawn) == 4  # type: ignore[arg-type]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


def test_a_reader_may_free_its_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = models.save(tmp_path / "model", models.NARROW_LLAMA)
    may_collect, collected = threading.Event(), threading.Event()
    read = RangeReader.read

    def reading(self: RangeReader, *args: Any) -> None:
        if may_collect.wait(10) and not collected.is_set():
            gc.collect()
            collected.set()
        read(self, *args)

    model = mlx_flash.load_model(directory, settings(lend_reserves=False))[0]
    models.run(model, CHUNKS)
    monkeypatch.setattr(RangeReader, "read", reading)
    model.engine.stream.close()  # type: ignore[union-attr]
    model.engine.stream.start()  # type: ignore[union-attr]
    gone = weakref.ref(model._life)
    model.cycle = [model]
    del model
    may_collect.set()
    assert collected.wait(10)
    for thread in threads_of_models():
        thread.join(10)
        assert not thread.is_alive()
    assert gone() is None


@pytest.mark.parametrize("budget", ["min", 8.0])
def test_a_model_that_nobody_has_is_freed_at_once(tmp_path: Path, budget: Any) -> None:
    """Its memory does not wait for Python's collector of cycles: a plan that was given up referred to its callers."""
    directory = models.save(tmp_path / "model", models.WIDE_LLAMA)

    def started_and_left() -> Any:
        model = mlx_flash.load_model(directory, settings(budget, context_length=64))[0]
        model.start()
        return weakref.ref(model)

    gc.collect()
    gc.disable()
    try:
        assert started_and_left()() is None
    finally:
        gc.enable()


@pytest.mark.skipif(sys.platform != "linux", reason="counts system threads in /proc")
def test_threads_that_generate_leave_no_more_system_threads_than_with_mlx_lm(tmp_path: Path) -> None:
    """MLX has a system thread for each stream and keeps it, so both leave some for each thread. Closing starts none."""
    directory = models.save(tmp_path / "model", models.NARROW_LLAMA)
    found = [children.run("-c", GENERATES, directory, way).stdout.split() for way in ("stock", "patched", "streamed")]
    stock, patched, streamed = (list(map(int, counts)) for counts in found)
    assert patched[2] <= stock[2] + 2  # its loading streams
    assert 0 < streamed[1] - streamed[0] <= stock[1] - stock[0]
    assert streamed[2] <= streamed[1]

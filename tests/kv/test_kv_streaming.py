"""KV caches of streamed models: mlx-lm's output bit for bit, wherever keys and values are, within the budget."""

from __future__ import annotations

import errno
import functools
import gc
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import (
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

import zoo
from kv_settings import FORMS, SMALL, STEP, little_under_way, same, settings
from mlx_flash import (
    BudgetError,
    CacheError,
    ConfigError,
    DiskKVCache,
    FlashConfig,
    FlashLLM,
    WriteError,
    load_model,
)
from mlx_flash.commands.generate import needed_context
from mlx_flash.engine.prepare import prepare
from mlx_flash.kv.kvledger import KVOptions
from mlx_flash.kv.kvpool import DiskQuantizedKVCache
from models import save, stock
from saved_models import models_fixture
from waiting import eventually

__all__ = ["little_under_way"]

PROMPT = mx.array([i * 7 % 300 for i in range(1, 200)])


MODELS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen3": zoo.configuration("qwen3"),
    "gemma3_text": zoo.configuration("gemma3_text") | {"num_hidden_layers": 12},
    "gpt_oss": zoo.configuration("gpt_oss") | {"num_hidden_layers": 10, "layer_types": None},
    "deepseek_v3": zoo.configuration("deepseek_v3"),
    "qwen3_next": zoo.configuration("qwen3_next") | {"num_hidden_layers": 8, "full_attention_interval": 2},
}
"""Plain caches; with sliding windows beside them; with keys and values of unlike widths; with recurrent states."""

directories = models_fixture(MODELS)


def generated(model: Any, num_tokens: int = 10, **options: Any) -> list[tuple[int, mx.array]]:
    steps = generate_step(PROMPT, model, max_tokens=num_tokens, prefill_step_size=STEP, **options)
    return [(int(token), logprobs) for token, logprobs in steps]


@pytest.fixture(scope="module")
def stock_output(directories: Callable[[str], Path]) -> Callable[[str], list[tuple[int, mx.array]]]:
    """Tokens and logits of stock mlx-lm, by model, each computed once."""
    return functools.cache(lambda name: generated(stock(directories(name))))


def went_to_disk(model: FlashLLM) -> bool:
    assert model.kv is not None
    return model.kv.note().num_offloaded > 0 and model.kv.note().read_bytes > 0


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name in MODELS for form in FORMS if form != "disk, wide pages" or name in ("llama", "gpt_oss")],
)
def test_output_is_stock(directories: Callable[[str], Path], stock_output: Any, name: str, form: str) -> None:
    directory = directories(name)
    resident, expected = stock(directory), stock_output(name)
    with load_model(directory, settings(directory, form))[0] as model:
        for theirs, mine in zip(make_prompt_cache(resident), make_prompt_cache(model), strict=True):
            assert isinstance(mine, DiskKVCache) if type(theirs) is KVCache else type(mine) is type(theirs)
        assert same(generated(model), expected)
        assert went_to_disk(model) == ("disk" in form)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_output_is_stock(directories: Callable[[str], Path], bits: int) -> None:
    directory, quantized = directories("llama"), {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": 100}
    with load_model(directory, settings(directory))[0] as model:
        cache = make_prompt_cache(model)
        mine = generated(model, prompt_cache=cache, **quantized)
        assert same(mine, generated(stock(directory), **quantized))
        assert all(type(entry) is DiskQuantizedKVCache for entry in cache)


def test_max_kv_size_without_effect_is_warned_about_once(
    directories: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """mlx-lm ignores it for a model with a ``make_cache`` of its own, such as Llama's."""
    for name in ("qwen3", "llama"):
        with load_model(directories(name), settings(directories(name)))[0] as model:
            make_prompt_cache(model)
            assert not caplog.messages
            caches = [make_prompt_cache(model, max_kv_size=64) for _ in range(2)]
    assert not any(isinstance(entry, RotatingKVCache) for cache in caches for entry in cache)
    (message,) = caplog.messages
    assert message.startswith("max_kv_size=64 has no effect") and "kv_max_tokens" in message


def test_max_kv_size_shortens_the_planned_context_where_caches_rotate(directories: Callable[[str], Path]) -> None:
    args = Namespace(max_tokens=100, max_kv_size=64, prefill_step_size=32)
    assert needed_context(args, 5000, directories("qwen3")) == 96
    assert needed_context(args, 5000, directories("llama")) == 5100


@pytest.mark.parametrize("keep", [0, 4])
def test_kv_max_tokens_are_the_last_ones_as_in_mlx_lm(directories: Callable[[str], Path], keep: int) -> None:
    directory, prompts = directories("llama"), [PROMPT.tolist(), [1, 2, 3]]
    with load_model(directory, settings(directory, "open", kv_max_tokens=128, kv_keep=keep))[0] as model:
        cache = make_prompt_cache(model)
        expected = generated(stock(directory), prompt_cache=[RotatingKVCache(128, keep) for _ in cache])
        assert same(generated(model, prompt_cache=cache), expected)
        assert 128 == cache[0].size() < cache[0].offset and cache[0].keep == keep
        assert model.is_batchable == (not keep), "mlx-lm's batches drop the first tokens too"
        generator = BatchGenerator(model, max_tokens=10, prefill_step_size=STEP)
        uids, found = generator.insert(prompts), dict[int, list[int]]()
        while responses := generator.next_generated():
            for response in responses:
                found.setdefault(response.uid, []).append(response.token)
        assert found[uids[0]] == [token for token, _ in expected] or not keep
    with pytest.raises(ConfigError, match="kv_keep is 128: it must be less than kv_max_tokens, 128"):
        FlashConfig(kv_max_tokens=128, kv_keep=128)


UNDER_WAY_BYTES = KVOptions.under_way_bytes


@pytest.mark.parametrize("context_length", [220, 100])
def test_a_kv_ram_gb_that_is_too_small_names_the_minimum(
    directories: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, context_length: int
) -> None:
    """That of a context shorter than 256 tokens was said to be too small for 256."""
    monkeypatch.setattr(KVOptions, "under_way_bytes", UNDER_WAY_BYTES)
    directory = directories("llama")
    config = settings(directory, context_length=context_length)
    too_small = replace(config, kv_ram_gb=1e-5)
    with pytest.raises(ConfigError, match=r"needs at least ([\d.]+)") as caught:
        prepare(directory, too_small)
    enough = float(str(caught.value).split("at least ")[1].split(":")[0])
    with load_model(directory, replace(config, kv_ram_gb=enough))[0] as model:
        assert same(generated(model), generated(stock(directory)))


LONG_PROMPT = mx.array([i * 7 % 300 for i in range(1150)])


def test_a_call_beyond_kv_ram_gb_names_it_with_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVOptions, "under_way_bytes", UNDER_WAY_BYTES)
    directory = save(tmp_path, SMALL | {"num_hidden_layers": 2})
    config = FlashConfig(ram_budget_gb=4, prefill_step_size=100, context_length=256, kv_ram_gb=0.001)
    with load_model(directory, config)[0] as model:
        cache = make_prompt_cache(model)
        with pytest.raises(
            BudgetError, match=r"in a context of \d+ needs .* for its keys and values; kv_ram_gb allows 1.0 MB"
        ) as caught:
            list(generate_step(LONG_PROMPT, model, max_tokens=1, prefill_step_size=100, prompt_cache=cache))
        assert "would take the process to" not in str(caught.value)
        assert "to more for a longer context" in str(caught.value)
        assert caught.value.minimum_bytes > 4e9


def test_more_context_than_planned_goes_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that memory has no room for is admitted when the disk has."""
    directory = save(tmp_path, SMALL | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 12})
    monkeypatch.setattr("mlx_flash.residency.machine.footprint", lambda: 400_000_000)
    config = FlashConfig(ram_budget_gb=4, prefill_step_size=STEP, context_length=256, kv_step=16, kv_cache="stock")
    config = replace(config, ram_budget_gb=(prepare(directory, config).plan.peak_bytes + 200_000) / 1e9)
    prompt = mx.array([i * 7 % 300 for i in range(1000)])

    def tokens(model: Any) -> list[int]:
        return [int(t) for t, _ in generate_step(prompt, model, max_tokens=4, prefill_step_size=STEP)]

    with load_model(directory, config)[0] as model, pytest.raises(BudgetError, match="KV"):
        tokens(model)
    with load_model(directory, replace(config, kv_cache=None))[0] as model:
        assert tokens(model) == tokens(stock(directory))
        assert went_to_disk(model)


@pytest.fixture
def offloaded(directories: Callable[[str], Path], tmp_path: Path) -> Iterator[tuple[FlashLLM, list[Any]]]:
    """A model, and a cache of it that is on disk."""
    directory = directories("llama")
    with load_model(directory, settings(directory, times=1.5, kv_directory=tmp_path / "kv"))[0] as model:
        cache = make_prompt_cache(model)
        generated(model, 2, prompt_cache=cache)
        assert any(entry.is_on_disk for entry in cache)
        yield model, cache


def test_a_kv_directory_that_cannot_be_one_is_refused(
    directories: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    for name, message in {
        "file": "which is not a directory",
        "link": "which is not a directory",
        "file/kv": "and .*/file is not a directory",
        "new/kv": "this user cannot write to .*",
    }.items():
        if name == "new/kv":  # tests may run as root
            monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
        with pytest.raises(ConfigError, match=f"kv_directory is .*/{name}[,:] {message}. Hint"):
            load_model(directories("llama"), settings(directories("llama"), kv_directory=tmp_path / name))


def test_a_full_disk_raises_before_the_call(offloaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = offloaded
    before = [entry.offset for entry in cache]
    with monkeypatch.context() as patch:
        patch.setattr("mlx_flash.kv.disk.free_bytes", lambda path: 10)
        with pytest.raises(WriteError, match=r"needs .* MB more on the disk of .*kv"):
            model(PROMPT[None, :STEP], cache=cache)
    assert [entry.offset for entry in cache] == before
    assert bool(mx.isfinite(model(PROMPT[None, :STEP], cache=cache)).all())


def test_a_pass_that_cannot_be_undone_costs_its_cache_alone(
    directories: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What undid it had to read tokens that were lost, and so did each later call, of any cache."""
    directory, real, failing = directories("llama"), os.pwrite, "none"

    def pwrite(fd: int, block: Any, offset: int) -> int:
        if failing in Path(f"/proc/self/fd/{fd}").readlink().name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, block, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with load_model(directory, settings(directory, kv_step=16, kv_directory=tmp_path / "kv"))[0] as model:
        model.start()
        assert model.kv is not None
        model.kv.options = replace(model.kv.options, always_on_disk=True)
        caches = [make_prompt_cache(model) for _ in range(2)]
        for cache in caches:
            mx.eval(model(PROMPT[None, :10], cache=cache))
        failing = caches[0][1].disk.file.path.name
        mx.eval(model(PROMPT[None, :11], cache=caches[0]))
        caches[0][0].disk.settle()
        failing = "layer-"
        rows = [model.row(PROMPT[None, :40], cache, STEP) for cache in caches]
        model.advance(rows)
        assert isinstance(rows[0].error, WriteError) and rows[1].error is None  # whose pages are written later
        failing = "none"
        assert same(generated(model), generated(stock(directory)))
        with pytest.raises(CacheError, match="Hint: start again with a fresh prompt cache"):
            model(PROMPT[None, :1], cache=caches[0])


def test_files_are_removed_with_a_model_that_is_not_closed(directories: Callable[[str], Path], tmp_path: Path) -> None:
    directory, base = directories("llama"), tmp_path / "missing" / "kv"
    model = load_model(directory, settings(directory, kv_directory=base))[0]
    generated(model, 2)
    assert list(base.iterdir())
    del model
    gc.collect()
    eventually(lambda: not list(base.iterdir()))

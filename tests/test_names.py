"""Objects that load, generate and close: the same text as mlx-lm's, and errors for what they cannot take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

import mlx_flash
from mlx_flash import (
    ConfigError,
    DiskKVCache,
    FlashConfig,
    FlashGenerationLoop,
    FlashLLM,
    FlashManager,
    parse_flash_directives,
)
from mlx_flash.engine import wrapped
from models import LLAMA, PREFILL_AND_DECODE, make_random_model, run, same_bits, save, stock

SHAPE = "--layers 2 --hidden-size 64 --intermediate-size 96 --heads 4 --kv-heads 2 --vocab-size 600"
CONFIG = FlashConfig(ram_budget_gb=2.0, telemetry=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("models") / "model", *SHAPE.split())


@pytest.fixture(scope="module")
def expected(folder: Path) -> str:
    model, tokenizer, *_ = mlx_lm.load(str(folder))
    return mlx_lm.generate(model, tokenizer, "Once", max_tokens=6)


def joined(parts: Iterator[str]) -> str:
    return "".join(parts)


def test_a_manager_loads_and_shuts_down(folder: Path, expected: str) -> None:
    with FlashManager(CONFIG) as manager:
        model, _ = manager.load(folder)
        assert joined(model.stream_generate("Once", max_tokens=6)) == expected
        assert "model" in [running.name for running in FlashManager.of_process().running]
    manager.shutdown()
    assert not manager.models
    with pytest.raises(mlx_flash.ClosedError):
        model(mx.array([[1]]))


def test_a_loop_takes_a_path_or_a_model(folder: Path, expected: str) -> None:
    loop = FlashGenerationLoop(folder, CONFIG)
    assert joined(loop.stream_generate("Once", max_tokens=6)) == expected
    again = FlashGenerationLoop(loop.flash_model, loop.tokenizer)
    assert joined(again.stream_generate("Once", max_tokens=6)) == expected
    with pytest.raises(ConfigError, match="Hint: model, tokenizer = "):
        FlashGenerationLoop(loop.flash_model)
    loop.shutdown()
    loop.shutdown()


def test_a_lazily_loaded_model_is_wrapped(folder: Path, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer, *_ = mlx_lm.load(str(folder), lazy=True)
    for path in (None, folder):
        if path is None:  # other tests have shards open too
            mine = [file for file in wrapped._open_files() if file.parent == folder]
            assert mine
            monkeypatch.setattr(wrapped, "_open_files", lambda mine=mine: mine)
        with FlashLLM(model, CONFIG, model_path=path) as flash:
            assert flash.name == "model"
            assert joined(FlashGenerationLoop(flash, tokenizer).stream_generate("Once", max_tokens=6)) == expected
            with pytest.raises(ConfigError, match="loaded without a tokenizer"):
                next(flash.stream_generate("Once"))
    monkeypatch.setattr(wrapped, "_open_files", list)
    with pytest.raises(ConfigError, match=r"is not known: .* none. Hint: .*model_path"):
        FlashLLM(model, CONFIG)


def test_a_model_that_was_changed_is_not_wrapped(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"in memory. Hint: load it with mlx_flash.load"):
        FlashLLM(stock(folder), CONFIG, model_path=folder)
    model, *_ = mlx_lm.load(str(folder), lazy=True)
    model.update({"model": {"norm": {"weight": model.model.norm.weight * 2}}})
    with pytest.raises(ConfigError, match=r"'model.norm.weight' is not as mlx-lm loads it .* 1 parameters"):
        FlashLLM(model, CONFIG, model_path=folder)


def test_directives_of_a_modelfile() -> None:
    text = 'FROM /models/x\nSYSTEM """You\nhelp"""\nflash true\nFLASH_RAM_GB 12\nFLASH_THREADS 6\nPARAMETER num_ctx 9\n'
    assert parse_flash_directives(text) == FlashConfig(enabled=True, ram_budget_gb=12.0, queue_depth=6)
    assert parse_flash_directives("FROM /models/x\nSYSTEM hello\n") == FlashConfig(enabled=False)
    for line, ours in (("FLASH_PREFETCH_LAYERS 3", "FLASH_NUM_SLOTS"), ("FLASH_TOP_K 4", "changes the output")):
        with pytest.raises(ConfigError, match=f"{line.split()[0]} is not available: .*{ours}"):
            parse_flash_directives(f"FLASH true\n{line}")
    with pytest.raises(ConfigError, match="FLASH_RAM"):
        parse_flash_directives("FLASH_RAMGB 3")


def test_a_cache_names_its_folder(tmp_path: Path) -> None:
    directory = save(tmp_path / "model", LLAMA | {"num_hidden_layers": 2})
    expected = run(stock(directory), PREFILL_AND_DECODE)
    model = stock(directory)
    cache = [DiskKVCache(max_tokens=None, cache_dir=tmp_path / "keys") for _ in model.layers]
    found = [model(mx.array([list(chunk)]), cache=cache) for chunk in PREFILL_AND_DECODE]
    assert same_bits(found, expected) and list((tmp_path / "keys").iterdir())

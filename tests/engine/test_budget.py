"""The budget of running models changes between passes. No bit of the output does."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_flash import BudgetError, ConfigError, FlashConfig, FlashLLM, load_model
from mlx_flash.engine.modelmanager import ModelManager
from mlx_flash.memory.lazy import active_memory
from mlx_flash.residency.plan import MB
from models import QWEN3_MOE, WIDE_LLAMA, same_bits, save, stock

MIXTURE = QWEN3_MOE | {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 32, "num_hidden_layers": 4}
"""0.11 GB in fp32."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    configs = {"dense": WIDE_LLAMA, "mixture": MIXTURE}
    return {name: save(tmp_path_factory.mktemp(name), config, mx.float32) for name, config in configs.items()}


@pytest.fixture(autouse=True)
def fixed_footprint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The footprint of this process depends on the tests before; another process measures it."""
    gc.collect()
    for module in ("residency.machine", "engine.need", "engine.lifecycle"):
        monkeypatch.setattr(f"mlx_flash.{module}.footprint", lambda: 100 * MB + active_memory())


def opened(directory: Path, budget_gb: float) -> FlashLLM:
    return load_model(directory, FlashConfig(ram_budget_gb=budget_gb, telemetry=False, context_length=256))[0]


def decode(model: Any, cache: list[Any], tokens: list[int]) -> list[mx.array]:
    outputs = []
    for token in tokens:
        outputs.append(model(mx.array([[token]]), cache=cache))
        mx.eval(outputs[-1])
    return outputs


@pytest.mark.parametrize("name", ["dense", "mixture"])
def test_changes_of_the_budget_change_no_bit(directories: dict[str, Path], name: str) -> None:
    tokens = [[(i * 37 + j) % 300 for j in range(3)] for i in range(8)]
    model = stock(directories[name])
    cache = make_prompt_cache(model)
    expected = [decode(model, cache, some) for some in tokens]
    del model
    with opened(directories[name], 0.19) as model:
        least = model.plan.minimum_bytes / 1e9 + 0.001
        cache, plans = make_prompt_cache(model), set()
        for some, outputs, gb in zip(tokens, expected, (0.19, 0.17, 0.3, least, 0.16, least, 0.5, 0.18), strict=True):
            ModelManager.of_process().set_ram_budget(gb)
            assert same_bits(decode(model, cache, some), outputs)
            assert model.plan.budget_bytes == round(gb * 1e9)
            assert active_memory() <= model.plan.budget_bytes - model.plan.base_bytes + model.plan.active_bytes
            plans.add(model.plan.peak_bytes)
        assert len(plans) > 1


def test_lent_memory_leaves_before_the_plan_changes(directories: dict[str, Path]) -> None:
    settings = FlashConfig(ram_budget_gb=0.19, context_length=512, prefill_step_size=32, telemetry=False)
    with load_model(directories["mixture"], settings)[0] as model:
        cache = make_prompt_cache(model)
        decode(model, cache, list(range(30)))
        engine, before = model.engine, active_memory()
        ModelManager.of_process().set_ram_budget(0.15)
        assert model.engine is engine and 100 * MB + active_memory() <= 150 * MB < 100 * MB + before
        ModelManager.of_process().set_ram_budget(0.2)
        decode(model, cache, list(range(40)))
        assert model.engine is engine and active_memory() > before


def test_page_cache_is_that_of_the_budget_in_force(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_flash.engine.session._spare_memory", lambda budget: 10**12 - budget)
    with opened(directories["dense"], 0.18) as model:
        engines = set()
        for megabytes in (180, 300, 190, 150):
            ModelManager.of_process().set_ram_budget(megabytes / 1000)
            model.start()
            engines.add(model.engine)
            assert model.engine is not None and model.engine.reader.cached.room() == 10**12 - megabytes * MB
        assert len(engines) == 2


def test_a_larger_budget_is_lent_to_streamed_weights(directories: dict[str, Path]) -> None:
    with opened(directories["dense"], 0.16) as model:
        cache = make_prompt_cache(model)
        decode(model, cache, [1, 2])
        engine = model.engine
        assert engine is not None and engine.loans.saved_bytes < model.plan.streaming.read_bytes
        ModelManager.of_process().set_ram_budget(1)
        decode(model, cache, [3, 4, 5])
        before = engine.reader.stats.nbytes
        decode(model, cache, [6, 7])
        assert model.engine is engine
        assert engine.loans.saved_bytes >= 0.99 * model.plan.streaming.read_bytes
        assert (
            engine.reader.stats.nbytes - before
            <= 2 * (model.plan.streaming.read_bytes - engine.loans.saved_bytes) + 9999
        )


def test_an_impossible_budget_is_refused_with_the_smallest(directories: dict[str, Path]) -> None:
    manager = ModelManager.of_process()
    with opened(directories["dense"], 0.18) as model:
        outputs = decode(model, make_prompt_cache(model), [1])
        with pytest.raises(BudgetError, match=r"0\.11 GB, but the models of this process need at least 0\.1") as error:
            manager.set_ram_budget(0.11)
        for wrong in ("min", None, -1, 0):
            with pytest.raises(ConfigError):
                manager.set_ram_budget(wrong)  # type: ignore[arg-type]
        assert model.plan.budget_bytes == 180 * MB
        assert same_bits(decode(model, make_prompt_cache(model), [1]), outputs)
        manager.set_ram_budget((error.value.minimum_bytes + MB) / 1e9)
        assert same_bits(decode(model, make_prompt_cache(model), [1]), outputs)


def test_models_that_share_a_budget_start_again(directories: dict[str, Path]) -> None:
    settings = FlashConfig(ram_budget_gb=0.35, context_length=256, prefill_step_size=16, telemetry=False)
    manager = ModelManager.of_process()
    models: list[FlashLLM] = []
    try:
        models += [load_model(directories[name], settings)[0] for name in ("dense", "mixture")]
        expected = [decode(model, make_prompt_cache(model), [1, 2]) for model in models]
        manager.set_ram_budget(manager.least_budget / 1e9)
        assert not manager.running
        for model, outputs in zip(models, expected, strict=True):
            assert same_bits(decode(model, make_prompt_cache(model), [1, 2]), outputs)
    finally:
        for model in models:
            model.close()


PROGRAM = """
import json, sys
import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_flash import FlashConfig, load_model
from mlx_flash.engine.modelmanager import ModelManager
from mlx_flash.memory.footprint import footprint
model, _ = load_model(sys.argv[1], FlashConfig(ram_budget_gb=0.2, context_length=256, telemetry=False))
cache, found = make_prompt_cache(model), []
for gb in (0.2, 0.18, 0.165, 0.2, 0.16):
    ModelManager.of_process().set_ram_budget(gb)
    for i in range(6):
        mx.eval(model(mx.array([[i * 37 % 1000]]), cache=cache))
    found.append((gb * 1e9, footprint()))
print(json.dumps(found))
"""


@pytest.mark.parametrize("name", ["dense", "mixture"])
def test_the_footprint_follows_the_budget(directories: dict[str, Path], name: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(directories[name])]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert all(footprint <= budget for budget, footprint in found), found

"""The models of a process, and the budget that they share, which changes between passes. No bit of the output does."""

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

import mlx_flash
from mlx_flash import BudgetError, ConfigError, FlashConfig, FlashError, FlashLLM, load_model
from mlx_flash.engine.lifecycle import ModelManager
from mlx_flash.engine.prepare import prepare
from mlx_flash.memory.arena import active_memory
from mlx_flash.memory.footprint import footprint
from mlx_flash.residency.plan import MB
from models import LLAMA, QWEN3_MOE, WIDE_LLAMA, same_bits, save
from saved_models import model_fixture
from zoo import configuration

directory = model_fixture(LLAMA, mx.bfloat16)


def test_a_model_that_cannot_start_stops_itself_only(directory: Path, tmp_path: Path) -> None:
    """The first start starts all, the smallest first: each leaves those after it what they need at least."""
    manager, config = ModelManager.of_process(), FlashConfig(ram_budget_gb=1, context_length=256)
    folder = save(tmp_path / "broken", LLAMA | {"num_hidden_layers": 2}, mx.bfloat16)
    other, broken = (FlashLLM(prepare(path, config), config, path.name) for path in (directory, folder))
    with other, broken:
        assert manager.waiting == [broken._life, other._life]
        (folder / "model.safetensors").unlink()
        told: list[tuple[int, int]] = []
        other.start(lambda *progress: told.append(progress))
        assert manager.running == [other._life] and manager.waiting == [broken._life] and told
        least = broken.plan.minimum_bytes - broken.plan.base_bytes
        assert other.plan.base_bytes >= other._life.promised_bytes == least > 0
        with pytest.raises(FlashError, match="broken"):
            broken.start()
        mx.eval(other(mx.array([[1, 2, 3]])))


def test_the_manager_of_the_process_lists_streamed_models(directory: Path) -> None:
    manager, config = ModelManager.of_process(), FlashConfig(ram_budget_gb=1, context_length=256)
    first = FlashLLM(prepare(directory, config), config, "first")
    assert [model.name for model in manager.waiting] == ["first"]
    second, _ = mlx_flash.load_model(directory, config)
    assert [model.name for model in manager.running] == ["first", directory.name]
    for model in manager.running:
        model.close()
    assert manager.running == manager.waiting == []
    assert first.close() is not second.close()
    third = FlashLLM(prepare(directory, config), config, "third")
    assert manager.waiting == [third._life] and manager.is_alone
    del third
    gc.collect()
    assert manager.waiting == []


@pytest.mark.skipif(sys.platform != "linux", reason="the resident set is Linux's footprint")
def test_a_later_model_counts_arrays_that_the_resident_set_lacks(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA the second model's plan knew nothing of arrays on the GPU, and its first call was refused."""
    monkeypatch.setattr("mlx_flash.memory.footprint._in_host", lambda: 100_000_000)
    monkeypatch.setattr("mlx_flash.memory.footprint.has_own_memory", lambda: True)
    monkeypatch.setattr("mlx_flash.memory.footprint.context_bytes", lambda: 50_000_000)
    config = FlashConfig(ram_budget_gb=1, context_length=256)
    with mlx_flash.load_model(directory, config)[0] as first:
        array = mx.ones((100_000_000,), mx.uint8)
        mx.eval(array)
        held = array.nbytes + first.plan.kv_bytes + first.plan.activation_bytes
        assert first.plan.base_bytes > 150_000_000
        with mlx_flash.load_model(directory, config)[0] as second:
            assert held <= second.plan.base_bytes - first.plan.base_bytes < held + 2 * first.plan.model_bytes
            assert held < dict(second.plan.parts())["other models and arrays"] == second.plan.active_bytes
            mx.eval(second(mx.array([[1, 2, 3]])))
        room_for_one = FlashConfig(ram_budget_gb=first.plan.minimum_bytes / 1e9, context_length=256)
        with pytest.raises(BudgetError, match=r"other models and arrays \d.* load the largest last"):
            mlx_flash.load_model(directory, room_for_one)


def test_loans_make_room_for_another_model(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They fill the budget, and end when another model starts: its plan must not count them."""
    with mlx_flash.load_model(directory, FlashConfig(ram_budget_gb="min", context_length=256))[0] as first:
        ModelManager.of_process().set_ram_budget(first.plan.budget_bytes / 1e9 + 0.05)
        for _ in range(2):
            mx.eval(first(mx.array([[1, 2, 3]])))
        assert first.engine is not None and first.engine.lending.nbytes > 0
        prepare(directory, FlashConfig(ram_budget_gb="min", context_length=256))
        assert first.engine.lending.nbytes == 0


def test_budgets_that_change_add_nothing_to_what_models_need(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model's plan counts what the others were promised as memory of the process."""
    monkeypatch.setattr("mlx_flash.residency.machine.footprint", lambda: 100_000_000)
    manager, config = ModelManager.of_process(), FlashConfig(ram_budget_gb=1, context_length=256)
    with mlx_flash.load_model(directory, config)[0] as first, mlx_flash.load_model(directory, config)[0] as second:
        least = manager.least_budget
        with pytest.raises(BudgetError, match=f"each alone: {first.name} 0"):
            manager.set_ram_budget(least / 1e9 - 0.001)
        for budget_gb in (0.9, 1.0, 0.9):
            manager.set_ram_budget(budget_gb)
            for model in (first, second):
                model.start()
                assert model.plan.budget_bytes == round(budget_gb * 1e9)
            assert manager.least_budget == least


def test_freed_buffers_are_given_back_while_a_model_runs(directory: Path) -> None:
    """MLX's CPU back end keeps 32 MiB of them by default, which no plan counts."""
    settings = FlashConfig(ram_budget_gb=footprint() / 1e9 + 0.3)
    before = mx.set_cache_limit(1 << 24)
    try:
        models = [mlx_flash.load_model(directory, settings)[0] for _ in range(2)]
        for model in models:
            mx.eval(model(mx.array([[1, 2, 3]])))
        for model in models:
            mx.eval(mx.ones((1 << 20,)) + 1)
            assert mx.get_cache_memory() <= model.plan.cache_limit
            model.close()
    finally:
        after = mx.set_cache_limit(before)
        assert after == (1 << 24 if mx.default_device() == mx.gpu else 0)  # putting it back would start system threads
        mx.clear_cache()


@pytest.mark.parametrize("shape", [LLAMA, configuration("deepseek_v3")], ids=["llama", "deepseek_v3"])
def test_two_models_at_their_smallest_budgets_both_go_on(tmp_path: Path, shape: dict[str, Any]) -> None:
    """The first one's budget did not count what the second one took, so its next long prompt was refused."""
    config = FlashConfig(ram_budget_gb="min", context_length=300, prefill_step_size=64)
    directory, other = save(tmp_path / "first", shape), save(tmp_path / "second", shape)
    with mlx_flash.load_model(directory, config)[0] as first, mlx_flash.load_model(other, config)[0] as second:
        for model in (first, second, first):
            tokens = mx.array([[7 * i % 300 for i in range(290)]])
            mx.eval(model(tokens, cache=make_prompt_cache(model)))
        assert first.engine is not None and second.engine is not None
        assert first.plan.budget_bytes == second.plan.budget_bytes == ModelManager.of_process().budget_bytes


MIXTURE = QWEN3_MOE | {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 32, "num_hidden_layers": 4}
"""0.11 GB in fp32."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    configs = {"dense": WIDE_LLAMA, "mixture": MIXTURE}
    return {name: save(tmp_path_factory.mktemp(name), config, mx.float32) for name, config in configs.items()}


@pytest.fixture
def fixed_footprint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The footprint of this process depends on the tests before; another process measures it."""
    gc.collect()
    for module in ("residency.machine", "engine.call", "engine.lifecycle"):
        monkeypatch.setattr(f"mlx_flash.{module}.footprint", lambda: 100 * MB + active_memory())


def opened(directory: Path, budget_gb: float) -> FlashLLM:
    return load_model(directory, FlashConfig(ram_budget_gb=budget_gb, telemetry=False, context_length=256))[0]


def decode(model: Any, cache: list[Any], tokens: list[int]) -> list[mx.array]:
    outputs = []
    for token in tokens:
        outputs.append(model(mx.array([[token]]), cache=cache))
        mx.eval(outputs[-1])
    return outputs


@pytest.mark.usefixtures("fixed_footprint")
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


@pytest.mark.usefixtures("fixed_footprint")
def test_page_cache_is_that_of_the_budget_in_force(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_flash.engine.engine._spare_memory", lambda budget: 10**12 - budget)
    with opened(directories["dense"], 0.18) as model:
        engines = set()
        for megabytes in (180, 300, 190, 150):
            ModelManager.of_process().set_ram_budget(megabytes / 1000)
            model.start()
            engines.add(model.engine)
            assert model.engine is not None and model.engine.reader.cached.room() == 10**12 - megabytes * MB
        assert len(engines) == 2


@pytest.mark.usefixtures("fixed_footprint")
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


PROGRAM = """
import json, sys
import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_flash import FlashConfig, load_model
from mlx_flash.engine.lifecycle import ModelManager
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

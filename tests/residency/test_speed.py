"""Predictions follow from the speeds that a short probe finds."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from machines import FIXED, make_machine, make_mixture, make_model, minimum_of, with_budget
from mlx_flash import load_model
from mlx_flash.config import FlashConfig
from mlx_flash.engine.prepare import prepare
from mlx_flash.layout.parts import ModelLayout
from mlx_flash.residency import machine
from mlx_flash.residency.machine import Machine, kept_products, largest_linear, prompt_speedup, read_products
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.residency.planner import make_plan
from mlx_flash.residency.sizes import ModelSizes
from mlx_flash.storage.probe import PROFILES
from models import LLAMA, run, save


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def plan_of(machine: Any = None, share: float = 0.3, config: FlashConfig = FIXED) -> ResidencyPlan:
    sizes, machine = make_model(), machine or make_machine()
    least = minimum_of(sizes, config, machine)
    return make_plan(sizes, with_budget(config, least + int(share * sizes.nbytes)), machine)


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> ModelLayout:
    return prepare(save(tmp_path_factory.mktemp("llama"), LLAMA), FlashConfig()).layout


def test_prompts_compute_as_fast_as_probed() -> None:
    plan, faster = plan_of(), plan_of(make_machine(prompt_speedup=2.0))
    assert plan.prompt_seconds_per_token == pytest.approx(plan.streaming.compute_seconds)
    assert faster.prompt_seconds_per_token == pytest.approx(plan.prompt_seconds_per_token / 2)


@pytest.mark.parametrize("bits", [None, 4])
def test_probe_of_prompts_counts_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int | None) -> None:
    """A processor that takes as long for each token brings nothing, one that takes as long for all 16 times as much."""
    layout = prepare(save(tmp_path / "model", LLAMA, bits=bits), FlashConfig()).layout
    monkeypatch.setattr(machine, "_seconds", lambda part, x: 0.5 * x.shape[1])
    assert prompt_speedup(layout) == 1
    monkeypatch.setattr(machine, "_seconds", lambda part, x: 0.5)
    assert prompt_speedup(layout) == 16


@pytest.mark.parametrize(
    ("planned", "half", "is_probed_again"), [(1e15, 0.5, True), (1.0, 0.5, True), (1e9, 1e-4, False)]
)
def test_disk_at_half_or_twice_its_probed_speed_is_probed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned: float, half: float, is_probed_again: bool
) -> None:
    monkeypatch.setattr("mlx_flash.engine.engine.HALF", half)
    monkeypatch.setattr("mlx_flash.engine.engine.MIN_READ_BYTES", 1)
    monkeypatch.setattr("mlx_flash.engine.engine._spare_memory", lambda budget: 0)  # nothing is in the page cache
    directory = save(tmp_path / "model", LLAMA)
    key = f"{platform.node()}:{directory.stat().st_dev}:any"
    PROFILES.save(key, {"bytes_per_second": planned, "read_size": 1 << 20, "queue_depth": 4, "direct": True})
    with load_model(directory, FlashConfig(ram_budget_gb="min"))[0] as model:
        run(model, [[token] for token in range(3)])
        assert "read_size" in PROFILES.load()[key]
    assert ("read_size" not in PROFILES.load()[key]) == is_probed_again


@pytest.mark.parametrize("share", [0, 0.3, 0.9, 2])
def test_time_to_first_token_is_at_least_that_of_reading_and_of_computing(share: float) -> None:
    plan = replace(plan_of(share=share), prompt_seconds_per_token=0.2)
    for num_tokens in (1, 64, 65, 1315):
        passes = plan.prompt_passes(num_tokens)
        assert 1 <= passes <= -(-num_tokens // plan.prefill_step_size)
        assert plan.prompt_read_bytes(num_tokens) == passes * plan.read_bytes
        seconds = plan.seconds_to_first_token(num_tokens)
        assert seconds >= plan.prompt_read_bytes(num_tokens) / plan.disk_bytes_per_second
        assert seconds >= 0.2 * num_tokens
        assert seconds >= plan.seconds
    assert plan.seconds_to_first_token(1315) > 10 * plan.seconds_to_first_token(64)


@pytest.mark.parametrize(
    ("sizes", "machine", "share", "near"),
    [
        (make_model(), make_machine(), 0.2, 0.1),
        (make_mixture(12, 64, 4), make_machine(compute_bytes_per_second=50e9), 0.3, 0.05),
    ],
    ids=["weights", "experts"],
)
def test_lent_memory_saves_reading_at_the_beginning(
    sizes: ModelSizes, machine: Machine, share: float, near: float
) -> None:
    configs = [replace(FIXED, context_length=length) for length in (256, 16 * 1024)]
    budget = minimum_of(sizes, configs[1], machine) + int(share * sizes.nbytes)
    short, long = (make_plan(sizes, with_budget(config, budget), machine) for config in configs)
    assert long.seconds > 1.1 * short.seconds, "the longer context leaves fewer weights in memory"
    assert long.opening_seconds == pytest.approx(short.opening_seconds, rel=near)
    if short.pool is None:
        assert short.streaming.compute_seconds < short.opening_seconds <= short.seconds
    else:
        assert long.pool is not None and 0 < long.pool.num_slots < 0.9 * short.pool.num_slots


def test_parts_of_a_prompt_share_passes_as_far_as_memory_allows() -> None:
    plan = replace(plan_of(share=0.3), prefill_step_size=16)
    per_part = plan.activations.waiting_bytes(16)
    free = plan.cache.nbytes(160) - plan.kv_bytes - plan.spare_bytes + plan.peak_bytes
    assert replace(plan, budget_bytes=free).prompt_passes(160) == 10
    assert replace(plan, budget_bytes=free + 4 * per_part).prompt_passes(160) == 2
    assert replace(plan, budget_bytes=free + 9 * per_part).prompt_passes(160) == 1
    cached = replace(plan, budget_bytes=free + 9 * per_part + 1, prefix_bytes=1, keeps_states=True)
    assert cached.prompt_passes(160) == 1
    kept = replace(cached, cache=replace(cached.cache, windows=((per_part // 80, 64),)))  # 64 tokens of it and 16 more
    assert kept.prompt_passes(160) == 2
    assert replace(kept, keeps_states=False).prompt_passes(160) == 1


def test_files_that_free_memory_holds_are_read_at_the_speed_of_the_page_cache() -> None:
    slow = replace(make_machine(), total_memory=10**12, available_memory=10**11, may_cache=True)
    cached = replace(slow, available_memory=10**12)
    read = replace(slow, disk=replace(slow.disk, bytes_per_second=machine.CACHED_BYTES_PER_SECOND))
    assert plan_of(slow) == plan_of(replace(slow, may_cache=False))
    assert (
        plan_of(cached).seconds == pytest.approx(plan_of(read).seconds) and plan_of(cached).seconds < plan_of().seconds
    )
    sizes, config = make_model(), replace(FIXED, kv_cache="disk", context_length=65536)
    sizes = replace(sizes, cache=replace(sizes.cache, token_bytes=24 * 4096, rows=(4096,) * 24, largest_row=4096))
    budget = with_budget(config, minimum_of(sizes, config, slow) + int(0.3 * sizes.nbytes))
    of_slow, of_cached = (make_plan(sizes, budget, each) for each in (slow, cached))
    assert of_cached.kv.num_on_disk and of_cached.seconds < of_slow.seconds, "of keys and values on disk nothing is"
    mixture = make_mixture()
    budget = with_budget(FIXED, minimum_of(mixture, FIXED, slow) + mixture.nbytes // 8)
    with_experts = make_plan(mixture, budget, replace(cached, may_cache=False))
    assert with_experts.pool is not None
    assert make_plan(mixture, budget, cached) == with_experts, "experts are read one by one"
    half = replace(slow, available_memory=10**11 + 10**9 - slow.base_bytes + 5 * 10**8).beside(10**9, 10**9)
    assert half.cached_share == 0.5
    assert 1 / half.read_bytes_per_second == pytest.approx(0.5 / slow.disk.bytes_per_second + 0.5 / 10e9)


def test_keys_and_values_go_to_disk_where_their_plan_needs_more_than_the_machine_has() -> None:
    sizes, machine = make_model(), replace(make_machine(), total_memory=10**12, available_memory=10**12)
    sizes = replace(sizes, cache=replace(sizes.cache, token_bytes=24 * 4096, rows=(4096,) * 24, largest_row=4096))
    config = replace(FIXED, context_length=65536, ram_budget_gb=20)
    in_memory = make_plan(sizes, config, machine)
    on_disk = make_plan(sizes, config, replace(machine, total_memory=in_memory.peak_bytes - 1))
    assert on_disk.kv.num_on_disk and not in_memory.kv.num_on_disk
    assert on_disk.peak_bytes < in_memory.peak_bytes


# --- weights that stay in a GPU's own memory --------------------------------------------------------------------------


def test_pinned_weights_compute_at_the_speed_of_memory() -> None:
    sizes, shared = make_model(), make_machine(barrier_seconds=0.0)
    gpu = replace(shared, resident_bytes_per_second=100 * shared.compute_bytes_per_second)
    computed = sum(unit.computed_bytes for unit in [*sizes.layers, *sizes.heads])
    everything = [make_plan(sizes, replace(FIXED, ram_budget_gb=100), machine) for machine in (shared, gpu)]
    assert not everything[1].read_bytes
    assert everything[0].opening_seconds == pytest.approx(computed / shared.compute_bytes_per_second)
    assert everything[1].opening_seconds == pytest.approx(computed / gpu.resident_bytes_per_second)
    budget = minimum_of(sizes, FIXED, gpu) + sizes.nbytes // 2
    plan = make_plan(sizes, with_budget(FIXED, budget), gpu)
    streamed = plan.streaming.read_bytes
    seconds = streamed / gpu.compute_bytes_per_second + (computed - streamed) / gpu.resident_bytes_per_second
    assert 0 < streamed < computed
    assert plan.streaming.compute_seconds == pytest.approx(seconds)
    prompts = [each.prompt_seconds_per_token for each in (*everything, plan)]
    assert prompts == pytest.approx([prompts[0]] * 3), "weights are fetched once for many tokens"


def test_experts_in_the_pool_compute_at_the_speed_of_memory() -> None:
    sizes, shared = make_mixture(12, 64, 4), make_machine(barrier_seconds=0.0, compute_bytes_per_second=1e9)
    gpu = replace(shared, resident_bytes_per_second=1e12, disk=replace(shared.disk, bytes_per_second=1e15))
    budget = minimum_of(sizes, FIXED, gpu) + sizes.nbytes // 2
    plan = make_plan(sizes, with_budget(FIXED, budget), gpu)
    experts = sizes.trunk.experts if sizes.trunk else None
    assert plan.pool is not None and experts is not None
    hits = experts.token_bytes - plan.pool.read_bytes
    assert 0 < hits < experts.token_bytes
    late = plan.pool.read_bytes / gpu.compute_bytes_per_second
    assert plan.pool.seconds == pytest.approx(hits / gpu.resident_bytes_per_second + late, rel=1e-3)


def test_token_takes_as_long_as_its_operations_take_to_start() -> None:
    sizes = replace(make_model(), num_operations=1000)
    gpu = make_machine(resident_bytes_per_second=1e15, operation_seconds=1e-5)
    plan = make_plan(sizes, replace(FIXED, ram_budget_gb=100), gpu)
    assert plan.opening_seconds == pytest.approx(1000 * 1e-5)


def test_named_budget_is_enough_for_the_next_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning leaves some memory with the process, which the next load must not add to the budget."""
    directory, grown = save(tmp_path / "model", LLAMA), 0
    monkeypatch.setattr(machine, "footprint", lambda: 99_999_999 + grown)
    monkeypatch.setattr(machine, "_counted", [])
    step = machine.GROWTH_BYTES[machine._back_end()]
    least = FlashConfig(ram_budget_gb="min", context_length=260)

    def named() -> int:
        return prepare(directory, least).plan.minimum_bytes

    first = named()
    grown = step
    assert named() == first
    grown = step + 10
    assert named() > first
    grown = 0
    assert named() == first


# As on a GPU that takes 5 seconds to fetch what the processor wrote, and half a second for a product or an operation


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the probes have written to memory for weights that were not fetched yet."""
    found: list[int] = []
    fill = machine.Arena.fill

    def seconds(function: Any, x: Any) -> float:
        outputs = function(x)
        taken = 5.0 if found and found.pop() == 0 else 0.0
        return taken + 0.5 * (len(outputs) if isinstance(outputs, list) else 1)

    monkeypatch.setattr(machine, "way_of_reading", lambda: "in place")
    monkeypatch.setattr(machine.Arena, "fill", lambda self, byte: (found.append(byte), fill(self, byte)))
    monkeypatch.setattr(machine, "_seconds", seconds)
    return found


def test_weights_are_fetched_where_they_were_just_read(
    layout: ModelLayout, written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = largest_linear(layout)
    assert kept_products(linear) == machine.operation_seconds() == 0.0, "memory is shared"
    monkeypatch.setattr(machine, "has_own_memory", lambda: True)
    assert kept_products(linear) == pytest.approx(11 * read_products(linear))
    assert machine.operation_seconds() == 0.5 / machine._NUM_OPERATIONS
    assert prompt_speedup(layout) == 16 * 11, "once for all tokens"
    cleared: list[int] = []
    monkeypatch.setattr(machine, "clear", lambda memory: cleared.append(len(memory)))
    monkeypatch.setattr(machine, "way_of_reading", lambda: "copied by the driver")
    assert kept_products(linear) == pytest.approx(read_products(linear)) and cleared, "the driver has written them"


def test_operations_of_a_token_are_counted_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save(tmp_path / "model", LLAMA)
    monkeypatch.setattr("mlx_flash.layout.units.has_own_memory", lambda: True)
    assert 10 * LLAMA["num_hidden_layers"] < prepare(directory, FlashConfig()).sizes.num_operations < 2000

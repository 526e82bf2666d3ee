"""Pinned weights leave room for parts of a prompt that share a pass, where the prompt reads less for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from machines import MB, MIB, make_machine, make_mixture, make_model
from mlx_flash.config import FlashConfig
from mlx_flash.layout.parts import CacheSizes, Held
from mlx_flash.residency.machine import Machine
from mlx_flash.residency.plan import DENSE_PAGE_BYTES, prefix_bytes
from mlx_flash.residency.planner import make_plan
from mlx_flash.residency.sizes import ActivationSizes, ModelSizes
from mlx_flash.storage.probe import DiskProfile

LAYER = tuple(8192 * n for n in (4096, 1024, 1024, 4096, 14336, 14336, 14336))
HEAD = (32000, 8192)


def llama_8b() -> ModelSizes:
    """A bf16 model of 14.5 GB, on a GPU whose attention stores its scores."""
    activations = ActivationSizes(
        per_token=172_032,
        scores_per_pair=194,
        unfused_per_pair=194,
        logits_per_token=128_000,
        embedding_per_token=16_384,
        returned_per_token=64_000,
    )
    cache = CacheSizes(token_bytes=131_072, largest_row=4096, rows=(4096,) * 32)
    return replace(make_model((LAYER,) * 32, HEAD, HEAD), activations=activations, cache=cache)


def gpu() -> Machine:
    return make_machine(
        base_bytes=230 * MB,
        runtime_bytes=640 * MB,
        disk=DiskProfile(bytes_per_second=1.5e9, read_size=4 * MIB, queue_depth=8, direct=True),
        compute_bytes_per_second=20e9,
        has_buffer_cache=True,
        exact_tiles=False,
        arrival="copied by the driver",
        resident_bytes_per_second=2e12,
    )


@pytest.mark.parametrize(("gigabytes", "most_passes"), [(4, 2), (6, 1), (10, 1)])
def test_a_prompt_of_the_planned_length_takes_few_passes(gigabytes: int, most_passes: int) -> None:
    config, apart = FlashConfig(ram_budget_gb=gigabytes), FlashConfig(ram_budget_gb=gigabytes, lend_reserves=False)
    plan, before = make_plan(llama_8b(), config, gpu()), make_plan(llama_8b(), apart, gpu())
    assert plan.context_length == 4096 and plan.prefill_step_size == before.prefill_step_size <= 1024
    assert plan.prompt_passes(4096) <= most_passes < before.prompt_passes(4096)
    assert plan.prompt_read_bytes(4096) < before.prompt_read_bytes(4096)
    assert plan.peak_bytes <= plan.budget_bytes
    # Between prompts the room holds weights, so tokens take as long.
    assert plan.opening_seconds == before.opening_seconds
    assert plan.seconds == pytest.approx(before.seconds)


@pytest.mark.parametrize("prefixes", ["off", "exact"])
@pytest.mark.parametrize("gigabytes", [2.2, 2.35, 2.55, 2.6, 2.65, 2.8, 3.0, 3.05, 3.1, 3.5])
def test_a_prefill_step_leaves_room_for_slots_and_parts(gigabytes: float, prefixes: str) -> None:
    # A larger step took that room at 2.3, 2.55, 3.0 and 3.05 GB: a prompt of 4,096 tokens took up to eight passes.
    sizes = llama_8b()
    held = replace(sizes, activations=replace(sizes.activations, held=Held((16_384,))))
    gigabytes += 0.101 if prefixes == "exact" else 0  # of its pages
    plan = make_plan(held, FlashConfig(ram_budget_gb=gigabytes, kv_prefixes=prefixes), gpu())  # type: ignore[arg-type]
    assert plan.context_length == 4096 and plan.prefill_step_size >= 128
    assert plan.prompt_passes(4096) <= 2
    assert plan.peak_bytes <= plan.budget_bytes


def test_large_windows_are_written_at_once() -> None:
    page, window = 8 * 8192 * 256, 40 * 8192 * 1024
    cache = CacheSizes(rows=(8192,) * 8, windows=((8192, 1024),) * 40)
    small = replace(cache, windows=((8192, 16),) * 40)
    off, exact = (FlashConfig(kv_prefixes=mode) for mode in ("off", "exact"))  # type: ignore[arg-type]
    assert window == 10 * DENSE_PAGE_BYTES
    assert prefix_bytes(cache, off, 4096) == 0
    assert prefix_bytes(cache, exact, 4096) == window + 3 * page
    assert prefix_bytes(small, exact, 4096) == 3 * (page + window // 64)
    assert prefix_bytes(cache, exact, 16) == 3 * (page + window // 64)  # so few tokens are in a short context


def test_a_pool_of_experts_leaves_no_room() -> None:
    plans = [
        make_plan(make_mixture(), FlashConfig(ram_budget_gb=1, lend_reserves=lends), make_machine())
        for lends in (True, False)
    ]
    assert plans[0].pool is not None
    assert plans[0] == plans[1]

"""Prefill step and context come from sizes and the budget alone: the same command gives the same bits tomorrow."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from machines import (
    MIB,
    configs,
    everything,
    machines,
    make_machine,
    make_mixture,
    make_model,
    minimum_of,
    models,
    shares,
    some,
    with_budget,
)
from mlx_flash.config import FlashConfig
from mlx_flash.layout.parts import CacheSizes
from mlx_flash.residency.machine import Machine
from mlx_flash.residency.plan import MB, ResidencyPlan
from mlx_flash.residency.planner import make_plan
from mlx_flash.residency.sizes import ModelSizes
from mlx_flash.storage.probe import DiskProfile

factors = st.floats(-1, 1).map(lambda power: 10**power)
"""Speeds of other machines, and of this one at other times: a tenth to ten times."""


def at_other_speed(machine: Machine, disk: float, compute: float, others: float) -> Machine:
    """The machine with other measured speeds."""
    return replace(
        machine,
        disk=replace(machine.disk, bytes_per_second=machine.disk.bytes_per_second * disk),
        compute_bytes_per_second=machine.compute_bytes_per_second * compute,
        barrier_seconds=machine.barrier_seconds * others,
        prompt_speedup=max(1.0, others),
        resident_bytes_per_second=2 * machine.compute_bytes_per_second * compute,
        operation_seconds=1e-6 * others,
    )


def tokens_of(plan: ResidencyPlan) -> tuple[int, int]:
    return plan.prefill_step_size, plan.context_length


@some(60)
@given(models(), configs, machines, shares, factors, factors, factors)
@example(make_model(), FlashConfig(), make_machine(), 0.4, 0.5, 1.0, 1.0)
@example(make_model(), FlashConfig(), make_machine(), 0.7, 0.1, 10.0, 1.0)
@example(make_mixture(), FlashConfig(), make_machine(), 0.1, 10.0, 0.1, 1.0)
def test_speeds_decide_neither_step_nor_context(
    sizes: ModelSizes,
    config: FlashConfig,
    machine: Machine,
    share: float,
    disk: float,
    compute: float,
    others: float,
) -> None:
    least, most = minimum_of(sizes, config, machine), everything(sizes, config, machine).peak_bytes
    config = with_budget(config, least + int(share * max(most - least, MIB)))
    other = at_other_speed(machine, disk, compute, others)
    assert tokens_of(make_plan(sizes, config, machine)) == tokens_of(make_plan(sizes, config, other))


SMALL = make_machine(base_bytes=10 * MB, disk=DiskProfile(2e9, read_size=2 * MIB, queue_depth=1, direct=True))
"""A machine whose reads take little memory beside a small process."""


@some(30)
@given(models(), configs, machines, shares, st.sampled_from([MIB // 4, MIB, 8 * MIB]), st.integers(1, 16))
@example(make_model([[100 * MB]] * 8, None, None, copies=True), FlashConfig(num_slots=3), SMALL, 0.0, 8 * MIB, 8)
def test_how_the_disk_is_read_decides_neither(
    sizes: ModelSizes, config: FlashConfig, machine: Machine, share: float, read_size: int, queue_depth: int
) -> None:
    """Except near the smallest budget, which has to hold the buffers of reads too."""
    profile = DiskProfile(machine.disk.bytes_per_second, read_size, queue_depth, machine.disk.direct)
    other = replace(machine, disk=profile)
    least = max(minimum_of(sizes, config, each) for each in (machine, other))
    most = everything(sizes, config, machine).peak_bytes
    config = with_budget(config, 3 * least // 2 + int(share * max(most - least, MIB)))
    assert tokens_of(make_plan(sizes, config, machine)) == tokens_of(make_plan(sizes, config, other))


def test_a_tight_budget_has_no_smaller_steps_than_it_needs() -> None:
    """A prompt in many small parts is slow; weights gain little from the room."""
    sizes, config, machine = make_model(), FlashConfig(context_length=512), make_machine()
    least = minimum_of(sizes, config, machine)
    steps = [
        make_plan(sizes, with_budget(config, least + more), machine).prefill_step_size
        for more in (0, 8 * MIB, 32 * MIB)
    ]
    assert steps == [16, 64, 128]


def test_contexts_that_kv_ram_gb_has_no_room_for_are_not_tried() -> None:
    """The longest one was refused, though a shorter one fits and the user asked for none."""
    rows = (4096,) * 24
    sizes = replace(make_model(), cache=CacheSizes(token_bytes=sum(rows), largest_row=4096, rows=rows))
    config = FlashConfig(ram_budget_gb=3, kv_cache="disk", kv_ram_gb=0.25)
    assert make_plan(sizes, config, make_machine()).context_length == 16384

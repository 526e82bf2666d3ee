"""Tests of the plan: whatever the model, the settings and the machine, it adds up and keeps its promises.

A plan is a pure function of numbers, so the numbers are made up here and no model is needed.
"""

from __future__ import annotations

import cProfile
import inspect
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from mlx_lm.generate import generate_step

from machines import (
    FIXED,
    LLAMA_LAYER,
    MB,
    MIB,
    alike,
    configs,
    everything,
    machines,
    make_machine,
    make_mixture,
    make_model,
    minimum_of,
    models,
    row_units,
    shares,
    some,
    tensor_bytes,
    unlike,
    with_budget,
)
from mlx_flash.compat.caches import CACHE_STEP
from mlx_flash.config import GB, FlashConfig
from mlx_flash.errors import BudgetError, ConfigError
from mlx_flash.residency.machine import Machine
from mlx_flash.residency.plan import DEFAULT_PREFILL_STEP_SIZE, KV_SHARE, PREFILL_STEPS, ResidencyPlan, in_gb, in_mb
from mlx_flash.residency.planner import (
    ACTIVATION_SHARE,
    CONTEXT_LENGTHS,
    MAX_SLOTS,
    PROFILE_SHARES,
    TILE_ROW_MULTIPLE,
    TILE_SLACK_BYTES,
    make_plan,
    simulate,
    spread,
    table_of_budgets,
    tile_rows,
)
from mlx_flash.residency.sizes import (
    ExpertSizes,
    ModelSizes,
    TensorSize,
    UnitSize,
)
from mlx_flash.storage.placement import padded_bytes
from mlx_flash.storage.probe import CANDIDATES, DiskProfile

# --- made-up models and machines -------------------------------------------------------------------------------------


def plans_between(
    sizes: ModelSizes, config: FlashConfig, machine: Machine, shares: Sequence[float]
) -> list[ResidencyPlan]:
    """Plans for budgets that are the minimum and so much of what it takes to have everything in memory more."""
    least = minimum_of(sizes, config, machine)
    room = everything(sizes, config, machine).peak_bytes - least
    budgets = [least + int(share * max(room, MB)) for share in shares]
    return [make_plan(sizes, with_budget(config, budget), machine) for budget in budgets]


# --- it adds up ------------------------------------------------------------------------------------------------------


def all_units(sizes: ModelSizes) -> list[UnitSize]:
    return [*sizes.layers, *sizes.heads, *sizes.tables]


def streamed_tensors(sizes: ModelSizes, plan: ResidencyPlan) -> list[list[TensorSize]]:
    """The tensors that each streamed layer reads. Checks that they are tensors of the model, none twice."""
    names = [name for name, _ in plan.streaming.layers]
    units = {unit.name: unit for unit in (sizes.layers, *sizes.finer)[plan.streaming.cut]}
    assert names == [name for name in units if name in set(names)]
    found = []
    for name, tensors in plan.streaming.layers:
        assert tensors
        assert len(set(tensors)) == len(tensors)
        by_name = {tensor.name: tensor for tensor in units[name].tensors}
        found.append([by_name[tensor] for tensor in tensors])
    return found


def tiled_units(sizes: ModelSizes, plan: ResidencyPlan) -> list[tuple[UnitSize, int]]:
    heads = {unit.name: unit for unit in [*sizes.heads, *(table for table in sizes.tables if table.is_tied)]}
    assert len(dict(plan.streaming.heads)) == len(plan.streaming.heads)
    return [(heads[name], num_rows) for name, num_rows in plan.streaming.heads]


def tiles(head: UnitSize, num_rows: int) -> list[int]:
    """Buffer bytes of each tile, wherever it lies in its file. Checks that the tiles are rows of the head, all of them,
    cut where rows stay aligned."""
    assert head.num_rows
    assert num_rows % TILE_ROW_MULTIPLE == 0 or num_rows == head.num_rows
    counts = [min(num_rows, head.num_rows - start) for start in range(0, head.num_rows, num_rows)]
    assert sum(counts) == head.num_rows
    return [sum(padded_bytes(count * tensor.nbytes // head.num_rows) for tensor in head.tensors) for count in counts]


def check(plan: ResidencyPlan, sizes: ModelSizes, config: FlashConfig, machine: Machine) -> None:
    """Everything that is true of every plan."""
    if plan.pool is not None:
        assert sizes.trunk is not None
        check_pool(plan, experts_of(sizes), machine)
        sizes = sizes.trunk
    streaming = plan.streaming
    layers, heads = streamed_tensors(sizes, plan), tiled_units(sizes, plan)
    assert plan.peak_bytes == sum(nbytes for _, nbytes in plan.parts())
    assert all(nbytes >= 0 for _, nbytes in plan.parts())
    assert plan.minimum_bytes <= plan.budget_bytes
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.model_bytes == sizes.nbytes

    rows_only = {table.name for table in sizes.tables} & set(streaming.tables)
    tiled = {head.name for head, _ in heads}
    assert rows_only == set(streaming.tables)
    elsewhere = sum(tensor.buffer_bytes for tensors in layers for tensor in tensors)
    elsewhere += sum(unit.buffer_bytes for unit in all_units(sizes) if unit.name in tiled | rows_only)
    assert plan.pinned_bytes + elsewhere == sum(unit.buffer_bytes for unit in all_units(sizes))
    assert all(table.name in tiled or not table.is_tied for table in sizes.tables if table.name in rows_only)

    read = sum(tensor.nbytes for tensors in layers for tensor in tensors) + sum(head.nbytes for head, _ in heads)
    assert streaming.read_bytes == read
    num_units = len(layers) + sum(len(tiles(head, num_rows)) for head, num_rows in heads)
    assert (streaming.num_slots == 0) == (streaming.slot_bytes == 0) == (num_units == 0)
    assert streaming.num_slots <= min(config.num_slots or MAX_SLOTS, num_units)
    if config.num_slots:
        assert streaming.num_slots == min(config.num_slots, num_units)
    needed = [sum(tensor.buffer_bytes for tensor in tensors) for tensors in layers]
    needed += [nbytes for head, num_rows in heads for nbytes in tiles(head, num_rows)]
    assert machine.exact_tiles or all(num_rows == head.num_rows for head, num_rows in heads)
    assert streaming.slot_bytes >= max(needed, default=0)

    computed = sum(unit.computed_bytes for unit in sizes.layers)
    computed += sum(unit.nbytes for unit in [*sizes.heads, *(t for t in sizes.tables if t.is_tied)])
    floor = max(read / machine.disk.bytes_per_second, computed / machine.compute_bytes_per_second)
    assert streaming.seconds >= floor * (1 - 1e-9)
    check_reserves(plan, sizes, config)


def experts_of(sizes: ModelSizes) -> ExpertSizes:
    assert sizes.trunk is not None and sizes.trunk.experts is not None
    return sizes.trunk.experts


def check_pool(plan: ResidencyPlan, experts: ExpertSizes, machine: Machine) -> None:
    pool = plan.pool
    assert pool is not None
    assert pool.slot_bytes == experts.slot_bytes
    assert pool.num_experts == sum(experts.num_experts)
    assert experts.least_slots <= pool.num_slots
    assert pool.num_slots <= max(pool.num_experts, experts.least_slots)
    assert plan.pool_bytes == pool.nbytes == pool.num_slots * pool.slot_bytes
    assert pool.nbytes in dict(plan.parts()).values()
    assert 0 <= pool.hit_rate == experts.hit_rate(pool.num_slots) <= 1
    assert pool.read_bytes == round((1 - pool.hit_rate) * experts.token_bytes)
    assert plan.read_bytes == plan.streaming.read_bytes + pool.read_bytes
    assert plan.seconds == plan.streaming.seconds + pool.seconds
    computed = experts.token_bytes / machine.compute_bytes_per_second
    assert pool.seconds >= max(computed, pool.read_bytes / machine.disk.bytes_per_second)


def check_reserves(plan: ResidencyPlan, sizes: ModelSizes, config: FlashConfig) -> None:
    """What is set aside for tokens is what was asked for, or what the shares allow."""
    context = -(-plan.context_length // CACHE_STEP) * CACHE_STEP
    assert plan.kv_bytes >= sizes.cache.token_bytes * context
    prefill = sizes.activations.nbytes(plan.prefill_step_size, context, all_logits=False)
    short = sizes.activations.nbytes(min(16, plan.prefill_step_size), context, all_logits=True)
    assert plan.activation_bytes == max(prefill, short)
    if config.context_length:
        assert plan.context_length == config.context_length
    else:
        least = max(CACHE_STEP, config.prefill_step_size or 0)
        assert least <= plan.context_length and plan.context_length in {*CONTEXT_LENGTHS, least}
        a_step = sizes.cache.token_bytes * CACHE_STEP
        a_copy = sizes.cache.largest_row * (context + CACHE_STEP) + sizes.cache.call_bytes * plan.prefill_step_size
        assert plan.kv_bytes - a_step - a_copy <= KV_SHARE * plan.budget_bytes or plan.context_length == least
    if config.prefill_step_size:
        assert plan.prefill_step_size == min(config.prefill_step_size, plan.context_length)
    else:
        least = min(PREFILL_STEPS[-1], plan.context_length)
        assert plan.prefill_step_size in {*PREFILL_STEPS, least}
        assert plan.activation_bytes <= ACTIVATION_SHARE * plan.budget_bytes or plan.prefill_step_size <= least


@st.composite
def mixtures(draw: Any) -> ModelSizes:
    num_experts = draw(st.integers(2, 40))
    num_layers = draw(st.integers(1, 12))
    return make_mixture(
        num_layers,
        num_experts,
        draw(st.integers(1, min(8, num_experts))),
        draw(st.lists(st.integers(20_000, 4_000_000), min_size=3, max_size=3)),
        draw(st.lists(tensor_bytes, min_size=3, max_size=5)),
        num_dense=draw(st.integers(0, num_layers - 1)),
        copies=draw(st.booleans()),
        head=draw(st.none() | st.sampled_from([(1000, 4096), (32_000, 4096)])),
        tied=draw(st.booleans()),
    )


@some(250)
@given(models() | mixtures(), configs, machines, shares)
@example(make_model(layers=[], table=(1000, 65_536)), FIXED, make_machine(), 0.3)
@example(make_model(layers=[], table=(1000, 65_536)), FIXED, make_machine(), 1.0)
@example(make_model(head=(256_000, 16_384)), FIXED, make_machine(), 0.01)
@example(make_model(head=None, table=None, copies=True), FIXED, make_machine(), 0.7)
def test_every_plan_adds_up(sizes: ModelSizes, config: FlashConfig, machine: Machine, share: float) -> None:
    (plan,) = plans_between(sizes, config, machine, [share])
    check(plan, sizes, config, machine)


def test_bounce_buffers_are_set_aside_only_where_reads_are_copied() -> None:
    disk = DiskProfile(2e9, 4 * MIB, 4, direct=True)
    for copies in (False, True):
        for direct in (False, True):
            machine = make_machine(disk=replace(disk, direct=direct))
            (plan,) = plans_between(make_model(copies=copies), FIXED, machine, [0.5])
            assert plan.bounce_bytes == (16 * MIB if copies and direct else 0)
            for arrival, is_set_aside in (("bounced", direct), ("copied by the driver", True)):
                bounced = replace(machine, arrival=arrival)
                (plan,) = plans_between(make_model(copies=copies), FIXED, bounced, [0.5])
                assert plan.bounce_bytes == (16 * MIB if is_set_aside else 0)


# --- the smallest budget ---------------------------------------------------------------------------------------------


@some(100)
@given(models() | mixtures(), configs, machines)
def test_the_minimum_is_enough_and_less_is_refused(sizes: ModelSizes, config: FlashConfig, machine: Machine) -> None:
    smallest = make_plan(sizes, replace(config, ram_budget_gb="min"), machine)
    least = smallest.minimum_bytes
    check(smallest, sizes, config, machine)
    if sizes.trunk is None:  # a mixture gets room for the least pool
        assert smallest.budget_bytes == least
        if config.num_slots in (None, 1):  # several slots of the largest layer can take more than pinning some of it
            assert smallest.peak_bytes == least
    enough = make_plan(sizes, with_budget(config, least), machine)
    assert enough.minimum_bytes == least
    check(enough, sizes, config, machine)
    for budget in (1, least // 3, least - 1):
        with pytest.raises(BudgetError) as caught:
            make_plan(sizes, replace(config, ram_budget_gb=budget / GB), machine)
        assert caught.value.minimum_bytes == least
        assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize("sizes", [make_model(), make_model(head=None), make_model(layers=[[70_001]] * 3)])
def test_the_smallest_budget_that_a_refusal_names_can_be_typed_back_in(sizes: ModelSizes) -> None:
    whole = 1001 * MB - minimum_of(sizes, FIXED, make_machine(base_bytes=0))  # where nothing is rounded
    for base in (whole, *range(100 * MB, 102 * MB, 199_999)):
        machine = make_machine(base_bytes=base)
        with pytest.raises(BudgetError) as caught:
            make_plan(sizes, replace(FIXED, ram_budget_gb=0.001), machine)
        found = re.search(r"ram_budget_gb is 0\.001, .* at least ([0-9.]+) .*Hint: give \1 ", str(caught.value))
        assert found is not None and (base != whole or found[1] == "1.001")
        least = caught.value.minimum_bytes
        for gigabytes in (float(found[1]), float(in_gb(least)), float(in_mb(least)) / 1000):
            assert 0 <= round(gigabytes * GB) - least < MB
            plan = make_plan(sizes, replace(FIXED, ram_budget_gb=gigabytes), machine)
            assert plan.budget_bytes - least < MB


def test_a_word_leaves_a_mixture_its_pool_beside_mlx_buffer_cache() -> None:
    """A larger buffer cache took the room of the pool, and whole layers were read."""
    sizes, machine = make_mixture(expert=(150_000_000,) * 3), make_machine(has_buffer_cache=True)
    plan = make_plan(sizes, FlashConfig(ram_budget_gb="min"), machine)
    assert plan.budget_bytes > plan.minimum_bytes  # reading layers takes less
    assert plan.pool is not None and plan.peak_bytes <= plan.budget_bytes


memories = st.integers(10**8, 10**11).flatmap(lambda total: st.tuples(st.just(total), st.integers(0, total)))


@some(60)
@given(models(), configs, machines, memories, st.sampled_from([None, *PROFILE_SHARES]))
def test_a_budget_that_depends_on_the_machine(
    sizes: ModelSizes, config: FlashConfig, machine: Machine, memory: tuple[int, int], word: Any
) -> None:
    total, available = memory
    machine = replace(machine, total_memory=total, available_memory=available)
    minimum = minimum_of(sizes, config, replace(machine, total_memory=10**15))
    assume(minimum <= total)
    plan = make_plan(sizes, replace(config, ram_budget_gb=word), machine)
    of_free, of_all = PROFILE_SHARES[word or "balanced"]
    assert plan.budget_bytes == max(minimum, min(int(of_free * available), int(of_all * total)))
    assert plan.minimum_bytes == minimum
    check(plan, sizes, config, machine)


@some(40)
@given(models(), configs, machines, shares)
def test_a_plan_larger_than_the_machine_is_refused(
    sizes: ModelSizes, config: FlashConfig, machine: Machine, share: float
) -> None:
    small_reads = replace(machine.disk, read_size=MIB, queue_depth=min(machine.disk.queue_depth, 4))
    machine = replace(machine, disk=small_reads)  # with larger ones, there would be a smaller plan
    (plan,) = plans_between(sizes, config, machine, [share])
    budget = with_budget(config, plan.budget_bytes)
    fits = replace(machine, total_memory=plan.peak_bytes)
    assert make_plan(sizes, budget, fits) == plan
    with pytest.raises(BudgetError, match="this process can have at most") as caught:
        make_plan(sizes, budget, replace(fits, total_memory=plan.peak_bytes - 1))
    assert caught.value.minimum_bytes == plan.minimum_bytes


@some(30)
@given(models(), configs, machines)
def test_the_minimum_does_not_depend_on_the_reads_that_a_disk_likes(
    sizes: ModelSizes, config: FlashConfig, machine: Machine
) -> None:
    """A budget that one run has named is enough for the next, whose probe may find other reads to be the best."""
    config = replace(config, queue_depth=None, read_size_mb=None)
    disks = [replace(machine.disk, read_size=size, queue_depth=depth) for size, depth in CANDIDATES if depth >= 4]
    found = [replace(machine, disk=disk) for disk in disks]
    least = {minimum_of(sizes, config, each) for each in found}
    assert len(least) == 1
    for each in found:
        plan = make_plan(sizes, with_budget(config, *least), each)
        assert plan.peak_bytes <= plan.budget_bytes
        check(plan, sizes, config, each)


@pytest.mark.parametrize(("more", "read_size"), [(-16 * MIB, MIB), (0, 8 * MIB)])
def test_small_reads_where_there_is_no_room_for_large_ones(more: int, read_size: int) -> None:
    disk = DiskProfile(2e9, 8 * MIB, 4, direct=True)
    machine, sizes = make_machine(disk=disk), make_model(copies=True)
    least = minimum_of(sizes, FIXED, machine) + 28 * MIB  # 32 MiB instead of 4 MiB of buffers
    plan = make_plan(sizes, with_budget(FIXED, least + more), machine)
    assert (plan.read_size, plan.queue_depth) == (read_size, 4)
    assert plan.minimum_bytes == least - 28 * MIB


# --- more memory -----------------------------------------------------------------------------------------------------


@some(60)
@given(models() | mixtures(), machines, st.integers(1, 4000), st.integers(1, 2000), st.none() | st.integers(1, 6))
def test_what_fits_whole_is_not_streamed(
    sizes: ModelSizes, machine: Machine, context: int, step: int, num_slots: int | None
) -> None:
    config = FlashConfig(context_length=context, prefill_step_size=step, num_slots=num_slots, expert_pool=False)
    whole = everything(sizes, config, machine)
    plan = make_plan(sizes, with_budget(replace(config, expert_pool=True), whole.peak_bytes), machine)
    assert plan.streaming == whole.streaming and plan.pool is None
    assert plan.streaming.layers == plan.streaming.heads == plan.streaming.tables == ()
    assert (plan.streaming.num_slots, plan.streaming.read_bytes, plan.slots_bytes) == (0, 0, 0)
    assert plan.pinned_bytes == sum(unit.buffer_bytes for unit in all_units(sizes))
    check(plan, sizes, config, machine)


many_shares = st.lists(shares, min_size=5, max_size=5).map(sorted)
many_alike = st.builds(
    lambda sizes, count: [sizes] * count,
    st.lists(st.integers(MIB, 60 * MIB), min_size=4, max_size=9),
    st.integers(16, 48),
)


dense = st.builds(make_model, many_alike, st.sampled_from([None, (32_000, 4096), (151_936, 2048)]), tied=st.booleans())


SMALL_UNITS = make_model([(70_000, 70_000, 8_000_000)] * 2)
"""Once its layers are in memory, only tiles of the head decide on the size of a slot, and each is waited for."""


@some(40)
@given(dense | mixtures(), machines, many_shares)
@example(SMALL_UNITS, make_machine(compute_bytes_per_second=1e9, barrier_seconds=5e-4), [0.0, 0.0625, 0.125, 0.25, 1.0])
def test_more_memory_is_not_slower(sizes: ModelSizes, machine: Machine, shares: Sequence[float]) -> None:
    """What is set aside for tokens is fixed here: left open, it grows with the budget, and may leave weights less.

    Room for parts of prompts grows, too: weights have it while tokens are decoded, which ``seconds`` counts.
    """
    plans = plans_between(sizes, FIXED, machine, shares)
    for less, more in pairwise(plan.seconds for plan in plans):
        assert more <= less * 1.03


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_nearly_all_of_the_memory_is_used(num_slots: int) -> None:
    for share in (0.2, 0.5, 0.8):
        (plan,) = plans_between(make_model(), replace(FIXED, num_slots=num_slots), make_machine(), [share])
        assert plan.budget_bytes - plan.peak_bytes <= sum(LLAMA_LAYER)


def test_a_second_slot_is_taken_where_it_hides_computing() -> None:
    (plan,) = plans_between(make_model(), FIXED, make_machine(compute_bytes_per_second=2e9), [0.3])
    assert plan.streaming.num_slots >= 2
    (plan,) = plans_between(make_model(), FIXED, make_machine(compute_bytes_per_second=1e12), [0.3])
    assert plan.streaming.num_slots == 1


# --- what is set aside for tokens ------------------------------------------------------------------------------------


def test_a_head_is_not_cut_into_many_small_tiles_to_pin_a_little_more() -> None:
    sizes = make_model(layers=[[3 * MB] * 4] * 12, head=(128_000, 4096))
    for plan in plans_between(sizes, FIXED, make_machine(), [0.1, 0.2, 0.3, 0.4]):
        for head, num_rows in tiled_units(sizes, plan):
            assert len(tiles(head, num_rows)) <= 64


def test_a_context_that_takes_most_of_the_memory_still_leaves_the_rest_to_weights() -> None:
    """Its activations exceed their share even with the shortest step."""
    sizes = make_model()
    sizes = replace(sizes, activations=replace(sizes.activations, scores_per_pair=2000))
    config = FlashConfig(context_length=20_000, ram_budget_gb=3)
    plan = make_plan(sizes, config, make_machine())
    assert plan.activation_bytes > ACTIVATION_SHARE * plan.budget_bytes
    assert plan.pinned_bytes + plan.spare_bytes > sizes.nbytes / 4  # that room is lent to weights


# --- tiles -----------------------------------------------------------------------------------------------------------


@some(200)
@given(row_units("head"), st.integers(0, 200 * MIB))
def test_tiles_fit_their_slot_and_are_few(head: UnitSize, spare: int) -> None:
    assert head.num_rows
    row = -(-head.nbytes // head.num_rows)
    slot = TILE_ROW_MULTIPLE * row + TILE_SLACK_BYTES + spare
    found = tiles(head, tile_rows(head.num_rows, head.row_bytes, slot))
    most = (slot - TILE_SLACK_BYTES) // row // TILE_ROW_MULTIPLE * TILE_ROW_MULTIPLE
    assert max(found) <= slot and len(found) <= -(-head.num_rows // most)


# --- spread ----------------------------------------------------------------------------------------------------------


@some(200)
@given(alike | unlike, st.floats(0, 1), st.booleans())
def test_every_stretch_of_layers_streams_its_share(
    layers: Sequence[Sequence[int]], share: float, whole_layers: bool
) -> None:
    units = make_model(layers).layers
    total = sum(unit.nbytes for unit in units)
    target = int(share * total)
    found = dict(spread(units, target, whole_layers).names)
    chosen = [tuple(t for t in unit.tensors if t.name in found.get(unit.name, ())) for unit in units]
    pieces = [unit.nbytes for unit in units] if whole_layers else [t.nbytes for unit in units for t in unit.tensors]
    passed = accumulate(unit.nbytes for unit in units)
    done = accumulate(sum(tensor.nbytes for tensor in tensors) for tensors in chosen)
    for streamed, so_far in zip(done, passed, strict=True):
        assert abs(streamed - target * so_far / total) <= max(pieces) / 2 + 1
    for unit, tensors in zip(units, chosen, strict=True):
        assert found.get(unit.name, ()) == tuple(tensor.name for tensor in tensors)
        assert not whole_layers or tensors in ((), unit.tensors)


# --- the simulated ring ----------------------------------------------------------------------------------------------

seconds = st.floats(1e-4, 10)
steps_read = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=12)


@some(100)
@given(steps_read)
def test_one_slot_reads_and_computes_by_turns(steps: Sequence[tuple[float, float]]) -> None:
    assert simulate(steps, 1) == pytest.approx(sum(read + compute for read, compute in steps))


def test_a_second_slot_hides_what_comes_after_the_reads() -> None:
    steps = [(1.0, 0.1)] * 6
    assert simulate(steps, 1, late=0.2) == pytest.approx(6 * 1.3)
    assert simulate(steps, 2, late=0.2) == pytest.approx(6)


# --- large models ----------------------------------------------------------------------------------------------------


def num_calls(profile: cProfile.Profile) -> int:
    """Return the number of Python's calls, which no other program changes as it changes their time."""
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.parametrize(
    ("sizes", "budget", "most_calls"),
    [
        *((make_model(layers=[LLAMA_LAYER] * 2000), budget, 6_000_000) for budget in ("min", 60)),  # about 2 s
        *((make_mixture(94, n, 8, (9_400_000,) * 3), budget, 1_500_000) for n in (128, 512) for budget in ("min", 100)),
    ],
)
def test_large_models_are_planned_in_no_time(sizes: ModelSizes, budget: Any, most_calls: int) -> None:
    with cProfile.Profile() as profile:
        plan = make_plan(sizes, FlashConfig(ram_budget_gb=budget), make_machine())
    assert num_calls(profile) < most_calls
    check(plan, sizes, FlashConfig(), make_machine())


def test_the_default_prefill_step_is_mlx_lms() -> None:
    assert inspect.signature(generate_step).parameters["prefill_step_size"].default == DEFAULT_PREFILL_STEP_SIZE


# --- mixtures of experts ---------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_pool_takes_what_the_trunk_and_rows_of_the_embedding_table_leave() -> None:
    sizes, machine = make_mixture(), make_machine()
    assert sizes.trunk is not None
    (table,) = sizes.trunk.tables  # a token needs one row of it
    plans = plans_between(sizes, FIXED, machine, (0.15, 0.3, 0.5, 0.7, 0.9))
    for plan in plans:
        assert plan.pool is not None and plan.streaming.read_bytes == 0
        assert plan.budget_bytes - plan.peak_bytes < plan.pool.slot_bytes
    sizes_of_pools = [plan.pool.num_slots for plan in plans if plan.pool is not None]
    assert sizes_of_pools == sorted(set(sizes_of_pools))
    for plan in plans[:3]:
        assert plan.streaming.tables == (table.name,)
        assert plan.pinned_bytes == sum(u.buffer_bytes for u in all_units(sizes.trunk)) - table.buffer_bytes


def test_a_pool_is_no_larger_than_an_array_may_be() -> None:
    """Metal's buffers have a limit below the memory of the machine."""
    sizes, machine = make_mixture(), make_machine()
    (plan,) = plans_between(sizes, FIXED, machine, [0.7])
    assert plan.pool is not None
    limit = plan.pool.nbytes // 2
    small = replace(machine, largest_array=limit)
    bounded = make_plan(sizes, with_budget(FIXED, plan.budget_bytes), small)
    assert bounded.pool is not None and limit - bounded.pool.slot_bytes < bounded.pool.nbytes <= limit


@some(40)
@given(mixtures(), machines, shares)
def test_no_pool_reads_whole_layers(sizes: ModelSizes, machine: Machine, share: float) -> None:
    config = replace(FIXED, expert_pool=False)
    (plan,) = plans_between(sizes, config, machine, [share])
    (dense,) = plans_between(replace(sizes, trunk=None), FIXED, machine, [share])
    assert plan.pool is None and plan == dense
    assert not any("experts" in name for name, _ in plan.parts())


@pytest.mark.parametrize("exact_tiles", [False, True])
def test_whole_layers_are_read_only_where_the_least_pool_does_not_fit(exact_tiles: bool) -> None:
    """A budget that can hold as many experts as have to be in memory together, and what is streamed beside them."""
    sizes, machine = make_mixture(), make_machine(exact_tiles=exact_tiles)
    word = make_plan(sizes, replace(FIXED, ram_budget_gb="min"), machine)
    assert word.pool is not None and word.pool.num_slots == experts_of(sizes).least_slots
    check(word, sizes, FIXED, machine)
    below = make_plan(sizes, with_budget(FIXED, word.budget_bytes - 1), machine)
    smallest = make_plan(sizes, with_budget(FIXED, word.minimum_bytes), machine)
    assert below.pool is None and smallest.pool is None and word.minimum_bytes < word.budget_bytes
    assert smallest.seconds > word.seconds
    between = replace(machine, total_memory=word.budget_bytes - 1, available_memory=GB)
    assert [plan.pool for plan, _ in table_of_budgets(sizes, FIXED, between)][:1] == [None]

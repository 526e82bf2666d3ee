"""Candidates for a plan: the ways to stream what does not fit a budget, and the fastest of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from mlx_flash.config import GB, FlashConfig
from mlx_flash.residency.assemble import (
    LEAST_TILE_BYTES,
    TILE_SLACK_BYTES,
    Reserve,
    Task,
    activation_bytes,
    assemble,
    assembled_bytes,
    everything_pinned,
    finished,
    heads_of,
    named,
    pool_of,
    timed,
)
from mlx_flash.residency.kv import KV_SHARE, least_bytes, most_on_disk
from mlx_flash.residency.plan import PREFILL_STEPS, ResidencyPlan
from mlx_flash.residency.sizes import CACHE_STEP
from mlx_flash.residency.spread import Streamed, spread, spread_whole

ACTIVATION_SHARE = 0.2
"""Share of the budget that a forward call's activations may take when the plan chooses the prefill step."""

CONTEXT_LENGTHS = (4096, 2048, 1024, 512, 256)
CONTEXT_LENGTHS_ON_DISK = (131072, 65536, 32768, 16384, 8192)
"""To try besides when the KV cache is to be on disk, and the length of the context was left open."""

DISK_SHARE = 0.5
"""Share of the free disk that it may take then."""

ENOUGH_CONTEXT = 1024
"""All weights in memory and this many tokens beat more tokens and weights that have to be read."""

MAX_SLOTS = 4

WORTH_A_SLOT = 0.99
"""More slots and smaller units must bring the predicted time below this share of what it is without."""

WORTH_MORE_TOKENS = 1.25
"""A longer context or prefill step may make the predicted time of a token this much longer."""

SEARCH_STEPS = 16

TILE_BYTES = (32 << 20, 8 << 20, 2 << 20, 0)
"""Smallest tiles of a streamed head to try: small ones leave memory, but each is waited for."""


def smallest(task: Task, reserve: Reserve) -> ResidencyPlan:
    """Return the smallest plan: the fewest slots and no pinned layer, or a tiny model in memory."""
    plans = [(plan, cut) for cut in _cuts(task) for plan in _smallest_of_cut(cut, reserve)]
    tiled = _tiled(task)
    if tiled is not None:  # two slots, so that reading and computing overlap, cost little here
        num_slots = task.config.num_slots or 2
        plans.append((assemble(tiled, reserve, num_slots, _all_layers(tiled), LEAST_TILE_BYTES), tiled))
    plan, cut = min(plans, key=lambda entry: entry[0].peak_bytes)
    everything = everything_pinned(task, reserve)
    if everything.peak_bytes < plan.peak_bytes:
        return timed(task, everything)
    return timed(cut, named(cut, plan, [unit.tensors for unit in cut.sizes.layers]))


def _smallest_of_cut(task: Task, reserve: Reserve) -> list[ResidencyPlan]:
    streamed, num_slots = _all_layers(task), task.config.num_slots or 1
    return [assemble(task, reserve, num_slots, streamed, tile_bytes) for tile_bytes in (0, None)]


def _least_bytes_of_cut(task: Task, reserve: Reserve) -> int:
    streamed, num_slots = _all_layers(task), task.config.num_slots or 1
    return min([assembled_bytes(task, reserve, num_slots, streamed, tile_bytes) for tile_bytes in (0, None)])


def _all_layers(task: Task) -> Streamed:
    return task.streamed(task.sizes.layer_bytes, True)


def _cuts(task: Task) -> list[Task]:
    """Return the task with whole layers, then with smaller and smaller units."""
    return [task, *task.finer]


def _tiled(task: Task, target: int | None = None) -> Task | None:
    """Return the task with linear layers in row tiles, where that is exact.

    Args:
        task: with whole layers.
        target: bytes of linear layers to stream, spread evenly; None for all.
    """
    linears = task.sizes.linears
    if not linears or not task.machine.exact_tiles:
        return None
    chosen = linears if target is None else spread_whole(linears, target)
    return replace(task, sizes=task.sizes.tiled({unit.name for unit in chosen}), cut=len(task.sizes.finer))


def least_reserve(config: FlashConfig) -> Reserve:
    """Return the shortest prefill step and context, where unset. A cache grows by ``CACHE_STEP`` anyway."""
    step = config.prefill_step_size or PREFILL_STEPS[-1]
    context = config.context_length or max(CACHE_STEP, step)
    return Reserve(min(step, context), context)


def best(task: Task, budget: int) -> ResidencyPlan | None:
    """Return the plan with the longest context and prefill step that is nearly as fast as one with the shortest."""
    reserves = list(_reserves(task, budget))
    for reserve in reserves:
        everything = everything_pinned(task, reserve)
        is_whole = everything.pool is None and everything.peak_bytes <= budget
        if is_whole and reserve.context_length >= ENOUGH_CONTEXT:
            return timed(task, everything)
    good = _least_seconds(task, budget) * WORTH_MORE_TOKENS
    plans = list(_candidates(task, budget, reserves[0]))
    if plans and (plan := _fastest(plans)).weights_seconds <= good:
        return plan
    least = least_reserve(task.config)
    plans = list(_candidates(task, budget, least))
    if task.machine.exact_tiles and task.sizes.linears:
        plans += _candidates_with_tiles(task, budget, least)
    if not plans:
        return None
    fastest = _fastest(plans)
    for reserve in reserves:
        plans = list(_candidates(task, budget, reserve))
        if plans and (plan := _fastest(plans)).weights_seconds <= fastest.weights_seconds * WORTH_MORE_TOKENS:
            return plan
    return fastest


def _least_seconds(task: Task, budget: int) -> float:
    """Return a time that no plan is below: all weights are computed with, and what the budget cannot hold is read."""
    machine = task.machine
    units = [*task.sizes.layers, *heads_of(task.sizes)]
    read = max(0, sum(unit.nbytes for unit in units) - (budget - machine.base_bytes))
    computed = sum(unit.computed_bytes for unit in units)
    trunk = max(computed / machine.kept_bytes_per_second, read / machine.disk.bytes_per_second)
    experts = task.sizes.experts
    if experts is None:
        return trunk
    most = max(experts.least_slots, (budget - machine.base_bytes) // experts.slot_bytes)
    return trunk + pool_of(task, experts, task.pool_slots or most).seconds


def _reserves(task: Task, budget: int) -> Iterator[Reserve]:
    """Yield reserves for tokens, the largest first. Values that the user set are kept; unset ones shrink."""
    config, least = task.config, least_reserve(task.config)
    for context in [config.context_length] if config.context_length else _open_contexts(task):
        if context < least.prefill_step_size:
            continue
        if (
            not config.context_length
            and context > CONTEXT_LENGTHS[-1]
            and not _is_modest_context(task, budget, context)
        ):
            continue
        longest = next((s for s in reversed(PREFILL_STEPS) if s >= context), PREFILL_STEPS[0])
        steps = [step for step in PREFILL_STEPS if step <= longest]
        for step in [least.prefill_step_size] if config.prefill_step_size else steps:
            reserve = Reserve(step, context)
            if _is_modest(task, budget, reserve):
                yield reserve
    yield least


def _open_contexts(task: Task) -> tuple[int, ...]:
    return (*CONTEXT_LENGTHS_ON_DISK, *CONTEXT_LENGTHS) if task.kv_on_disk else CONTEXT_LENGTHS


def _is_modest_context(task: Task, budget: int, context: int) -> bool:
    """Return whether keys and values leave the weights their room, and others theirs on the disk."""
    sizes, config = task.sizes, task.config
    if not task.kv_on_disk:
        return sizes.cache.nbytes(context) <= KV_SHARE * budget
    if most_on_disk(sizes, config, context) > DISK_SHARE * task.machine.kv_disk_bytes:
        return False
    room = KV_SHARE * budget if config.kv_ram_gb is None else config.kv_ram_gb * GB
    return least_bytes(sizes, config, context, PREFILL_STEPS[0]) <= room


def _is_modest(task: Task, budget: int, reserve: Reserve) -> bool:
    """Return whether the activations leave the weights their room, or are as small as they can be."""
    if task.config.prefill_step_size or reserve == least_reserve(task.config):
        return True
    states = task.sizes.cache.call_bytes * reserve.prefill_step_size
    return activation_bytes(task, reserve) + states <= ACTIVATION_SHARE * budget


def _candidates(task: Task, budget: int, reserve: Reserve) -> Iterator[ResidencyPlan]:
    """Yield everything in memory if that fits; else the most pinned for each cut and number of slots."""
    everything = everything_pinned(task, reserve)
    if everything.peak_bytes <= budget:
        yield finished(task, everything, budget)
        if everything.pool is not None:  # a token needs one row of a table, and more than one expert
            yield finished(task, everything_pinned(task, reserve, tables=False), budget)
        return
    for cut in _cuts(task):
        if _least_bytes_of_cut(cut, reserve) <= budget:
            yield from _candidates_of_cut(cut, budget, reserve, may_skip_layers=cut is task)


def _candidates_of_cut(task: Task, budget: int, reserve: Reserve, *, may_skip_layers: bool) -> Iterator[ResidencyPlan]:
    tilings = TILE_BYTES if heads_of(task.sizes) else ()
    for num_slots in [task.config.num_slots] if task.config.num_slots else range(1, MAX_SLOTS + 1):
        for whole_layers in (True, False) if may_skip_layers else (False,):
            for tile_bytes in (None, *tilings):
                plan = _most_pinned(task, budget, reserve, num_slots, whole_layers, tile_bytes)
                if plan is not None:
                    yield finished(task, plan, budget)
                    if tile_bytes and plan.streaming.slot_bytes > tile_bytes + TILE_SLACK_BYTES:
                        break  # the layers' slots are larger anyway


def _candidates_with_tiles(task: Task, budget: int, reserve: Reserve) -> Iterator[ResidencyPlan]:
    """Yield linear layers in row tiles; as few of them as the budget allows."""
    for num_slots in [task.config.num_slots] if task.config.num_slots else range(2, MAX_SLOTS + 1):
        best, low, high = None, 0, sum(unit.nbytes for unit in task.sizes.linears)
        for _ in range(SEARCH_STEPS):
            target = high if best is None else (low + high) // 2
            tiled = _tiled(task, target)
            assert tiled is not None
            plan = assemble(tiled, reserve, num_slots, _all_layers(tiled), LEAST_TILE_BYTES)
            if plan.peak_bytes <= budget:
                best, high = (tiled, plan), target
            elif best is None:
                break
            else:
                low = target
        if best is not None:
            tiled, plan = best
            yield finished(tiled, named(tiled, plan, [unit.tensors for unit in tiled.sizes.layers]), budget)


def _most_pinned(
    task: Task, budget: int, reserve: Reserve, num_slots: int, whole_layers: bool, tile_bytes: int | None
) -> ResidencyPlan | None:
    """Find by bisection how few of the layers' bytes can be streamed within the budget."""
    # In small models, many targets stream the same tensors.
    needed = cache(lambda streamed: assembled_bytes(task, reserve, num_slots, streamed, tile_bytes))
    low, high = 0, task.sizes.layer_bytes
    if needed(task.streamed(high, whole_layers)) > budget:
        return None
    for _ in range(SEARCH_STEPS - 1):
        middle = (low + high) // 2
        if needed(task.streamed(middle, whole_layers)) <= budget:
            high = middle
        else:
            low = middle
    plan = assemble(task, reserve, num_slots, task.streamed(high, whole_layers), tile_bytes)
    return named(task, plan, spread(task.sizes.layers, high, whole_layers))


def _fastest(plans: Sequence[ResidencyPlan]) -> ResidencyPlan:
    """Return the first that is nearly as fast as the fastest: coarse cuts and few slots come first."""
    enough = min(plan.seconds for plan in plans) / WORTH_A_SLOT
    return next(plan for plan in plans if plan.seconds <= enough)

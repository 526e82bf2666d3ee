"""Candidates for a plan: the ways to stream what does not fit a budget, and the fastest of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache

from mlx_flash.residency.costs import (
    LEAST_TILE_BYTES,
    TILE_SLACK_BYTES,
    Reserve,
    Task,
    assemble,
    assembled_bytes,
    everything_pinned,
    finished,
    heads_of,
    named,
    pool_of,
    timed,
)
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.residency.selection import Streamed, spread, spread_whole

MAX_SLOTS = 4

WORTH_A_SLOT = 0.99
"""More slots and smaller units must bring the predicted time below this share of what it is without."""

NEARLY = 1.25
"""Row tiles are tried where other plans take so many times the least that is possible."""

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
    return replace(
        task, sizes=task.sizes.tiled({unit.name for unit in chosen}), cut=len(task.sizes.finer), is_tiled=True
    )


def best(task: Task, budget: int, reserves: Iterable[Reserve]) -> ResidencyPlan | None:
    """Return the fastest plan with the first of some reserves that the budget has room for; None if it has for none."""
    for reserve in reserves:
        plans = list(_candidates(task, budget, reserve))
        is_good = plans and _fastest(plans).weights_seconds <= NEARLY * _least_seconds(task, budget)
        if not is_good and task.machine.exact_tiles and task.sizes.linears:
            plans += _candidates_with_tiles(task, budget, reserve)
        if plans:
            return _fastest(plans)
    return None


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


def fastest_like(task: Task, plan: ResidencyPlan, reserve: Reserve) -> ResidencyPlan | None:
    """Return the fastest plan for a reserve with the slots of another plan; None if the budget has room for none.

    Args:
        task: with the cut of that plan.
        plan: the other plan.
        reserve: tokens to set memory aside for.
    """
    if plan.streaming.is_tiled:  # row tiles of layers: there is next to no pinned weight
        return None
    like = replace(task, config=replace(task.config, num_slots=task.config.num_slots or plan.streaming.num_slots))
    plans = list(_candidates_of_cut(like, plan.budget_bytes, reserve, may_skip_layers=not plan.streaming.cut))
    return replace(_fastest(plans), budget_bytes=plan.budget_bytes) if plans else None

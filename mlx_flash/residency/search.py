"""What stays in memory: a pure function from sizes, settings and machine to a plan that adds up.

A forward pass reads in a cycle: a least-recently-used cache hits nothing there, a fixed pinned part hits its share.
What is streamed is spread evenly over the layers, so that reading overlaps computing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mlx_flash.config import GB, FlashConfig, Profile
from mlx_flash.errors import BudgetError, ConfigError
from mlx_flash.residency.assemble import (
    LEAST_TILE_BYTES,
    TILE_SLACK_BYTES,
    Reserve,
    Task,
    activation_bytes,
    assemble,
    cache_limit_of,
    everything_pinned,
    finished,
    heads_of,
    named,
    pool_of,
    timed,
)
from mlx_flash.residency.kv import KV_SHARE, check_kv, least_bytes, most_on_disk
from mlx_flash.residency.plan import MB, PREFILL_STEPS, Machine, ResidencyPlan, in_gb
from mlx_flash.residency.sizes import CACHE_STEP, ModelSizes
from mlx_flash.residency.spread import Streamed, spread, spread_whole

PROFILE_SHARES: dict[Profile, tuple[float, float]] = {
    "safe": (0.5, 0.4),
    "balanced": (0.7, 0.7),
    "performance": (0.9, 0.8),
}
"""What each profile takes at most: this share of the memory that is free, and this share of the machine's. The second
counts on a machine where little runs yet: what is started later needs room too."""

ACTIVATION_SHARE = 0.2
"""Share of the budget that a forward call's activations may take when the plan chooses the prefill step."""

CONTEXT_LENGTHS = (4096, 2048, 1024, 512, 256)
CONTEXT_LENGTHS_ON_DISK = (131072, 65536, 32768, 16384, 8192)
"""To try besides when the KV cache is to be on disk, and the length of the context was left open."""

DISK_SHARE = 0.5
"""Share of the free disk that it may take then."""

WORTH_THE_DISK = 0.8
"""A KV cache that could be in memory is on disk when that brings the predicted time below this share."""

ENOUGH_CONTEXT = 1024
"""Everything in memory with this many tokens beats more tokens and weights that have to be read."""

MAX_SLOTS = 4

WORTH_A_SLOT = 0.99
"""More slots and smaller units must bring the predicted time below this share of what it is without."""

WORTH_MORE_TOKENS = 1.25
"""A longer context or prefill step may make the predicted time of a token this much longer."""

SEARCH_STEPS = 16

TILE_BYTES = (32 << 20, 8 << 20, 2 << 20, 0)
"""How large the tiles of a streamed head are at least, to try: small ones leave memory, but each is waited for."""


def make_plan(sizes: ModelSizes, config: FlashConfig, machine: Machine) -> ResidencyPlan:
    """Decides what stays in memory.

    Args:
        sizes: the model in numbers.
        config: the settings.
        machine: the machine in numbers.

    Raises:
        BudgetError: the budget, or the machine, is too small; it names the smallest workable budget.
    """
    plans: list[ResidencyPlan] = []
    errors: list[BudgetError] = []
    for kv_on_disk in _places_of_kv(sizes, config, machine):
        try:
            plans.append(_make_plan(sizes, config, machine, kv_on_disk))
        except BudgetError as error:
            errors.append(error)
    if not plans:
        raise min(errors, key=lambda error: error.minimum_bytes)
    least = min(plan.budget_bytes for plan in plans)  # "min" is the smallest of all
    plan, *others = [plan for plan in plans if plan.budget_bytes == least]
    plan = min([plan, *(o for o in others if o.seconds < WORTH_THE_DISK * plan.seconds)], key=lambda p: p.seconds)
    minima = [plan.minimum_bytes for plan in plans] + [error.minimum_bytes for error in errors]
    return replace(plan, minimum_bytes=min(minima))


def _places_of_kv(sizes: ModelSizes, config: FlashConfig, machine: Machine) -> tuple[bool, ...]:
    """Whether plans are made with the KV cache on disk, and whether with all of it in memory.

    Raises:
        ConfigError: it shall be on disk, where there is no room for it; or settings contradict each other.
    """
    check_kv(config)
    if not sizes.cache.rows or config.kv_cache in ("stock", "preallocated", "lazy") or config.writes_nothing:
        return (False,)
    needed = most_on_disk(sizes, config, config.context_length or 0)
    if config.kv_cache is None and config.kv_ram_gb is None:
        return (False, True) if 0 < needed <= machine.kv_disk_bytes else (False,)
    if needed > machine.kv_disk_bytes:
        raise ConfigError(
            f"the KV cache of {config.context_length} tokens takes {needed / GB:.3f} GB on disk, where "
            f"{machine.kv_disk_bytes / GB:.3f} GB are free. Hint: make room, set kv_directory, or a smaller "
            "context_length."
        )
    return (True,)


def _make_plan(sizes: ModelSizes, config: FlashConfig, machine: Machine, kv_on_disk: bool) -> ResidencyPlan:
    tasks = [Task(sizes, config, machine, cache_limit_of(machine, 0), kv_on_disk=kv_on_disk)]
    if sizes.trunk is not None and config.expert_pool_gb != 0:
        tasks.insert(0, _with_experts(tasks[0], sizes.trunk))
    smallest = {id(task): _smallest(task, _least(config)) for task in tasks}
    if len(tasks) > 1 and config.expert_pool_gb:  # a pool that was asked for is left out only if everything fits
        smallest[id(tasks[-1])] = timed(tasks[-1], everything_pinned(tasks[-1], _least(config)))
    minimum = min(plan.peak_bytes for plan in smallest.values())
    # Words never stand for a budget at which whole layers would be read because a pool is a little too large for it.
    budget = _budget(config, machine, smallest[id(tasks[0])].peak_bytes)
    usable = [task for task in tasks if smallest[id(task)].peak_bytes <= budget]
    if not usable:
        least = min(smallest.values(), key=lambda plan: plan.peak_bytes)
        raise BudgetError(_too_small(budget, minimum, least), minimum)
    if _fits_whole(tasks[-1], budget):
        usable = tasks[-1:]
    elif config.expert_pool_gb:
        usable = usable[:1]
    cache_limit = cache_limit_of(machine, budget)
    rooms = (int(KV_SHARE * budget), 0) if kv_on_disk else (0,)
    plans = [
        _best(replace(task, cache_limit=cache_limit, kv_room=room), budget) or smallest[id(task)]
        for task in usable
        for room in rooms
    ]
    plan = min(plans, key=lambda plan: plan.seconds)
    plan = replace(plan, budget_bytes=budget, minimum_bytes=minimum)
    if plan.peak_bytes > machine.total_memory:
        raise BudgetError(
            f"the plan needs {plan.peak_bytes / GB:.2f} GB, but this process can have at most "
            f"{machine.total_memory / GB:.2f} GB. Hint: {_smaller(minimum, machine)}.",
            minimum,
        )
    return plan


def _with_experts(task: Task, trunk: ModelSizes) -> Task:
    """The same task, with experts read one by one.

    Raises:
        ConfigError: the pool that was asked for is too small.
    """
    experts, pool_gb = trunk.experts, task.config.expert_pool_gb
    assert experts is not None
    if pool_gb is None:
        return replace(task, sizes=trunk)
    num_slots = min(round(pool_gb * GB) // experts.slot_bytes, sum(experts.num_experts))
    if num_slots < experts.least_slots:
        raise ConfigError(
            f"expert_pool_gb is {pool_gb:g}, but this model needs at least "
            f"{in_gb(experts.least_slots * experts.slot_bytes)}: {experts.least_slots} experts of "
            f"{experts.slot_bytes / MB:.1f} MB. Hint: give more, or 0 to read whole layers."
        )
    return replace(task, sizes=trunk, pool_slots=num_slots)


def _fits_whole(task: Task, budget: int) -> bool:
    """Whether all weights fit the budget, with room for a conversation."""
    least = _least(task.config)
    enough = least.context_length if task.kv_on_disk else max(least.context_length, ENOUGH_CONTEXT)
    reserve = replace(least, context_length=task.config.context_length or enough)
    return everything_pinned(task, reserve).peak_bytes <= budget


def _budget(config: FlashConfig, machine: Machine, least: int) -> int:
    """The budget in bytes. A word never stands for less than the least."""
    budget = config.budget_bytes
    if isinstance(budget, int):
        return budget
    if budget == "min":
        return least
    of_free, of_all = PROFILE_SHARES[budget]
    return max(least, min(int(machine.available_memory * of_free), int(machine.total_memory * of_all)))


def _smaller(minimum: int, machine: Machine) -> str:
    if minimum <= machine.total_memory:
        return f"the smallest workable budget is {in_gb(minimum)} GB"
    return "a smaller context_length or prefill_step_size needs less"


def _too_small(budget: int, minimum: int, smallest: ResidencyPlan) -> str:
    parts = ", ".join(f"{name} {nbytes / MB:.0f} MB" for name, nbytes in smallest.parts() if nbytes >= MB)
    return (
        f"ram_budget_gb is {budget / GB:g}, but this model needs at least {in_gb(minimum)} with these settings: "
        f"{parts}. Hint: give {in_gb(minimum)} or more, or 'min'; a smaller context_length or prefill_step_size "
        "lowers it."
    )


def _smallest(task: Task, reserve: Reserve) -> ResidencyPlan:
    """As few slots as allowed, no layer pinned; or everything in memory, for a tiny model."""
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


def _all_layers(task: Task) -> Streamed:
    return task.streamed(task.sizes.layer_bytes, True)


def _cuts(task: Task) -> list[Task]:
    """The task with whole layers, then with smaller and smaller units."""
    return [task, *task.finer]


def _tiled(task: Task, target: int | None = None) -> Task | None:
    """The task with linear layers in row tiles, where that is exact.

    Args:
        task: with whole layers.
        target: bytes of linear layers to stream, spread evenly; None for all.
    """
    linears = task.sizes.linears
    if not linears or not task.machine.exact_tiles:
        return None
    chosen = linears if target is None else spread_whole(linears, target)
    return replace(task, sizes=task.sizes.tiled({unit.name for unit in chosen}), cut=len(task.sizes.finer))


def _least(config: FlashConfig) -> Reserve:
    """The shortest prefill step and context, as far as they were left open. A cache grows by ``CACHE_STEP`` anyway."""
    step = config.prefill_step_size or PREFILL_STEPS[-1]
    context = config.context_length or max(CACHE_STEP, step)
    return Reserve(min(step, context), context)


def _best(task: Task, budget: int) -> ResidencyPlan | None:
    """The plan with the longest context and prefill step that is nearly as fast as one with the shortest."""
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
    least = _least(task.config)
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
    """No plan is faster: all weights are computed with, and what the budget cannot hold is read."""
    machine = task.machine
    units = [*task.sizes.layers, *heads_of(task.sizes)]
    read = max(0, sum(unit.nbytes for unit in units) - (budget - machine.base_bytes))
    computed = sum(unit.computed_bytes for unit in units)
    trunk = max(computed / machine.compute_bytes_per_second, read / machine.disk.bytes_per_second)
    experts = task.sizes.experts
    if experts is None:
        return trunk
    most = max(experts.least_slots, (budget - machine.base_bytes) // experts.slot_bytes)
    return trunk + pool_of(task, experts, task.pool_slots or most).seconds


def _reserves(task: Task, budget: int) -> Iterator[Reserve]:
    """What to set aside for tokens, most first. What the user asked for is not cut; what was left open is."""
    config, least = task.config, _least(task.config)
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
    """Whether keys and values leave the weights their room, and others theirs on the disk."""
    sizes, config = task.sizes, task.config
    if not task.kv_on_disk:
        return sizes.cache.nbytes(context) <= KV_SHARE * budget
    if most_on_disk(sizes, config, context) > DISK_SHARE * task.machine.kv_disk_bytes:
        return False
    room = KV_SHARE * budget if config.kv_ram_gb is None else config.kv_ram_gb * GB
    return least_bytes(sizes, config, context, PREFILL_STEPS[0]) <= room


def _is_modest(task: Task, budget: int, reserve: Reserve) -> bool:
    """Whether the activations leave the weights their room, or are as small as they can be."""
    if task.config.prefill_step_size or reserve == _least(task.config):
        return True
    states = task.sizes.cache.call_bytes * reserve.prefill_step_size
    return activation_bytes(task, reserve) + states <= ACTIVATION_SHARE * budget


def _candidates(task: Task, budget: int, reserve: Reserve) -> Iterator[ResidencyPlan]:
    """Everything in memory if that fits; else, for each way to cut layers and number of slots, the most pinned."""
    everything = everything_pinned(task, reserve)
    if everything.peak_bytes <= budget:
        yield finished(task, everything, budget)
        if everything.pool is not None:  # a token needs one row of a table, and more than one expert
            yield finished(task, everything_pinned(task, reserve, tables=False), budget)
        return
    for cut in _cuts(task):
        if all(plan.peak_bytes > budget for plan in _smallest_of_cut(cut, reserve)):
            continue
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
    """Linear layers in row tiles; as few of them as the budget allows."""
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
    """Finds by bisection how few of the layers' bytes can be streamed within the budget."""
    best: tuple[ResidencyPlan, int] | None = None
    low, high = 0, task.sizes.layer_bytes
    for _ in range(SEARCH_STEPS):
        middle = high if best is None else (low + high) // 2
        plan = assemble(task, reserve, num_slots, task.streamed(middle, whole_layers), tile_bytes)
        if plan.peak_bytes <= budget:
            best, high = (plan, middle), middle
        elif best is None:
            return None
        else:
            low = middle
    if best is None:
        return None
    plan, target = best
    return named(task, plan, spread(task.sizes.layers, target, whole_layers))


def _fastest(plans: Sequence[ResidencyPlan]) -> ResidencyPlan:
    """The first that is nearly as fast as the fastest: coarse cuts and few slots come first."""
    enough = min(plan.seconds for plan in plans) / WORTH_A_SLOT
    return next(plan for plan in plans if plan.seconds <= enough)

"""The choice of weights that stay in memory: a pure function from sizes, settings and machine to a plan that adds up.

A forward pass reads in a cycle: a least-recently-used cache hits nothing there, a fixed pinned part hits its share.
What is streamed is spread evenly over the layers, so that reading overlaps computing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import tee

from mlx_flash.config import GB, FlashConfig, Profile
from mlx_flash.errors import BudgetError, ConfigError
from mlx_flash.memory.footprint import MemoryReading
from mlx_flash.memory.pagecache import round_up
from mlx_flash.residency.candidate import Candidate, Task, Weights, cache_limit_of
from mlx_flash.residency.kv import KV_SHARE, PROMISED_CONTEXT, check_kv, promised_bytes
from mlx_flash.residency.machine import BASE_STEP, Machine
from mlx_flash.residency.plan import MB, ResidencyPlan, in_gb, round_up_to_mb
from mlx_flash.residency.reserve import least_reserve, reserves
from mlx_flash.residency.search import best, everything, opening_seconds, smallest, with_room_for_parts
from mlx_flash.residency.sizes import ModelSizes
from mlx_flash.speculation import OwnGuesses, worth_guessing
from mlx_flash.storage.blocks import BLOCK_BYTES
from mlx_flash.storage.probe import SMALL_QUEUE_DEPTH, SMALL_READ_SIZE, SMALL_READS_SHARE

PROFILE_SHARES: dict[Profile, tuple[float, float]] = {
    "safe": (0.5, 0.4),
    "balanced": (0.7, 0.7),
    "performance": (0.9, 0.8),
}
"""The most that each profile takes: this share of the memory that is free, and this share of the machine's. The second
counts on a machine where little runs yet: what is started later needs room too."""

WORTH_THE_DISK = 0.8
"""A KV cache that could be in memory is on disk when that brings the predicted time below this share."""

Option = tuple[Weights, Candidate]
"""A way to read the model, layer by layer or expert by expert, and its smallest candidate."""


def make_plan(sizes: ModelSizes, config: FlashConfig, machine: Machine) -> ResidencyPlan:
    """Decide what stays in memory.

    A budget gets small reads if it has no room for the buffers of those that the disk likes best, or makes more of that
    memory. So the smallest one is enough in the next run, too, in which a probe may find other reads to be the best.

    Args:
        sizes: the model in numbers.
        config: the settings.
        machine: the machine in numbers.

    Raises:
        BudgetError: the budget, or the machine, is too small; it names the smallest workable budget.
        ConfigError: settings contradict each other, or the disk has no room for the KV cache.
    """
    plan = _plain_plan(sizes, config, machine)
    if sizes.own_head is None or not plan.read_bytes:
        return plan
    with suppress(BudgetError):
        step = plan.prefill_step_size  # on which last bits depend
        same = replace(config, ram_budget_gb=plan.budget_bytes / GB, prefill_step_size=step)
        guessing = _plain_plan(sizes.guessing, same, machine)
        worth = worth_guessing(OwnGuesses.expected[1], guessing.seconds, guessing.row_seconds, 1)
        if guessing.read_bytes and worth.speed * plan.seconds > 1:
            return replace(guessing, minimum_bytes=plan.minimum_bytes)
    return plan


def _plain_plan(sizes: ModelSizes, config: FlashConfig, machine: Machine) -> ResidencyPlan:
    """Return the plan of a model whose own head is in memory, or is not there."""
    tasks, options, reached = _tasks(sizes, config, machine), _options(sizes, config, machine), machine.reached_bytes
    needs = [_needs(task, options) for task in tasks]
    least = min(map(min, needs))
    minimum = max(_told(reached), least)
    # A word is never a budget at which whole layers would be read because a pool is a little too large for it.
    of_word = max(_told(reached), min([of_options[0] for of_options in needs]))
    memory = MemoryReading(machine.total_memory, machine.available_memory)
    budget = budget_of(config, memory, machine.base_bytes, of_word)
    if budget < reached and least < _told(reached):
        raise BudgetError(
            f"ram_budget_gb is {budget / GB:g}, but loading the tokenizer took this process to {in_gb(reached)} GB. "
            f"Hint: give {in_gb(minimum)} or more, or 'min'.",
            minimum,
        )
    if budget < least:
        task = tasks[needs.index(min(needs, key=min))]
        _, candidate = min(options, key=lambda option: option[1].nbytes)
        raise BudgetError(_too_small(budget, candidate.plan(task, task.tokens(least_reserve(config)))), minimum)
    is_number = isinstance(config.budget_bytes, int)
    fitting = [each for each in zip(tasks, needs, strict=True) if budget >= (min(each[1]) if is_number else each[1][0])]
    first = fitting[0][0]  # times decide between places of the KV cache, not the prefill step or the context
    plans = [_plan(task, options, of_options, budget, first) for task, of_options in fitting]
    plan = _preferred([plan for plan in plans if plan.peak_bytes <= machine.total_memory] or plans)
    if plan.peak_bytes > machine.total_memory:
        raise BudgetError(
            f"the plan needs {plan.peak_bytes / GB:.2f} GB, but this process can have at most "
            f"{machine.total_memory / GB:.2f} GB. Hint: {_smaller(minimum, machine)}.",
            minimum,
        )
    return replace(plan, minimum_bytes=minimum)


def least_budget(sizes: ModelSizes, config: FlashConfig, machine: Machine) -> int:
    """Return the smallest budget that would do.

    Raises:
        ConfigError: settings contradict each other, or the disk has no room for the KV cache.
    """
    options = _options(sizes, config, machine)
    least = min([min(_needs(task, options)) for task in _tasks(sizes, config, machine)])
    return max(_told(machine.reached_bytes), least)


def _tasks(sizes: ModelSizes, config: FlashConfig, machine: Machine) -> list[Task]:
    """Return what is to be planned: with the KV cache in memory, then on disk, as far as it may be there."""
    task = Task(sizes, config, machine, promised_bytes(sizes, config), cache_limit_of(machine, 0))
    return [replace(task, kv_on_disk=place) for place in _places_of_kv(sizes, config, machine)]


def _needs(task: Task, options: Sequence[Option]) -> list[int]:
    """Return the smallest budget of each way to read the model."""
    beside = task.process_bytes + task.tokens(least_reserve(task.config)).nbytes
    return [beside + candidate.nbytes for _, candidate in options]


def _with_small_reads(config: FlashConfig, machine: Machine) -> Machine:
    """Return the machine with the smallest reads and queue that are worth it, unless the settings name others.

    Threads that decode compressed weights are not fewer.
    """
    disk, least = machine.disk, SMALL_READ_SIZE if machine.compression is None else max(SMALL_READ_SIZE, BLOCK_BYTES)
    read_size = disk.read_size if config.read_size_mb else min(disk.read_size, least)
    keeps_depth = config.queue_depth is not None or machine.compression is not None
    queue_depth = disk.queue_depth if keeps_depth else min(disk.queue_depth, SMALL_QUEUE_DEPTH)
    if (read_size, queue_depth) == (disk.read_size, disk.queue_depth):
        return machine
    speed = SMALL_READS_SHARE * disk.bytes_per_second
    return replace(machine, disk=replace(disk, bytes_per_second=speed, read_size=read_size, queue_depth=queue_depth))


def _places_of_kv(sizes: ModelSizes, config: FlashConfig, machine: Machine) -> tuple[bool, ...]:
    """Return the places of the KV cache to plan with: False for memory, True for the disk."""
    check_kv(config)
    if not sizes.cache.rows or config.kv_cache in ("stock", "preallocated") or config.writes_nothing:
        return (False,)
    needed = sum(sizes.cache.rows) * (config.context_length or 0)
    if config.kv_cache is None and config.kv_ram_gb is None:
        return (False, True) if 0 < needed <= machine.kv_disk_bytes else (False,)
    if needed > machine.kv_disk_bytes:
        raise ConfigError(
            f"the KV cache of {config.context_length} tokens takes {needed / GB:.3f} GB on disk, where "
            f"{machine.kv_disk_bytes / GB:.3f} GB are free. Hint: make room, set kv_directory, or a smaller "
            "context_length."
        )
    return (True,)


def _preferred(plans: Sequence[ResidencyPlan]) -> ResidencyPlan:
    """Return the first plan, unless another is worth the disk."""
    return min([p for p in plans if p is plans[0] or p.seconds < WORTH_THE_DISK * plans[0].seconds], key=_seconds)


def _seconds(plan: ResidencyPlan) -> float:
    return plan.seconds


def _plan(task: Task, options: Sequence[Option], needs: Sequence[int], budget: int, like: Task) -> ResidencyPlan:
    """Return the fastest plan for a budget, given the place of the KV cache.

    The options have small reads; the task has the machine with those that the disk likes best. ``needs`` are their
    smallest budgets. The prefill step and context of ``like`` are taken.
    """
    machine, least = task.machine, task.tokens(least_reserve(task.config))
    smallest_budget = max([need for need in needs if need <= budget])  # of both options, unless the budget is below one
    if budget - smallest_budget >= (limit := cache_limit_of(machine, budget)) - task.cache_limit:
        task = replace(task, cache_limit=limit)
    first, others = tee(reserves(replace(like, cache_limit=task.cache_limit), options[0][0], budget))
    room = budget - task.process_bytes
    usable = _usable(options, room - least.nbytes, room - task.tokens(next(first).reserve).nbytes)
    plans = []
    for (weights, candidate), tried in zip(usable, tee(others, len(usable)), strict=True):
        at_hand = (task.tokens(each.reserve) for each in tried)
        tokens = next(each for each in at_hand if each.nbytes <= room - candidate.nbytes)
        chosen = _with_reads(weights, machine, room - tokens.nbytes)
        for kv_room in (int(KV_SHARE * budget), 0) if task.kv_on_disk else (0,):
            each = replace(task, kv_room=kv_room)
            plan = best(each, chosen, each.tokens(tokens.reserve), budget)
            plans += [] if plan is None else [(plan, each, chosen)]
    plan, task, weights = min(plans, key=lambda entry: entry[0].seconds)
    return with_room_for_parts(task, weights, replace(plan, opening_seconds=opening_seconds(task, weights, plan)))


def _with_reads(weights: Weights, liked: Machine, room: int) -> Weights:
    """Return the weights with the reads that the disk likes best, if their buffers have room, and are worth it.

    They are if reading the weights that the room does not hold takes no longer.
    """
    if weights.machine is liked:
        return weights
    other, experts = replace(weights, machine=liked), weights.sizes.experts
    if smallest(other).nbytes > room:
        return weights
    held = room - (experts.nbytes if experts is not None else 0)
    small, large = (
        max(0, everything(each).nbytes - held) / each.machine.disk.bytes_per_second for each in (weights, other)
    )
    return other if large <= small else weights


def _options(sizes: ModelSizes, config: FlashConfig, machine: Machine) -> list[Option]:
    """Return the ways to read the model: expert by expert if it has any, then layer by layer, in small reads."""
    whole = Weights(sizes, _with_small_reads(config, machine), config.num_slots)
    if sizes.trunk is None or config.expert_pool_gb == 0:
        return [(whole, smallest(whole))]
    by_expert = _with_pool(replace(whole, sizes=sizes.trunk), config.expert_pool_gb)
    # A pool that was asked for is left out only if everything fits.
    return [(by_expert, smallest(by_expert)), (whole, everything(whole) if config.expert_pool_gb else smallest(whole))]


def _usable(options: Sequence[Option], room: int, room_beside_more: int) -> list[Option]:
    """Return the options to choose from within some room, beside the fewest tokens and beside those that are wanted.

    If all weights fit beside the latter, the model is read layer by layer.
    """
    if everything(options[-1][0]).nbytes <= room_beside_more:
        return [options[-1]]
    usable = [option for option in options if option[1].nbytes <= room]
    return usable[:1] if options[0][0].pool_slots else usable


def _with_pool(weights: Weights, pool_gb: float | None) -> Weights:
    """Return the weights with a pool of experts of the size that was asked for.

    Raises:
        ConfigError: it is too small.
    """
    experts = weights.sizes.experts
    assert experts is not None
    if pool_gb is None:
        return weights
    num_slots = min(round(pool_gb * GB) // experts.slot_bytes, weights.most_slots(experts))
    if num_slots < experts.least_slots:
        raise ConfigError(
            f"expert_pool_gb is {pool_gb:g}, but this model needs at least "
            f"{in_gb(experts.least_slots * experts.slot_bytes)}: {experts.least_slots} experts of "
            f"{experts.slot_bytes / MB:.1f} MB. Hint: give more, or 0 to read whole layers."
        )
    return replace(weights, pool_slots=num_slots)


def budget_of(config: FlashConfig, memory: MemoryReading, held: int, least: int) -> int:
    """Return the budget in bytes, in a process that holds some already. A word never stands for less than the least."""
    budget = config.budget_bytes
    if isinstance(budget, int):
        return budget
    if budget == "min":
        return least
    if budget == "auto":
        return max(least, memory.room(held))
    of_free, of_all = PROFILE_SHARES[budget]
    return max(least, min(int(memory.available * of_free), int(memory.total * of_all)))


def _told(reached_bytes: int) -> int:
    """Return the peak of loading a tokenizer as a budget that is enough next time too: it varies a little."""
    return round_up(reached_bytes, BASE_STEP) + BASE_STEP if reached_bytes else 0


def _smaller(minimum: int, machine: Machine) -> str:
    if minimum <= machine.total_memory:
        return f"the smallest workable budget is {in_gb(minimum)} GB"
    return "a smaller context_length or prefill_step_size needs less"


def _too_small(budget: int, least: ResidencyPlan) -> str:
    minimum = least.peak_bytes
    parts = ", ".join(f"{name} {nbytes / MB:.0f} MB" for name, nbytes in least.parts() if nbytes >= MB)
    others = " A model takes what those before it left: load the largest last." if least.active_bytes >= MB else ""
    return (
        f"ram_budget_gb is {budget / GB:g}, but this model needs at least {in_gb(minimum)} with these settings: "
        f"{parts}. Hint: give {in_gb(minimum)} or more, or 'min'; a smaller context_length or prefill_step_size "
        f"lowers it.{others}"
    )


NUM_BUDGETS = 6
CONTEXTS = tuple(1024 << i for i in range(11))
"""Context lengths to try, up to a million tokens."""

_ENDLESS_GB = 1e6


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """A budget and its plan.

    Attributes:
        plan: the plan.
        longest_context: the longest of ``CONTEXTS`` that the budget holds, in memory or on disk, or the promised one.
    """

    plan: ResidencyPlan
    longest_context: int


def table_of_budgets(sizes: ModelSizes, config: FlashConfig, machine: Machine) -> Iterator[BudgetRow]:
    """Yield plans from the smallest budget to the first that reads nothing, or to the machine's memory."""
    promised = PROMISED_CONTEXT if promised_bytes(sizes, config) else 0
    contexts = {length: _least_for(sizes, config, machine, length) for length in CONTEXTS}
    for budget in _budgets(sizes, config, machine):
        try:
            plan = make_plan(sizes, replace(config, ram_budget_gb=budget / GB), machine)
        except BudgetError:
            continue
        fitting = [length for length, least in contexts.items() if least is not None and least <= budget]
        yield BudgetRow(plan, max([promised, *fitting]))
        if not plan.read_bytes:
            return


def _budgets(sizes: ModelSizes, config: FlashConfig, machine: Machine) -> list[int]:
    """Return budgets at equal ratios, in whole MB."""
    least = _least_for(sizes, config, machine, config.context_length)
    if least is None:
        return []
    whole = make_plan(sizes, replace(config, ram_budget_gb=_ENDLESS_GB), replace(machine, total_memory=1 << 62))
    most = max(least, min(whole.peak_bytes, machine.total_memory))
    ratio = (most / least) ** (1 / (NUM_BUDGETS - 1))
    rounded = {round_up_to_mb(int(least * ratio**i)) for i in range(NUM_BUDGETS)}
    return sorted({min(budget, max(least, machine.total_memory)) for budget in rounded})


def _least_for(sizes: ModelSizes, config: FlashConfig, machine: Machine, context: int | None) -> int | None:
    """Return the smallest budget for a context; None where no memory or disk of the machine holds it."""
    step = config.prefill_step_size
    step = step if step is None or context is None else min(step, context)
    try:
        least = least_budget(sizes, replace(config, context_length=context, prefill_step_size=step), machine)
    except ConfigError:
        return None
    return least if least <= machine.total_memory else None

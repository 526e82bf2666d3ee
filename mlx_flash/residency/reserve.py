"""The prefill step and the context that memory is set aside for, where they are unset.

Last bits of the output depend on the step. So both come from sizes, settings and the budget, not from measured speeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter

from mlx_flash.compat.caches import CACHE_STEP
from mlx_flash.config import GB, FlashConfig
from mlx_flash.memory.pagecache import round_up
from mlx_flash.residency.candidate import all_streamed
from mlx_flash.residency.kv import KV_SHARE, ledger_of, most_on_disk
from mlx_flash.residency.plan import PREFILL_STEPS
from mlx_flash.residency.task import Reserve, Task

ACTIVATION_SHARE = 0.2
"""Share of the budget that a forward call's activations may take when the plan chooses the prefill step."""

CONTEXT_LENGTHS = (4096, 2048, 1024, 512, 256)
CONTEXT_LENGTHS_ON_DISK = (131072, 65536, 32768, 16384, 8192)
"""To try besides when the KV cache is to be on disk, and the length of the context was left open."""

DISK_SHARE = 0.5
"""Share of the free disk that it may take then."""

PROCESS_BYTES = 128_000_000
"""The process without models, as the choice counts it. The real one differs a little from run to run."""

SLOTS_FIRST = 2
"""Tokens get only the least context, and steps up to `LEAST_STEP`, where the budget has no room for so many layers."""

LEAST_STEP = 128
"""A prefill step is not made smaller for the sake of fewer passes, or of one more slot: many small parts are slow."""

DRIVER_STEP = 256_000_000
"""With a GPU that has memory of its own, its libraries take most of the process. They count in such steps."""

WORTH_MORE_TOKENS = 1.25
"""A longer context or prefill step may make a token read so many times as much."""


def least_reserve(config: FlashConfig) -> Reserve:
    """Return the shortest prefill step and context, where unset. A cache grows by ``CACHE_STEP`` anyway."""
    step = config.prefill_step_size or PREFILL_STEPS[-1]
    context = config.context_length or max(CACHE_STEP, step)
    return Reserve(min(step, context), context)


def reserves(task: Task, budget: int) -> Iterator[Reserve]:
    """Yield the reserve to plan with, then smaller ones, for a process that leaves less room than expected."""
    least = least_reserve(task.config)
    most_read = WORTH_MORE_TOKENS * _read_bytes(task, budget, least)
    largest = max((unit.nbytes for unit in task.sizes.layers), default=0)
    is_tight = _room(task, budget, least) < SLOTS_FIRST * largest
    for _, same_context in groupby(_all_reserves(task), key=attrgetter("context_length")):
        good: list[Reserve] = []
        for reserve in same_context:
            is_more = reserve.context_length > least.context_length or reserve.prefill_step_size > LEAST_STEP
            if is_tight and is_more and _token_bytes(task, reserve) > _token_bytes(task, least):
                continue  # a slot more brings more
            if _is_modest(task, budget, reserve) and _read_bytes(task, budget, reserve) <= most_read:
                good.append(reserve)
        yield from sorted(
            good, key=lambda reserve: _prompt_passes(task, budget, reserve)
        )  # of equals the largest first
    yield least


def _prompt_passes(task: Task, budget: int, reserve: Reserve) -> float:
    """Return about how many passes a prompt of the planned length takes; infinity for a step below the least one.

    Its parts share passes as far as they have room beside two slots, or beside one where two do not fit.
    """
    step, context, bare = reserve.prefill_step_size, reserve.context_length, task.bare(reserve)
    num_parts = -(-context // step)
    if step < LEAST_STEP:
        return math.inf
    if not bare.shares_parts or not task.config.lend_reserves:
        return num_parts
    machine, process = task.machine, PROCESS_BYTES
    if machine.arrival == "copied by the driver":
        process = round_up(machine.base_bytes - machine.active_bytes, DRIVER_STEP)
    room = _room(task, budget, reserve, process)
    room -= next((taken for n in (SLOTS_FIRST, 1) if (taken := _least_taken(task, reserve, n)) <= room), room)
    return -(-num_parts // bare.ledger.parts_together(room, context))


def _least_taken(task: Task, reserve: Reserve, num_slots: int) -> int:
    """Return the least memory that weights take beside so many slots: what is pinned, and the slots."""
    tried = all_streamed(task, reserve, num_slots)
    return min([each.pinned_bytes + num_slots * each.streaming.slot_bytes for each in tried])


def _all_reserves(task: Task) -> Iterator[Reserve]:
    """Yield reserves for tokens, the largest first. Values that the user set are kept."""
    config, least = task.config, least_reserve(task.config)
    lengths = (*CONTEXT_LENGTHS_ON_DISK, *CONTEXT_LENGTHS) if task.kv_on_disk else CONTEXT_LENGTHS
    for context in [config.context_length] if config.context_length else lengths:
        longest = next((step for step in reversed(PREFILL_STEPS) if step >= context), PREFILL_STEPS[0])
        steps = [step for step in PREFILL_STEPS if step <= longest]
        if context >= least.prefill_step_size:
            yield from (Reserve(s, context) for s in ([least.prefill_step_size] if config.prefill_step_size else steps))


def _is_modest(task: Task, budget: int, reserve: Reserve) -> bool:
    """Return whether tokens leave weights their room, and others theirs on the disk."""
    sizes, config, context = task.sizes, task.config, reserve.context_length
    if not config.prefill_step_size:
        states = sizes.cache.call_bytes * reserve.prefill_step_size
        by_step = task.bare(reserve).activation_bytes - sizes.activations.per_call + states
        if by_step > ACTIVATION_SHARE * budget:
            return False
    if config.context_length or context <= CONTEXT_LENGTHS[-1]:
        return True
    if not task.kv_on_disk:
        return sizes.cache.nbytes(context) <= KV_SHARE * budget
    if most_on_disk(sizes, config, context) > DISK_SHARE * task.machine.kv_disk_bytes:
        return False
    room = KV_SHARE * budget if config.kv_ram_gb is None else config.kv_ram_gb * GB
    ledger = ledger_of(sizes, config, context, PREFILL_STEPS[0])
    return ledger.least_rows(ledger.held_tokens(context), ledger.step) <= room


def _read_bytes(task: Task, budget: int, reserve: Reserve) -> float:
    """Return about how much a token reads beside a reserve: the weights that the rest of the budget does not hold.

    Of a mixture, the trunk is held first, and the pool of experts gets what is left.
    """
    sizes, experts, room = task.sizes, task.sizes.experts, _room(task, budget, reserve)
    if experts is None:
        weights = sizes.layer_bytes + sum([unit.nbytes for unit in [*sizes.heads, *sizes.tables]])
        return min(weights, max(0, weights - room))
    trunk = sizes.layer_bytes + sum([unit.nbytes for unit in sizes.all_heads])
    least = experts.least_slots * experts.slot_bytes
    pool = max(least, room - trunk)
    missing = (1 - experts.hit_rate(task.pool_slots or pool // experts.slot_bytes)) * experts.token_bytes
    return min(trunk, max(0, trunk + least - room)) + missing


def _room(task: Task, budget: int, reserve: Reserve, process: int = PROCESS_BYTES) -> int:
    """Return about how much of a budget is left for weights that can be streamed."""
    others = process + task.machine.runtime_bytes + task.sizes.resident_bytes + task.cache_limit
    return budget - others - _token_bytes(task, reserve)


def _token_bytes(task: Task, reserve: Reserve) -> int:
    """Return the memory that a plan sets aside for tokens. The promised context counts in any case."""
    bare = task.bare(reserve)
    return bare.reserved_bytes + bare.prefix_bytes

"""The prefill step and the context that memory is set aside for, where they are unset.

Last bits of the output depend on the step. So both come from sizes, settings and the budget, not from measured speeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

from mlx_flash.compat.caches import CACHE_STEP
from mlx_flash.config import GB, FlashConfig
from mlx_flash.memory.pagecache import round_up
from mlx_flash.residency.candidate import Reserve, Task, Tokens, Weights, all_streamed
from mlx_flash.residency.kv import KV_SHARE, ledger_of
from mlx_flash.residency.plan import PREFILL_STEPS

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


def reserves(task: Task, weights: Weights, budget: int) -> Iterator[Tokens]:
    """Yield the tokens to plan with, then fewer ones, for a process that leaves less room than expected."""
    config, machine, least = task.config, task.machine, task.tokens(least_reserve(task.config))
    beside = budget - machine.runtime_bytes - weights.sizes.resident_bytes - task.cache_limit
    room = beside - PROCESS_BYTES
    most_read = WORTH_MORE_TOKENS * _read_bytes(weights, room - least.nbytes)
    is_tight = room - least.nbytes < SLOTS_FIRST * max([unit.nbytes for unit in weights.sizes.layers], default=0)
    for context in _contexts(task, budget):
        good: list[Tokens] = []
        for tokens in [task.tokens(Reserve(step, context)) for step in _steps(config, least.reserve, context)]:
            is_more = context > least.reserve.context_length or tokens.reserve.prefill_step_size > LEAST_STEP
            if is_tight and is_more and tokens.nbytes > least.nbytes:
                continue  # a slot more brings more
            is_modest = config.prefill_step_size or _by_step(task, tokens) <= ACTIVATION_SHARE * budget
            if is_modest and _read_bytes(weights, room - tokens.nbytes) <= most_read:
                good.append(tokens)
        if len(good) > 1 and config.lend_reserves and weights.sizes.experts is None:
            process = PROCESS_BYTES
            if machine.arrival == "copied by the driver":
                process = round_up(machine.base_bytes - machine.active_bytes, DRIVER_STEP)
            taken = [_least_taken(weights, num_slots) for num_slots in (SLOTS_FIRST, 1)]
            good.sort(key=partial(_prompt_passes, beside - process, taken))  # of equals the largest comes first
        yield from good
    yield least


def _contexts(task: Task, budget: int) -> list[int]:
    """Return the lengths to try, the longest first, that leave weights their room, and others theirs on the disk."""
    config = task.config
    if config.context_length:
        return [config.context_length]
    lengths = (*CONTEXT_LENGTHS_ON_DISK, *CONTEXT_LENGTHS) if task.kv_on_disk else CONTEXT_LENGTHS
    return [each for each in lengths if each <= CONTEXT_LENGTHS[-1] or _has_room(task, budget, each)]


def _has_room(task: Task, budget: int, context: int) -> bool:
    """Return whether keys and values of a context take no more than their shares of the budget and the disk."""
    sizes, config = task.sizes, task.config
    if not task.kv_on_disk:
        return sizes.cache.nbytes(context) <= KV_SHARE * budget
    if sum(sizes.cache.rows) * context > DISK_SHARE * task.machine.kv_disk_bytes:
        return False
    room = KV_SHARE * budget if config.kv_ram_gb is None else config.kv_ram_gb * GB
    ledger = ledger_of(sizes, config, context, PREFILL_STEPS[0])
    return ledger.least_rows(context, ledger.step) <= room


def _steps(config: FlashConfig, least: Reserve, context: int) -> list[int]:
    """Return the prefill steps to try with a context, the largest first. A value that the user set is kept."""
    if config.prefill_step_size:
        return [least.prefill_step_size] if least.prefill_step_size <= context else []
    longest = next((step for step in reversed(PREFILL_STEPS) if step >= context), PREFILL_STEPS[0])
    return [step for step in PREFILL_STEPS if step <= longest]


def _prompt_passes(room: int, taken: Sequence[int], tokens: Tokens) -> float:
    """Return about how many passes a prompt of the planned length takes; infinity for a step below the least one.

    Its parts share passes as far as they have room beside the weights: beside the first number of bytes in ``taken``
    that fits.
    """
    step, context = tokens.reserve
    num_parts = -(-context // step)
    if step < LEAST_STEP:
        return math.inf
    if tokens.kv.num_on_disk and not tokens.ledger.shares_on_disk:
        return num_parts
    room -= tokens.nbytes
    room -= next((nbytes for nbytes in taken if nbytes <= room), room)
    return -(-num_parts // tokens.ledger.parts_together(room, context))


def _least_taken(weights: Weights, num_slots: int) -> int:
    """Return the least memory that weights take beside so many slots: what is pinned, and the slots."""
    return min([each.pinned_bytes + each.slots_bytes for each in all_streamed(weights, num_slots)])


def _by_step(task: Task, tokens: Tokens) -> int:
    """Return the bytes of activations that a smaller prefill step would lower."""
    sizes = task.sizes
    states = sizes.cache.call_bytes * tokens.reserve.prefill_step_size
    return tokens.activation_bytes - sizes.activations.per_call + states


def _read_bytes(weights: Weights, room: int) -> float:
    """Return about how much a token reads: the weights that the room does not hold.

    Of a mixture, the trunk is held first, and the pool of experts gets what is left.
    """
    sizes, experts = weights.sizes, weights.sizes.experts
    if experts is None:
        total = sizes.layer_bytes + sum([unit.nbytes for unit in [*sizes.heads, *sizes.tables]])
        return min(total, max(0, total - room))
    trunk = sizes.layer_bytes + sum([unit.nbytes for unit in sizes.all_heads])
    least = experts.least_slots * experts.slot_bytes
    pool = max(least, room - trunk)
    missing = (1 - experts.hit_rate(weights.pool_slots or pool // experts.slot_bytes)) * experts.token_bytes
    return min(trunk, max(0, trunk + least - room)) + missing

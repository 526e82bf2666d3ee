"""The speed at the beginning of a conversation, while memory that is set aside for its tokens holds weights."""

from __future__ import annotations

from mlx_flash.compat.caches import CACHE_STEP
from mlx_flash.residency.candidate import Weights
from mlx_flash.residency.machine import BASE_STEP
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.residency.task import Reserve, Task
from mlx_flash.residency.timing import pool_of

TOKENS_AHEAD = 32
"""Tokens whose keys and values are not lent: the next ones must not wait for memory."""

UNLENT_SHARE = 0.01
"""Share of the budget that is not lent, ``BASE_STEP`` at least: intermediate results are known about so well."""

UNFORESEEN_SHARE = 0.4
"""Share of the missing experts that look-ahead does not read early. Fitted to one model (docs/lab-notes.md)."""


def unlent_bytes(plan: ResidencyPlan) -> int:
    """Return the bytes of a budget that are never lent."""
    return max(BASE_STEP, int(UNLENT_SHARE * plan.budget_bytes)) + TOKENS_AHEAD * plan.kv_bytes_per_token


def opening_seconds(task: Task, weights: Weights, plan: ResidencyPlan) -> float:
    """Return the predicted time of a pass that decodes one token when a conversation begins.

    Streamed weights get the lent memory first, and need not be read then. Experts get the rest, where the memory of the
    pool can grow. Look-ahead reads most of the missing experts while everything else computes. The others are waited
    for. Those that were missing compute last.
    """
    machine, streaming, experts = weights.machine, plan.streaming, weights.sizes.experts
    first = task.tokens(Reserve(1, CACHE_STEP))
    unused = plan.room_bytes - first.kv.nbytes - first.activation_bytes
    lent = max(0, unused - unlent_bytes(plan))
    of_weights = min(lent, streaming.read_bytes)
    read_bytes = streaming.read_bytes - of_weights
    seconds = max(streaming.compute_seconds, streaming.seconds - of_weights / machine.disk.bytes_per_second)
    if plan.pool is None or experts is None:
        return seconds
    grows = not machine.has_buffer_cache and not weights.pool_slots  # on GPUs stacks grow, too: not known here
    more = (lent - of_weights) // experts.slot_bytes if grows else 0
    most = max(plan.pool.num_slots, weights.most_slots(experts))
    pool = pool_of(machine, experts, min(plan.pool.num_slots + more, most))
    seconds += (experts.token_bytes - pool.read_bytes) / machine.kept_bytes_per_second
    seconds += len(experts.num_experts) * machine.barrier_seconds
    waiting = UNFORESEEN_SHARE * pool.read_bytes / machine.disk.bytes_per_second
    reading = (read_bytes + pool.read_bytes) / machine.disk.bytes_per_second
    return max(seconds + waiting, reading) + pool.read_bytes / machine.compute_bytes_per_second

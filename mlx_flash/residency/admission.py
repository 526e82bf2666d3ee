"""Admission of requests and sequences: the memory that each one will need, from the numbers of the plan.

Exact batches have a cache for each request, of its own length. mlx-lm's caches have a row for each request, as long as
the longest one; while a part of a batch moves on from prompts to answers, its rows are there twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from mlx_flash.compat.caches import CACHE_STEP
from mlx_flash.errors import RefusedError
from mlx_flash.memory.pagecache import round_up
from mlx_flash.residency.plan import ResidencyPlan, in_mb

Decision = Literal["batch", "alone", "wait"]


def room_bytes(plan: ResidencyPlan) -> int:
    """Return the memory that the budget leaves for requests: what the plan reserves, and what it leaves over."""
    return plan.budget_bytes - plan.peak_bytes + plan.reserved_bytes


def batch_bytes(plan: ResidencyPlan, lengths: Sequence[int]) -> int:
    """Return the most memory of a batch.

    Args:
        plan: the plan of the model.
        lengths: tokens of each request, prompt and answer.
    """
    if not lengths:
        return 0
    num_rows, longest = len(lengths), _capacity(max(lengths))
    rows = (2 * num_rows - 1) * plan.cache.nbytes(longest) + num_rows * plan.cache.largest_row * longest
    return rows + _call_bytes(plan, num_rows, max(lengths))


def rows_bytes(plan: ResidencyPlan, lengths: Sequence[int], *, may_spill: bool) -> int:
    """Return the most memory of requests that share passes, each with a cache of its own length.

    Args:
        plan: the plan of the model.
        lengths: tokens of each request, prompt and answer.
        may_spill: whether keys and values may go to disk.
    """
    if not lengths:
        return 0
    options, cache, step = plan.kv.options, plan.cache, plan.prefill_step_size
    held = [length if options is None else options.held_tokens(length, step) for length in lengths]
    room = _capacity if options is None else options.most_capacity
    in_memory = sum(cache.nbytes(room(tokens)) for tokens in held) + cache.largest_row * room(max(held))
    if may_spill and options is not None and options.budget_bytes is not None:
        under_way = options.under_way_bytes(cache.rows, max(held), step)
        last_pages = (len(held) - 1) * options.step * sum(cache.rows)
        others = sum(cache.nbytes(tokens) - sum(cache.rows) * tokens for tokens in held)
        in_memory = min(in_memory, options.least_bytes(cache.rows, max(held)) + under_way + last_pages + others)
    waiting = plan.activations.waiting_bytes(1) + 2 * plan.activations.logits_per_token
    return in_memory + _call_bytes(plan, 1, max(held)) + (len(held) - 1) * waiting


def alone_bytes(plan: ResidencyPlan, length: int) -> int:
    """Return the least memory of a request that is in no batch: token by token, with keys and values on disk.

    Args:
        plan: the plan of the model.
        length: tokens, prompt and answer.
    """
    options, cache = plan.kv.options, plan.cache
    if options is None:
        return batch_bytes(plan, [length])
    held = options.held_tokens(length, 1)
    rows = cache.largest_row * _capacity(held) + sum(cache.rows) * _capacity(held)
    if options.budget_bytes is not None:
        under_way = options.under_way_bytes(cache.rows, held, 1, 1)
        rows = min(rows, options.least_bytes(cache.rows, held, 1) + under_way)
    return rows + cache.others_bytes(held) + plan.activations.nbytes(1, held, all_logits=True)


def together_bytes(plan: ResidencyPlan, lengths: Sequence[int], batching: str) -> int:
    """Return the most memory of requests that are answered together.

    Args:
        plan: the plan of the model.
        lengths: tokens of each request, prompt and answer.
        batching: the setting.
    """
    if batching == "stock":
        return batch_bytes(plan, lengths)
    return rows_bytes(plan, lengths, may_spill=bool(plan.kv.num_on_disk))


def _capacity(length: int) -> int:
    return round_up(length, CACHE_STEP) + CACHE_STEP


def _call_bytes(plan: ResidencyPlan, num_rows: int, context: int) -> int:
    step = plan.prefill_step_size
    prompts = plan.activations.nbytes(max(step, num_rows), context, all_logits=False)
    answers = plan.activations.nbytes(num_rows, context, all_logits=True)
    return max(prompts, answers) + plan.cache.call_bytes * step


def decide(
    plan: ResidencyPlan, num_prompt: int, num_new: int, running: Sequence[int], *, may_batch: bool, batching: str
) -> Decision:
    """Return where a request is answered now: in a batch with those that run, alone, or not yet.

    Args:
        plan: the plan of the model.
        num_prompt: tokens of the prompt.
        num_new: the most tokens of the answer.
        running: tokens of each request that is being answered, prompt and answer.
        may_batch: whether it may be in a batch.
        batching: the setting.

    Raises:
        RefusedError: the budget has no room for it, even when nothing else runs.
    """
    room, length = room_bytes(plan), num_prompt + num_new
    if may_batch and together_bytes(plan, [length], batching) <= room:
        return "batch" if together_bytes(plan, [*running, length], batching) <= room else "wait"
    needed = alone_bytes(plan, length)
    if needed <= room:
        return "wait" if running else "alone"
    raise RefusedError(
        f"a prompt of {num_prompt} tokens and an answer of at most {num_new} need {in_mb(needed)} MB for keys, values "
        f"and activations; the budget is {in_mb(plan.budget_bytes)} MB, which leaves {in_mb(max(0, room))} MB "
        f"beside the model. Hint: send a shorter prompt or set a smaller max_tokens, or serve with --ram-budget-gb "
        f"{-(-(plan.budget_bytes + needed - room) // 1_000_000) / 1000:.3f}.",
        413,
    )

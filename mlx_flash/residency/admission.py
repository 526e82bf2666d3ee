"""Admission of requests and sequences: what the ledger says of the tokens that each one may come to.

Exact batches have a cache for each request, of its own length. mlx-lm's caches have a row for each request, as long as
the longest one; while a part of a batch moves on from prompts to answers, its rows are there twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from mlx_flash.compat.caches import CACHE_STEP
from mlx_flash.errors import RefusedError
from mlx_flash.memory.pagecache import round_up
from mlx_flash.residency.plan import ResidencyPlan, in_gb, in_mb

Decision = Literal["batch", "alone", "wait"]


def room_bytes(plan: ResidencyPlan) -> int:
    """Return the memory that the budget leaves for requests: what the plan reserves, and what it leaves over."""
    return plan.budget_bytes - plan.peak_bytes + plan.reserved_bytes


def batch_bytes(plan: ResidencyPlan, lengths: Sequence[int]) -> int:
    """Return the most memory of a batch. Lengths are tokens of each request, prompt and answer."""
    if not lengths:
        return 0
    ledger, num_rows, longest = plan.ledger, len(lengths), _capacity(max(lengths))
    copies = (num_rows - 1) * ledger.cache.largest_row * longest
    return ledger.in_memory([longest] * (2 * num_rows - 1)) + copies + _call_bytes(plan, num_rows, max(lengths))


def rows_bytes(plan: ResidencyPlan, lengths: Sequence[int], *, may_offload: bool) -> int:
    """Return the most memory of requests that share passes, each with a cache of its own length.

    ``may_offload`` says that keys and values may go to disk.
    """
    if not lengths:
        return 0
    ledger, options, num_others = plan.ledger, plan.kv.options, len(lengths) - 1
    held = [ledger.held(length) for length in lengths]
    room = _capacity if options is None else options.most_capacity
    nbytes = ledger.in_memory([room(tokens) for tokens in held])
    if may_offload and options is not None and ledger.may_offload:
        last_pages = num_others * options.step * sum(ledger.cache.rows)
        others = sum([ledger.others.nbytes(tokens) for tokens in held])
        nbytes = min(nbytes, ledger.on_disk(max(held), ledger.step) + last_pages + others)
    waiting = ledger.activations.waiting_bytes(1) + 2 * ledger.activations.logits_per_token
    return nbytes + _call_bytes(plan, 1, max(held)) + num_others * waiting


def alone_bytes(plan: ResidencyPlan, length: int) -> int:
    """Return the least memory of a request that is in no batch: token by token, with keys and values on disk."""
    ledger = plan.ledger
    if ledger.options is None:
        return batch_bytes(plan, [length])
    held = ledger.held(length, 1)
    rows = (ledger.cache.largest_row + sum(ledger.cache.rows)) * _capacity(held)
    if ledger.may_offload:
        rows = min(rows, ledger.on_disk(held, 1, num_slots=1))
    return rows + ledger.one_by_one(held, held)


def together_bytes(plan: ResidencyPlan, lengths: Sequence[int], batching: str) -> int:
    """Return the most memory of requests that are answered together."""
    if batching == "stock":
        return batch_bytes(plan, lengths)
    return rows_bytes(plan, lengths, may_offload=bool(plan.kv.num_on_disk))


def _capacity(length: int) -> int:
    return round_up(length, CACHE_STEP) + CACHE_STEP


def _call_bytes(plan: ResidencyPlan, num_rows: int, context: int) -> int:
    ledger = plan.ledger
    return ledger.computing(max(ledger.step, num_rows), num_rows, context) + ledger.states(ledger.step)


def decide(
    plan: ResidencyPlan, num_prompt: int, num_answer: int, running: Sequence[int], *, may_batch: bool, batching: str
) -> Decision:
    """Return where a request is answered now: in a batch with those that run, alone, or not yet.

    Args:
        plan: the plan of the model.
        num_prompt: tokens of the prompt.
        num_answer: the most tokens of the answer.
        running: tokens of each request that is being answered, prompt and answer.
        may_batch: whether it may be in a batch.
        batching: the setting.

    Raises:
        RefusedError: the budget has no room for it, even when nothing else runs.
    """
    room, length = room_bytes(plan), num_prompt + num_answer
    if may_batch and together_bytes(plan, [length], batching) <= room:
        return "batch" if together_bytes(plan, [*running, length], batching) <= room else "wait"
    needed = alone_bytes(plan, length)
    if needed <= room:
        return "wait" if running else "alone"
    raise RefusedError(
        f"a prompt of {num_prompt} tokens and an answer of at most {num_answer} need {in_mb(needed)} MB for keys, "
        f"values and activations; the budget is {in_mb(plan.budget_bytes)} MB, which leaves {in_mb(max(0, room))} MB "
        f"beside the model. Hint: send a shorter prompt or set a smaller max_tokens, or serve with --ram-budget-gb "
        f"{in_gb(plan.budget_bytes + needed - room)}.",
        413,
    )

"""Admission of requests and sequences: what the ledger says of the tokens that each one may come to.

Exact batches have a cache for each request, of its own length. mlx-lm's caches have a row for each request, as long as
the longest one; while a part of a batch moves on from prompts to answers, its rows are there twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from mlx_flash.errors import RefusedError
from mlx_flash.residency.ledger import Ledger, NewTokens, stock_capacity
from mlx_flash.residency.plan import ResidencyPlan, in_gb, in_mb

Decision = Literal["batch", "alone", "wait"]


def batch_bytes(plan: ResidencyPlan, lengths: Sequence[int]) -> int:
    """Return the most memory of a batch. Lengths are tokens of each request, prompt and answer."""
    if not lengths:
        return 0
    ledger, num_rows, longest = plan.ledger, len(lengths), stock_capacity(max(lengths))
    copies = (num_rows - 1) * ledger.cache.largest_row * longest
    return ledger.in_memory([longest] * (2 * num_rows - 1)) + copies + _call_bytes(ledger, num_rows, max(lengths))


def rows_bytes(plan: ResidencyPlan, lengths: Sequence[int], *, may_offload: bool) -> int:
    """Return the most memory of requests that share passes, each with a cache of its own length.

    ``may_offload`` says that keys and values may go to disk.
    """
    if not lengths:
        return 0
    ledger, num_others = plan.ledger, len(lengths) - 1
    nbytes = ledger.in_memory([*map(ledger.capacity, lengths)])
    if may_offload and ledger.may_offload:
        others = sum([ledger.others.nbytes(tokens) for tokens in lengths])
        nbytes = min(nbytes, ledger.on_disk(lengths, ledger.step) + others)
    return nbytes + _call_bytes(ledger, 1, max(lengths)) + num_others * ledger.waiting(NewTokens(1, 1, 1))


def alone_bytes(plan: ResidencyPlan, length: int) -> int:
    """Return the least memory of a request that is in no batch: token by token, with keys and values on disk."""
    ledger = plan.ledger
    return batch_bytes(plan, [length]) if ledger.options is None else ledger.one_by_one(length, length)


def together_bytes(plan: ResidencyPlan, lengths: Sequence[int], batching: str) -> int:
    """Return the most memory of requests that are answered together."""
    if batching == "stock":
        return batch_bytes(plan, lengths)
    return rows_bytes(plan, lengths, may_offload=bool(plan.kv.num_on_disk))


def _call_bytes(ledger: Ledger, num_rows: int, context: int) -> int:
    return ledger.computing(num_rows, context) + ledger.states(ledger.step)


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
    room, length = plan.room_bytes, num_prompt + num_answer
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

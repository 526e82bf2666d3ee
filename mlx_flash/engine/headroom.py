"""The checks before a forward call: the call fits the budget, and what it leaves is lent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlx_flash.compat.caches import CACHE_STEP
from mlx_flash.engine.call import ForwardCall
from mlx_flash.engine.lane import Lane, other_entries, own_entries
from mlx_flash.engine.lending import Lending
from mlx_flash.errors import BudgetError
from mlx_flash.kv.options import SLOT_PADDING, slot_memory
from mlx_flash.kv.pool import KVPool
from mlx_flash.kv.sizes import update_growth
from mlx_flash.layout.arrays import arrays_in, nbytes_in
from mlx_flash.memory.driver import has_own_memory
from mlx_flash.memory.footprint import footprint, release_freed_memory
from mlx_flash.memory.lazy import active_memory
from mlx_flash.memory.pagecache import round_up
from mlx_flash.residency.opening import unlent_bytes
from mlx_flash.residency.plan import MB, ResidencyPlan

_SETTLED = "settled_padding"
"""Attribute of an evaluated batch with its array of paddings, which mlx-lm replaces when sequences come or go."""


def check_headroom(
    plan: ResidencyPlan, lanes: Sequence[Lane], loans: Lending | None = None, wish: int = 0, *, may_shrink: bool = False
) -> int:
    """Refuse a pass that would take the process over its budget; only loans have changed when it raises.

    Loans end as far as the pass needs their memory. What it does not need is lent.

    Args:
        plan: the plan of the model.
        lanes: calls that share the pass.
        loans: weights in memory that is reserved for something else; None lends nothing.
        wish: bytes that would make the pass faster.
        may_shrink: whether the caller tries fewer tokens when these are refused. Then nothing goes to disk to make room
            for more activations than were planned.

    Returns:
        The part of ``wish`` that the pass may use.

    Raises:
        BudgetError: it names what to change.
        WriteError: keys and values would have to go to disk, which has no room.
    """
    own = _own_of(lanes)
    if not wish and _has_room(plan, lanes, own):
        return 0
    _settle_batches([entry for lane in lanes for entry in other_entries(lane.call.cache)], loans)
    need = needed(plan, lanes)
    missing = need.total - plan.budget_bytes
    growth_of_own = _own_growth(plan, own) if wish or loans is not None or may_shrink else 0
    room = (max(0, loans.nbytes) if loans is not None else 0) - missing - growth_of_own
    granted = max(0, min(wish, room))
    missing += granted
    if loans is not None:
        freed = _settle(plan, loans, missing + growth_of_own, need.elsewhere + need.in_use)
        need, missing = replace(need, in_use=need.in_use - freed), missing - freed
    if may_shrink and need.activations > plan.activation_bytes and missing + growth_of_own > 0:
        raise _too_large(plan, lanes, need, missing + growth_of_own)
    if own:
        missing = _admit(plan, own, lanes, missing)
    if missing > 0:
        raise _too_large(plan, lanes, need, missing)
    return granted


def _has_room(plan: ResidencyPlan, lanes: Sequence[Lane], own: _Own) -> bool:
    """Return whether a single token surely fits the budget, with nothing to lend or to evict.

    With all weights in memory this is so for nearly all tokens. The sums over all layers take a millisecond or two.
    """
    call = lanes[0].call
    if len(lanes) > 1 or not call.is_decode or plan.streaming.num_units or plan.pool is not None:
        return False
    if own and (plan.kv.options is None or plan.kv.options.max_tokens is not None or own[0][0].pool.on_disk):
        return False
    others = other_entries(call.cache)
    is_batch = any(getattr(entry, "left_padding", None) is not None for entry in others)
    if is_batch or not call.cache or any(entry.rows.memory.takes_more(1) for entry, _ in own):
        return False
    growth = _most_growth(plan, lanes[0]) if others else 0
    return _elsewhere(plan) + active_memory() + activation_bytes(plan, lanes) + growth <= plan.budget_bytes


def _most_growth(plan: ResidencyPlan, lane: Lane) -> int:
    """Return the most bytes that a token adds to mlx-lm's own caches: all are copied to make room, and then cut."""
    call = lane.call
    states = call.batch_size * plan.cache.constant_bytes + call.num_tokens * plan.cache.call_bytes
    return states + 2 * call.batch_size * (lane.context + CACHE_STEP) * _bytes_of_others(plan, call)


def _admit(plan: ResidencyPlan, own: _Own, lanes: Sequence[Lane], missing: int) -> int:
    """Evict layers as the pass needs it. Return the bytes that are missing."""
    pool = own[0][0].pool
    while True:
        held = _held_slots(plan, lanes) if pool.on_disk else 0
        room, lacking = _room_for_kv(plan, own, lanes, missing, held)
        if not lacking:
            pool.admit(*_coming(plan, own), room)
        if lacking or held or not pool.on_disk or not _held_slots(plan, lanes):
            return lacking


def _held_slots(plan: ResidencyPlan, lanes: Sequence[Lane]) -> int:
    """Return the bytes of slots that lanes hold while another one computes.

    Where units are smaller than layers, a lane waits inside its attention. It holds the slot, which the pool replaces.
    """
    options = plan.kv.options
    if not plan.streaming.cut or options is None:
        return 0
    tokens = [
        lane.call.batch_size * round_up(lane.context, options.step) for lane in lanes if own_entries(lane.call.cache)
    ]
    sizes = [slot_memory(plan.cache.largest_row * count + SLOT_PADDING) for count in tokens]
    return sum(sizes) - min(sizes)


def check_least(plan: ResidencyPlan, lane: Lane, loans: Lending | None = None) -> None:
    """Refuse a call that does not fit even token by token, with no weights lent. Changes nothing.

    Args:
        plan: the plan of the model.
        lane: the call.
        loans: weights in memory that is reserved for something else.

    Raises:
        BudgetError, WriteError: as :func:`check_headroom`.
    """
    lanes = [replace(lane, step=1)]
    need = needed(plan, lanes)
    missing = need.total - plan.budget_bytes - (loans.recallable if loans is not None else 0)
    if own := _own_of(lanes):
        missing = _room_for_kv(plan, own, lanes, missing)[1]
    if missing > 0:
        raise _too_large(plan, lanes, need, missing)


@dataclass(frozen=True, slots=True)
class Need:
    """The memory of the process in a pass, in bytes: itself and buffers, arrays now, and what comes to them."""

    elsewhere: int
    in_use: int
    activations: int
    growth: int

    @property
    def total(self) -> int:
        return self.elsewhere + self.in_use + self.activations + self.growth


def needed(plan: ResidencyPlan, lanes: Sequence[Lane]) -> Need:
    """Return the memory of a pass."""
    if (need := _need(plan, lanes)).total <= plan.budget_bytes or not has_own_memory():
        return need
    mx.synchronize()  # MLX has not let go of the last results yet
    return _need(plan, lanes)


def _need(plan: ResidencyPlan, lanes: Sequence[Lane]) -> Need:
    states = plan.cache.call_bytes * max(lane.num_at_once for lane in lanes)
    return Need(
        elsewhere=_elsewhere(plan),
        in_use=_in_use({entry.pool for entry, _ in _own_of(lanes)}),
        activations=activation_bytes(plan, lanes),
        growth=sum(_kv_growth(plan, lane.call) for lane in lanes) + states,
    )


def _elsewhere(plan: ResidencyPlan) -> int:
    """Return the memory of the process beside its arrays."""
    return plan.base_bytes - plan.active_bytes + plan.bounce_bytes + plan.prefix_bytes + plan.cache_limit


def _room_for_kv(plan: ResidencyPlan, own: _Own, lanes: Sequence[Lane], missing: int, held: int = 0) -> tuple[int, int]:
    """Return a limit for keys and values, and the bytes that are missing even with all of them on disk.

    Args:
        plan: the plan of the model.
        own: the caches that can be on disk.
        lanes: the calls.
        missing: bytes that are missing while keys and values are where they are.
        held: bytes of slots that calls hold while others compute.

    Raises:
        BudgetError: a limit that the user set is too low.
        WriteError: they would have to go to disk, which has no room.
    """
    pool = own[0][0].pool
    for room in _rooms(plan, pool.memory_bytes - missing - held, held):
        wanted = int(pool.missing(*_coming(plan, own), room))
        if not wanted:
            break
    if wanted and plan.kv.is_fixed and room == plan.kv.limit:
        num_tokens = sum(lane.call.num_tokens for lane in lanes)
        raise _no_room_for_kv(plan, num_tokens, max(lane.context for lane in lanes), room + wanted)
    return room, wanted


def _too_large(plan: ResidencyPlan, lanes: Sequence[Lane], need: Need, missing: int) -> BudgetError:
    num_tokens, context = sum(lane.call.num_tokens for lane in lanes), max(lane.context for lane in lanes)
    total = plan.budget_bytes + missing
    kv = total - need.elsewhere - need.in_use - need.activations
    hint = _hint(plan, max(lane.num_at_once for lane in lanes), context, any(x.call.wants_logits for x in lanes))
    return BudgetError(
        f"a forward call with {num_tokens} new token{'s' * (num_tokens != 1)} in a context of {context} would take "
        f"the process to {total / MB:.1f} MB: {need.elsewhere / MB:.0f} MB for the process itself, "
        f"{need.in_use / MB:.0f} MB in arrays now, {need.activations / MB:.0f} MB of activations, {kv / MB:.0f} MB of "
        f"KV cache; the budget is {plan.budget_bytes / MB:.1f} MB. {hint}",
        total,
    )


def activation_bytes(plan: ResidencyPlan, lanes: Sequence[Lane]) -> int:
    """Return the memory of intermediate results: of the lane that computes, and of those that wait."""
    sizes = plan.activations
    waiting = [lane.waiting_bytes(sizes) for lane in lanes]
    return sum(waiting) + max(lane.active_bytes(sizes) - nbytes for lane, nbytes in zip(lanes, waiting, strict=True))


def _no_room_for_kv(plan: ResidencyPlan, num_tokens: int, context: int, needed: int) -> BudgetError:
    """Return the error for a call that fits the budget, but not the share of it that the user gave the KV cache."""
    limit = plan.kv.limit or 0
    held = context if plan.kv.options is None else plan.kv.options.held_tokens(context, num_tokens)
    return BudgetError(
        f"a forward call with {num_tokens} new token{'s' * (num_tokens != 1)} in a context of {context} needs "
        f"{needed / MB:.1f} MB for the keys and values of {held} tokens; kv_ram_gb allows {limit / MB:.1f} MB. "
        f"Hint: raise kv_ram_gb to {-(-needed // 1000) / 1e6:.6f}, or set a smaller kv_max_tokens.",
        plan.budget_bytes + needed - limit,
    )


def _hint(plan: ResidencyPlan, num_tokens: int, context: int, all_logits: bool) -> str:
    if num_tokens > plan.prefill_step_size:
        return f"Hint: pass prefill_step_size={plan.prefill_step_size} to mlx_lm, or raise ram_budget_gb."
    if context > plan.context_length:
        return f"Hint: load the model with FlashConfig(context_length={2 * context}), or raise ram_budget_gb."
    if all_logits and num_tokens > 1:
        return (
            "Hint: ask for the logits of fewer tokens at a time; for several sequences at once load the model with a "
            "larger context_length, which counts tokens over all of them; or raise ram_budget_gb."
        )
    return (
        "Hint: raise ram_budget_gb; let go of other arrays and models in this process; for several sequences at once "
        "ask for a larger context_length, which counts tokens over all of them."
    )


def _in_use(pools: set[KVPool]) -> int:
    """Bytes in arrays now, of caches what they take instead of what they reserve."""
    reserved = sum(pool.reserved_bytes for pool in pools)
    return max(0, active_memory() - reserved) + sum(pool.memory_bytes for pool in pools)


def _rooms(plan: ResidencyPlan, free: int, held: int) -> list[int]:
    """Return limits for keys and values: the plan's, and then all that is free."""
    if plan.kv.limit is None:
        return [free]
    return [min(free, plan.kv.limit - held), *(() if plan.kv.is_fixed else (free,))]


def _settle(plan: ResidencyPlan, loans: Lending, short: int, known_bytes: int) -> int:
    """End loans where memory is short, and lend what is left over. Return the bytes that were freed.

    Args:
        plan, loans: of the model.
        short: bytes that are missing if positive, left over if negative.
        known_bytes: the footprint, as the plan and the arrays explain it. What the process has beyond that, such as
            holes between arrays, is not lent.
    """
    if short + max(0, footprint() - known_bytes) > 0:
        release_freed_memory()
    short += max(0, footprint() - known_bytes)
    if short > 0:
        return loans.recall(short)
    loans.lend(-short - unlent_bytes(plan))
    return 0


_Own = Sequence[tuple[Any, Lane]]
"""Entries in the pool, each with the lane that adds to it."""


def _own_growth(plan: ResidencyPlan, own: _Own) -> int:
    """Return the bytes that a pass adds to caches in memory, as far as the plan lets them grow."""
    if not own:
        return 0
    pool = own[0][0].pool
    growth = int(pool.growth(*_coming(plan, own)))
    limit = plan.kv.limit
    return growth if limit is None else min(growth, max(0, limit - pool.memory_bytes))


def _own_of(lanes: Sequence[Lane]) -> _Own:
    return [(entry, lane) for lane in lanes for entry in own_entries(lane.call.cache)]


def _coming(plan: ResidencyPlan, own: _Own) -> tuple[list[Any], list[int], int, list[int]]:
    """Return the layers, the new tokens of each, how many go through at a time, and the bytes of a token in each.

    Tokens are those of one sequence; a token of a batch has the bytes of all its sequences.
    """
    num_layers = max(Counter(id(lane) for _, lane in own).values())
    row_bytes = plan.kv.rows if len(plan.kv.rows) == num_layers else [max(plan.kv.rows, default=0)] * num_layers
    return (
        [entry.rows for entry, _ in own],
        [lane.call.num_tokens // lane.call.batch_size for _, lane in own],
        max(lane.num_at_once // lane.call.batch_size for _, lane in own),
        [row_bytes[i % num_layers] * lane.call.batch_size for i, (_, lane) in enumerate(own)],
    )


def _settle_batches(entries: Sequence[Any], loans: Lending | None) -> None:
    """Evaluate, layer by layer, the batches that sequences were added to or removed from since their last call.

    mlx-lm replaces the arrays of all layers at once, but lazily. Evaluated together, they would be there twice.
    """
    paddings = {id(entry): vars(entry).get("left_padding") for entry in entries}
    changed = [entry for entry in entries if paddings[id(entry)] is not vars(entry).get(_SETTLED)]
    if changed and loans is not None:
        loans.recall(min(nbytes_in(changed), loans.nbytes))
    for entry in changed:
        mx.eval(arrays_in(entry))
        setattr(entry, _SETTLED, paddings[id(entry)])


def _kv_growth(plan: ResidencyPlan, call: ForwardCall) -> int:
    """Return the bytes that a call adds to mlx-lm's own caches."""
    entries = other_entries(call.cache)
    if not entries:
        return 0
    states = 0 if any(map(arrays_in, entries)) else call.batch_size * plan.cache.constant_bytes
    per_layer = call.batch_size * _bytes_of_others(plan, call) // len(entries)
    growth = update_growth(entries, call.num_tokens // call.batch_size, [per_layer] * len(entries))
    return states + growth.added


def _bytes_of_others(plan: ResidencyPlan, call: ForwardCall) -> int:
    """Return the bytes of a token of one sequence in mlx-lm's own caches."""
    return plan.kv_bytes_per_token - (sum(plan.cache.rows) if own_entries(call.cache) else 0)

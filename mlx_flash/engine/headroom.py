"""The checks before a forward call: the call fits the budget, and what it leaves is lent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_flash.engine.lane import Lane
from mlx_flash.engine.lending import Lending
from mlx_flash.engine.owncaches import OwnCaches
from mlx_flash.engine.refusals import too_large
from mlx_flash.kv.growth import Growth, update_growth
from mlx_flash.kv.kvpool import KVPool
from mlx_flash.layout.reachable import arrays_in, nbytes_in
from mlx_flash.memory.footprint import footprint, release_freed_memory
from mlx_flash.memory.lazy import active_memory
from mlx_flash.residency.ledger import Need
from mlx_flash.residency.lent import unlent_bytes
from mlx_flash.residency.plan import ResidencyPlan

_CALLED_WITH = "padding_of_last_call"
"""Attribute of a batch with the array of paddings of its last call. mlx-lm replaces it when sequences come or go."""

_LITTLE_BYTES = 16_000_000
"""Less than what plans set aside for what running adds to a process. Nearly all calls for one token take less."""


def check_headroom(
    plan: ResidencyPlan,
    lanes: Sequence[Lane],
    lending: Lending | None = None,
    wish: int = 0,
    *,
    may_shrink: bool = False,
    offloads: bool = False,
    is_ahead: bool = False,
) -> int:
    """Refuse a pass that would take the process over its budget; only loans have changed when it raises.

    Loans end as far as the pass needs their memory. What it does not need is lent. If it ``may_shrink``, nothing goes
    to disk to make room for more activations than were planned: the caller tries fewer tokens. If it ``offloads``,
    layers go to disk before loans end for their sake, and before a part of the wish is refused. If ``is_ahead``, the
    wish is that of :func:`ahead_bytes`. It is refused where buffers of keys and values grow, since two layers would
    have old and new ones, and where a layer waits for those on disk.

    Returns:
        The part of ``wish``, bytes that would make the pass faster, that it may use.

    Raises:
        BudgetError: it names what to change.
        WriteError: keys and values would have to go to disk, which has no room.
    """
    own, need = OwnCaches(plan, lanes), needed(plan, lanes)
    changed = _changed_batches([entry for lane in lanes for entry in lane.others])
    if changed:
        nbytes = nbytes_in(changed)
        if (lending is None or not lending.nbytes) and need.total + nbytes <= plan.budget_bytes:
            need = replace(need, growth=need.growth + nbytes)  # the call may evaluate all of them
        else:
            _evaluate_layers(changed, nbytes, lending)
            need = needed(plan, lanes)
    missing = need.total - plan.budget_bytes
    growth_of_own = 0
    may_shrink = may_shrink and need.activations > plan.activation_bytes
    if wish or lending is not None or may_shrink:
        growth_of_own = own.growth_on_disk() if offloads else own.growth  # one slot will do for a prompt
    if is_ahead and (growth_of_own or need.growth > _state_bytes(plan, lanes[0]) or own.are_on_disk):
        wish = 0
    room = (max(0, lending.nbytes) if lending is not None else 0) - missing - growth_of_own
    granted = max(0, min(wish, room))
    missing += granted
    if lending is not None:
        freed = _settle(plan, lending, missing + growth_of_own, need.process + need.in_use)
        need, missing = replace(need, in_use=need.in_use - freed), missing - freed
    if may_shrink and missing + growth_of_own > 0:
        raise too_large(plan, lanes, need, missing + growth_of_own)
    missing = own.admit(missing)
    if missing > 0:
        raise too_large(plan, lanes, need, missing)
    _note_called(changed)
    return granted


def check_least(plan: ResidencyPlan, lane: Lane, lending: Lending | None = None) -> None:
    """Refuse a call that does not fit even token by token, with no weights lent. Changes nothing."""
    lanes = [Lane(lane.call, 1, lane.num_kept)]
    need = needed(plan, lanes)
    missing = need.total - plan.budget_bytes - (lending.recallable if lending is not None else 0)
    missing = OwnCaches(plan, lanes).room(missing)[1]
    if missing > 0:
        raise too_large(plan, lanes, need, missing)


def most_granted(plan: ResidencyPlan, lanes: Sequence[Lane], lending: Lending | None) -> int:
    """Return bytes that :func:`check_headroom` may grant at most. Changes nothing."""
    lent = max(lending.nbytes, lending.recallable) if lending is not None else 0
    return plan.budget_bytes - needed(plan, lanes).total + lent


def goes_to_disk(plan: ResidencyPlan, lanes: Sequence[Lane], lending: Lending | None) -> bool:
    """Return whether layers go to disk for so many tokens, or stay there. Changes nothing."""
    recallable = lending.recallable if lending is not None else 0
    return OwnCaches(plan, lanes).goes_to_disk(needed(plan, lanes).total - plan.budget_bytes - recallable)


def layers_at_once(plan: ResidencyPlan, lanes: Sequence[Lane], num_layers: int) -> int | None:
    """Return the number of layers that MLX may record ahead of a GPU; None if their results fit the budget together.

    MLX keeps the intermediate results of recorded layers until they are computed, and the old arrays of caches that
    grow. Checks before a pass count one layer. Lanes wait for each other, so with several each layer is waited for.
    """
    if num_layers < 2:
        return None
    if len(lanes) > 1:
        return 1
    own = OwnCaches(plan, lanes)
    each = plan.ledger.of_a_layer(lanes[0].tokens) + max(own.replaced_bytes, _replaced_of_others(plan, lanes[0]))
    if (num_layers - 1) * each <= _LITTLE_BYTES:
        return None
    found = 1 + max(0, plan.budget_bytes - needed(plan, lanes).total - own.growth) // each
    return None if found >= num_layers else found


def _replaced_of_others(plan: ResidencyPlan, lane: Lane) -> int:
    """Return the most bytes of one of mlx-lm's own caches that a call may replace by a larger one."""
    return max(map(nbytes_in, lane.others), default=0) if _growth_of_others(plan, [lane]) else 0


def needed(plan: ResidencyPlan, lanes: Sequence[Lane]) -> Need:
    """Return the memory of a pass."""
    if (need := _need(plan, lanes)).total <= plan.budget_bytes:
        return need
    mx.synchronize()  # a prompt may still be computed, and GPUs let go of the last results late
    return _need(plan, lanes)


def _need(plan: ResidencyPlan, lanes: Sequence[Lane]) -> Need:
    tokens, ledger = [lane.tokens for lane in lanes], plan.ledger
    return Need(
        process=ledger.process,
        in_use=_in_use({pool for lane in lanes for pool in lane.pools}),
        activations=ledger.computed(tokens),
        growth=_growth_of_others(plan, lanes),
        states=plan.cache.call_bytes * max([new.num_at_once for new in tokens]),
    )


def ahead_bytes(plan: ResidencyPlan, lanes: Sequence[Lane]) -> int:
    """Return the memory of the results of a layer that begins before the one before it is computed.

    0 for calls that compute longer than Python takes between two layers: of several tokens, or of several caches.
    """
    new = lanes[0].tokens
    if len(lanes) > 1 or new.num_tokens > new.batch_size:
        return 0
    return plan.ledger.of_a_layer(new) + _state_bytes(plan, lanes[0])


def _state_bytes(plan: ResidencyPlan, lane: Lane) -> int:
    """Return the bytes of the largest recurrent state, which a call replaces."""
    return lane.tokens.batch_size * plan.cache.largest_state


def _in_use(pools: set[KVPool]) -> int:
    """Bytes in arrays now, of caches what they take instead of what they reserve."""
    reserved = sum([pool.reserved_bytes for pool in pools])
    return max(0, active_memory() - reserved) + sum([pool.memory_bytes for pool in pools])


def _growth_of_others(plan: ResidencyPlan, lanes: Sequence[Lane]) -> int:
    """Return the most bytes that calls add to mlx-lm's own caches, which copy one layer after another as they grow."""
    states, growths = 0, [Growth(0, 0)]
    for lane in lanes:
        call, entries = lane.call, lane.others
        if entries:
            states += 0 if any(map(arrays_in, entries)) else call.batch_size * plan.cache.constant_bytes
            per_layer = call.batch_size * _bytes_of_others(plan, lane) // len(entries)
            rows = [per_layer] * len(entries)
            growths.append(update_growth(entries, call.length, rows, lane.step))
    if len(growths) == 1:  # no lane has such caches
        return 0
    return states + sum([each.added for each in growths]) + max([each.peak - each.added for each in growths])


def _bytes_of_others(plan: ResidencyPlan, lane: Lane) -> int:
    """Return the bytes of a token of one sequence in mlx-lm's own caches."""
    return plan.kv_bytes_per_token - (sum(plan.cache.rows) if lane.own else 0)


def _settle(plan: ResidencyPlan, lending: Lending, short: int, known_bytes: int) -> int:
    """End loans where memory is short, and lend what is left over. Return the bytes that were freed.

    What the process has beyond ``known_bytes``, the footprint as plan and arrays explain it, such as holes between
    arrays, is not lent.
    """
    unknown = max(0, footprint() - known_bytes)
    if short + unknown > 0:
        release_freed_memory()
        unknown = max(0, footprint() - known_bytes)
    short += unknown
    if short > 0:
        return lending.recall(short)
    lending.lend(-short - unlent_bytes(plan))
    return 0


def _changed_batches(entries: Sequence[Any]) -> list[Any]:
    """Return the batches that sequences were added to or removed from since their last call."""
    return [entry for entry in entries if vars(entry).get("left_padding") is not vars(entry).get(_CALLED_WITH)]


def _note_called(batches: Sequence[Any]) -> None:
    """Note with which sequences batches are called."""
    for entry in batches:
        setattr(entry, _CALLED_WITH, entry.left_padding)


def _evaluate_layers(batches: Sequence[Any], nbytes: int, lending: Lending | None) -> None:
    """Evaluate the layers of batches one after another.

    When sequences come or go, mlx-lm replaces the arrays of all layers at once, but lazily. Evaluated together, they
    would be there twice.
    """
    if lending is not None:
        lending.recall(min(nbytes, lending.nbytes))
    for entry in batches:
        mx.eval(arrays_in(entry))

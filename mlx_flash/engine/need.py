"""The need of a pass: one sum, for the choice of its calls, for the check before it, and for errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_flash.engine.call import Lane
from mlx_flash.engine.engine import Lending
from mlx_flash.errors import BudgetError, ConfigError, FlashError
from mlx_flash.kv.growth import Growth, update_growth
from mlx_flash.kv.kvledger import NUM_SLOTS, KVLedger, KVOptions, Way
from mlx_flash.kv.kvpool import Adding, KVPool, PooledCache
from mlx_flash.layout.reachable import arrays_in, nbytes_in
from mlx_flash.memory.arena import active_memory
from mlx_flash.memory.footprint import footprint, release_freed_memory
from mlx_flash.residency.plan import MB, ResidencyPlan

_CALLED_WITH = "padding_of_last_call"
"""Attribute of a batch with the array of paddings of its last call. mlx-lm replaces it when sequences come or go."""

_LITTLE_BYTES = 16_000_000
"""Less than what plans set aside for what running adds to a process. Nearly all calls for one token take less."""


@dataclass
class Need:
    """The memory of the process in a pass, in bytes: what there is now, and what the pass adds."""

    plan: ResidencyPlan
    lanes: Sequence[Lane]
    process: int  # the process itself without arrays, and buffers
    in_use: int  # arrays now: weights, keys and values
    activations: int  # intermediate results of the calls that compute, and of those that wait
    waiting: int  # intermediate results of more parts of the same prompts, or of a layer that begins ahead
    growth: int  # what comes to caches of mlx-lm, and to those of a head that guesses
    states: int  # what recurrent states keep of a call
    pool: KVPool | None  # of the caches that the plan knows; None where there are none in the calls
    adding: Adding  # the tokens that come to these
    kv: KVLedger  # the layers of all caches of the pool, with those tokens

    @property
    def total(self) -> int:
        """All of it, but for what comes to caches of the pool."""
        return self.process + self.in_use + self.activations + self.waiting + self.growth + self.states

    @property
    def missing(self) -> int:
        """Bytes that the budget lacks for that; negative where something is left."""
        return self.total - self.plan.budget_bytes

    @property
    def kv_growth(self) -> int:
        """Bytes that come to caches of the pool that stay where they are, as far as the plan lets them grow."""
        kv, limit = self.kv, self.plan.kv.limit
        growth = kv.growth if limit is None else min(kv.growth, max(0, limit - kv.now))
        return max(growth, self.kv_growth_on_disk(NUM_SLOTS)) if kv.is_on_disk else growth

    def kv_growth_on_disk(self, num_slots: int = 1) -> int:
        """Return the same with every layer on disk; it is negative where they take less than now."""
        return 0 if self.pool is None else self.kv.least_with(num_slots) - self.kv.now

    def fits(self, lent: int, *, offloads: bool = False) -> bool:
        """Return whether the pass has room once ``lent`` bytes are given back. If it ``offloads``, layers go to disk.

        Raises: WriteError: keys and values would have to go to disk, which has no room.
        """
        if self.missing - lent + (self.kv_growth_on_disk() if offloads else self.kv_growth) > 0:
            return False
        try:
            return self.kv_way(lent)[1].missing <= 0
        except BudgetError:
            return False

    def begin_ahead(self, lent: int) -> bool:
        """Count that a layer begins before the one before it is computed, if there is room. Return whether there is.

        Not for calls that compute longer than Python takes between two layers: of several tokens, or of several caches.
        Nor where buffers of keys and values grow, since two layers would have old and new ones, nor where a layer waits
        for those on disk.
        """
        new = self.lanes[0].tokens
        if len(self.lanes) > 1 or new.num_tokens > new.batch_size:
            return False
        states = new.batch_size * self.plan.cache.largest_state  # which the call replaces
        if self.kv.is_on_disk or self.growth > states or self.kv_growth:
            return False
        nbytes = self.plan.ledger.of_a_layer(new) + states
        if self.missing + nbytes > lent:
            return False
        self.waiting = nbytes
        return True

    def goes_to_disk(self, lent: int) -> bool:
        """Return whether layers go to disk for the tokens, or stay there."""
        if self.pool is None or self.pool.options.budget_bytes is None:
            return False
        way = self.kv.way(self._kv_limits(lent)[-1])
        return bool(way.num_slots) and not way.missing

    def kv_way(self, lent: int = 0, held: int = 0) -> tuple[int, Way]:
        """Return a limit for the caches of the pool once ``lent`` bytes are given back, and how they stay within it.

        Slots that calls hold while others compute take ``held`` bytes. Raises: BudgetError, WriteError.
        """
        if self.pool is None:
            return 0, Way(self.missing - lent)
        plan = self.plan
        for limit in self._kv_limits(lent, held):
            way = self.pool.way(self.kv, limit)
            if not way.missing:
                break
        if way.missing and plan.kv.is_fixed and limit == plan.kv.limit:
            raise no_room_for_kv(plan, self.lanes, limit + way.missing)
        return limit, way

    def _kv_limits(self, lent: int, held: int = 0) -> list[int]:
        """Return limits for keys and values: the plan's, and then all that is free."""
        kv, free = self.plan.kv, self.kv.now - self.missing + lent - held
        if kv.limit is None:
            return [free]
        return [min(free, kv.limit - held), *(() if kv.is_fixed else (free,))]

    @property
    def slots_held(self) -> int:
        """The bytes of slots that sequences with layers on disk hold while another one computes."""
        if self.pool is None or not self.kv.is_on_disk:
            return 0
        lanes = [lane for lane in self.lanes if lane.own]
        ledger, together = self.plan.ledger, [lane.tokens for lane in lanes]
        if not (held := ledger.slots_held(together)):
            return 0
        if any(lane.step for lane in lanes):
            return held
        # one slot serves all, with room for the longest, and MLX replaces it as a whole
        slots = [*map(ledger.slot_held, together), *[each.nbytes for each in self.pool.ring.slots]]
        return max(slots) * (len(together) - 1)


_NO_LAYERS = KVLedger(KVOptions(copies_slots=False), ())


def need(plan: ResidencyPlan, lanes: Sequence[Lane], waiting: int = 0) -> Need:
    """Return what a pass needs; ``waiting`` are bytes of parts of prompts that wait in it."""
    found = _need(plan, lanes, waiting)
    if found.missing > 0:  # a prompt may still be computed, and GPUs let go of the last results late
        mx.synchronize()
        found = _need(plan, lanes, waiting)
    return found


def _need(plan: ResidencyPlan, lanes: Sequence[Lane], waiting: int) -> Need:
    new, ledger, pools = [lane.tokens for lane in lanes], plan.ledger, {pool for lane in lanes for pool in lane.pools}
    if len(pools) > 1:
        raise ConfigError(
            f"the layers of a prompt cache are of {len(pools)} models, or were made with as many different settings, "
            "so that their memory is not counted together. Hint: take all layers from one make_prompt_cache(model)."
        )
    pool, adding, kv, in_use = next(iter(pools), None), _adding(plan, lanes), _NO_LAYERS, active_memory()
    if pool is not None:  # caches count with what they take instead of what they reserve
        kv = pool.ledger(adding)
        in_use = max(0, in_use - kv.active) + kv.now
    return Need(
        plan,
        lanes,
        process=plan.process_bytes,
        in_use=in_use,
        activations=ledger.computed(new),
        waiting=waiting,
        growth=_growth_of_others(plan, lanes) + sum([each.reader.missing_bytes for each in lanes if each.reader]),
        states=ledger.states(max([each.num_at_once for each in new])),
        pool=pool,
        adding=adding,
        kv=kv,
    )


def _adding(plan: ResidencyPlan, lanes: Sequence[Lane]) -> Adding:
    """Return the tokens that calls add to caches of the pool."""
    step, tokens = 0, dict[PooledCache, tuple[int, int]]()
    for lane in lanes:
        if lane.own:
            rows, new = plan.cache.rows, lane.tokens
            step, num_new = max(step, new.num_at_once // new.batch_size), new.num_tokens // new.batch_size
            known = rows if len(rows) == len(lane.own) else [max(rows, default=0)] * len(lane.own)
            for entry, nbytes in zip(lane.own, known, strict=True):
                tokens[entry] = num_new, new.batch_size * nbytes
    return Adding(tokens, step)


def make_room(need: Need, lending: Lending | None = None, *, may_shrink: bool = False, offloads: bool = False) -> Need:
    """Refuse a pass that would take the process over its budget; only loans have changed when it raises.

    Loans end as far as the pass needs their memory. What it does not need is lent. If it ``may_shrink``, nothing goes
    to disk to make room for more activations than were planned: the caller tries fewer tokens. If it ``offloads``,
    layers go to disk before loans end for their sake. Return what it needs, as it was counted last.

    Raises: BudgetError, which names what to change; WriteError, where the disk has no room for keys and values.
    """
    plan, lanes = need.plan, need.lanes
    changed = _changed_batches([entry for lane in lanes for entry in lane.others])
    if changed:
        nbytes = nbytes_in(changed)
        if (lending is None or not lending.nbytes) and need.missing + nbytes <= 0:
            need.growth += nbytes  # the call may evaluate all of them
        else:
            _evaluate_layers(changed, nbytes, lending)
            need = _need(plan, lanes, need.waiting)
    growth = need.kv_growth_on_disk() if offloads else need.kv_growth  # one slot will do for a prompt
    if lending is not None:
        need.in_use -= _settle(need, lending, growth)
    if may_shrink and need.activations > plan.activation_bytes and need.missing + growth > 0:
        raise too_large(need, need.missing + growth)
    missing = _make_room_for_kv(need)
    if missing > 0:
        raise too_large(need, missing)
    for entry in changed:
        setattr(entry, _CALLED_WITH, entry.left_padding)
    return need


def admit_in_memory(need: Need) -> bool:
    """Let a pass begin for which nothing has to leave memory, or be evaluated first. Return whether it may."""
    if need.kv.is_on_disk or _changed_batches([entry for lane in need.lanes for entry in lane.others]):
        return False
    try:
        limit, way = need.kv_way()
    except FlashError:
        return False  # a pass is tried next, and raises the error
    if way.missing > 0 or way.num_slots:
        return False
    return need.pool is None or need.pool.admit(need.adding, limit, way) == 0


def _make_room_for_kv(need: Need) -> int:
    """Offload layers of the pool for the pass. Return the bytes that are missing even then."""
    if (pool := need.pool) is None:
        return need.missing
    while True:
        held = need.slots_held
        limit, way = need.kv_way(held=held)
        if not way.missing:
            pool.admit(need.adding, limit, way)
        if way.missing or held or not way.num_slots:  # with each layer where it is
            return way.missing
        need.kv = pool.ledger(need.adding)  # layers have moved
        if not need.slots_held:
            return 0


def check_least(plan: ResidencyPlan, lane: Lane, lending: Lending | None = None) -> None:
    """Refuse a call that does not fit even token by token, with no weights lent. Changes nothing."""
    least = need(plan, [Lane(*lane.calls, step=1, num_kept=lane.num_kept)])
    way = least.kv_way(0 if lending is None else lending.recallable)[1]
    if way.missing > 0:
        raise too_large(least, way.missing)


def layers_at_once(need: Need, num_layers: int, num_calls: int = 1) -> int | None:
    """Return the number of layers that MLX may record ahead of a GPU; None if their results fit the budget together.

    MLX keeps the intermediate results of recorded layers until they are computed, and the old arrays of caches that
    grow. Checks before a pass count one layer. Calls wait for each other, so with several each layer is waited for.
    """
    if num_layers < 2:
        return None
    if num_calls > 1:
        return 1
    lane, plan = need.lanes[0], need.plan
    replaced = max(map(nbytes_in, lane.others), default=0) if need.growth else 0
    each = plan.ledger.of_a_layer(lane.tokens) + max(need.kv.replaced, replaced)
    if (num_layers - 1) * each <= _LITTLE_BYTES:
        return None
    found = 1 + max(0, -need.missing - need.kv_growth) // each
    return None if found >= num_layers else found


def _growth_of_others(plan: ResidencyPlan, lanes: Sequence[Lane]) -> int:
    """Return the most bytes that calls add to mlx-lm's own caches, which copy one layer after another as they grow."""
    states, growths = 0, [Growth(0, 0)]
    for lane in lanes:
        new, entries = lane.tokens, lane.others
        if entries:
            states += 0 if any(map(arrays_in, entries)) else new.batch_size * plan.cache.constant_bytes
            token_bytes = plan.kv_bytes_per_token - (sum(plan.cache.rows) if lane.own else 0)
            per_layer = new.batch_size * token_bytes // len(entries)
            growths.append(update_growth(entries, lane.length, per_layer, lane.step))
    if len(growths) == 1:  # no lane has such caches
        return 0
    return states + sum([each.added for each in growths]) + max([each.peak - each.added for each in growths])


def _settle(need: Need, lending: Lending, growth: int) -> int:
    """End loans where memory is short, and lend what is left over. Return the bytes that were freed.

    What the process has beyond the footprint as plan and arrays explain it, such as holes between arrays, is not lent.
    """
    short, known_bytes = need.missing + growth, need.process + need.in_use
    unknown = max(0, footprint() - known_bytes)
    if short + unknown > 0:
        release_freed_memory()
        unknown = max(0, footprint() - known_bytes)
    short += unknown
    if short > 0:
        return lending.recall(short)
    lending.lend(-short - need.plan.unlent_bytes)
    return 0


def _changed_batches(entries: Sequence[Any]) -> list[Any]:
    """Return the batches that sequences were added to or removed from since their last call."""
    return [entry for entry in entries if vars(entry).get("left_padding") is not vars(entry).get(_CALLED_WITH)]


def _evaluate_layers(batches: Sequence[Any], nbytes: int, lending: Lending | None) -> None:
    """Evaluate the layers of batches one after another.

    When sequences come or go, mlx-lm replaces the arrays of all layers at once, but lazily. Evaluated together, they
    would be there twice.
    """
    if lending is not None:
        lending.recall(min(nbytes, lending.nbytes))
    for entry in batches:
        mx.eval(arrays_in(entry))


def too_large(need: Need, missing: int) -> BudgetError:
    """Return the error for a pass that takes so many bytes more than the budget."""
    plan, lanes = need.plan, need.lanes
    num_tokens, context = _sizes(lanes)
    total = plan.budget_bytes + missing
    kv = total - need.process - need.in_use - need.activations
    all_logits = any(x.tokens.all_logits and x.length > 1 for x in lanes)
    hint = _hint(plan, max(x.tokens.num_at_once for x in lanes), context, all_logits)
    return BudgetError(
        f"a forward call with {num_tokens} new token{'s' * (num_tokens != 1)} in a context of {context} would take "
        f"the process to {total / MB:.1f} MB: {need.process / MB:.0f} MB for the process itself, "
        f"{need.in_use / MB:.0f} MB in arrays now, {need.activations / MB:.0f} MB of activations, {kv / MB:.0f} MB of "
        f"KV cache; the budget is {plan.budget_bytes / MB:.1f} MB. {hint}",
        total,
    )


def no_room_for_kv(plan: ResidencyPlan, lanes: Sequence[Lane], needed: int) -> BudgetError:
    """Return the error for a call that fits the budget, but not the share of it that the user gave the KV cache."""
    (num_tokens, context), limit = _sizes(lanes), plan.kv.limit or 0
    return BudgetError(
        f"a forward call with {num_tokens} new token{'s' * (num_tokens != 1)} in a context of {context} needs "
        f"{needed / MB:.1f} MB for its keys and values; kv_ram_gb "
        f"allows {limit / MB:.1f} MB. "
        f"Hint: raise kv_ram_gb to at least {-(-needed // 1000) / 1e6:.6f}, to more for a longer context.",
        plan.budget_bytes + needed - limit,
    )


def _sizes(lanes: Sequence[Lane]) -> tuple[int, int]:
    """Return the new tokens of all calls, and the longest context."""
    return sum(lane.tokens.num_tokens for lane in lanes), max(lane.tokens.context for lane in lanes)


def _hint(plan: ResidencyPlan, num_tokens: int, context: int, all_logits: bool) -> str:
    if num_tokens > plan.prefill_step_size:
        return f"Hint: pass prefill_step_size={plan.prefill_step_size} to mlx_lm, or raise ram_budget_gb."
    if context > plan.context_length:
        return f"Hint: load the model with FlashConfig(context_length={2 * context}), or raise ram_budget_gb."
    if all_logits:
        return (
            "Hint: ask for the logits of fewer tokens at a time; for several sequences at once load the model with a "
            "larger context_length, which counts tokens over all of them; or raise ram_budget_gb."
        )
    return (
        "Hint: raise ram_budget_gb; let go of other arrays and models in this process; for several sequences at once "
        "ask for a larger context_length, which counts tokens over all of them."
    )

"""The search for the fastest plan within a budget: which candidates are tried, and which of them is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter, itemgetter

from mlx_flash.compat.caches import CACHE_STEP
from mlx_flash.residency.candidate import (
    TILE_SLACK_BYTES,
    Candidate,
    Reserve,
    Task,
    Tokens,
    Weights,
    all_streamed,
    pool_of,
    spread,
)
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.residency.sizes import UnitSize

MAX_SLOTS = 4

WORTH_A_SLOT = 0.99
"""More slots and smaller units must bring the predicted time below this share of what it is without."""

NEARLY = 1.25
"""Row tiles are tried where other plans take so many times the least that is possible."""

TILE_BYTES = (32 << 20, 8 << 20, 2 << 20, 0)
"""Smallest tiles of a streamed head to try: small ones leave memory, but each is waited for."""

LEAST_TILE_BYTES = 8 << 20
"""Smallest tile of a layer: small reads are slow, and each tile is waited for."""

PARTS_SHARE = 0.75
"""Share of their memory that pinned weights leave to parts at most: lent memory is copied to, and read again later."""


UNFORESEEN_SHARE = 0.4
"""Share of the missing experts that look-ahead does not read early. Fitted to one model (docs/lab-notes.md)."""

Tried = tuple[ResidencyPlan, Candidate]
"""A candidate and its plan."""


def smallest(weights: Weights) -> Candidate:
    """Return the smallest candidate: the fewest slots and no pinned layer, or a tiny model in memory."""
    candidates = all_streamed(weights, weights.num_slots or 1)
    if _can_be_tiled(weights):  # two slots, so that reading and computing overlap, cost little here
        candidates.append(_tiled(weights, weights.num_slots or 2))
    return min([*candidates, everything(weights)], key=attrgetter("nbytes"))


def everything(weights: Weights) -> Candidate:
    """Return the candidate with all weights but experts in memory."""
    return replace(weights.candidate(0, 0), pins_tables=True)


def best(task: Task, weights: Weights, tokens: Tokens, budget: int) -> ResidencyPlan | None:
    """Return the fastest plan with memory for tokens; None if the budget has no room for it."""
    room = budget - task.process_bytes - tokens.nbytes
    tried = [(candidate.plan(task, tokens, budget), candidate) for candidate in _candidates(weights, room)]
    is_good = tried and _fastest(tried)[0].weights_seconds <= NEARLY * _least_seconds(weights, budget)
    if not is_good and _can_be_tiled(weights):
        tried += [(candidate.plan(task, tokens, budget), candidate) for candidate in _tiled_candidates(weights, room)]
    if not tried:
        return None
    plan, candidate = _fastest(tried)
    return candidate.named(plan)


def _candidates(weights: Weights, room: int) -> Iterator[Candidate]:
    """Yield everything in memory if that fits; else the most pinned for each cut and number of slots."""
    whole = everything(weights)
    if whole.nbytes > room:
        for cut in weights.cuts:
            yield from _candidates_of_cut(cut, room)
        return
    yield whole
    if weights.sizes.experts is not None:  # a token needs one row of a table, and more than one expert
        yield replace(whole, pins_tables=False)


def _candidates_of_cut(weights: Weights, room: int) -> Iterator[Candidate]:
    """Yield the most pinned for each number of slots, of whole layers or tensors, beside heads in tiles or pinned."""
    if weights.least_bytes > room:
        return
    tilings = (None, *_unlike_tiles(weights)) if weights.sizes.all_heads else (None,)
    for num_slots in [weights.num_slots] if weights.num_slots else range(1, MAX_SLOTS + 1):
        has_room = False
        for whole_layers in (False,) if weights.cut else (True, False):
            for tile_bytes in tilings:
                make = partial(weights.candidate, num_slots, whole_layers=whole_layers, tile_bytes=tile_bytes)
                found = _most_pinned(make, weights.sizes.layers, room)
                if found is not None:
                    has_room = True
                    yield found
                    if tile_bytes and found.num_units and found.tiles.slot_bytes > tile_bytes + TILE_SLACK_BYTES:
                        break  # the layers' slots are larger anyway
        if not has_room:
            break  # nor for more slots


def _unlike_tiles(weights: Weights) -> tuple[int, ...]:
    """Return the smallest tiles to try, without those that give the same slots and tiles as a smaller one."""
    whole = max([head.nbytes for head in weights.sizes.all_heads]) if weights.machine.exact_tiles else 0
    return tuple({min(tile_bytes, whole): tile_bytes for tile_bytes in TILE_BYTES}.values())


def _tiled_candidates(weights: Weights, room: int) -> Iterator[Candidate]:
    """Yield linear layers in row tiles, as few of them as there is room for, for each number of slots."""
    for num_slots in [weights.num_slots] if weights.num_slots else range(2, MAX_SLOTS + 1):
        found = _most_pinned(partial(_tiled, weights, num_slots), weights.sizes.linears, room)
        if found is None:
            break  # more slots take more
        yield found


def _most_pinned(make: Callable[[int], Candidate], units: Sequence[UnitSize], room: int) -> Candidate | None:
    """Find by bisection how few bytes of units can be streamed; None if there is no room even with all streamed.

    It ends when less than the smallest tensor is left to decide.
    """
    low, high = 0, sum(map(attrgetter("nbytes"), units))
    found = make(high)
    if found.nbytes > room:
        return None
    least = min([piece.nbytes for unit in units for piece in unit.tensors], default=0)
    while high - low > max(1, least):
        middle = (low + high) // 2
        tried = make(middle)
        if tried.nbytes <= room:
            high, found = middle, tried
        else:
            low = middle
    return found


def _can_be_tiled(weights: Weights) -> bool:
    """Return whether there are linear layers whose row tiles are exact."""
    return bool(weights.sizes.linears) and weights.machine.exact_tiles


def _tiled(weights: Weights, num_slots: int, target: int | None = None) -> Candidate:
    """Return the candidate with linear layers in row tiles: so many bytes, spread evenly, or all of them."""
    chosen = weights.sizes.linears
    if target is not None:
        chosen = tuple([unit for unit, some in zip(chosen, spread(chosen, target, True).reads, strict=True) if some])
    tiled = weights.tiled(chosen)
    return tiled.candidate(num_slots, tiled.sizes.layer_bytes, tile_bytes=LEAST_TILE_BYTES)


def _least_seconds(weights: Weights, budget: int) -> float:
    """Return a time that no choice is below: all weights are computed with, and what the budget cannot hold is read."""
    sizes, machine = weights.sizes, weights.machine
    units = [*sizes.layers, *sizes.all_heads]
    read = max(0, sum([unit.nbytes for unit in units]) - (budget - machine.base_bytes))
    computed = sum([unit.computed_bytes for unit in units])
    trunk = max(computed / machine.kept_bytes_per_second, read / machine.disk.bytes_per_second)
    experts = sizes.experts
    if experts is None:
        return trunk
    most = max(experts.least_slots, (budget - machine.base_bytes) // experts.slot_bytes)
    return trunk + pool_of(machine, experts, weights.pool_slots or most).seconds


def _fastest(tried: Sequence[Tried]) -> Tried:
    """Return the first that is nearly as fast as the fastest: coarse cuts and few slots come first."""
    enough = min([plan.seconds for plan, _ in tried]) / WORTH_A_SLOT
    return next(each for each in tried if each[0].seconds <= enough)


def with_room_for_parts(task: Task, weights: Weights, plan: ResidencyPlan) -> ResidencyPlan:
    """Return a plan with the room in which a prompt of the planned length reads least, for parts that share a pass.

    Pinned weights leave that room. It holds weights between prompts, so the predicted time of a token stays. A prompt
    reads a little more in each of its passes, and takes fewer of them.
    """
    step, context, streaming = plan.prefill_step_size, plan.context_length, plan.streaming
    is_tight = not streaming.num_units or not plan.pinned_bytes or streaming.is_tiled
    if is_tight or not plan.shares_parts or not task.config.lend_reserves:
        return plan
    like = replace(weights.cuts[streaming.cut], num_slots=weights.num_slots or streaming.num_slots)
    tokens, num_parts = task.tokens(Reserve(step, context)), -(-context // step)
    free = plan.room_bytes - plan.kv_bytes - plan.activation_bytes
    choices = []
    for num_together in {-(-num_parts // num_passes) for num_passes in range(1, plan.prompt_passes(context))}:
        waiting = plan.ledger.parts_waiting(num_together - 1, context)
        if (taken := max(0, waiting - free)) <= PARTS_SHARE * plan.pinned_bytes:
            choices.append((-(-num_parts // num_together) * (plan.read_bytes + taken), waiting))
    for _, waiting in sorted(choices, key=itemgetter(0)):
        more = tokens._replace(spare_bytes=max(tokens.spare_bytes, waiting))
        room = plan.budget_bytes - task.process_bytes - more.nbytes
        tried = [(each.plan(task, more, plan.budget_bytes), each) for each in _candidates_of_cut(like, room)]
        if not tried:
            continue
        found, candidate = _fastest(tried)
        if found.prompt_read_bytes(context) < plan.prompt_read_bytes(context):
            saved = max(0.0, found.weights_seconds - plan.weights_seconds)
            found = replace(candidate.named(found), minimum_bytes=plan.minimum_bytes)
            return replace(found, opening_seconds=plan.opening_seconds, lent_seconds=saved)
    return plan


def opening_seconds(task: Task, weights: Weights, plan: ResidencyPlan) -> float:
    """Return the predicted time of a pass that decodes one token when a conversation begins.

    Streamed weights get the lent memory first, and need not be read then. Experts get the rest, where the memory of the
    pool can grow. Look-ahead reads most of the missing experts while everything else computes. The others are waited
    for. Those that were missing compute last.
    """
    machine, streaming, experts = weights.machine, plan.streaming, weights.sizes.experts
    first = task.tokens(Reserve(1, CACHE_STEP))
    unused = plan.room_bytes - first.kv.nbytes - first.activation_bytes
    lent = max(0, unused - plan.unlent_bytes)
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

"""The search for the fastest plan within a budget: which candidates are tried, and which of them is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mlx_flash.residency.candidate import TILE_SLACK_BYTES, Candidate, all_streamed
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.residency.selection import spread
from mlx_flash.residency.sizes import UnitSize
from mlx_flash.residency.task import Reserve, Task
from mlx_flash.residency.timing import pool_of

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


def smallest(task: Task, reserve: Reserve) -> Candidate:
    """Return the smallest candidate: the fewest slots and no pinned layer, or a tiny model in memory."""
    candidates = all_streamed(task, reserve, task.config.num_slots or 1)
    if _can_be_tiled(task):  # two slots, so that reading and computing overlap, cost little here
        candidates.append(_tiled(task, reserve, task.config.num_slots or 2))
    return min([*candidates, everything(task, reserve)], key=lambda candidate: candidate.peak_bytes)


def everything(task: Task, reserve: Reserve) -> Candidate:
    """Return the candidate with all weights but experts in memory."""
    return Candidate(task, reserve, pins_tables=True)


def best(task: Task, budget: int, reserve: Reserve) -> ResidencyPlan | None:
    """Return the fastest plan with a reserve; None if the budget has no room for it."""
    plans = [candidate.plan(budget) for candidate in _candidates(task, budget, reserve)]
    is_good = plans and _fastest(plans).weights_seconds <= NEARLY * _least_seconds(task, budget)
    if not is_good and _can_be_tiled(task):
        plans += [candidate.plan(budget) for candidate in _tiled_candidates(task, budget, reserve)]
    return _fastest(plans) if plans else None


def _candidates(task: Task, budget: int, reserve: Reserve) -> Iterator[Candidate]:
    """Yield everything in memory if that fits; else the most pinned for each cut and number of slots."""
    whole = everything(task, reserve)
    if whole.peak_bytes > budget:
        for cut in task.cuts:
            yield from _candidates_of_cut(cut, budget, reserve)
        return
    yield whole
    if task.sizes.experts is not None:  # a token needs one row of a table, and more than one expert
        yield replace(whole, pins_tables=False)


def _candidates_of_cut(task: Task, budget: int, reserve: Reserve) -> Iterator[Candidate]:
    """Yield the most pinned for each number of slots, of whole layers or tensors, beside heads in tiles or pinned."""
    if task.bare(reserve).peak_bytes > budget:
        return
    tilings = (None, *_unlike_tiles(task)) if task.sizes.all_heads else (None,)
    for num_slots in [task.config.num_slots] if task.config.num_slots else range(1, MAX_SLOTS + 1):
        has_room = False
        for whole_layers in (False,) if task.cut else (True, False):
            for tile_bytes in tilings:
                all_streamed = Candidate(task, reserve, num_slots, whole_layers, tile_bytes, task.sizes.layer_bytes)
                target = _fewest_bytes(all_streamed.peak_of, task.sizes.layers, budget)
                if target is not None:
                    has_room = True
                    found = replace(all_streamed, target=target)
                    yield found
                    if tile_bytes and found.streaming.slot_bytes > tile_bytes + TILE_SLACK_BYTES:
                        break  # the layers' slots are larger anyway
        if not has_room:
            break  # nor for more slots


def _unlike_tiles(task: Task) -> tuple[int, ...]:
    """Return the smallest tiles to try, without those that give the same slots and tiles as a smaller one."""
    whole = max([head.nbytes for head in task.sizes.all_heads]) if task.machine.exact_tiles else 0
    return tuple({min(tile_bytes, whole): tile_bytes for tile_bytes in TILE_BYTES}.values())


def _tiled_candidates(task: Task, budget: int, reserve: Reserve) -> Iterator[Candidate]:
    """Yield linear layers in row tiles, as few of them as the budget allows, for each number of slots."""
    for num_slots in [task.config.num_slots] if task.config.num_slots else range(2, MAX_SLOTS + 1):

        def peak_of(target: int, num_slots: int = num_slots) -> int:
            return _tiled(task, reserve, num_slots, target).peak_bytes

        target = _fewest_bytes(peak_of, task.sizes.linears, budget)
        if target is None:
            break  # more slots take more
        yield _tiled(task, reserve, num_slots, target)


def _fewest_bytes(peak_of: Callable[[int], int], units: Sequence[UnitSize], budget: int) -> int | None:
    """Find by bisection how few bytes of units can be streamed within the budget; None if even all cannot.

    It ends when less than the smallest tensor is left to decide.
    """
    low, high = 0, sum([unit.nbytes for unit in units])
    least = min([piece.nbytes for unit in units for piece in unit.tensors], default=0)
    if peak_of(high) > budget:
        return None
    while high - low > max(1, least):
        middle = (low + high) // 2
        if peak_of(middle) <= budget:
            high = middle
        else:
            low = middle
    return high


def _can_be_tiled(task: Task) -> bool:
    """Return whether there are linear layers whose row tiles are exact."""
    return bool(task.sizes.linears) and task.machine.exact_tiles


def _tiled(task: Task, reserve: Reserve, num_slots: int, target: int | None = None) -> Candidate:
    """Return the candidate with linear layers in row tiles: so many bytes, spread evenly, or all of them."""
    sizes = task.sizes
    chosen = sizes.linears
    if target is not None:
        chosen = tuple([unit for unit, some in zip(chosen, spread(chosen, target, True).pieces, strict=True) if some])
    tiled = task.tiled(chosen)
    return Candidate(tiled, reserve, num_slots, True, LEAST_TILE_BYTES, tiled.sizes.layer_bytes)


def _least_seconds(task: Task, budget: int) -> float:
    """Return a time that no plan is below: all weights are computed with, and what the budget cannot hold is read."""
    machine = task.machine
    units = [*task.sizes.layers, *task.sizes.all_heads]
    read = max(0, sum([unit.nbytes for unit in units]) - (budget - machine.base_bytes))
    computed = sum([unit.computed_bytes for unit in units])
    trunk = max(computed / machine.kept_bytes_per_second, read / machine.disk.bytes_per_second)
    experts = task.sizes.experts
    if experts is None:
        return trunk
    most = max(experts.least_slots, (budget - machine.base_bytes) // experts.slot_bytes)
    return trunk + pool_of(machine, experts, task.pool_slots or most).seconds


def _fastest(plans: Sequence[ResidencyPlan]) -> ResidencyPlan:
    """Return the first that is nearly as fast as the fastest: coarse cuts and few slots come first."""
    enough = min([plan.seconds for plan in plans]) / WORTH_A_SLOT
    return next(plan for plan in plans if plan.seconds <= enough)


def with_room_for_parts(task: Task, plan: ResidencyPlan) -> ResidencyPlan:
    """Return a plan with the room in which a prompt of the planned length reads least, for parts that share a pass.

    Pinned weights leave that room. It holds weights between prompts, so the predicted time of a token stays. A prompt
    reads a little more in each of its passes, and takes fewer of them.
    """
    step, context, streaming = plan.prefill_step_size, plan.context_length, plan.streaming
    is_tight = not streaming.num_units or not plan.pinned_bytes or streaming.is_tiled
    if is_tight or not plan.shares_parts or not task.config.lend_reserves:
        return plan
    num_slots = task.config.num_slots or streaming.num_slots
    same_cut = task.cuts[streaming.cut]
    like = replace(same_cut, config=replace(task.config, num_slots=num_slots))
    num_parts = -(-context // step)
    free = plan.room_bytes - plan.kv_bytes - plan.activation_bytes
    choices = []
    for num_together in {-(-num_parts // num_passes) for num_passes in range(1, plan.prompt_passes(context))}:
        reserve = Reserve(step, context, num_together)
        taken = max(0, same_cut.ledger(reserve).parts_waiting(num_together - 1, context) - free)
        if taken <= PARTS_SHARE * plan.pinned_bytes:
            choices.append((-(-num_parts // num_together) * (plan.read_bytes + taken), reserve))
    for _, reserve in sorted(choices, key=lambda choice: choice[0]):
        plans = [found.plan(plan.budget_bytes) for found in _candidates_of_cut(like, plan.budget_bytes, reserve)]
        found = replace(_fastest(plans), budget_bytes=plan.budget_bytes) if plans else plan
        if found.prompt_read_bytes(context) < plan.prompt_read_bytes(context):
            saved = max(0.0, found.weights_seconds - plan.weights_seconds)
            return replace(
                found, minimum_bytes=plan.minimum_bytes, opening_seconds=plan.opening_seconds, lent_seconds=saved
            )
    return plan

"""The choice of the calls that share the next pass over the weights, and of those that wait for a later one.

Each row computes its next part. If all of them do not fit the budget, half of the rows wait; if one alone does not fit,
its parts get smaller. What the budget has left goes to more parts of the same prompts. Within a pass such a part waits
while another one computes, and takes memory meanwhile.

Where keys and values of a prompt do not fit into memory, they go to disk in the pass that its parts share, and not only
once memory is full: a pass over the weights costs more.
"""

from __future__ import annotations

import gc
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import inf
from typing import Any, NamedTuple

from mlx_flash.compat.caches import entries_of
from mlx_flash.engine.call import ForwardCall, Lane, Row
from mlx_flash.engine.group import CallGroup
from mlx_flash.engine.lending import Lending
from mlx_flash.engine.need import Need, check_least, layers_at_once, make_room, need
from mlx_flash.engine.session import Session
from mlx_flash.errors import BudgetError, FlashError
from mlx_flash.kv.checkpoints import kept_bytes
from mlx_flash.logs import log
from mlx_flash.memory.driver import has_own_memory
from mlx_flash.residency.plan import PREFILL_STEPS, ResidencyPlan


class _Asked(NamedTuple):
    """Rows whose next parts share a pass, and the rows of parts after these that may share it with them, in order."""

    plan: ResidencyPlan
    lending: Lending | None
    rows: Sequence[Row]
    more: Sequence[Row]

    def lanes(self, number: int) -> list[Lane]:
        """Return the next part of each row, and so many more."""
        counts = Counter(self.more[:number])
        return [row.lane(1 + counts[row]) for row in self.rows]

    def need(self, number: int = 0, waiting: int = 0) -> Need:
        """Return what a pass with so many more parts needs, which take so many bytes while they wait."""
        return need(self.plan, self.lanes(number), waiting)

    @property
    def lent(self) -> int:
        """Bytes that weights have beyond the plan."""
        return 0 if self.lending is None else max(0, self.lending.nbytes)

    def fitting(self, *, offloads: bool) -> list[int]:
        """Return the bytes of one, two and more parts while they wait, as many as there is room for.

        Layers are where they are, or on disk. Raises: WriteError: they would have to go there, which has no room.
        """
        room, parts = self.lent - self.need().missing, [lane.calls for lane in self.lanes(len(self.more))]
        waiting = waiting_bytes(self.plan, parts, room, on_disk=offloads)

        def is_too_much(number: int) -> bool:
            return not self.need(number, waiting[number - 1]).fits(self.lent, offloads=offloads)

        return waiting[: bisect_left(range(1, len(waiting) + 1), True, key=is_too_much)]


class Chosen(NamedTuple):
    """Calls that share the next pass."""

    lanes: dict[Row, Lane]
    layers_at_once: int | None = None  # as :func:`layers_at_once` returns it
    computes_ahead: bool = False  # as of :class:`WeightStream`


class Sharing:
    """The choice of calls that share a pass. All ranks choose the same.

    Args:
        session: the weights of the model, and what counts beside them.
        group: runs calls that share a pass.
    """

    def __init__(self, session: Session, group: CallGroup) -> None:
        self._session = session
        self._group = group
        self._told_steps: set[int] = set()
        chain = session.chain
        self._all_have_room = nullcontext if chain is None else chain.all_have_room
        self._least: Callable[[int], int] = int if chain is None else chain.least
        # On CUDA, MLX lets go of results late. Experts and other ranks are waited for inside a layer.
        has_units = bool(session.engine.stream.units) and session.engine.experts is None
        self._may_be_ahead = has_units and chain is None and not has_own_memory()

    def choose(self, plan: ResidencyPlan, rows: Sequence[Row], lending: Lending | None) -> Chosen:
        """Return as many of the rows as memory allows, each with the parts that share the next pass.

        If not even the first one fits, it gets the error, and nothing is returned.
        """
        num_rows, step, is_collected = len(rows) if self._group.can_share else 1, 0, False
        while True:
            chosen, can_cut = rows[:num_rows], False
            asked = _Asked(plan, lending, chosen, [row for row in chosen for _ in range(self._num_more(row))])
            try:
                with self._all_have_room():
                    for row in chosen:
                        if not row.num_done and len(row.left) > 1 and row.left[0].checkpoints is None:
                            check_least(plan, Lane(row.whole, num_kept=row.num_joined), lending)
                can_cut = rows[0].length > 1
                found = self._with_room(asked, can_cut and all(row.length > PREFILL_STEPS[-1] for row in chosen))
                if step:
                    self._tell_step(rows[0], step)
                return found
            except FlashError as error:
                if isinstance(error, BudgetError) and not is_collected:
                    gc.collect()  # a cache that was dropped while it owed a token refers to itself
                    is_collected = True
                elif num_rows > 1:
                    num_rows //= 2
                elif isinstance(error, BudgetError) and can_cut:
                    step = rows[0].cut()
                else:
                    rows[0].error = error
                    return Chosen({})

    def _with_room(self, asked: _Asked, may_shrink: bool) -> Chosen:
        """Make room for the next part of each row, and for as many more as there is room for on every rank."""
        fitting, offloads = list[int](), False  # bytes of one, two and more parts while they wait
        if asked.more:
            with self._all_have_room():
                fitting = asked.fitting(offloads=False)
                if len(fitting) < len(asked.more) and self._offloads(asked):
                    others = asked.fitting(offloads=True)
                    if len(others) > len(fitting):
                        fitting, offloads = others, True
        number = self._least(len(fitting)) if asked.more else 0
        while True:
            try:
                with self._all_have_room():
                    found = asked.need(number, fitting[number - 1] if number else 0)
                    is_ahead = self._may_be_ahead and not asked.more and found.begin_ahead(asked.lent)
                    found = make_room(found, asked.lending, may_shrink=may_shrink or number > 0, offloads=offloads)
            except BudgetError:
                if not number:
                    raise
                number, offloads = number // 2, offloads and number > 1
                continue
            num_layers = len(self._session.engine.pinned.modules)
            at_once = layers_at_once(found, num_layers, len(asked.rows) + number) if num_layers else None
            return Chosen(dict(zip(asked.rows, found.lanes, strict=True)), at_once, is_ahead)

    def _num_more(self, row: Row) -> int:
        """Return how many parts of a row may share a pass with the first one that is left."""
        first, num_others = row.left[0], len(row.left) - 1
        if not num_others or first.cache is None:
            return 0
        is_guessed = first.checkpoints is not None  # such tokens can be taken back
        can_share = self.refusal(first.cache) is None if is_guessed else self._group.fits(first.cache)
        return num_others if can_share else 0

    def refusal(self, cache: Sequence[Any]) -> str | None:
        """Return the reason why guessed tokens cannot be computed with a prompt cache; None if they can."""
        if self._session.chain is not None:
            return "how many are guessed depends on measured times, which differ between ranks"
        return self._group.refusal(cache)

    def _offloads(self, asked: _Asked) -> bool:
        """Return whether keys and values of the tokens that are left go to disk sooner or later."""
        if self._session.chain is not None or not asked.plan.ledger.shares_on_disk:
            return False
        whole = need(asked.plan, [row.lane(len(row.left)) for row in asked.rows])
        return whole.goes_to_disk(0 if asked.lending is None else asked.lending.recallable)

    def _tell_step(self, row: Row, step: int) -> None:
        """Log that the parts of a row get smaller; warn once of each size."""
        level = logging.INFO if step in self._told_steps else logging.WARNING
        self._told_steps.add(step)
        log.log(
            level,
            "from token %d of a prompt on the budget has room for %d tokens at a time: output is mlx-lm's own for "
            "--prefill-step-size %d from there on",
            row.num_done,
            step * row.whole.batch_size,
            step,
        )


def waiting_bytes(
    plan: ResidencyPlan, rows: Sequence[Sequence[ForwardCall]], most: float = inf, *, on_disk: bool = False
) -> list[int]:
    """Return the bytes of one, two and more parts after the first ones of the rows while another part computes.

    It ends with the first number of parts that take more than ``most`` with their keys and values: a prompt may have
    thousands of parts that are left, before each of many passes. Where keys and values are ``on_disk``, the parts of a
    row use one slot, which counts with the layers on disk.
    """
    found, waiting, cost = list[int](), 0, 0
    ledger, per_token = plan.ledger, 0 if on_disk else plan.kv_bytes_per_token
    for before, *others in rows:
        cache, end = list(entries_of(before.cache or ())), Lane(before).tokens.context
        for number, part in enumerate(others):
            kept = plan.cache.states_bytes(before.num_tokens, end) if plan.keeps_states else 0
            if part.checkpoints is not None:  # guesses are taken back to what was before
                kept += sum(map(kept_bytes, cache))
            new, batch_size, before = part.num_tokens, part.batch_size, part
            end += new // batch_size
            nbytes = ledger.part_waiting(new, batch_size, end, is_first=not number, on_disk=on_disk, kept=kept)
            waiting, cost = waiting + nbytes, cost + max(1, nbytes + new * per_token)
            if cost > most:
                return found
            found.append(waiting)
    return found

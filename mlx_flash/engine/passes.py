"""Passes over the weights: which calls share one, and what is counted about it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import mlx.core as mx

from mlx_flash.compat.caches import recurrent_states
from mlx_flash.compat.compiler import explained
from mlx_flash.engine.call import ForwardCall
from mlx_flash.engine.dropped import DroppedResult
from mlx_flash.engine.group import CallGroup, Compute
from mlx_flash.engine.headroom import check_headroom, check_least, layers_at_once
from mlx_flash.engine.lane import Lane
from mlx_flash.engine.lending import Lending
from mlx_flash.engine.row import Row
from mlx_flash.engine.session import Session
from mlx_flash.engine.sharing import costs, waiting_bytes
from mlx_flash.engine.status import PassCounters
from mlx_flash.engine.undo import broken
from mlx_flash.errors import BudgetError, FlashError
from mlx_flash.kv.pool import KVPool
from mlx_flash.layout.arrays import arrays_in
from mlx_flash.prefixes.leaves import forget
from mlx_flash.residency.plan import PREFILL_STEPS, ResidencyPlan
from mlx_flash.streaming.lockstep import CALL_ERRORS

_log = logging.getLogger("mlx_flash")


class Passes:
    """The passes of a running model.

    Args:
        model: mlx-lm's model.
        session: its weights, and what counts beside them.
        kv: what its KV caches share; None where they are mlx-lm's own.
        counters: of its calls.
    """

    def __init__(self, model: Any, session: Session, kv: KVPool | None, counters: PassCounters) -> None:
        self.group = CallGroup(session.engine, session.chain)
        self._model = model
        self._session = session
        self._kv = kv
        self._counters = counters
        self._told_steps: set[int] = set()
        self._under_way: dict[Row, Callable[[], None]] = {}
        chain = session.chain
        self._all_have_room = contextlib.nullcontext if chain is None else chain.all_have_room
        self._least: Callable[[int], int] = int if chain is None else chain.least

    def advance(self, plan: ResidencyPlan, rows: Sequence[Row], *, lends: bool) -> None:
        """Compute at least a part of each row, in as few passes as memory allows.

        Rows with few parts go first. What fails in one row is noted there.

        Args:
            plan: the plan of the model.
            rows: the rows.
            lends: whether reserved memory may be lent.

        Raises:
            ReadError: weights could not be read, and no row went on.
            PeerError: the ranks were called differently, or one was lost.
        """
        self._put_back()
        for row in rows:
            row.error = row.error or broken(row.whole.cache)
        waiting = sorted((row for row in rows if not row.is_done), key=lambda row: len(row.left))
        loans = self._session.engine.lending if lends else None
        owed = [row.pending for row in waiting if row.pending is not None]
        try:
            for pending in owed:
                pending.lift()
            while waiting:
                lanes = self._choose(plan, waiting, loans)
                if lanes:
                    pinned, calls = self._session.engine.pinned, [call for lane in lanes.values() for call in lane]
                    pinned.num_at_once = layers_at_once(plan, list(map(Lane, calls)), pinned.num_layers)
                    self._run(list(lanes), list(lanes.values()))
                waiting = waiting[max(1, len(lanes)) :]
        finally:
            for pending in owed:
                pending.put()  # if its token was not computed

    def _choose(self, plan: ResidencyPlan, rows: Sequence[Row], loans: Lending | None) -> dict[Row, list[ForwardCall]]:
        """Return as many of the rows as memory allows, each with the parts that share the next pass."""
        num_rows = len(rows) if self.group.can_share else 1
        while True:
            chosen = rows[:num_rows]
            more, can_cut = [self._more(row) for row in chosen], False
            wish = sum(
                cost for row, parts in zip(chosen, more, strict=True) for cost in costs(plan, [row.left[0], *parts])
            )
            try:
                with self._all_have_room():
                    for row in chosen:
                        if not row.num_done and len(row.left) > 1 and row.left[0].checkpoints is None:
                            check_least(plan, Lane(row.whole), loans)
                can_cut = rows[0].length > 1
                with self._all_have_room():
                    may_shrink = all(row.length > PREFILL_STEPS[-1] for row in chosen)
                    granted = check_headroom(plan, [row.lane() for row in chosen], loans, wish, may_shrink=may_shrink)
                return self._with_more(plan, chosen, more, granted, loans)
            except FlashError as error:
                if num_rows > 1:
                    num_rows //= 2
                elif isinstance(error, BudgetError) and can_cut:
                    self._tell_step(rows[0], rows[0].cut())
                else:
                    rows[0].error = error
                    return {}

    def _with_more(
        self,
        plan: ResidencyPlan,
        rows: Sequence[Row],
        more: Sequence[Sequence[ForwardCall]],
        granted: int,
        loans: Lending | None,
    ) -> dict[Row, list[ForwardCall]]:
        """Return the first part of each row, and as many more as memory allows on every rank."""
        found = [
            (row, part, cost)
            for row, parts in zip(rows, more, strict=True)
            for part, cost in zip(parts, costs(plan, [row.left[0], *parts]), strict=True)
        ]
        totals = accumulate(cost for _, _, cost in found)
        extra = [(row, part) for (row, part, _), total in zip(found, totals, strict=True) if total <= granted]
        tried = self._least(len(extra)) if found else 0
        extra = extra[:tried]
        while extra:
            chosen = {row: [row.left[0], *(part for owner, part in extra if owner is row)] for row in rows}
            if self._least(_fit(plan, chosen, loans)):
                return chosen
            extra = extra[: len(extra) // 2]
        if tried:
            with self._all_have_room():
                check_headroom(plan, [row.lane() for row in rows], loans)
        return {row: [row.left[0]] for row in rows}

    def _tell_step(self, row: Row, step: int) -> None:
        """Log that the parts of a row get smaller; warn once of each size."""
        level = logging.INFO if step in self._told_steps else logging.WARNING
        self._told_steps.add(step)
        _log.log(
            level,
            "from token %d of a prompt on the budget has room for %d tokens at a time: output is mlx-lm's own for "
            "parts of this length",
            row.num_done,
            step * row.whole.batch_size,
        )

    def _more(self, row: Row) -> list[ForwardCall]:
        """Return the parts that may share a pass with the first one that is left."""
        first = row.left[0]
        if len(row.left) == 1 or first.cache is None:
            return []
        can_be_undone = first.checkpoints is not None
        if can_be_undone:
            fits = self.refusal(first.cache) is None
        else:
            fits = self._session.prefixes is None and self.group.fits(first.cache)
        return list(row.left)[1:] if fits else []

    def refusal(self, cache: Sequence[Any]) -> str | None:
        """Return the reason why guessed tokens cannot be computed with a prompt cache; None if they can."""
        if self._session.chain is not None:
            return "how many are guessed depends on measured times, which differ between ranks"
        return "prompts are cached" if self._session.prefixes is not None else self.group.refusal(cache)

    def _run(self, rows: list[Row], lanes: list[list[ForwardCall]]) -> None:
        """Compute parts of some rows in a pass. It ends with one assignment, before which an exception undoes it."""
        self._under_way = {row: row.undo(lane) for row, lane in zip(rows, lanes, strict=True)}
        try:
            self._compute_parts(rows, lanes)
        except BaseException:
            self._put_back()
            raise
        self._under_way = {}

    def _put_back(self) -> None:
        """Undo a pass that was interrupted. Repeated before the next one, in case that was interrupted too."""
        if self._under_way:
            for undo in self._under_way.values():
                undo()
            self._session.engine.recover()
            self._under_way = {}

    def _compute_parts(self, rows: list[Row], lanes: list[list[ForwardCall]]) -> None:
        calls = [call for lane in lanes for call in lane]
        if len(calls) == 1:
            self._run_alone(rows[0], calls[0])
            return
        num_tokens = sum(call.num_tokens for call in calls)
        report: Callable[[float], None] = lambda share: None  # noqa: E731
        if len(rows) == 1:
            report = partial(rows[0].tell, num_tokens)
        run = partial(self.group.run, lanes, partial(self._with_prefixes, compute=self._call), report)
        for row, lane, outcome in zip(rows, lanes, self._counted(calls, lanes, run), strict=True):
            if isinstance(outcome, Exception):
                row.error = explained(outcome)
            elif outcome is not None:
                row.finish(lane, outcome)
            else:  # its parts need an order
                self._under_way[row] = row.undo(lane[:1])
                self._run_alone(row, lane[0])

    def _run_alone(self, row: Row, call: ForwardCall) -> None:
        try:
            output = self._with_prefixes(call, self._compute)
            if len(row.left) > 1:  # lets the intermediate results go
                mx.eval(arrays_in(call.cache), arrays_in(output if call.wants_logits else ()))
        except CALL_ERRORS as error:
            self._under_way[row]()
            row.error = explained(error)
        else:
            row.finish([call], [output])

    def _compute(self, call: ForwardCall) -> Any:
        self._session.engine.drop_logits(not call.wants_logits)
        chain = self._session.chain

        def run() -> Any:
            with contextlib.nullcontext() if chain is None else chain.calls([call.tokens], [call.cache]):
                return self._call(call)

        return self._counted([call], [[call]], run)

    def _with_prefixes(self, call: ForwardCall, compute: Compute) -> Any:
        """Compute the part of a call that the prefix cache does not answer."""
        prefixes = self._session.prefixes
        if prefixes is None or call.cache is None:
            return compute(call)
        if call.tokens is None or not call.is_plain:
            forget(call.cache)
            return compute(call)
        cached = prefixes.begin(call.tokens, call.cache, is_prompt=not call.wants_logits)
        if cached is None:
            return compute(call)
        output = None if cached.is_answered else compute(call.part(cached.num_restored))
        prefixes.end(cached)
        return DroppedResult() if cached.num_restored else output

    def _call(self, call: ForwardCall) -> Any:
        chain = self._session.chain
        with contextlib.nullcontext() if chain is None else chain.computing(call.cache):
            output = self._model(*call.arguments, **call.keywords)
        if chain is None:  # no logits need the last state, and another thread could not compute it
            mx.async_eval(*recurrent_states(call.cache or ()))
        return output

    def _counted(
        self, calls: Sequence[ForwardCall], lanes: Sequence[Sequence[ForwardCall]], run: Callable[[], Any]
    ) -> Any:
        """Compute some calls in one pass, and count it."""
        certain = [lane if lane[0].checkpoints is None else lane[:1] for lane in lanes]
        sizes = [sum(call.num_tokens for call in lane) for lane in certain]
        num_tokens, num_sequences = sum(sizes), sum(lane[0].batch_size for lane in lanes)
        num_decoding = sum(n for n, lane in zip(sizes, lanes, strict=True) if n == lane[0].batch_size)
        self._counters.begin(num_tokens, num_sequences, num_decoding)
        self._session.meter.begin(is_comparable=len(lanes) == 1 and num_tokens == num_sequences)
        try:
            output = run()
        except BaseException:
            self._counters.end(failed=True)
            self._session.engine.recover()
            raise
        if self._kv is not None:
            self._kv.note()
        self._counters.end()
        if len(lanes) == 1:
            self._session.meter.end(num_tokens, num_sequences, len(calls) - sum(map(len, certain)))
        return output


def _fit(plan: ResidencyPlan, chosen: dict[Row, list[ForwardCall]], loans: Lending | None) -> bool:
    """Return whether parts of rows may share a pass. What is lent, and on disk, is as they need it then."""
    lanes = [row.lane(len(parts)) for row, parts in chosen.items()]
    waiting = sum(waiting_bytes(plan, parts) for parts in chosen.values())
    try:
        return check_headroom(plan, lanes, loans, waiting, may_shrink=True) == waiting
    except BudgetError:
        return False

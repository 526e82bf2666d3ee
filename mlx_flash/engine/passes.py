"""Passes over the weights: their calls are chosen, computed together and counted, and undone after an exception."""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from math import inf
from typing import Any, NamedTuple, cast

import mlx.core as mx

from mlx_flash import enginethread
from mlx_flash.compat.arrays import explained
from mlx_flash.compat.caches import entries_of, trimmable
from mlx_flash.engine.call import (
    DroppedResult,
    ForwardCall,
    Lane,
    Need,
    Row,
    admit_in_memory,
    check_least,
    layers_at_once,
    make_room,
    need,
)
from mlx_flash.engine.engine import Engine, Lending
from mlx_flash.errors import BudgetError, CacheError, FlashError, PeerError, StreamedWeightsError
from mlx_flash.kv.kvpool import OnDisk
from mlx_flash.kv.owed import Debt, Owed, owed_to
from mlx_flash.kv.views import (
    CacheViews,
    PutBack,
    SharedEntryError,
    can_be_viewed,
    checkpoint,
    is_empty,
    kept_bytes,
    trim_to,
)
from mlx_flash.layout.parts import body_of, head_of
from mlx_flash.layout.reachable import arrays_in
from mlx_flash.logs import log
from mlx_flash.memory.driver import has_own_memory
from mlx_flash.prefixes.prefixcache import KnownCall, PrefixCache, forget
from mlx_flash.ranks import is_elsewhere
from mlx_flash.residency.machine import Machine
from mlx_flash.residency.plan import PREFILL_STEPS, ResidencyPlan
from mlx_flash.speculation import Times
from mlx_flash.streaming.stream import CALL_ERRORS, Lockstep, Results

Outcome = list[Any] | Exception | None
"""Outputs of the calls of a lane, or why there are none; None if its calls need an order."""


class _Part:
    """The calls of a row in a pass, which share its prompt cache: how they end, and the way back."""

    def __init__(self, row: Row, calls: list[ForwardCall], known: KnownCall | None = None) -> None:
        self.row, self.calls, self.cache, self.known = row, calls, calls[0].cache or (), known
        self.undo, self.can_repeat = Undo(calls), False
        self.views: CacheViews | None = None
        self.computed = calls  # with views of the cache
        self.outcome: Outcome = None

    def view(self, is_proven: bool) -> None:
        """Let the calls run beside each other, in a model that is known to need no order or not."""
        if len(self.calls) > 1:
            lengths, checkpoints = [call.length for call in self.calls], self.calls[0].checkpoints
            self.can_repeat = checkpoints is not None or (not is_proven and is_empty(self.cache))
            observer = self.known if checkpoints is None else checkpoints
            self.views = CacheViews(self.cache, lengths, None if observer is None else observer.add)
            self.computed = [
                replace(call, arguments=(call.tokens,), keywords={"cache": view}, cache=view)
                for call, view in zip(self.calls, self.views.views, strict=True)
            ]

    def task(self, index: int, compute: Callable[[ForwardCall], Any]) -> Any:
        """Compute one call, and what it adds to the cache. An output that nobody wants would keep keys and values."""
        output = compute(self.computed[index])
        if not self.calls[index].wants_output:
            output = DroppedResult()
        mx.eval(arrays_in(output, [entry for entry in entries_of(self.cache) if not is_elsewhere(entry)]))
        return output

    def end(self, found: list[Any] | Exception) -> None:
        """Take the outputs of the calls, or why there are none; then the caller puts the cache back."""
        self.outcome = found
        if isinstance(found, SharedEntryError):
            found.__traceback__ = None  # its frames refer to the error, and to the calls with their logits
            self.outcome = None if self.can_repeat else _out_of_order(found)


_OUTCOMES: tuple[type, ...] = (list, SharedEntryError, Exception)
"""From good to bad."""


def _failed_on(rank: int, kind: type) -> Exception:
    if kind is SharedEntryError:
        return SharedEntryError()
    return PeerError(f"rank {rank} cannot compute a call that shares a pass with others. Hint: see what it prints.")


def _out_of_order(cause: SharedEntryError) -> StreamedWeightsError:
    error = StreamedWeightsError(
        "the parts of a prompt shared a pass, and one used the prompt cache out of order. "
        "Hint: start again with a new prompt cache."
    )
    error.__cause__ = cause
    return error


class Chosen(NamedTuple):
    """Calls that share the next pass."""

    lanes: dict[Row, Lane]
    layers_at_once: int | None = None  # as :func:`layers_at_once` returns it
    computes_ahead: bool = False  # as of :class:`WeightStream`


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


LONGEST_GAP_SECONDS = 60.0
"""A longer time between two calls is idle time, not the evaluation of what a call left lazy."""


@dataclass(slots=True)
class PassCounters:
    """Counters of a model's forward calls, as :mod:`mlx_flash.telemetry` describes them.

    The calling thread writes them, any thread may read them. Moments are of ``time.perf_counter()``. A gap is the time
    between a call that ended and the next one, in which MLX evaluates what the call left lazy. Idle time is not
    counted, and tokens of prompts that share a pass with generated ones count as neither.
    """

    num_passes: int = 0
    num_failed: int = 0
    num_tokens_in: int = 0
    num_tokens_out: int = 0
    num_prompt_tokens: int = 0
    num_sequences: int = 0
    pass_seconds: float = 0.0
    last_seconds: float = 0.0
    decode_seconds: float = 0.0
    prompt_gap_seconds: float = 0.0
    decode_gap_seconds: float = 0.0
    num_guessed: int = 0
    num_right: int = 0
    began: float | None = None
    last_began: float = 0.0
    last_ended: float = 0.0
    num_tokens: int = 0
    batch_size: int = 0
    num_decoding: int = 0

    def begin(self, num_tokens: int, batch_size: int, num_decoding: int) -> None:
        """Note the start of a pass: its new tokens over all sequences, these, and those of them with one new token."""
        now = time.perf_counter()
        gap = now - self.last_ended
        if self.num_passes and self.last_ended >= self.last_began and gap < LONGEST_GAP_SECONDS:
            if not self.num_decoding:
                self.prompt_gap_seconds += gap
                self.num_prompt_tokens += self.num_tokens
            elif num_tokens == batch_size:
                self.decode_gap_seconds += gap
        self.num_tokens, self.batch_size, self.num_decoding = num_tokens, batch_size, num_decoding
        self.began = self.last_began = now

    def end(self, *, failed: bool = False) -> None:
        """Note the end of the call; when it ``failed``, no tokens are counted. Harmless when none has begun."""
        if self.began is None:
            return
        now = time.perf_counter()
        seconds = now - self.began
        self.pass_seconds += seconds
        self.began = None
        if failed:
            self.num_failed += 1
            return
        Machine.has_run = True
        self.num_passes += 1
        self.num_tokens_in += self.num_tokens
        self.num_sequences += self.batch_size
        self.last_seconds = seconds
        if self.num_decoding:
            self.decode_seconds += seconds
            self.num_tokens_out += self.num_decoding
        self.last_ended = now

    def end_guess(self, num_guessed: int, num_right: int) -> None:
        """Count the tokens that were guessed in the last call, which counts as one token, and those that were right."""
        self.num_guessed += num_guessed
        self.num_right += num_right
        self.num_tokens_in += num_right
        self.num_tokens_out += num_right


class Passes:
    """The passes of a running model."""

    def __init__(self, model: Any, engine: Engine, counters: PassCounters, times: Times) -> None:
        self._model, self._body, self._times = model, body_of(model), times
        self._engine, self._chain, self._kv, self._counters = engine, engine.chain, engine.kv, counters
        self._lending: Lending | None = None  # None where the pass may not lend
        self._is_proven = self._needs_order = False
        self.is_in_memory = engine.chain is None and engine.is_resident
        self._told_steps: set[int] = set()
        self._all_have_room = nullcontext if engine.chain is None else engine.chain.all_have_room
        self._least: Callable[[int], int] = int if engine.chain is None else engine.chain.least
        # On CUDA, MLX lets go of results late. Experts and other ranks are waited for inside a layer.
        has_units = bool(engine.stream.units) and engine.experts is None
        self._may_be_ahead = has_units and engine.chain is None and not has_own_memory()

    def admit(self, call: ForwardCall) -> bool:
        """Let a call of a model in memory begin as it is, if there is room for it. Return whether it may.

        Not a call with something to look up or to undo, with more tokens than the plan's step, or whose layers a GPU
        has to be waited for.
        """
        if self._engine.prefixes is not None or not call.is_plain or call.length > self._engine.plan.prefill_step_size:
            return False
        if owed_to(call.cache):
            return False
        needed, num_layers = need(self._engine.plan, [Lane(call)]), len(self._engine.pinned.modules)
        if num_layers and layers_at_once(needed, num_layers) is not None:
            return False
        return admit_in_memory(needed)

    def advance(self, rows: Sequence[Row], *, lends: bool) -> None:
        """Compute at least a part of each row, in as few passes as memory allows, rows with few parts first.

        What fails in one row is noted there. ``lends`` says that reserved memory may be lent.

        Raises: ReadError: weights could not be read, and no row went on.
        """
        self._lending = self._engine.lending if lends else None
        lifted = list[Owed]()
        try:
            for row in rows:
                row.error = row.error or _unpaid(row)
                lifted += [row.owed] if row.owed is not None and row.error is None else []
            waiting = sorted([row for row in rows if not row.is_done], key=lambda row: len(row.left))
            while waiting := self._without_cached(waiting):
                enginethread.check()
                lanes, at_once, is_ahead = self.choose(waiting)
                if self._engine.prefixes is not None and not all(row.was_sought for row in lanes):
                    continue  # parts were cut, and may be cached as they are now
                if lanes:
                    self._engine.pinned.compute_at_once(at_once)
                    self._engine.stream.computes_ahead = is_ahead
                    self._run(lanes)
                    self._engine.stream.computes_ahead = False  # a program may call single layers
                    if self.is_in_memory:
                        self._engine.pinned.compute_at_once(None)  # tokens are mlx-lm's own calls
                waiting = waiting[max(1, len(lanes)) :]
                for row in waiting:
                    row.was_sought = False  # this pass may have computed the prefix
        finally:
            for each in lifted:
                if each.debt is not None:  # its token was not computed, or guesses were
                    each.put()

    def choose(self, rows: Sequence[Row]) -> Chosen:
        """Return as many of the rows as memory allows, each with the parts that share the next pass.

        Each row computes its next part. If all of them do not fit the budget, half of the rows wait; if one alone does
        not fit, its parts get smaller, or it gets the error, and nothing is returned. What is left goes to more parts
        of the same prompts, which take memory while they wait. Keys and values that do not fit go to disk in the pass
        that parts share: a pass over the weights costs more. All ranks choose the same.
        """
        plan, lending = self._engine.plan, self._lending
        num_rows, step, is_collected = len(rows) if self.can_share else 1, 0, False
        while True:
            chosen, can_cut = rows[:num_rows], False
            try:
                with self._all_have_room():
                    for row in chosen:
                        if not row.num_done and len(row.left) > 1 and row.left[0].checkpoints is None:
                            check_least(plan, Lane(row.whole, num_kept=row.num_joined), lending)
                can_cut = rows[0].length > 1
                found = self._with_room(chosen, can_cut and all(row.length > PREFILL_STEPS[-1] for row in chosen))
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

    def _with_room(self, rows: Sequence[Row], may_shrink: bool) -> Chosen:
        """Make room for the next part of each row, and for as many more as there is room for on every rank."""
        more = [row for row in rows for _ in range(self._num_more(row))]  # the rows of parts after these, in order
        fitting, offloads = list[int](), False  # bytes of one, two and more parts while they wait
        if more:
            with self._all_have_room():
                fitting = self._fitting(rows, more, offloads=False)
                if len(fitting) < len(more) and self._offloads(rows):
                    others = self._fitting(rows, more, offloads=True)
                    if len(others) > len(fitting):
                        fitting, offloads = others, True
        number = self._least(len(fitting)) if more else 0
        while True:
            try:
                with self._all_have_room():
                    found = self._need(rows, more[:number], fitting[number - 1] if number else 0)
                    is_ahead = self._may_be_ahead and not more and found.begin_ahead(self._lent)
                    found = make_room(found, self._lending, may_shrink=may_shrink or number > 0, offloads=offloads)
            except BudgetError:
                if not number:
                    raise
                number, offloads = number // 2, offloads and number > 1
                continue
            num_layers = len(self._engine.pinned.modules)
            at_once = layers_at_once(found, num_layers, len(rows) + number) if num_layers else None
            return Chosen(dict(zip(rows, found.lanes, strict=True)), at_once, is_ahead)

    def _need(self, rows: Sequence[Row], more: Sequence[Row] = (), waiting: int = 0) -> Need:
        """Return what a pass with the next part of each row needs, and more parts of some, which wait."""
        counts = Counter(more)
        return need(self._engine.plan, [row.lane(1 + counts[row]) for row in rows], waiting)

    @property
    def _lent(self) -> int:
        """Bytes that weights have beyond the plan."""
        return 0 if self._lending is None else max(0, self._lending.nbytes)

    def _fitting(self, rows: Sequence[Row], more: Sequence[Row], *, offloads: bool) -> list[int]:
        """Return the bytes of one, two and more parts while they wait, as many as there is room for.

        Layers are where they are, or on disk. Raises: WriteError: they would have to go there, which has no room.
        """
        counts, room = Counter(more), self._lent - self._need(rows).missing
        parts = [row.lane(1 + counts[row]).calls for row in rows]
        waiting = waiting_bytes(self._engine.plan, parts, room, on_disk=offloads)

        def is_too_much(number: int) -> bool:
            return not self._need(rows, more[:number], waiting[number - 1]).fits(self._lent, offloads=offloads)

        return waiting[: bisect_left(range(1, len(waiting) + 1), True, key=is_too_much)]

    def _num_more(self, row: Row) -> int:
        """Return how many parts of a row may share a pass with the first one that is left."""
        first, num_others = row.left[0], len(row.left) - 1
        if not num_others or first.cache is None:
            return 0
        is_guessed = first.checkpoints is not None  # such tokens can be taken back
        can_share = self.refusal(first.cache) is None if is_guessed else self.fits(first.cache)
        return num_others if can_share else 0

    def _offloads(self, rows: Sequence[Row]) -> bool:
        """Return whether keys and values of the tokens that are left go to disk sooner or later."""
        if self._chain is not None or not self._engine.plan.ledger.shares_on_disk:
            return False
        whole = need(self._engine.plan, [row.lane(len(row.left)) for row in rows])
        return whole.goes_to_disk(0 if self._lending is None else self._lending.recallable)

    def _tell_step(self, row: Row, step: int) -> None:
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

    @property
    def can_share(self) -> bool:
        """True if calls gain by sharing a pass. Of several ranks another one may read, and all do the same."""
        engine = self._engine
        return bool(engine.stream.units) or engine.experts is not None or self._chain is not None

    def fits(self, cache: Sequence[Any]) -> bool:
        """Return whether several calls with one prompt cache can share a pass."""
        return self._refusal(cache) is None and (self._is_proven or is_empty(cache))

    def refusal(self, cache: Sequence[Any]) -> str | None:
        """Return the reason why guessed tokens cannot be computed with a prompt cache; None if they can."""
        if self._chain is not None:
            return "how many are guessed depends on measured times, which differ between ranks"
        if any(isinstance(entry, OnDisk) for entry in cache):
            return "keys and values are on disk"
        return self._refusal(cache)

    def _refusal(self, cache: Sequence[Any]) -> str | None:
        if not self.can_share:
            return "all weights are in memory" if self._engine.experts is None else "experts are traced call by call"
        if self._needs_order:
            return "layers of the model share entries of the prompt cache"
        if not can_be_viewed(cache):
            return "the model has a prompt cache of its own kind"
        return None

    def run(self, parts: Sequence[_Part], progress: Callable[[float], None]) -> None:
        """Run calls in lockstep, with the output of the calls one after another, bit for bit.

        What fails in one part leaves the others alone. A model may use an entry of the cache again in a later layer:
        the calls of its prompts must run in order. The first prompt of a model starts with an empty cache, so that it
        can be undone. Until one has succeeded, prompts that start with a filled cache run in order.

        Raises: ReadError: weights could not be read. The caller puts the caches back.
        """
        with self._messages(parts):
            for part in parts:
                part.view(self._is_proven)
            places = [(part, index) for part in parts for index in range(len(part.calls))]
            num_layers = 0 if self._engine.experts is None else len(self._engine.experts.stacks)
            num_runs = len(places) * (1 + len(self._engine.stream.units) + num_layers)  # from place to place

            def before(number: int) -> None:
                part, index = places[number]
                self.drop_logits(not part.calls[index].wants_logits)

            def after(number: int) -> None:
                part, index = places[number]
                if part.views is not None:
                    part.views.after(index)

            lockstep = Lockstep(
                self._engine.stream,
                before,
                after,
                progress=lambda done: progress(min(1.0, done / num_runs)),
                agree=self._agree,
                num_groups=1 if self._chain is None else min(self._chain.peers.size, len(parts)),
            )
            found = lockstep.run(
                [[partial(part.task, index, self._compute) for index in range(len(part.calls))] for part in parts]
            )
        for part, each in zip(parts, found, strict=True):
            part.end(each)
            self._is_proven |= part.views is not None and isinstance(part.outcome, list)
            self._needs_order |= part.outcome is None

    def _messages(self, parts: Sequence[_Part]) -> AbstractContextManager[object]:
        """Return what exchanges the messages of a pass, where there are several ranks."""
        if self._chain is None:
            return nullcontext()
        tokens = [call.tokens for part in parts for call in part.calls]
        stream: Any = self._engine.stream  # which lockstep gives a way to wait once it has begun
        return self._chain.calls(tokens, [part.calls[0].cache for part in parts], lambda place: stream.wait_turn(place))

    def _agree(self, results: Results) -> Results:
        """Let a lane that has failed on one rank fail on all, since the others would wait for its messages."""
        if self._chain is None:
            return results
        own = [next(i for i, kind in enumerate(_OUTCOMES) if isinstance(result, kind)) for result in results]
        return [
            result if mine == worst else _failed_on(rank, _OUTCOMES[worst])
            for result, mine, (worst, rank) in zip(results, own, self._chain.worst(own), strict=True)
        ]

    def _run(self, lanes: Mapping[Row, Lane]) -> None:
        parts = [_Part(row, lane.calls) for row, lane in lanes.items()]
        with self._undoing(parts):
            for part in parts:
                part.known = self._known(part.calls)
            calls = [part.calls for part in parts]
            if sum(map(len, calls)) > 1 or self._may_be_left(parts[0]):
                num_tokens = sum(call.num_tokens for call in calls[0])
                tell = partial(parts[0].row.tell, num_tokens) if len(parts) == 1 else lambda share: None
                self._counted(calls, partial(self.run, parts, tell))
            for i, part in enumerate(parts):
                if part.outcome is None:  # one call, or the first of some that need an order
                    if len(part.calls) > 1:
                        part.undo()
                        part = parts[i] = _Part(part.row, part.calls[:1], self._known(part.calls[:1]))
                    part.outcome = self._alone(part.calls[0])
                part.outcome = self._kept(part.known, part.outcome)
                if isinstance(part.outcome, Exception):
                    part.undo()
            if self._kv is not None:
                self._kv.note()  # not before a GPU has something to compute
        for part in parts:  # the pass is done, and nothing of it is undone any more
            assert part.outcome is not None
            part.row.finish(part.calls, part.outcome)
        for part in parts:
            if part.row.error is None:
                part.row.tell(0)

    def _may_be_left(self, part: _Part) -> bool:
        """Return whether a call alone takes so long that its caller may leave, which lockstep notices at each unit."""
        is_long = part.row.report is not None and part.calls[0].num_tokens > PREFILL_STEPS[-1]
        return is_long and self.can_share and self._chain is None

    @contextmanager
    def _undoing(self, parts: Sequence[_Part]) -> Iterator[None]:
        """Put caches back after an exception. Where that cannot be, an interrupt does not end the pass."""
        try:
            with nullcontext() if all(part.undo.is_possible for part in parts) else enginethread.whole():
                yield
        except BaseException:
            for part in parts:
                part.undo()
            self._engine.recover()
            raise

    def _alone(self, call: ForwardCall) -> list[Any] | Exception:
        """Return the output of a call in a pass of its own, or why there is none."""

        def compute() -> Any:
            output = self._compute(call, is_pass=True)
            mx.eval(arrays_in(call.cache, output if call.wants_output else None))
            return output

        self.drop_logits(not call.wants_logits)
        try:
            return [self._counted([[call]], compute)]
        except CALL_ERRORS as error:
            return error

    def drop_logits(self, is_dropped: bool) -> None:
        """Set whether the logits of the next calls are dropped. Streamed heads are not read then."""
        for head in self._engine.heads:
            head.is_dropped = is_dropped

    def _known(self, calls: Sequence[ForwardCall]) -> KnownCall | None:
        """Plan what the prefix cache keeps of calls that share a prompt cache and a pass. Return them as it does."""
        prefixes, cache = self._engine.prefixes, calls[0].cache
        if prefixes is None or cache is None:
            return None
        tokens = [call.tokens for call in calls if call.tokens is not None and call.is_plain]
        if len(tokens) < len(calls):
            forget(cache)
            return None
        num_prompts = len([*takewhile(lambda call: not call.wants_output, calls)])
        return prefixes.begin(tokens, cache, num_prompts, [call.segment_left for call in calls])

    def _kept(self, known: KnownCall | None, outcome: list[Any] | Exception) -> list[Any] | Exception:
        """Keep calls that were computed. Return their outcome, or the error."""
        if isinstance(outcome, Exception):
            return explained(outcome)
        try:
            if self._engine.prefixes is not None and known is not None:
                self._engine.prefixes.end(known)
        except CALL_ERRORS as error:
            return explained(error)
        return outcome

    def _without_cached(self, rows: Sequence[Row]) -> list[Row]:
        """Take from disk what is cached of some rows. Return those with parts that are left."""
        if (prefixes := self._engine.prefixes) is not None:
            for row in rows:
                self._take_cached(prefixes, row)
        return [row for row in rows if not row.is_done]

    def _take_cached(self, prefixes: PrefixCache, row: Row) -> None:
        """Take the longest cached prefix of a prompt from disk, in one go, before its parts are computed."""
        if row.was_sought:
            return
        row.was_sought = True
        parts = [*takewhile(lambda part: not part.wants_output and part.is_plain, row.left)]
        tokens, cache = [part.tokens for part in parts if part.tokens is not None], row.whole.cache
        if not tokens or cache is None:
            return
        if (cached := prefixes.look(tokens, cache, [part.segment_left for part in parts])) is None:
            return
        call = row.left[0].with_tokens(cached.tokens[:, : cached.num_restored])
        try:
            make_room(need(self._engine.plan, [Lane(call, step=1)]), self._lending)
        except FlashError:
            return  # the parts of the prompt say what is wrong, if they have no room either
        part = _Part(row, [call])
        with self._undoing([part]):
            try:
                row.skip(prefixes.restore(cached))
            except CALL_ERRORS as error:
                part.undo()
                row.error = explained(error)
        row.tell(0)

    def _compute(self, call: ForwardCall, *, is_pass: bool = False) -> Any:
        """Call the model; in a chain of ranks, with the messages of a pass if the call is one."""
        if (chain := self._chain) is None:
            reads = call.reader is not None and self._engine.has_own_head
            run = partial(self._read, call) if reads else self._model
            output = (call.runs or run)(*call.arguments, **call.keywords)
            self._engine.stream.release_computed()
            return output
        with ExitStack() as stack:
            if is_pass:
                stack.enter_context(chain.calls([call.tokens], [call.cache]))
            stack.enter_context(chain.computing(call.cache))
            return self._model(*call.arguments, **call.keywords)

    def _read(self, call: ForwardCall, *args: Any, **kwargs: Any) -> Any:
        """Call the model in two halves, between which the source of guesses reads the hidden states."""
        assert self._body is not None and call.reader is not None and call.tokens is not None
        states = cast(Any, self._body)(*args, **kwargs)
        call.reader.read(call.tokens, states)
        return head_of(self._model, self._body)(states) if call.wants_logits else DroppedResult()

    def _counted(self, lanes: Sequence[Sequence[ForwardCall]], run: Callable[[], Any]) -> Any:
        """Compute some calls in one pass, and count it. One that computes tokens alone is measured."""
        num_tokens = num_sequences = num_decoding = 0
        for calls in lanes:
            certain = calls if calls[0].checkpoints is None else calls[:1]
            size = sum([call.num_tokens for call in certain if call.runs is None or call.cache is not None])
            batch_size = calls[0].batch_size
            num_tokens += size
            num_sequences += batch_size
            num_decoding += batch_size if size == batch_size else 0
        stats, reader = self._engine.stream.stats, self._engine.reader
        waited, busy = stats.wait_seconds, reader.busy_seconds
        self._counters.begin(num_tokens, num_sequences, num_decoding)
        try:
            output = run()
        except BaseException:
            self._counters.end(failed=True)
            self._engine.recover()
            raise
        self._counters.end()
        if num_decoding == num_sequences == len(lanes):
            rows, seconds = sum(map(len, lanes)), self._counters.last_seconds
            self._times.note(rows, seconds, stats.wait_seconds - waited, reader.busy_seconds - busy)
        return output


def _unpaid(row: Row) -> FlashError | None:
    """Make a prompt cache hold what it says, but for what the row makes up for. Return why it does not."""
    try:
        for owed in owed_to(row.whole.cache):
            if owed is not row.owed:
                owed.settle()
        if row.owed is not None:
            row.owed.lift()
    except FlashError as error:
        return error
    return None


class Undo:
    """The way back of a prompt cache to what it is before some calls of a pass. It may be taken several times.

    A cache whose layers replace what they hold cannot be put back: ``is_possible`` is False, and it refuses every use
    then.
    """

    def __init__(self, calls: Sequence[ForwardCall]) -> None:
        cache, checkpoints, self.is_possible = calls[0].cache or (), calls[0].checkpoints, True
        reader = calls[0].reader
        self._steps: list[PutBack]
        if len(calls) > 1 and checkpoints is not None:
            self._steps = [partial(checkpoints.take_back, 0)]
        elif (offsets := trimmable(cache)) is not None:
            self._steps = [partial(_trim, cache, offsets)]
        elif can_be_viewed(cache) and is_empty(cache):
            self._steps = [checkpoint(entry) for entry in entries_of(cache)]
        else:
            self._steps, self.is_possible = [partial(break_cache, cache)], False
        self._steps += [] if reader is None else [reader.restart]

    def __call__(self) -> None:
        for step in self._steps:
            step()


def _trim(cache: Sequence[Any], offsets: Sequence[int]) -> None:
    with suppress(FlashError, OSError):  # tokens on disk, which may be full or gone, cannot be read
        for entry, offset in zip(cache, offsets, strict=True):
            trim_to(entry, offset)
    if [entry.offset for entry in cache] != offsets:
        break_cache(cache)


def break_cache(cache: Sequence[Any]) -> None:
    """Make a prompt cache refuse every use: some of its layers have tokens that others do not have."""
    kinds = sorted({type(entry).__name__ for entry in entries_of(cache)})

    def refuse() -> None:
        raise CacheError(
            "a call with this prompt cache was interrupted or failed before all layers had its tokens, and what was "
            f"dropped from its {', '.join(kinds)} cannot be put back. Hint: start again with a fresh prompt cache."
        )

    Owed(cache).owe(Debt(0, refuse))

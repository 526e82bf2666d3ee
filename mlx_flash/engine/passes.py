"""Passes over the weights: the calls of each are computed and counted, and undone after an exception."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import takewhile
from typing import Any, cast

import mlx.core as mx

from mlx_flash import enginethread
from mlx_flash.compat.arrays import explained
from mlx_flash.compat.caches import entries_of
from mlx_flash.engine.call import ForwardCall, Lane, Row, teller
from mlx_flash.engine.dropped import DroppedResult
from mlx_flash.engine.group import CallGroup, Outcome
from mlx_flash.engine.lending import Lending
from mlx_flash.engine.need import admit_in_memory, layers_at_once, make_room, need
from mlx_flash.engine.session import Session
from mlx_flash.engine.sharing import Sharing
from mlx_flash.engine.status import PassCounters
from mlx_flash.errors import CacheError, FlashError
from mlx_flash.kv.checkpoints import PutBack, checkpoint, is_empty, trim_all_to, trimmable
from mlx_flash.kv.diskcache import PooledCache, arrays_of
from mlx_flash.kv.kvpool import CacheGroup, KVPool
from mlx_flash.kv.owed import Debt, Owed, owed_to
from mlx_flash.kv.views import can_be_viewed
from mlx_flash.layout.parts import body_of, head_of
from mlx_flash.layout.reachable import arrays_in
from mlx_flash.prefixes.call import KnownCall
from mlx_flash.prefixes.leaves import forget
from mlx_flash.prefixes.prefixcache import PrefixCache
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.streaming.lockstep import CALL_ERRORS


class Passes:
    """The passes of a running model.

    Args:
        model: mlx-lm's model.
        session: its weights, and what counts beside them.
        kv: what its KV caches share; None where they are mlx-lm's own.
        counters: of its calls.

    Attributes:
        group, sharing: the calls that share a pass, and their choice.
        is_in_memory: True if nothing is streamed: a token that needs no more memory is a call of mlx-lm's own.
    """

    def __init__(self, model: Any, session: Session, kv: KVPool | None, counters: PassCounters) -> None:
        self.group = CallGroup(session.engine, session.chain)
        self.sharing = Sharing(session, self.group)
        self._model = model
        self._body = body_of(model)
        self._session = session
        self._kv = kv
        self._counters = counters
        self.is_in_memory = session.chain is None and session.engine.is_resident

    def admit(self, plan: ResidencyPlan, call: ForwardCall) -> bool:
        """Let a call of a model in memory begin as it is, if there is room for it. Return whether it may.

        Not a call with something to look up or to undo, with more tokens than the plan's step, or whose layers a GPU
        has to be waited for.
        """
        if self._session.prefixes is not None or not call.is_plain or call.length > plan.prefill_step_size:
            return False
        if owed_to(call.cache):
            return False
        needed, num_layers = need(plan, [Lane(call)]), len(self._session.engine.pinned.modules)
        if num_layers and layers_at_once(needed, num_layers) is not None:
            return False
        return admit_in_memory(needed)

    def advance(self, plan: ResidencyPlan, rows: Sequence[Row], *, lends: Callable[[], bool]) -> None:
        """Compute at least a part of each row, in as few passes as memory allows.

        Rows with few parts go first. What fails in one row is noted there.

        Args:
            plan: the plan of the model.
            rows: the rows.
            lends: returns whether reserved memory may be lent.

        Raises:
            ReadError: weights could not be read, and no row went on.
            PeerError: the ranks were called differently, or one was lost.
        """
        lending = self._session.engine.lending if lends() else None
        lifted = list[Owed]()
        try:
            for row in rows:
                row.error = row.error or _unpaid(row)
                lifted += [row.owed] if row.owed is not None and row.error is None else []
            waiting = sorted([row for row in rows if not row.is_done], key=lambda row: len(row.left))
            if self._kv is not None:  # parked between two tokens, a row would be copied for each of them
                self._kv.in_turns = _groups_of(waiting) if self.is_in_memory and len(waiting) > 1 else frozenset()
            while waiting := self._without_cached(plan, waiting, lending):
                enginethread.check()
                lanes, at_once, is_ahead = self.sharing.choose(plan, waiting, lending)
                if self._session.prefixes is not None and not all(row.was_sought for row in lanes):
                    continue  # parts were cut, and may be cached as they are now
                if lanes:
                    self._session.engine.pinned.compute_at_once(at_once)
                    self._session.engine.stream.computes_ahead = is_ahead
                    self._run(lanes)
                    self._session.engine.stream.computes_ahead = False  # a program may call single layers
                    if self.is_in_memory:
                        self._session.engine.pinned.compute_at_once(None)  # tokens are mlx-lm's own calls
                waiting = waiting[max(1, len(lanes)) :]
                for row in waiting:
                    row.was_sought = False  # this pass may have computed the prefix
        finally:
            for each in lifted:
                if each.debt is not None:  # its token was not computed, or guesses were
                    each.put()

    def _run(self, lanes: Mapping[Row, Lane]) -> None:
        """Compute parts of some rows in a pass."""
        calls = [lane.calls for lane in lanes.values()]
        undo = {row: Undo(lane.calls) for row, lane in lanes.items()}
        with self._undoing(undo):
            outcomes: list[Outcome] = [None]
            known = {row: self._known(lane.calls) for row, lane in lanes.items()}
            if sum(map(len, calls)) > 1:
                compute = partial(self._compute, is_pass=False)
                run = partial(self.group.run, calls, compute, [*known.values()], teller(lanes))
                outcomes = self._counted(calls, run)
            ended = dict[Row, list[Any] | Exception]()
            for (row, lane), outcome in zip(lanes.items(), outcomes, strict=True):
                if outcome is None:  # one call, or the first of some that need an order
                    if len(lane.calls) > 1:
                        undo[row]()
                        del lane.calls[1:]
                        undo[row], known[row] = Undo(lane.calls), self._known(lane.calls)
                    outcome = self._alone(lane.calls[0])
                ended[row] = self._kept(known[row], outcome)
                if isinstance(ended[row], Exception):
                    undo[row]()
            if self._kv is not None:
                self._kv.note()  # not before a GPU has something to compute
        for row, lane in lanes.items():  # the pass is done, and nothing of it is undone any more
            row.finish(lane.calls, ended[row])
        for row in [row for row in lanes if row.error is None]:
            row.tell(0)

    @contextmanager
    def _undoing(self, undo: Mapping[Row, Undo]) -> Iterator[None]:
        """Put caches back after an exception. Where that cannot be, an interrupt does not end the pass."""
        try:
            with nullcontext() if all(each.is_possible for each in undo.values()) else enginethread.whole():
                yield
        except BaseException:
            for each in undo.values():
                each()
            self._session.engine.recover()
            raise

    def _alone(self, call: ForwardCall) -> list[Any] | Exception:
        """Return the output of a call in a pass of its own, or why there is none."""
        self._session.engine.drop_logits(not call.wants_logits)
        try:
            output = self._counted([[call]], partial(self._compute, call, is_pass=True))
            mx.eval(arrays_of(call.cache or ()), arrays_in(output) if call.wants_output else ())
        except CALL_ERRORS as error:
            return error
        return [output]

    def _known(self, calls: Sequence[ForwardCall]) -> KnownCall | None:
        """Plan what the prefix cache keeps of calls that share a prompt cache and a pass. Return them as it does."""
        prefixes, cache = self._session.prefixes, calls[0].cache
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
            if self._session.prefixes is not None and known is not None:
                self._session.prefixes.end(known)
        except CALL_ERRORS as error:
            return explained(error)
        return outcome

    def _without_cached(self, plan: ResidencyPlan, rows: Sequence[Row], lending: Lending | None) -> list[Row]:
        """Take from disk what is cached of some rows. Return those with parts that are left."""
        if (prefixes := self._session.prefixes) is not None:
            for row in rows:
                self._take_cached(prefixes, plan, row, lending)
        return [row for row in rows if not row.is_done]

    def _take_cached(self, prefixes: PrefixCache, plan: ResidencyPlan, row: Row, lending: Lending | None) -> None:
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
            make_room(need(plan, [Lane(call, step=1)]), lending)
        except FlashError:
            return  # the parts of the prompt say what is wrong, if they have no room either
        undo = Undo([call])
        with self._undoing({row: undo}):
            try:
                row.skip(prefixes.restore(cached))
            except CALL_ERRORS as error:
                undo()
                row.error = explained(error)
        row.tell(0)

    def _compute(self, call: ForwardCall, *, is_pass: bool) -> Any:
        """Call the model; in a chain of ranks, with the messages of a pass if the call is one."""
        if (chain := self._session.chain) is None:
            reads = call.reader is not None and self._session.engine.has_own_head
            run = partial(self._read, call) if reads else self._model
            output = (call.runs or run)(*call.arguments, **call.keywords)
            self._session.engine.stream.release_computed()
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
        """Compute some calls in one pass, and count it."""
        num_tokens = num_sequences = num_decoding = 0
        for calls in lanes:
            certain = calls if calls[0].checkpoints is None else calls[:1]
            size = sum([call.num_tokens for call in certain if not call.is_head])
            batch_size = calls[0].batch_size
            num_tokens += size
            num_sequences += batch_size
            num_decoding += batch_size if size == batch_size else 0
        self._counters.begin(num_tokens, num_sequences, num_decoding)
        try:
            output = run()
        except BaseException:
            self._counters.end(failed=True)
            self._session.engine.recover()
            raise
        self._counters.end()
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


def _groups_of(rows: Iterable[Row]) -> frozenset[CacheGroup]:
    """Return the lists of caches of rows that the pool has."""
    pooled = [next((each for each in row.whole.cache or () if isinstance(each, PooledCache)), None) for row in rows]
    return frozenset(each.rows.group for each in pooled if each is not None)


class Undo:
    """The way back of a prompt cache to what it is before some calls of a pass. It may be taken several times.

    A pass changes a cache layer by layer. One whose layers replace what they hold cannot be put back.

    Attributes:
        is_possible: False if there is none. The cache refuses every use then.
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
        """Put the cache back."""
        for step in self._steps:
            step()


def _trim(cache: Sequence[Any], offsets: Sequence[int]) -> None:
    with suppress(FlashError, OSError):  # tokens on disk, which may be full or gone, cannot be read
        trim_all_to(cache, offsets)
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

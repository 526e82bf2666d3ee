"""Calls of a model that share a pass over the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_flash.compat.caches import entries_of
from mlx_flash.engine.call import ForwardCall
from mlx_flash.engine.dropped import DroppedResult
from mlx_flash.engine.engine import Engine
from mlx_flash.errors import PeerError, StreamedWeightsError
from mlx_flash.kv.checkpoints import is_empty
from mlx_flash.kv.diskcache import PooledCache
from mlx_flash.kv.views import CacheViews, Observer, SharedEntryError, can_be_viewed
from mlx_flash.layout.reachable import arrays_in
from mlx_flash.ranks import Chain, is_elsewhere
from mlx_flash.streaming.lockstep import Lockstep, Results
from mlx_flash.streaming.stream import Place

Compute = Callable[[ForwardCall], Any]
Outcome = list[Any] | Exception | None
"""Outputs of the calls of a lane, or why there are none; None if its calls need an order."""


class _LaneRun:
    """Calls that share one prompt cache.

    Args:
        calls: the calls, in order.
        is_proven: whether the model is known to need no order.
        observer: gets the entries of the cache between the calls.

    Attributes:
        can_repeat: whether the cache can be put back after calls that were in no order.
    """

    def __init__(self, calls: Sequence[ForwardCall], is_proven: bool, observer: Observer | None) -> None:
        self.cache = calls[0].cache or ()
        self.can_repeat = False
        self.views = None
        self.calls = list(calls)
        if len(calls) > 1:
            lengths, checkpoints = [call.length for call in calls], calls[0].checkpoints
            self.can_repeat = checkpoints is not None or (not is_proven and is_empty(self.cache))
            self.views = CacheViews(self.cache, lengths, observer if checkpoints is None else checkpoints)
            self.calls = [_with_cache(call, view) for call, view in zip(calls, self.views.views, strict=True)]

    def task(self, index: int, compute: Compute) -> Any:
        """Compute one call, and what it adds to the cache. An output that nobody wants would keep keys and values."""
        output = compute(self.calls[index])
        if not self.calls[index].wants_output:
            output = DroppedResult()
        mx.eval(arrays_in(output, [entry for entry in entries_of(self.cache) if not is_elsewhere(entry)]))
        return output

    def outcome(self, found: list[Any] | Exception) -> Outcome:
        """Return the outcome of the calls. If it is not their outputs, the caller puts the cache back."""
        if isinstance(found, SharedEntryError):
            found.__traceback__ = None  # its frames refer to the error, and to the calls with their logits
            return None if self.can_repeat else _out_of_order(found)
        return found


class CallGroup:
    """Run calls in lockstep: the output is that of the calls one after another, bit for bit.

    A model may use an entry of the cache again in a later layer. The parts of its prompts must run in order. The first
    prompt of a model starts with an empty cache, so that it can be undone. Until one has succeeded, prompts that start
    with a filled cache run in order.

    Args:
        engine: the weights of the model.
        chain: what each rank computes; None where there is one rank.
    """

    def __init__(self, engine: Engine, chain: Chain | None = None) -> None:
        self._engine = engine
        self._chain = chain
        self._is_proven = False
        self._needs_order = False

    @property
    def can_share(self) -> bool:
        """True if calls gain by sharing a pass, and nobody counts passes of single calls."""
        experts = self._engine.experts
        if experts is None:  # other ranks may read, and all do the same
            return bool(self._engine.stream.units) or self._chain is not None
        return not experts.listeners

    def fits(self, cache: Sequence[Any]) -> bool:
        """Return whether several calls with one prompt cache can share a pass."""
        return self._refusal(cache) is None and (self._is_proven or is_empty(cache))

    def refusal(self, cache: Sequence[Any]) -> str | None:
        """Return the reason why calls with one prompt cache cannot share a pass if they can be taken back; or None."""
        if any(isinstance(entry, PooledCache) and entry.rows.disk is not None for entry in cache):
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

    def run(
        self,
        lanes: Sequence[Sequence[ForwardCall]],
        compute: Compute,
        observers: Sequence[Observer | None],
        progress: Callable[[float], None],
    ) -> list[Outcome]:
        """Return the outcome of each lane: calls that share a prompt cache. What fails in one leaves the others alone.

        Args:
            lanes: the calls.
            compute: computes a call.
            observers: for each lane, what gets its cache between the calls.
            progress: told the share of the pass that is done.

        Raises:
            ReadError: weights could not be read. The caller puts the caches back.
            PeerError: the ranks were called differently, or one was lost.
        """
        with self._messages(lanes):
            made = [_LaneRun(calls, self._is_proven, each) for calls, each in zip(lanes, observers, strict=True)]
            places = [(lane, index) for lane in made for index in range(len(lane.calls))]
            num_units = max(1, len(self._engine.stream.units))
            lockstep = Lockstep(
                self._engine.stream,
                before=lambda number: self._before(*places[number]),
                after=lambda number: _after(*places[number]),
                progress=lambda done: progress(min(1.0, done / num_units)),
                agree=self._agree,
                num_groups=1 if self._chain is None else min(self._chain.peers.size, len(made)),
            )
            found = lockstep.run(
                [[partial(lane.task, index, compute) for index in range(len(lane.calls))] for lane in made]
            )
        outcomes = [lane.outcome(each) for lane, each in zip(made, found, strict=True)]
        for lane, outcome in zip(made, outcomes, strict=True):
            self._is_proven |= lane.views is not None and isinstance(outcome, list)
            self._needs_order |= outcome is None
        return outcomes

    def _messages(self, lanes: Sequence[Sequence[ForwardCall]]) -> AbstractContextManager[object]:
        """Return what exchanges the messages of a pass, where there are several ranks."""
        if self._chain is None:
            return nullcontext()
        tokens = [call.tokens for calls in lanes for call in calls]
        return self._chain.calls(tokens, [calls[0].cache for calls in lanes], self._wait_turn)

    def _wait_turn(self, place: Place) -> None:
        wait_turn = self._engine.stream.wait_turn
        assert wait_turn is not None
        wait_turn(place)

    def _agree(self, results: Results) -> Results:
        """Let a lane that has failed on one rank fail on all, since the others would wait for its messages."""
        if self._chain is None:
            return results
        own = [next(i for i, kind in enumerate(_OUTCOMES) if isinstance(result, kind)) for result in results]
        return [
            result if mine == worst else _failed_on(rank, _OUTCOMES[worst])
            for result, mine, (worst, rank) in zip(results, own, self._chain.worst(own), strict=True)
        ]

    def _before(self, lane: _LaneRun, index: int) -> None:
        self._engine.drop_logits(not lane.calls[index].wants_logits)


_OUTCOMES: tuple[type, ...] = (list, SharedEntryError, Exception)
"""From good to bad."""


def _failed_on(rank: int, kind: type) -> Exception:
    if kind is SharedEntryError:
        return SharedEntryError()
    return PeerError(f"rank {rank} cannot compute a call that shares a pass with others. Hint: see what it prints.")


def _after(lane: _LaneRun, index: int) -> None:
    if lane.views is not None:
        lane.views.after(index)


def _with_cache(call: ForwardCall, cache: list[Any]) -> ForwardCall:
    return replace(call, arguments=(call.tokens,), keywords={"cache": cache}, cache=cache)


def _out_of_order(cause: SharedEntryError) -> StreamedWeightsError:
    error = StreamedWeightsError(
        "the parts of a prompt shared a pass, and one used the prompt cache out of order. "
        "Hint: start again with a new prompt cache."
    )
    error.__cause__ = cause
    return error

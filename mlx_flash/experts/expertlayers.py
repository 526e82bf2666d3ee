"""Layers of experts that compute only with the experts that a token is routed to.

A call evaluates its indices, asks the pool for the experts and computes with the rows of the pool's slots: the module's
own code, on arrays that have a slot where it expects an expert. The next layer's router is asked which experts it would
choose now, and they are read early. Where rows may be computed one by one, experts in memory compute while others are
read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import itemgetter
from typing import Any, cast

import mlx.core as mx
import numpy as np

from mlx_flash import enginethread
from mlx_flash.compat.expertstacks import SORTED_SIZE, answered_by
from mlx_flash.experts.pool import ABSENT, ExpertPool, Numbers, Slots
from mlx_flash.experts.pooledstacks import PooledStacks, Routing, Stage, join_rows
from mlx_flash.layout.parts import ExpertStack
from mlx_flash.layout.swap import SwappedClass, own_class, swap_class
from mlx_flash.layout.trace import scores_of
from mlx_flash.memory.arena import StackArena
from mlx_flash.streaming.stream import GuessEndedError, WeightStream, hand_in

POOL_SHARE = 1 / 8
"""Share of the pool that predicted experts may take."""

CAREFUL_ODDS = 0.86
"""Share of right choices from which on a rank is read, where rows compute while others are read: what comes late then
costs little, and what is read in vain delays it."""

EVEN_ODDS = 0.5
"""The same where a call waits for all its experts, while the disk would have nothing else to do."""

_NUM_CHOICES = 1024
"""Number of choices of a rank over which that share is averaged."""

_PRIOR = 4
"""Number of choices that the initial share of one half counts for."""


class GuessedError(GuessEndedError):
    """The end of a speculative call: the router has chosen. Its only argument is their array, ``(..., top_k)``."""


Guess = list[mx.array]
"""The experts that a router would choose now, ``(..., top_k)``, and if they can be observed its scores of them,
``(tokens, top_k)``. Not evaluated."""


def ranks_of(guess: Guess) -> dict[int, int]:
    """Return for each expert the best rank that a token gave it, best first. Unknown ranks are 0."""
    indices, *scores = map(np.array, guess)
    if not scores:
        return dict.fromkeys(indices.reshape(-1).tolist(), 0)
    ranks: dict[int, int] = {}  # in plain Python: calls of numpy cost more here
    tokens = indices.reshape(-1, indices.shape[-1]).tolist()
    for chosen, of_chosen in zip(tokens, scores[0].tolist(), strict=True):
        for rank, (_, expert) in enumerate(sorted(zip(of_chosen, chosen, strict=True), reverse=True)):
            ranks[expert] = min(rank, ranks.get(expert, rank))
    return ranks if len(tokens) == 1 else dict(sorted(ranks.items(), key=itemgetter(1)))


class Odds:
    """The share of right choices by rank. A choice is never worse than one of a later rank."""

    def __init__(self, least: float) -> None:
        self.num_good = 0  # ranks that are right often enough to be read
        self._least = least
        self._right: list[float] = []
        self._seen: list[int] = []

    def note(self, ranks: Mapping[int, int], needed: Collection[int]) -> None:
        """Learn from a guess: the ranks of some experts, and the experts that were needed."""
        for expert, rank in ranks.items():
            more = rank + 1 - len(self._seen)
            self._seen += [_PRIOR] * more
            self._right += [0.5] * more
            self._seen[rank] = min(self._seen[rank] + 1, _NUM_CHOICES)
            self._right[rank] += ((expert in needed) - self._right[rank]) / self._seen[rank]
        self.num_good = len(self._right)
        while self.num_good and self._right[self.num_good - 1] < self._least:
            self.num_good -= 1


@dataclass(slots=True)
class _Stack:
    """The state of a stack, and of the modules around it."""

    before: mx.array | None = None  # the residual before its experts, if it is that of few tokens
    after: mx.array | None = None  # that after them
    # the norm before its router, and the block with the router; None where it cannot be guessed
    route: tuple[Callable[..., mx.array], Callable[..., object]] | None = None
    is_asked: bool = False  # whether its router is called speculatively
    said: Any = None  # what the router's module returned then


class _Norm(SwappedClass):
    """The norm before the router. Its argument is the residual."""

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        state: _Stack = self._flash_state
        is_simple = not args and not kwargs and x.size <= SORTED_SIZE * x.shape[-1]
        state.before, state.after = x if is_simple else None, None
        result: mx.array = super().__call__(x, *args, **kwargs)  # type: ignore[misc]
        return result


class _Block(SwappedClass):
    """Router and experts. Their result is added to the residual."""

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        state: _Stack = self._flash_state
        before = state.before  # the next guess takes it
        result: mx.array = super().__call__(*args, **kwargs)  # type: ignore[misc]
        is_simple = len(args) == 1 and not kwargs  # else the block may have added the residual itself
        if is_simple and before is not None and isinstance(result, mx.array) and result.shape == before.shape:
            state.after = before + result
        return result


class _Gate(SwappedClass):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(*args, **kwargs)  # type: ignore[misc]
        state: _Stack = self._flash_state
        if state.is_asked:
            state.said = result
        return result


class Lookahead:
    """Guesses which experts stacks will need, and starts to read them.

    The routers of the next stacks are called with an earlier residual. A stack can be guessed twice: early, from the
    residual before the experts of the stack before, and late, from the residual after them, while its own layer's
    attention computes. Guesses only start reads. A router's first choices are nearly always right and its last ones
    often not: a choice is read if those of its rank were right often enough so far.
    """

    def __init__(
        self,
        stacks: Sequence[ExpertStack],
        pool: ExpertPool,
        stream: WeightStream,
        *,
        least_odds: float,
        enabled: bool,
    ) -> None:
        self._stacks = stacks
        self._pool = pool
        self._stream = stream
        self._states = [_Stack(route=_route_of(stack)) for stack in stacks]
        # Guesses that the next call of a stack will settle: the odds they count for, and the ranks of missing experts.
        self.unsettled: list[list[tuple[Odds, dict[int, int]]]] = [[] for _ in stacks]
        self._early, self._late = Odds(least_odds), Odds(least_odds)
        if enabled:
            for layer in range(len(stacks) - 1):
                self._remember(layer)

    def _remember(self, layer: int) -> None:
        """Make the modules around a stack store the residual, if that helps to guess the next stack."""
        stack, after, state = self._stacks[layer], self._stacks[layer + 1], self._states[layer]
        if stack.norm is None or stack.block is None or self._states[layer + 1].route is None:
            return
        if not isinstance(stack.norm, SwappedClass) and not isinstance(stack.block, SwappedClass):
            swap_class(stack.norm, _Norm, state)
            swap_class(stack.block, _Block, state)
            if after.gate is not None and not isinstance(after.gate, SwappedClass):
                swap_class(after.gate, _Gate, self._states[layer + 1])

    def guess(self, layer: int, *, is_early: bool) -> Guess | None:
        """Return what a stack's router would choose if the layers in between changed nothing; None if none is needed.

        Early guesses are from the residual before the experts of the previous stack, others from that after them.
        """
        previous = self._states[layer - 1]
        residual = previous.before if is_early else previous.after
        if not is_early:
            previous.after = None
        if residual is None or layer == len(self._stacks):
            return None
        state = self._states[layer]
        if state.route is None or ABSENT not in self._pool.slot_of[layer]:  # nothing could be read
            return None
        norm, block = state.route
        self._stream.is_guessing = state.is_asked = True
        try:
            block(norm(residual))
        except GuessedError as guessed:
            indices: mx.array = guessed.args[0]
            scores = scores_of(state.said, indices, self._stacks[layer].num_experts)
            return [indices] if scores is None else [indices, scores]
        except GuessEndedError:
            return None
        finally:
            self._stream.is_guessing = state.is_asked = False
            state.said = None
        return None

    def read(self, layer: int, guess: Guess, *, is_early: bool) -> None:
        """Evaluate a guess, and start to read the experts that a stack will probably need."""
        ranks, odds = ranks_of(guess), self._early if is_early else self._late
        missing = dict(compress(ranks.items(), self._pool.slot_of[layer][[*ranks]] == ABSENT))
        if not missing:
            return
        self.unsettled[layer].append((odds, missing))
        likely = [expert for expert, rank in missing.items() if rank < odds.num_good]
        most = int(self._pool.slots.num_slots * POOL_SHARE)
        if likely and most:
            self._pool.read_ahead(layer, likely, most, urgent=not is_early)

    def settle(self, layer: int, needed: Collection[int]) -> None:
        """Learn from the guesses of a call's experts which it needs."""
        for odds, missing in self.unsettled[layer]:
            odds.note(missing, set(needed))
        self.unsettled[layer].clear()

    def let_go(self) -> None:
        """Drop the residuals and guesses of a pass that has failed."""
        for state in self._states:
            state.before = state.after = None
        for unsettled in self.unsettled:
            unsettled.clear()


def _route_of(stack: ExpertStack) -> tuple[Callable[..., mx.array], Callable[..., object]] | None:
    """Return the norm before a stack and its block, whose calls leave no trace."""
    if stack.norm is None or stack.block is None:
        return None
    norm, block = (partial(own_class(module).__call__, module) for module in (stack.norm, stack.block))
    return norm, block


_NUM_CALLS = 64
"""Number of calls over which the share of late experts is averaged."""


class _Routed(SwappedClass):
    """A stack of experts whose calls go through the pool."""

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        if (work := enginethread.here.call) is None:
            return cast(mx.array, hand_in(self, *args, **kwargs))
        if work.is_to_end:
            enginethread.check()
        result: mx.array = self._flash_state(*args, **kwargs)
        return result


@dataclass(frozen=True, slots=True)
class _Begun:
    """A computation with the experts in memory that started before the indices were known."""

    rows: mx.array  # ``(pairs, width)``; those of experts that were missing are of no use
    pairs: mx.array | None  # numbers of the (token, expert) pairs of the rows; None for all
    ready: Slots  # of the experts that were in their slots


class Experts:
    """All stacks of experts of a model, in the order of calls.

    With ``exact_rows``, a row of a matrix product is the same whatever the other rows are. Then the pool serves calls
    of any size, and rows compute as their experts come. Otherwise a call waits for all of them: CUDA's kernel for
    quantized experts is another one below eight rows.
    """

    def __init__(
        self,
        stacks: Sequence[ExpertStack],
        pooled: PooledStacks,
        stream: WeightStream,
        *,
        exact_rows: bool,
        lookahead: bool,
    ) -> None:
        self.pool = pooled.pool
        self.stacks = stacks
        self._stage = Stage(self.pool, stacks)
        self._stream = stream
        self._exact_rows = exact_rows
        self._pooled = pooled
        self._pending: list[mx.array] = []
        self._late_share = 0.0
        for layer, stack in enumerate(stacks):
            swap_class(stack.unit.module, _Routed, answered_by(stack.unit.module, partial(self.call, layer)))
        # At the full shape, experts in flight are not waited for, but read with the rest.
        self._ahead = Lookahead(
            stacks,
            self.pool,
            stream,
            least_odds=CAREFUL_ODDS if exact_rows else EVEN_ODDS,
            enabled=lookahead and all(self._pooled.takes_slots),
        )

    def call(self, layer: int, x: mx.array, indices: mx.array) -> mx.array:
        """Compute tokens ``(..., width)`` with experts ``(..., top_k)`` of a layer. Raises: ReadError, IndexError."""
        stream, pool, ahead = self._stream, self.pool, self._ahead
        if stream.is_guessing:
            raise GuessedError(indices)
        if stream.wait_turn is not None and not stream.holds_units:
            mx.eval(x, indices)
            stream.wait_turn(("experts", layer))  # so that experts that several calls need are read once
        next_guess = begun = None
        known = [indices]  # evaluated before anything is computed with them
        takes_slots, num_slots, top_k = self._pooled.takes_slots[layer], pool.slots.num_slots, indices.shape[-1]
        is_small = indices.size < SORTED_SIZE
        is_whole = x.size // x.shape[-1] * top_k == indices.size  # every token has experts of its own
        if is_small and stream.wait_turn is None:  # the last residual may be another call's
            # A processor that computes a layer in less time than a guess takes would wait for the guess.
            guess = ahead.guess(layer, is_early=False) if self._exact_rows else None
            if guess is not None:
                mx.async_eval(guess)
                mx.async_eval(indices)  # the layer's attention computes while Python looks at the guess
                ahead.read(layer, guess, is_early=False)
            next_guess = ahead.guess(layer + 1, is_early=True)
            known += next_guess or []
            if takes_slots and is_whole and indices.size <= num_slots:
                begun = self._begin(layer, x, known, guess)
        pending, self._pending = self._pending, []  # dropped even after an error
        mx.eval(known, pending)
        del pending  # a prompt's are large
        routing = np.array(indices)
        counts = self._count(layer, routing)
        experts = counts.nonzero()[0]
        needed: list[int] = experts.tolist()
        pool.stats.num_calls += 1
        if ahead.unsettled[layer]:
            ahead.settle(layer, needed)
        num_tokens = max(1, routing.size // top_k)
        # Sorted calls on a GPU need all experts: CUDA's kernel for them ignores the gaps between slots.
        if not takes_slots or not (self._exact_rows or is_small) or len(needed) > num_slots:
            pool.stats.num_full += 1
            pool.use(layer, experts, counts[experts], num_tokens)
            hottest = sorted(needed, key=lambda i: -counts[i])
            quota = max(1, 2 * num_slots // len(self.stacks))  # twice its share, since layers compete
            return self._stage.run(layer, x, indices, hottest, quota)
        late = pool.request(layer, needed)
        if is_small:
            self._late_share += (len(late) / max(1, len(needed)) - self._late_share) / _NUM_CALLS
        pool.use(layer, experts, counts[experts], num_tokens)
        if next_guess is not None and not self._exact_rows:  # nothing else happens until all experts are there
            ahead.read(layer + 1, next_guess, is_early=True)
        if begun is not None and begun.pairs is None and ABSENT not in begun.ready[experts]:
            result = begun.rows.reshape(*routing.shape, -1)
        else:
            result = self._compute(layer, x, routing, begun, late, is_whole=is_whole)
            if is_small:
                # It computes while Python goes through the rest of the model. A prompt's results are large: they wait.
                mx.async_eval(result)
        self._pending.append(result)
        if layer == len(self.stacks) - 1:
            self._evaluate_pending()  # nothing of a pass waits for the next one
        if next_guess is not None and self._exact_rows:  # not before: it would delay the experts that rows wait for
            ahead.read(layer + 1, next_guess, is_early=True)
        return result

    def _begin(self, layer: int, x: mx.array, known: list[mx.array], guess: Guess | None) -> _Begun | None:
        """Start to compute a small call before its indices are known, so that the processor need not wait for Python.

        It computes as many rows as experts are expected to be in memory. A row of a missing expert costs as much, and
        is of no use. Where rows depend on each other's number, it computes all of them or none. ``known`` begins with
        the indices, goes on with what is evaluated with them, and gets the pairs of the rows.
        """
        indices, ready = known[0], self.pool.ready(layer)
        if ABSENT not in ready:
            num_late = 0
        elif guess is None or guess[0].size != indices.size:
            num_late = int(indices.size * self._late_share)
        else:
            num_late = ready[np.array(guess[0])].ravel().tolist().count(ABSENT)
        num_rows = indices.size - num_late  # of experts that will probably be there
        if not num_rows or (num_late and not self._exact_rows):
            return None
        last, last_slot = len(ready) - 1, self.pool.slots.num_slots - 1
        # They are not checked yet. Each operation less is felt on a GPU.
        safe = mx.minimum(indices, last) if indices.dtype == mx.uint32 else mx.clip(indices, 0, last)
        pairs = None
        if num_late:
            slots = mx.array(ready)[safe].reshape(-1)
            pairs = mx.argsort(slots)[:num_rows]  # those without a slot last
            known.append(pairs)
        mx.async_eval(known)  # in a call of its own: whatever is evaluated with the rows has to wait for them
        if pairs is None:
            slots = mx.array(np.minimum(ready, last_slot))[safe]
            rows = self._pooled.run(layer, x, slots).reshape(num_rows, -1)
        else:
            slots = mx.minimum(slots, last_slot)[pairs]
            rows = self._pooled.run_pairs(layer, x, slots, pairs, indices.shape[-1])
        mx.async_eval(rows)
        return _Begun(rows, pairs, ready)

    def _count(self, layer: int, routing: Routing) -> Numbers:
        """Return for how many tokens each expert of a layer is needed. Raises: IndexError: there is no such expert."""
        num_experts, flat = self.stacks[layer].num_experts, routing.reshape(-1)
        # As unsigned numbers, negative ones are larger than all others.
        if np.maximum.reduce(flat.view(f"u{flat.itemsize}"), initial=0) >= num_experts:
            asked = f"experts {flat.min()} to {flat.max()}"
            raise IndexError(f"'{self.stacks[layer].unit.name}' was asked for {asked}: it has {num_experts}")
        return np.bincount(flat, minlength=num_experts)

    def _compute(
        self,
        layer: int,
        x: mx.array,
        routing: Routing,
        begun: _Begun | None,
        late: Sequence[int],
        *,
        is_whole: bool,
    ) -> mx.array:
        """Compute a call from the slots: rows that have begun, the needed experts, and those of them in flight."""
        if self._exact_rows and routing.size and is_whole:
            # Each expert of a small call computes when it comes, but the last; those of a prompt when all have come.
            most_left = 1 if routing.size < SORTED_SIZE else len(late)
            parts, late = self._compute_parts(layer, x, routing, begun, late, most_left)
            result = join_rows(parts, routing.shape)
        else:
            result = self._pooled.run(layer, x, self._pooled.slots(layer, routing))
        self.pool.wait(layer, late)  # the part that computes with them is not evaluated yet
        return result

    def _compute_parts(
        self, layer: int, x: mx.array, routing: Routing, begun: _Begun | None, late: Sequence[int], most_left: int
    ) -> tuple[list[tuple[mx.array, Sequence[int]]], Sequence[int]]:
        """Compute (token, expert) pairs as their experts come, until at most so many are in flight.

        Return rows with the numbers of their pairs, and the experts to wait for before they are evaluated.
        """
        experts = routing.reshape(-1).tolist()  # in plain Python: calls of numpy cost more here
        parts: list[tuple[mx.array, Sequence[int]]] = []
        left = list(range(len(experts)))
        if begun is not None:
            pairs = left if begun.pairs is None else cast("list[int]", begun.pairs.tolist())
            parts.append((begun.rows, pairs))
            done = {pair for pair in pairs if begun.ready[experts[pair]] != ABSENT}
            left = [pair for pair in left if pair not in done]
        while True:
            absent, here, others = set(late), list[int](), list[int]()
            for pair in left:
                (others if experts[pair] in absent else here).append(pair)
            if here:
                parts.append((self._pooled.run_rows(layer, x, routing, here), here))
                if late:
                    mx.async_eval(parts[-1][0])
            left = others
            if len(late) <= most_left:
                break
            came = self.pool.wait_any(layer, late)
            late = [expert for expert in late if expert not in came]
        if late:
            parts.append((self._pooled.run_rows(layer, x, routing, left), left))
        return parts, late

    @property
    def least_slots(self) -> int:
        """The fewest slots that calls can be computed with."""
        slots = self.pool.slots
        if isinstance(slots, StackArena):
            return slots.least
        return max(self._stage.num_slots, *(stack.top_k for stack in self.stacks))

    def resize(self, num_slots: int) -> None:
        """Change the number of slots of the pool, between passes."""
        self._evaluate_pending()
        if not isinstance(self.pool.slots, StackArena):
            self.pool.resize(num_slots)
            return
        self._stage.let_go()
        self._pooled.let_go()
        try:
            self.pool.resize(num_slots)
        finally:
            self._pooled.arrange()
            self._stage.arrange()

    def recover(self) -> None:
        """Drop what a failed pass has not computed."""
        self._pending.clear()
        self._ahead.let_go()

    def _evaluate_pending(self) -> None:
        pending, self._pending = self._pending, []
        mx.eval(pending)

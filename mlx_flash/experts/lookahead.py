"""Look-ahead: the routers of the next stacks are called with an earlier residual, and their choices are read early.

A stack can be guessed twice: early, from the residual before the experts of the stack before, and late, from the
residual after them, while its own layer's attention computes. Guesses only start reads. A router's first choices are
nearly always right and its last ones often not: a choice is read if those of its rank were right often enough so far.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_flash.compat.expertstacks import SORTED_SIZE
from mlx_flash.experts.pool import ABSENT, ExpertPool, Numbers
from mlx_flash.layout.parts import ExpertStack
from mlx_flash.layout.swap import SwappedClass, own_class, swap_class
from mlx_flash.layout.trace import scores_of
from mlx_flash.streaming.stream import GuessEndedError, WeightStream

POOL_SHARE = 1 / 8
"""Share of the pool that predicted experts may take."""

CAREFUL_ODDS = 0.86
"""Share of right choices from which on a rank is read, where rows compute while others are read: what comes late then
costs little, and what is read in vain delays it."""

EVEN_ODDS = 0.5
"""The same where a call waits for all its experts, while the disk would have nothing else to do."""

_MEMORY = 1024
"""Number of choices of a rank over which that share is averaged."""

_PRIOR = 4
"""Number of choices that the initial share of one half counts for."""


class GuessedError(GuessEndedError):
    """The end of a speculative call: the router has chosen.

    Its only argument is an array with the chosen experts, ``(..., top_k)``.
    """


@dataclass(frozen=True)
class Guess:
    """The experts that a router would choose now, not evaluated."""

    indices: mx.array  # ``(..., top_k)``
    scores: mx.array | None  # the router's scores of them, ``(tokens, top_k)``; None when they cannot be observed

    def ranks(self) -> dict[int, int]:
        """Return for each expert the best rank that a token gave it, best first. Unknown ranks are 0."""
        indices = np.array(self.indices)
        if self.scores is None:
            return dict.fromkeys(indices.reshape(-1).tolist(), 0)
        ranks: dict[int, int] = {}  # in plain Python: calls of numpy cost more here
        tokens = indices.reshape(-1, indices.shape[-1]).tolist()
        for chosen, scores in zip(tokens, np.array(self.scores).tolist(), strict=True):
            for rank, (_, expert) in enumerate(sorted(zip(scores, chosen, strict=True), reverse=True)):
                ranks[expert] = min(rank, ranks.get(expert, rank))
        return dict(sorted(ranks.items(), key=itemgetter(1)))


class Odds:
    """The share of right choices by rank. A choice is never worse than one of a later rank.

    Attributes:
        num_good: number of ranks that are right often enough to be read.
    """

    def __init__(self, least: float) -> None:
        self.num_good = 0
        self._least = least
        self._right: list[float] = []
        self._seen: list[int] = []

    def note(self, ranks: Mapping[int, int], needed: Collection[int]) -> None:
        """Learn from a guess: the ranks of some experts, and the experts that were needed."""
        for expert, rank in ranks.items():
            more = rank + 1 - len(self._seen)
            self._seen += [_PRIOR] * more
            self._right += [0.5] * more
            self._seen[rank] = min(self._seen[rank] + 1, _MEMORY)
            self._right[rank] += ((expert in needed) - self._right[rank]) / self._seen[rank]
        self.num_good = len(self._right)
        while self.num_good and self._right[self.num_good - 1] < self._least:
            self.num_good -= 1


@dataclass(slots=True)
class _Stack:
    """The state of a stack, and of the modules around it."""

    before: mx.array | None = None  # the residual before its experts and after them, if it is that of few tokens
    after: mx.array | None = None
    # the norm before its router, and the block with the router; None where it cannot be guessed
    route: tuple[Callable[..., mx.array], Callable[..., object]] | None = None
    is_asked: bool = False  # whether its router is called speculatively
    said: Any = None  # what the router's module returned then
    # guesses that its next call will settle: the odds they count for, and the ranks of missing experts
    unsettled: list[tuple[Odds, dict[int, int]]] = field(default_factory=list)


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
    """The module that scores the experts."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(*args, **kwargs)  # type: ignore[misc]
        state: _Stack = self._flash_state
        if state.is_asked:
            state.said = result
        return result


class Lookahead:
    """Guesses which experts stacks will need, and starts to read them."""

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
        """Return what a stack's router would choose if the layers in between changed nothing.

        Early guesses are from the residual before the experts of the previous stack, others from that after them.
        """
        previous = self._states[layer - 1]
        residual = previous.before if is_early else previous.after
        if not is_early:
            previous.after = None
        if residual is None or layer == len(self._stacks):
            return None
        state = self._states[layer]
        if state.route is None:
            return None
        norm, block = state.route
        self._stream.is_guessing = state.is_asked = True
        try:
            block(norm(residual))
        except GuessedError as guessed:
            indices: mx.array = guessed.args[0]
            return Guess(indices, scores_of(state.said, indices, self._stacks[layer].num_experts))
        except GuessEndedError:
            return None
        finally:
            self._stream.is_guessing = state.is_asked = False
            state.said = None
        return None

    def read(self, layer: int, guess: Guess, *, is_early: bool) -> None:
        """Evaluate a guess, and start to read the experts that a stack will probably need."""
        table, odds = self._pool.slot_of[layer], self._early if is_early else self._late
        missing, likely = dict[int, int](), list[int]()
        for expert, rank in guess.ranks().items():
            if table[expert] == ABSENT:
                missing[expert] = rank
                likely += [expert] * (rank < odds.num_good)
        self._states[layer].unsettled.append((odds, missing))
        most = int(self._pool.slots.num_slots * POOL_SHARE)
        if likely and most:
            self._pool.read_ahead(layer, likely, most, urgent=not is_early)

    def settle(self, layer: int, experts: Numbers) -> None:
        """Learn from the experts that a call needs how good the guesses were."""
        unsettled = self._states[layer].unsettled
        needed = set(experts.tolist()) if unsettled else set()
        for odds, missing in unsettled:
            if missing:
                odds.note(missing, needed)
        unsettled.clear()

    def let_go(self) -> None:
        """Drop the residuals and guesses of a pass that has failed."""
        for state in self._states:
            state.before = state.after = None
            state.unsettled.clear()


def _route_of(stack: ExpertStack) -> tuple[Callable[..., mx.array], Callable[..., object]] | None:
    """Return the norm before a stack and its block, whose calls leave no trace."""
    if stack.norm is None or stack.block is None:
        return None
    norm, block = (partial(own_class(module).__call__, module) for module in (stack.norm, stack.block))
    return norm, block

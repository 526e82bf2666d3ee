"""Look-ahead: the routers of the next stacks are called with an earlier residual, and their choices are read early.

A stack can be guessed twice: early, from the residual before the experts of the stack before, and late, from the
residual after them, while its own layer's attention computes. Guesses only start reads. A router's first choices are
nearly always right and its last ones often not: a choice is read if those of its rank were right often enough so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_flash.compat.expertstacks import SORTED_SIZE
from mlx_flash.experts.eviction import Numbers
from mlx_flash.experts.pool import ExpertPool
from mlx_flash.experts.slots import ABSENT
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

    Attributes:
        indices: the chosen experts, ``(..., top_k)``.
    """

    def __init__(self, indices: mx.array) -> None:
        self.indices = indices


@dataclass(frozen=True)
class Guess:
    """The experts that a router would choose now, not evaluated.

    Attributes:
        indices: ``(..., top_k)``.
        scores: the router's scores of them, ``(tokens, top_k)``; None when they cannot be observed.
    """

    indices: mx.array
    scores: mx.array | None

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays to evaluate."""
        return [self.indices] if self.scores is None else [self.indices, self.scores]

    @cached_property
    def chosen(self) -> list[list[int]]:
        """The experts of each token. Evaluates the guess."""
        return np.array(self.indices).reshape(-1, self.indices.shape[-1]).tolist()

    def ranks(self) -> dict[int, int]:
        """Return for each expert the best rank that a token gave it, best first. Unknown ranks are 0."""
        if self.scores is None:
            return {expert: 0 for chosen in self.chosen for expert in chosen}
        ranks: dict[int, int] = {}  # in plain Python: calls of numpy cost more here
        for chosen, scores in zip(self.chosen, np.array(self.scores).tolist(), strict=True):
            for rank, (_, expert) in enumerate(sorted(zip(scores, chosen, strict=True), reverse=True)):
                ranks[expert] = min(rank, ranks.get(expert, rank))
        return dict(sorted(ranks.items(), key=itemgetter(1)))


class Odds:
    """The share of right choices by rank. A choice is never worse than one of a later rank.

    Args:
        least: share of right choices from which on a rank is worth reading.
    """

    def __init__(self, least: float) -> None:
        self._least = least
        self._right: list[float] = []
        self._seen: list[int] = []

    @property
    def num_good(self) -> int:
        """Number of ranks that are worth reading."""
        good = [rank for rank, right in enumerate(self._right) if right >= self._least]
        return good[-1] + 1 if good else 0

    def note(self, rank: int, is_right: bool) -> None:
        """Learn from a choice."""
        more = rank + 1 - len(self._seen)
        self._seen += [_PRIOR] * more
        self._right += [0.5] * more
        self._seen[rank] = min(self._seen[rank] + 1, _MEMORY)
        self._right[rank] += (is_right - self._right[rank]) / self._seen[rank]


@dataclass(slots=True)
class _Residual:
    """The residual before a stack of experts and after it, if it is that of few tokens."""

    before: mx.array | None = None
    after: mx.array | None = None


class _Norm(SwappedClass):
    """The norm before the router. Its argument is the residual."""

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        residual = cast(_Residual, self._flash_state)
        is_simple = not args and not kwargs and x.size <= SORTED_SIZE * x.shape[-1]
        residual.before, residual.after = x if is_simple else None, None
        return cast(mx.array, own_class(self).__call__(self, x, *args, **kwargs))


class _Block(SwappedClass):
    """Router and experts. Their result is added to the residual."""

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        residual = cast(_Residual, self._flash_state)
        before = residual.before  # the next guess takes it
        result = own_class(self).__call__(self, *args, **kwargs)
        is_simple = len(args) == 1 and not kwargs  # else the block may have added the residual itself
        if is_simple and before is not None and isinstance(result, mx.array) and result.shape == before.shape:
            residual.after = before + result
        return cast(mx.array, result)


@dataclass(slots=True)
class _Said:
    """The result of a router's module during a speculative call."""

    is_asked: bool = False
    result: Any = None


class _Gate(SwappedClass):
    """The module that scores the experts."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = own_class(self).__call__(self, *args, **kwargs)
        said = cast(_Said, self._flash_state)
        if said.is_asked:
            said.result = result
        return result


@dataclass(slots=True)
class _Stack:
    """The state of a stack.

    Attributes:
        residual: of its last call.
        said: result of its router.
        unsettled: guesses that its next call will settle: the odds they count for, and the ranks of missing experts.
    """

    residual: _Residual = field(default_factory=_Residual)
    said: _Said = field(default_factory=_Said)
    unsettled: list[tuple[Odds, dict[int, int]]] = field(default_factory=list)


class Lookahead:
    """Guesses which experts stacks will need, and starts to read them.

    Args:
        stacks: in the order of calls.
        pool: reads experts.
        stream: notified during speculative calls.
        least_odds: share of right choices from which on a rank is read.
        enabled: whether to guess at all.
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
        self._states = [_Stack() for _ in stacks]
        self._early, self._late = Odds(least_odds), Odds(least_odds)
        if enabled:
            for layer in range(len(stacks) - 1):
                self._remember(layer)

    def _remember(self, layer: int) -> None:
        """Make the modules around a stack store the residual, if that helps to guess the next stack."""
        stack, after, state = self._stacks[layer], self._stacks[layer + 1], self._states[layer]
        if stack.norm is None or stack.block is None or not self._can_be_guessed(layer + 1):
            return
        if not isinstance(stack.norm, SwappedClass) and not isinstance(stack.block, SwappedClass):
            swap_class(stack.norm, _Norm, state.residual)
            swap_class(stack.block, _Block, state.residual)
            if after.gate is not None and not isinstance(after.gate, SwappedClass):
                swap_class(after.gate, _Gate, self._states[layer + 1].said)

    def _can_be_guessed(self, layer: int) -> bool:
        return layer < len(self._stacks) and self._stacks[layer].block is not None and bool(self._stacks[layer].norm)

    def early(self, layer: int) -> Guess | None:
        """Guess a stack from the residual before the experts of the previous one."""
        return self._guess(layer, self._states[layer - 1].residual.before)

    def late(self, layer: int) -> Guess | None:
        """Guess a stack from the residual after the experts of the previous one."""
        residual = self._states[layer - 1].residual
        after, residual.after = residual.after, None
        return self._guess(layer, after)

    def _guess(self, layer: int, residual: mx.array | None) -> Guess | None:
        """Return what a stack's router would choose if the layers in between changed nothing."""
        if residual is None or not self._can_be_guessed(layer):
            return None
        stack, said = self._stacks[layer], self._states[layer].said
        norm, block = cast(nn.Module, stack.norm), cast(nn.Module, stack.block)
        self._stream.is_guessing = said.is_asked = True
        try:
            own_class(block).__call__(block, own_class(norm).__call__(norm, residual))
        except GuessedError as guessed:
            return Guess(guessed.indices, scores_of(said.result, guessed.indices, stack.num_experts))
        except GuessEndedError:
            return None
        finally:
            self._stream.is_guessing = said.is_asked = False
            said.result = None
        return None

    def read(self, layer: int, guess: Guess, *, is_early: bool) -> None:
        """Evaluate a guess, and start to read the experts that a stack will probably need."""
        table, odds = self._pool.slot_of[layer], self._early if is_early else self._late
        missing = {expert: rank for expert, rank in guess.ranks().items() if table[expert] == ABSENT}
        self._states[layer].unsettled.append((odds, missing))
        num_good = odds.num_good
        likely = [expert for expert, rank in missing.items() if rank < num_good]
        self._pool.read_ahead(layer, likely, int(self._pool.slots.num_slots * POOL_SHARE), urgent=not is_early)

    def settle(self, layer: int, experts: Numbers) -> None:
        """Learn from the experts that a call needs how good the guesses were."""
        unsettled = self._states[layer].unsettled
        needed = set(experts.tolist()) if unsettled else set()
        for odds, missing in unsettled:
            for expert, rank in missing.items():
                odds.note(rank, expert in needed)
        unsettled.clear()

    def let_go(self) -> None:
        """Drop the residuals and guesses of a pass that has failed."""
        for state in self._states:
            state.residual.before = state.residual.after = None
            state.said.is_asked, state.said.result = False, None
            state.unsettled.clear()

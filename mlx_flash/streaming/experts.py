"""Layers of experts that compute with those experts only that a token is routed to.

A call evaluates its indices, asks the pool for the experts and computes with the rows of the pool's slots: the module's
own code, on arrays that have a slot where it expects an expert. Experts that are there already compute while the
others are read. Before that, the next layer's router is asked which experts it would choose now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_flash.checkpoint.layout import ExpertStack
from mlx_flash.streaming.eviction import Mask, Numbers
from mlx_flash.streaming.pool import ExpertPool
from mlx_flash.streaming.stage import Stage
from mlx_flash.streaming.stream import GuessEndedError, WeightStream
from mlx_flash.streaming.swap import SwappedClass, clone_tree, own_class, state_of, swap_class

SORTED_SIZE = 64
"""From so many indices on mlx-lm sorts them, and kernels on GPUs choose by the number of experts."""

LOOKAHEAD_SHARE = 1 / 8
"""Share of the pool that experts may take which a router is only expected to choose."""

_SMALL_BYTES = 16 << 20
"""What a call for one token may take, whatever it copies."""

Routing = np.ndarray[Any, np.dtype[np.int64]]
OnRouting = Callable[[int, Routing], None]
"""Called with the number of a layer and the experts of each of its tokens, ``(..., top_k)``."""


class _GuessedError(GuessEndedError):
    """A router has chosen."""

    def __init__(self, indices: mx.array) -> None:
        self.indices = indices


class _Routed(SwappedClass):
    """A stack of experts whose calls go through the pool."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        experts, layer = cast("tuple[Experts, int]", state_of(self))
        return experts.call(layer, x, indices)


@dataclass(slots=True)
class _Residual:
    """The residual before a stack of experts and after it, when it is that of few tokens."""

    before: mx.array | None = None
    after: mx.array | None = None


class _Norm(SwappedClass):
    """The norm before the router: what it is given is the residual."""

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        residual = cast(_Residual, state_of(self))
        is_simple = not args and not kwargs and x.size <= SORTED_SIZE * x.shape[-1]
        residual.before, residual.after = x if is_simple else None, None
        return cast(mx.array, own_class(self).__call__(self, x, *args, **kwargs))


class _Block(SwappedClass):
    """Router and experts: what they make is added to the residual."""

    def __call__(self, x: mx.array) -> mx.array:
        residual = cast(_Residual, state_of(self))
        before = residual.before  # the next guess takes it
        result = own_class(self).__call__(self, x)
        if before is not None and isinstance(result, mx.array) and result.shape == before.shape:
            residual.after = before + result
        return cast(mx.array, result)


@dataclass(frozen=True, slots=True)
class _Early:
    """What was begun with the experts that were there, whichever are needed.

    Attributes:
        result: ``(..., top_k, width)``; rows of experts that were not there are of no use.
        ready: of each expert, whether it was there.
    """

    result: mx.array
    ready: Mask


class Experts:
    """All stacks of experts of a model, and what they compute with.

    Args:
        stacks: in the pool's order, which is the order of calls.
        pool: the experts in memory.
        stage: for calls at the full number of experts.
        stream: what else is streamed.
        exact_rows: whether a row of a matrix product is the same whatever the other rows are. Then the pool serves
            calls of any size.
        lookahead: read experts early that the next layer is likely to need.

    Attributes:
        pool: the experts in memory.
        stacks: as given.
        listeners: told of every call.
        changed: the modules whose class was changed.
    """

    def __init__(
        self,
        stacks: Sequence[ExpertStack],
        pool: ExpertPool,
        stage: Stage,
        stream: WeightStream,
        *,
        exact_rows: bool,
        lookahead: bool,
    ) -> None:
        self.pool = pool
        self.stacks = stacks
        self.listeners: list[OnRouting] = []
        self._stage = stage
        self._stream = stream
        self._exact_rows = exact_rows
        self._modules = [self._pooled_copy(layer) for layer in range(len(stacks))]
        self._takes_slots = [
            takes_slots(module, stack.unit.large[0].container)
            for module, stack in zip(self._modules, stacks, strict=True)
        ]
        self._pending: list[mx.array] = []
        self.changed: list[nn.Module] = []
        for layer, stack in enumerate(stacks):
            self._swap(stack.unit.module, _Routed, (self, layer))
        self._residuals = [self._remember(layer) if lookahead else _Residual() for layer in range(len(stacks))]

    def _pooled_copy(self, layer: int) -> nn.Module:
        """The stack with the pool's slots in the place of its experts."""
        unit = self.stacks[layer].unit
        offsets = self.pool.layers[layer].placement.offsets
        offsets = (*offsets, *(offset for offset, _ in self.pool.layers[layer].kept))
        arrays = {
            (id(p.container), p.key): self.pool.slots.view(offset, p.array.shape[1:], p.array.dtype)
            for p, offset in zip([*unit.large, *unit.small], offsets, strict=True)
        }
        return clone_tree(unit.module, arrays)

    def _swap(self, module: nn.Module, mixin: type[SwappedClass], state: object) -> None:
        swap_class(module, mixin, state)
        self.changed.append(module)

    def _remember(self, layer: int) -> _Residual:
        """Makes the modules around a stack remember the residual, if it helps to guess what the next stack needs."""
        residual, stack = _Residual(), self.stacks[layer]
        if stack.norm is None or stack.block is None or not self._can_be_guessed(layer + 1):
            return residual
        if not isinstance(stack.norm, SwappedClass) and not isinstance(stack.block, SwappedClass):
            self._swap(stack.norm, _Norm, residual)
            self._swap(stack.block, _Block, residual)
        return residual

    def _can_be_guessed(self, layer: int) -> bool:
        return layer < len(self.stacks) and self.stacks[layer].block is not None and bool(self.stacks[layer].norm)

    def call(self, layer: int, x: mx.array, indices: mx.array) -> mx.array:
        """What a stack makes of tokens.

        Args:
            layer: number of the stack.
            x: the tokens, ``(..., width)``.
            indices: their experts, ``(..., top_k)``.

        Raises:
            ReadError: experts could not be read.
            IndexError: there are no such experts.
        """
        if self._stream.is_guessing:
            raise _GuessedError(indices)
        guess = early = None
        if indices.size < SORTED_SIZE:
            guess = self._guess_now(layer, indices)
            early = self._begin(layer, x, indices, guess)
        self._evaluate_pending(indices, *([] if guess is None else [guess]))
        self.pool.hold(layer, ())
        routing = np.array(indices)
        counts = self._count(layer, routing)
        experts = np.flatnonzero(counts).tolist()
        self.pool.stats.num_calls += 1
        if self._fits_slots(layer, len(experts), routing.size):
            return self._compact(layer, x, routing, counts, early, guess)
        self.pool.stats.num_full += 1
        self._note(layer, routing, counts)
        return self._stage.run(layer, x, indices, sorted(experts, key=lambda i: -counts[i]), self._quota)

    def _begin(self, layer: int, x: mx.array, indices: mx.array, guess: mx.array | None) -> _Early | None:
        """Begins to compute a small call before it is known which experts it needs.

        The processor need not wait for us then to look at the indices. Rows of experts that turn out to be missing are
        of no use; while those are read there is nothing else to compute.
        """
        if not (self._takes_slots[layer] and indices.size <= self.pool.slots.num_slots):
            return None
        mx.async_eval(indices, *([] if guess is None else [guess]))
        ready = self.pool.ready(layer)
        slots = mx.array(np.where(ready, self.pool.slot_of[layer], 0).astype(np.uint32))
        known = mx.clip(indices, 0, self.stacks[layer].num_experts - 1)  # they are not checked yet
        result = self._run(layer, x, slots[known])
        mx.async_eval(result)
        return _Early(result, ready)

    def _count(self, layer: int, routing: Routing) -> Numbers:
        """How many tokens each expert computes."""
        num_experts = self.stacks[layer].num_experts
        if routing.size and not 0 <= routing.min() <= routing.max() < num_experts:
            asked = f"experts {routing.min()} to {routing.max()}"
            raise IndexError(f"'{self.stacks[layer].unit.name}' was asked for {asked}: it has {num_experts}")
        return np.bincount(routing.reshape(-1), minlength=num_experts)

    def _note(self, layer: int, routing: Routing, counts: Numbers) -> None:
        """Remembers what a call needed."""
        for listener in self.listeners:
            listener(layer, routing.astype(np.int64))
        experts = np.flatnonzero(counts)
        self.pool.use(layer, experts, counts[experts], max(1, routing.size // routing.shape[-1]))

    def _fits_slots(self, layer: int, num_experts: int, num_indices: int) -> bool:
        """Whether a call can be computed from the slots, and as exactly as with all experts.

        Sorted calls on a GPU cannot: CUDA's kernel for them does not heed the gaps between slots.
        """
        is_exact = self._exact_rows or num_indices < SORTED_SIZE
        return self._takes_slots[layer] and is_exact and num_experts <= self.pool.slots.num_slots

    @property
    def _quota(self) -> int:
        """Experts of each layer that enter the pool when a prompt passes: twice its share, since layers compete."""
        return max(1, 2 * self.pool.slots.num_slots // len(self.stacks))

    def _compact(
        self, layer: int, x: mx.array, routing: Routing, counts: Numbers, early: _Early | None, guess: mx.array | None
    ) -> mx.array:
        """Computes with what is there while the rest is read, and begins to read what the next layer will need."""
        pool, experts = self.pool, np.flatnonzero(counts).tolist()
        ready = pool.ready(layer) if early is None else early.ready
        late = [expert for expert in experts if not ready[expert]]
        is_there = ready[routing.reshape(-1)]
        can_part = len(late) < len(experts) and _num_rows(x) * routing.shape[-1] == routing.size
        first, rows = None, np.flatnonzero(is_there)
        if early is not None:
            first, rows = early.result, np.arange(routing.size)
        elif late and can_part:
            first = self._run_rows(layer, x, routing, rows)
            mx.async_eval(first)
        pool.request(layer, experts)
        pool.hold(layer, experts)
        self._note(layer, routing, counts)
        if not late:
            self._read_ahead(layer + 1, guess)
        if late and can_part and first is not None:
            others = np.flatnonzero(~is_there)
            second = self._run_rows(layer, x, routing, others)
            result = _merged(first, rows, second, others).reshape(*routing.shape, -1)
        elif late or first is None:
            result = self._run(layer, x, mx.array(pool.slot_of[layer][routing].astype(np.uint32)))
        else:
            result = first
        pool.wait(layer, late)  # what computes with them was not evaluated yet
        if routing.size < SORTED_SIZE:
            # It computes while the rest of the model's code is gone through. A prompt's results are large: they wait.
            mx.async_eval(result)
        if late:  # not before: it would have taken the disk from what was waited for
            self._read_ahead(layer + 1, guess)
        self._pending.append(result)
        if layer == len(self.stacks) - 1:
            self._evaluate_pending()  # the next call may come from another thread, which cannot
        return result

    def let_go(self) -> None:
        """Forgets what was not computed: the pass has failed, and the next may come from another thread."""
        self._pending.clear()

    def _evaluate_pending(self, *others: mx.array) -> None:
        pending, self._pending = self._pending, []  # they go, whatever happens: they may be of another thread's
        mx.eval(pending, others)

    def _run_rows(self, layer: int, x: mx.array, routing: Routing, chosen: Numbers) -> mx.array:
        """What some of the (token, expert) pairs make, ``(pairs, width)``."""
        tokens = x.reshape(-1, x.shape[-1])[mx.array((chosen // routing.shape[-1]).astype(np.uint32))]
        slots = self.pool.slot_of[layer][routing.reshape(-1)[chosen]]
        return self._run(layer, tokens, mx.array(slots[:, None].astype(np.uint32)))[:, 0]

    def _run(self, layer: int, x: mx.array, slots: mx.array) -> mx.array:
        module = self._modules[layer]
        return cast(mx.array, own_class(module).__call__(module, x, slots))

    def _guess_now(self, layer: int, indices: mx.array) -> mx.array | None:
        """Reads ahead what this stack will probably need, and returns a guess for the next one, not evaluated.

        What this stack needs is guessed from the residual before its layer: that is known while the layer's attention
        computes, which goes on meanwhile.
        """
        before, self._residuals[layer - 1].after = self._residuals[layer - 1].after, None
        guess = self._guess(layer, before)
        if guess is not None:
            mx.async_eval(guess)
            mx.async_eval(indices)
            self._read_ahead(layer, guess, urgent=True)
        return self._guess(layer + 1, self._residuals[layer].before)

    def _read_ahead(self, layer: int, guess: mx.array | None, *, urgent: bool = False) -> None:
        if guess is None:
            return
        likely = sorted(set(np.array(guess).reshape(-1).tolist()))
        self.pool.read_ahead(layer, likely, int(self.pool.slots.num_slots * LOOKAHEAD_SHARE), urgent=urgent)

    def _guess(self, layer: int, residual: mx.array | None) -> mx.array | None:
        """The experts that a stack's router would choose if the layers in between changed nothing."""
        if residual is None or not self._can_be_guessed(layer):
            return None
        stack = self.stacks[layer]
        norm, block = cast(nn.Module, stack.norm), cast(nn.Module, stack.block)
        self._stream.is_guessing = True
        try:
            own_class(block).__call__(block, own_class(norm).__call__(norm, residual))
        except _GuessedError as guessed:
            return guessed.indices
        except GuessEndedError:
            return None
        finally:
            self._stream.is_guessing = False
        return None


def takes_slots(module: nn.Module, first: Any) -> bool:
    """Whether the back end computes with experts that lie in slots, with gaps between them, without a copy of them all.

    CUDA's kernels for quantized experts do not. One token is tried, with experts of zeros.

    Args:
        module: a stack whose arrays are views of empty slots.
        first: the ``SwitchLinear`` of it that tokens come to first.
    """
    dtype = first["scales" if "scales" in first else "weight"].dtype
    x = mx.zeros((1, first.input_dims), dtype if mx.issubdtype(dtype, mx.floating) else mx.bfloat16)
    # Several times, for other threads may take memory meanwhile.
    return any(_copies_little(module, x, int(first["weight"].nbytes) // 2) for _ in range(3))


def _copies_little(module: nn.Module, x: mx.array, limit: int) -> bool:
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    try:
        mx.eval(cast(Callable[..., mx.array], module)(x, mx.zeros((1, 1), mx.uint32)))
    except RuntimeError:
        return False
    return int(mx.get_peak_memory()) - before < max(_SMALL_BYTES, limit)


def _num_rows(x: mx.array) -> int:
    return x.size // x.shape[-1]


def _merged(first: mx.array, first_rows: Numbers, second: mx.array, second_rows: Numbers) -> mx.array:
    """The rows of both in their order. Where both have a row, the second's."""
    source = np.empty(max(first_rows.max(), second_rows.max()) + 1, np.uint32)
    source[first_rows] = np.arange(len(first_rows))
    source[second_rows] = len(first_rows) + np.arange(len(second_rows))
    return mx.concatenate([first.reshape(-1, first.shape[-1]), second])[mx.array(source)]

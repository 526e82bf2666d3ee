"""Layers of experts that compute with those experts only that a token is routed to.

A call evaluates its indices, asks the pool for the experts and computes with the rows of the pool's slots: the module's
own code, on arrays that have a slot where it expects an expert. Experts that are there already compute while the
others are read. Before that, the next layer's router is asked which experts it would choose now.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_flash.compat.experts import SORTED_SIZE
from mlx_flash.experts.eviction import Mask, Numbers
from mlx_flash.experts.lookahead import Guess, GuessedError, Lookahead
from mlx_flash.experts.pool import ExpertPool
from mlx_flash.experts.stage import Stage
from mlx_flash.layout.load import ExpertStack
from mlx_flash.layout.swap import SwappedClass, clone_tree, own_class, state_of, swap_class
from mlx_flash.streaming.stream import WeightStream

_SMALL_BYTES = 16 << 20
"""What a call for one token may take, whatever it copies."""

_MEMORY = 64
"""Over how many calls it is averaged how many experts come late."""

Routing = np.ndarray[Any, np.dtype[np.int64]]
OnRouting = Callable[[int, Routing], None]
"""Called with the number of a layer and the experts of each of its tokens, ``(..., top_k)``."""


class _Routed(SwappedClass):
    """A stack of experts whose calls go through the pool."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        experts, layer = cast("tuple[Experts, int]", state_of(self))
        return experts.call(layer, x, indices)


@dataclass(frozen=True, slots=True)
class _Begun:
    """What was begun with the experts that were there, before it was known which are needed.

    Attributes:
        rows: ``(pairs, width)``; those of experts that were not there are of no use.
        pairs: which of the call's (token, expert) pairs these are, counted in order; None for all.
        ready: of each expert, whether it was there.
    """

    rows: mx.array
    pairs: mx.array | None
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
        self._late_share = 0.0
        for layer, stack in enumerate(stacks):
            swap_class(stack.unit.module, _Routed, (self, layer))
        # At the full shape what is on its way is not waited for, but read with the rest.
        self._ahead = Lookahead(stacks, pool, stream, enabled=lookahead and all(self._takes_slots))
        self.changed = [*(stack.unit.module for stack in stacks), *self._ahead.changed]

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
            raise GuessedError(indices)
        next_guess = begun = None
        known = [indices]  # before anything is computed with them
        if indices.size < SORTED_SIZE:
            guess = self._ahead.late(layer)
            if guess is not None:
                mx.async_eval(guess.arrays)
                mx.async_eval(indices)  # the layer's attention computes while the guess is looked at
                self._ahead.read(layer, guess, is_early=False)
            next_guess = self._ahead.early(layer + 1)
            known += [] if next_guess is None else next_guess.arrays
            begun = self._begin(layer, x, known, guess)
        self._evaluate_pending(known)
        self.pool.hold(layer, ())
        routing = np.array(indices)
        counts = self._count(layer, routing)
        self.pool.stats.num_calls += 1
        if self._fits_slots(layer, int(np.count_nonzero(counts)), routing.size):
            result = self._compact(layer, x, routing, counts, begun)
            if next_guess is not None:  # not before: it would have taken the disk from what was waited for
                self._ahead.read(layer + 1, next_guess, is_early=True)
            return result
        self.pool.stats.num_full += 1
        self._note(layer, routing, counts)
        experts = sorted(np.flatnonzero(counts).tolist(), key=lambda i: -counts[i])
        return self._stage.run(layer, x, indices, experts, self._quota)

    def _begin(self, layer: int, x: mx.array, known: list[mx.array], guess: Guess | None) -> _Begun | None:
        """Begins to compute a small call before it is known which experts it needs.

        The processor need not wait for us then to look at the indices. It computes as many rows as experts are expected
        to be there, of those that are: a row of one that is missing costs as much, and is of no use.

        Args:
            layer: number of the stack.
            x: the tokens.
            known: the indices first, and what is to be evaluated with them; which rows are begun is added.
            guess: of the indices.
        """
        indices = known[0]
        if not self._takes_slots[layer] or indices.size > self.pool.slots.num_slots or not _is_whole(x, indices):
            return None
        ready = self.pool.ready(layer)
        num_rows = indices.size - self._num_late(ready, guess, indices.size)
        if not num_rows:
            return None
        num_slots = self.pool.slots.num_slots
        table = np.where(ready, self.pool.slot_of[layer], num_slots).astype(np.uint32)
        slots = mx.array(table)[mx.clip(indices, 0, len(table) - 1)]  # they are not checked yet
        pairs = None
        if num_rows < indices.size:
            pairs = mx.argsort(slots.reshape(-1))[:num_rows]
            known.append(pairs)
        mx.async_eval(known)  # in a call of its own: what is evaluated with the rows is not there before they are
        slots = mx.minimum(slots, num_slots - 1)
        if pairs is None:
            rows = self._run(layer, x, slots).reshape(num_rows, -1)
        else:
            rows = self._run_pairs(layer, x, slots.reshape(-1)[pairs], pairs, indices.shape[-1])
        mx.async_eval(rows)
        return _Begun(rows, pairs, ready)

    def _num_late(self, ready: Mask, guess: Guess | None, size: int) -> int:
        """How many of a call's (token, expert) pairs will probably have to wait for their experts."""
        if guess is None or guess.indices.size != size:
            return int(size * self._late_share)
        return sum(not ready[expert] for chosen in guess.chosen for expert in chosen)

    def _count(self, layer: int, routing: Routing) -> Numbers:
        """How many tokens each expert computes."""
        num_experts = self.stacks[layer].num_experts
        lowest = int(routing.min(initial=0)) if routing.dtype.kind == "i" else 0
        highest = int(routing.max(initial=0))
        if lowest < 0 or highest >= num_experts:
            asked = f"experts {lowest} to {highest}"
            raise IndexError(f"'{self.stacks[layer].unit.name}' was asked for {asked}: it has {num_experts}")
        return np.bincount(routing.reshape(-1), minlength=num_experts)

    def _note(self, layer: int, routing: Routing, counts: Numbers) -> None:
        """Remembers what a call needed."""
        for listener in self.listeners:
            listener(layer, routing.astype(np.int64))
        self._ahead.settle(layer, counts)
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

    def _compact(self, layer: int, x: mx.array, routing: Routing, counts: Numbers, begun: _Begun | None) -> mx.array:
        """Computes from the slots."""
        experts = np.flatnonzero(counts).tolist()
        late: Sequence[int] = self.pool.request(layer, experts)
        if routing.size < SORTED_SIZE:
            self._late_share += (len(late) / max(1, len(experts)) - self._late_share) / _MEMORY
        self.pool.hold(layer, experts)
        self._note(layer, routing, counts)
        if routing.size and _is_whole(x, routing):
            result, late = self._compute_parts(layer, x, routing, begun, late)
        else:
            result = self._run(layer, x, self._slots(layer, routing))
        self.pool.wait(layer, late)  # what computes with them was not evaluated yet
        if routing.size < SORTED_SIZE:
            # It computes while the rest of the model's code is gone through. A prompt's results are large: they wait.
            mx.async_eval(result)
        self._pending.append(result)
        if layer == len(self.stacks) - 1:
            self._evaluate_pending()  # the next call may come from another thread, which cannot
        return result

    def _compute_parts(
        self, layer: int, x: mx.array, routing: Routing, begun: _Begun | None, late: Sequence[int]
    ) -> tuple[mx.array, Sequence[int]]:
        """What is there computes while the rest is read; for few tokens, each expert when it comes.

        Returns:
            The result, ``(..., top_k, width)``, and the experts that have to be waited for before it is evaluated.
        """
        experts = routing.reshape(-1).tolist()  # in plain Python: what calls of numpy cost shows here
        parts: list[tuple[mx.array, Sequence[int]]] = []
        left = list(range(len(experts)))
        if begun is not None:
            pairs = left if begun.pairs is None else cast("list[int]", begun.pairs.tolist())
            parts.append((begun.rows, pairs))
            done = {pair for pair in pairs if begun.ready[experts[pair]]}
            left = [pair for pair in left if pair not in done]
        absent = set(late)
        most_left = 1 if routing.size < SORTED_SIZE else len(late)
        while True:
            here = [pair for pair in left if experts[pair] not in absent]
            if here:
                parts.append((self._run_rows(layer, x, routing, here), here))
                if absent:
                    mx.async_eval(parts[-1][0])
                left = [pair for pair in left if experts[pair] in absent]
            if len(absent) <= most_left:
                break
            absent.difference_update(self.pool.wait_any(layer, [expert for expert in late if expert in absent]))
        if absent:
            parts.append((self._run_rows(layer, x, routing, left), left))
        return _joined(parts, routing.shape), [expert for expert in late if expert in absent]

    def let_go(self) -> None:
        """Forgets what was not computed: the pass has failed, and the next may come from another thread."""
        self._pending.clear()
        self._ahead.let_go()

    def _evaluate_pending(self, others: Sequence[mx.array] = ()) -> None:
        pending, self._pending = self._pending, []  # they go, whatever happens: they may be of another thread's
        mx.eval(pending, others)

    def _run_rows(self, layer: int, x: mx.array, routing: Routing, pairs: list[int]) -> mx.array:
        """What some of the (token, expert) pairs make, ``(pairs, width)``."""
        if len(pairs) == routing.size:
            return self._run(layer, x, self._slots(layer, routing)).reshape(routing.size, -1)
        slots = self._slots(layer, routing.reshape(-1)[pairs])
        return self._run_pairs(layer, x, slots, mx.array(pairs, mx.uint32), routing.shape[-1])

    def _slots(self, layer: int, experts: Routing) -> mx.array:
        return mx.array(self.pool.slot_of[layer][experts].astype(np.uint32))

    def _run_pairs(self, layer: int, x: mx.array, slots: mx.array, pairs: mx.array, top_k: int) -> mx.array:
        """What some of the (token, expert) pairs make, ``(pairs, width)``, whose experts are in these slots."""
        tokens = x.reshape(-1, x.shape[-1])
        if len(tokens) == 1:  # as the model itself calls them: no rows to gather
            return self._run(layer, tokens, slots[None])[0]
        return self._run(layer, tokens[pairs // top_k], slots[:, None])[:, 0]

    def _run(self, layer: int, x: mx.array, slots: mx.array) -> mx.array:
        module = self._modules[layer]
        return cast(mx.array, own_class(module).__call__(module, x, slots))


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


def _is_whole(x: mx.array, indices: mx.array | Routing) -> bool:
    """Whether every token has its own experts."""
    return x.size // x.shape[-1] * indices.shape[-1] == indices.size


def _joined(parts: Sequence[tuple[mx.array, Sequence[int]]], shape: Sequence[int]) -> mx.array:
    """All rows in their order, ``(*shape, width)``. Where several parts have a row, the last one's.

    Args:
        parts: rows ``(pairs, width)``, and which pairs these are.
        shape: of the routing.
    """
    rows = parts[0][0]
    if len(parts) > 1:
        source = [0] * math.prod(shape)
        for row, pair in enumerate(chain.from_iterable(pairs for _, pairs in parts)):
            source[pair] = row
        rows = mx.concatenate([rows for rows, _ in parts])[mx.array(source, mx.uint32)]
    return rows.reshape(*shape, -1)

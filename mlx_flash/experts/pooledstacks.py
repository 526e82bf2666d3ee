"""Stacks of experts that compute from the slots of the pool."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_flash.experts.pool import ExpertPool, PoolLayer, pool_layer, stack_layers
from mlx_flash.layout.parts import ExpertStack
from mlx_flash.layout.swap import clone_tree
from mlx_flash.memory.arena import SlotArena, StackArena

_SMALL_BYTES = 16 << 20
"""Memory that a call for one token may take without counting as a copy of all experts."""

_TRIED_BYTES = 4 * _SMALL_BYTES
"""Memory of the largest tensors in the slots that a back end is tried with."""

_MOST_ITEMS = 2**31 - 1
"""MLX's dimensions are 32-bit."""

Routing = np.ndarray[Any, np.dtype[np.int64]]

MakePool = Callable[[SlotArena | StackArena, Sequence[PoolLayer]], ExpertPool]


def make_pooled(stacks: Sequence[ExpertStack], slots: tuple[int, int, int], make_pool: MakePool) -> PooledStacks:
    """Return stacks over a new pool, in a form that the back end computes with, if there is one.

    An expert is read fastest when all of it lies in one place. Kernels that do not compute with that, such as CUDA's
    for quantized experts, get one stack for each tensor.

    Args:
        stacks: in the order of calls.
        slots: the number of slots, the bytes of each, and the most slots that the pool may grow to.
        make_pool: called with the memory, and the layers as they lie in it.
    """
    num_slots, slot_bytes, most_slots = slots
    layers = list(map(pool_layer, stacks))
    widths = layers[0].widths
    # With few slots, since a kernel that copies all of them would take the pool's memory a second time.
    num_tried = min(num_slots, -(-_TRIED_BYTES // min(max(layer.widths) for layer in layers)))
    tried = PooledStacks(stacks, make_pool(SlotArena(num_tried, slot_bytes), layers))
    takes = tried.takes_slots
    tried.pool.close()
    del tried
    if not all(takes):
        gc.collect()  # in case the error of a refused call refers to the slots: they would count against the budget
    mx.synchronize()
    mx.clear_cache()
    if all(takes) or any(layer.widths != widths for layer in layers):
        return PooledStacks(stacks, make_pool(SlotArena(num_slots, slot_bytes, most_slots), layers), takes)
    items = [p.array.dtype.size for p in (*stacks[0].unit.large, *stacks[0].unit.small)]
    most = min(_MOST_ITEMS * size // width for size, width in zip(items, widths, strict=True))
    arena = StackArena(min(num_slots, most), slot_bytes, widths, min(most_slots, most))
    return PooledStacks(stacks, make_pool(arena, stack_layers(layers, arena.offsets)))


class PooledStacks:
    """Copies of all stacks of a model that hold the pool's slots in the place of their experts.

    A *pair* is a (token, expert) pair of a call, by its number in the order of the routing.

    Attributes:
        pool: the experts in memory.
        takes_slots: for each stack whether the back end computes with slots; tried if it is not given.
    """

    def __init__(
        self, stacks: Sequence[ExpertStack], pool: ExpertPool, takes_slots: Sequence[bool] | None = None
    ) -> None:
        self.pool = pool
        self._stacks = stacks
        self._modules: list[Any] = []
        self.arrange()
        self.takes_slots = takes_slots or [
            not stack.is_widened and try_slots(module, stack.unit.large[0].container)
            for module, stack in zip(self._modules, stacks, strict=True)
        ]

    def arrange(self) -> None:
        """Make the copies. Call it again after :meth:`let_go`."""
        self._modules = [self._copy(layer, stack) for layer, stack in enumerate(self._stacks)]

    def let_go(self) -> None:
        """Drop all views of the slots, before others take their place."""
        self._modules = []

    def _copy(self, layer: int, stack: ExpertStack) -> nn.Module:
        unit, of_pool = stack.unit, self.pool.layers[layer]
        offsets = (*of_pool.offsets, *(offset for offset, _ in of_pool.kept))
        arrays = {
            (id(p.container), p.key): self.pool.slots.view(offset, p.array.shape[1:], p.array.dtype)
            for p, offset in zip([*unit.large, *unit.small], offsets, strict=True)
        }
        return clone_tree(unit.module, arrays)

    def run(self, layer: int, x: mx.array, slots: mx.array) -> mx.array:
        """Compute tokens with the experts in some slots, ``(..., top_k)``."""
        result: mx.array = self._modules[layer](x, slots)
        return result

    def run_routing(self, layer: int, x: mx.array, routing: Routing) -> mx.array:
        """Compute tokens with their experts, all of which have slots."""
        return self.run(layer, x, self._slots(layer, routing))

    def run_rows(self, layer: int, x: mx.array, routing: Routing, pairs: list[int]) -> mx.array:
        """Compute some pairs, ``(pairs, width)``."""
        if len(pairs) == routing.size:
            return self.run_routing(layer, x, routing).reshape(routing.size, -1)
        slots = self._slots(layer, routing.reshape(-1)[pairs])
        return self.run_pairs(layer, x, slots, mx.array(pairs, mx.uint32), routing.shape[-1])

    def run_pairs(self, layer: int, x: mx.array, slots: mx.array, pairs: mx.array, top_k: int) -> mx.array:
        """Compute some pairs whose experts are in these slots, ``(pairs, width)``."""
        tokens = x.reshape(-1, x.shape[-1])
        if len(tokens) == 1:  # as the model itself calls them: no rows to gather
            return self.run(layer, tokens, slots[None])[0]
        return self.run(layer, tokens[pairs // top_k], slots[:, None])[:, 0]

    def _slots(self, layer: int, experts: Routing) -> mx.array:
        slots = self.pool.slot_of[layer][experts]
        if slots.size and not 0 <= slots.min() <= slots.max() < self.pool.slots.num_slots:
            raise AssertionError(
                f"experts {experts} of stack {layer} are in slots {slots}"
            )  # a kernel would not say so
        return mx.array(slots.astype(np.uint32))


def try_slots(module: nn.Module, first: Any) -> bool:
    """Return whether the back end computes with experts in slots, with gaps between them, without copying all of them.

    CUDA's kernels for quantized experts do not. The function tries one token with experts of zeros.
    """
    dtype = first["scales" if "scales" in first else "weight"].dtype
    x = mx.zeros((1, first.input_dims), dtype if mx.issubdtype(dtype, mx.floating) else mx.bfloat16)
    # Several times, since other threads may take memory meanwhile.
    return any(_copies_little(module, x, int(first["weight"].nbytes) // 2) for _ in range(3))


def _copies_little(module: nn.Module, x: mx.array, limit: int) -> bool:
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    try:
        mx.eval(cast(Callable[..., mx.array], module)(x, mx.zeros((1, 1), mx.uint32)))
    except RuntimeError:
        return False
    return int(mx.get_peak_memory()) - before < max(_SMALL_BYTES, limit)


def is_whole(x: mx.array, indices: mx.array | Routing) -> bool:
    """Return whether every token has experts of its own."""
    return x.size // x.shape[-1] * indices.shape[-1] == indices.size


def join_rows(parts: Sequence[tuple[mx.array, Sequence[int]]], shape: Sequence[int]) -> mx.array:
    """Return all rows in the order of their pairs, ``(*shape, width)``. The last part that has a row counts."""
    if len(parts) == 1:
        return parts[0][0].reshape(*shape, -1)
    rows, numbers = zip(*parts, strict=True)
    source = [0] * math.prod(shape)
    for row, pair in enumerate(chain.from_iterable(numbers)):
        source[pair] = row
    return mx.concatenate([*rows])[mx.array(source, mx.uint32)].reshape(*shape, -1)

"""Stacks of experts that compute from the slots of the pool, or at their full shape in a stage.

A stack is computed at its full shape where kernels depend on the number of experts. Its matrices pass one after
another through the stage, which is the memory of the pool's first slots. A matrix lies there as in its file, but only
with the needed experts. Those in the pool are copied, the others are read, each once, in the order of the file.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_flash.experts.pool import Bytes, ExpertPool, PoolLayer, pool_layer, stack_layers
from mlx_flash.layout.parts import ExpertStack
from mlx_flash.layout.reachable import arrays_in
from mlx_flash.layout.swap import SwappedClass, clone_tree, own_class, swap_class
from mlx_flash.layout.units import expert_records, matrices_of, place_matrix
from mlx_flash.memory.arena import SlotArena, StackArena
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT
from mlx_flash.storage.placement import Placement, Segment, grouped, read_scattered
from mlx_flash.storage.prefetcher import Ticket
from mlx_flash.storage.safetensors import TensorRecord
from mlx_flash.streaming.stream import POISON

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
    for quantized experts, get one stack for each tensor. ``slots`` are their number, the bytes of each, and the most.
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
    """

    def __init__(
        self, stacks: Sequence[ExpertStack], pool: ExpertPool, takes_slots: Sequence[bool] | None = None
    ) -> None:
        self.pool = pool
        self._stacks = stacks
        self._modules: list[Any] = []
        self.arrange()
        # For each stack whether the back end computes with slots; tried if it is not given.
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
        offsets = (*of_pool.placements.offsets, *(offset for offset, _ in of_pool.kept))
        arrays = {
            (id(p.container), p.key): self.pool.slots.view(offset, p.array.shape[1:], p.array.dtype)
            for p, offset in zip([*unit.large, *unit.small], offsets, strict=True)
        }
        return clone_tree(unit.module, arrays)

    def run(self, layer: int, x: mx.array, slots: mx.array) -> mx.array:
        """Compute tokens with the experts in some slots, ``(..., top_k)``."""
        result: mx.array = self._modules[layer](x, slots)
        return result

    def run_rows(self, layer: int, x: mx.array, routing: Routing, pairs: list[int]) -> mx.array:
        if len(pairs) == routing.size:
            return self.run(layer, x, self.slots(layer, routing)).reshape(routing.size, -1)
        slots = self.slots(layer, routing.reshape(-1)[pairs])
        return self.run_pairs(layer, x, slots, mx.array(pairs, mx.uint32), routing.shape[-1])

    def run_pairs(self, layer: int, x: mx.array, slots: mx.array, pairs: mx.array, top_k: int) -> mx.array:
        """Compute some pairs whose experts are in these slots, ``(pairs, width)``."""
        tokens = x.reshape(-1, x.shape[-1])
        if len(tokens) == 1:  # as the model itself calls them: no rows to gather
            return self.run(layer, tokens, slots[None])[0]
        return self.run(layer, tokens[pairs // top_k], slots[:, None])[:, 0]

    def slots(self, layer: int, experts: Routing) -> mx.array:
        """Return the slots of experts, each of which has one."""
        slots = self.pool.slot_of[layer][experts]
        if np.maximum.reduce(slots, None, initial=0) >= self.pool.slots.num_slots:
            # A kernel would not say so.
            raise AssertionError(f"experts {experts} of stack {layer} are in slots {slots}")
        return mx.array(slots)


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


def join_rows(parts: Sequence[tuple[mx.array, Sequence[int]]], shape: Sequence[int]) -> mx.array:
    """Return all rows in the order of their pairs, ``(*shape, width)``. The last part that has a row counts."""
    if len(parts) == 1:
        return parts[0][0].reshape(*shape, -1)
    rows, numbers = zip(*parts, strict=True)
    source = [0] * math.prod(shape)
    for row, pair in enumerate(chain.from_iterable(numbers)):
        source[pair] = row
    return mx.concatenate([*rows])[mx.array(source, mx.uint32)].reshape(*shape, -1)


class _Matrix:
    """One module of a stack that holds weights of all experts."""

    def __init__(self, stack: ExpertStack, columns: list[int]) -> None:
        self.columns = columns  # numbers of its tensors in an expert
        self.parameters = [stack.unit.large[i] for i in columns]
        self.module = cast(nn.Module, self.parameters[0].container)  # later that in the full-shape copy of the stack
        self.rows = [expert_records(parameter) for parameter in self.parameters]
        self.placement = place_matrix(stack, columns)  # of the whole parameters
        self.views: dict[int, list[mx.array]] = {}  # the parameters in each region of the stage


@dataclass(slots=True)
class _Call:
    layer: int  # number of the stack
    waiting: list[_Matrix]  # matrices that are not in the stage yet
    experts: list[int]  # the needed experts, ascending
    present: set[int]  # those of them that are in the pool
    adopted: dict[int, int] = field(default_factory=dict)  # slots of those that enter the pool meanwhile


class _Staged(SwappedClass):
    """A matrix that waits for its weights and releases them after its call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stage, matrix = cast("tuple[Stage, _Matrix]", self._flash_state)
        stage.enter(matrix)
        result = own_class(self).__call__(self, *args, **kwargs)
        mx.eval(arrays_in(result, args, kwargs))
        stage.leave(matrix)
        return result


class Stage:
    """Computes stacks of experts at their full shape, in the first slots of the pool."""

    def __init__(self, pool: ExpertPool, stacks: Sequence[ExpertStack]) -> None:
        self._pool = pool
        self._matrices = [[_Matrix(stack, columns) for columns in matrices_of(stack)] for stack in stacks]
        self._copies = [
            self._full_copy(stack, matrices) for stack, matrices in zip(stacks, self._matrices, strict=True)
        ]
        self._region_bytes = max(matrix.placement.nbytes for matrices in self._matrices for matrix in matrices)
        self.arrange()
        self._call = _Call(0, [], [], set())
        self._regions: dict[int, tuple[_Matrix, Ticket]] = {}

    def arrange(self) -> None:
        """Take the first slots of the pool. Call it again after :meth:`let_go`."""
        slots = self._pool.slots
        two, one = (slots.num_head(count * self._region_bytes) for count in (2, 1))
        self._num_regions, self.num_slots = (2, two) if 2 * two <= slots.num_slots else (1, one)
        self._arena = slots.head(self.num_slots)

    def let_go(self) -> None:
        """Drop all views of the slots, before others take their place."""
        del self._arena
        for matrix in chain.from_iterable(self._matrices):
            matrix.views.clear()
            for parameter in matrix.parameters:
                dict.__setitem__(matrix.module, parameter.key, parameter.array)

    def _full_copy(self, stack: ExpertStack, matrices: Sequence[_Matrix]) -> nn.Module:
        arrays = {(id(p.container), p.key): p.array for p in [*stack.unit.large, *stack.unit.small]}
        copy = clone_tree(stack.unit.module, arrays)
        by_name = dict(copy.named_modules())
        for name, module in stack.unit.module.named_modules():
            for matrix in matrices:
                if matrix.module is module:
                    matrix.module = by_name[name]
                    swap_class(matrix.module, _Staged, (self, matrix))
        return copy

    def run(self, layer: int, x: mx.array, indices: mx.array, hottest: list[int], quota: int) -> mx.array:
        """Compute tokens with a stack, and evaluate the result. Raises: ReadError.

        Of the needed experts, those of most tokens first, a quota is to be in the pool afterwards.
        """
        pool = self._pool
        pool.drop_unread(layer, hottest)  # their reads may be late in the queue; they are read with the others now
        pool.clear_head(self.num_slots)
        present = set(hottest).difference(pool.count(layer, hottest))
        call = self._call = _Call(layer, list(self._matrices[layer]), sorted(hottest), present)
        try:
            for region in range(self._num_regions):
                self._load_next(region)
            absent = [expert for expert in hottest[:quota] if expert not in present]
            call.adopted.update(pool.adopt(layer, absent, pool.spared(layer, hottest)))
            module = self._copies[layer]
            result = cast(mx.array, own_class(module).__call__(module, x, indices))
            mx.eval(result)
        except BaseException:
            for expert in call.adopted:
                pool.leave((layer, expert))
            raise
        finally:
            self._end()
        return result

    def _end(self) -> None:
        for _, ticket in self._regions.values():
            ticket.cancel()
        self._regions.clear()
        self._pool.restore_head()

    def enter(self, matrix: _Matrix) -> None:
        region = self._region_of(matrix)
        if region is None:  # called in another order than the one they were found in, or once more
            region = 0
            if region in self._regions:
                other, ticket = self._regions[region]
                ticket.cancel()
                self._call.waiting.append(other)
            if matrix in self._call.waiting:
                self._call.waiting.remove(matrix)
            self._load(matrix, region)
        self._pool.stats.wait_seconds += self._regions[region][1].wait()

    def _region_of(self, matrix: _Matrix) -> int | None:
        return next((region for region, (loaded, _) in self._regions.items() if loaded is matrix), None)

    def leave(self, matrix: _Matrix) -> None:
        """Give a matrix's place to the next one. Everything that computes with it must be evaluated."""
        region = self._region_of(matrix)
        assert region is not None
        del self._regions[region]
        memory = self._memory(region)
        for expert, slot in self._call.adopted.items():
            for of_slot, of_stage in self._rows(matrix, slot, memory, expert):
                of_slot[:] = of_stage
        if self._pool.poison:
            np.frombuffer(memory, np.uint8)[:] = POISON
        self._load_next(region)

    def _load_next(self, region: int) -> None:
        if self._call.waiting:
            self._load(self._call.waiting.pop(0), region)

    def _load(self, matrix: _Matrix, region: int) -> None:
        call, memory = self._call, self._memory(region)
        for parameter, view in zip(matrix.parameters, self._views(matrix, region), strict=True):
            dict.__setitem__(matrix.module, parameter.key, view)
        missing = [expert for expert in call.experts if expert not in call.present]
        segments = rows_in_place(matrix.placement, matrix.rows, missing)
        self._regions[region] = matrix, self._pool.reader.submit(segments, memory, urgent=True)
        self._pool.stats.read_bytes += sum(piece.nbytes for segment in segments for piece in segment.pieces)
        for expert in call.present:
            slot = int(self._pool.slot_of[call.layer][expert])
            for of_slot, of_stage in self._rows(matrix, slot, memory, expert):
                of_stage[:] = of_slot

    def _rows(self, matrix: _Matrix, slot: int, memory: memoryview, expert: int) -> Iterator[tuple[Bytes, Bytes]]:
        """Yield the bytes of an expert's part of a matrix, in its slot and in the stage."""
        in_stage = np.frombuffer(memory, np.uint8)
        offsets = self._pool.layers[self._call.layer].placements.offsets
        for column, start, rows in zip(matrix.columns, matrix.placement.offsets, matrix.rows, strict=True):
            nbytes = rows[expert].nbytes
            first = start + expert * nbytes
            in_slot = np.frombuffer(self._pool.slots.part(slot, offsets[column], nbytes), np.uint8)
            yield in_slot, in_stage[first : first + nbytes]

    def _views(self, matrix: _Matrix, region: int) -> list[mx.array]:
        if region not in matrix.views:
            start = region * self._region_bytes
            matrix.views[region] = [
                self._arena.view(start + offset, parameter.array.shape, parameter.array.dtype)
                for parameter, offset in zip(matrix.parameters, matrix.placement.offsets, strict=True)
            ]
        return matrix.views[region]

    def _memory(self, region: int) -> memoryview:
        return self._arena.memory[region * self._region_bytes :][: self._region_bytes]


def rows_in_place(
    placement: Placement, rows: Sequence[Sequence[TensorRecord]], wanted: Collection[int]
) -> list[Segment]:
    """Return the reads that put some rows of stacks, ascending, where the whole stacks would have them."""
    in_place = [
        range(s.buffer_offset, s.buffer_offset + s.nbytes) for s in placement.segments if s.buffer_offset is not None
    ]

    def follows(left: tuple[TensorRecord, int], right: tuple[TensorRecord, int]) -> bool:
        return (left[0].path, left[0].end) == (right[0].path, right[0].offset)

    segments = []
    for offset, records in zip(placement.offsets, rows, strict=True):
        lies_in_place = any(offset in places for places in in_place)
        placed = [(records[i], offset + i * records[i].nbytes) for i in wanted]
        placed.sort(key=lambda entry: (str(entry[0].path), entry[0].offset))
        for run in grouped(placed, follows):  # in place, the rest of its pages lies in the buffer as in the file
            at = run[0][1] - run[0][0].offset % DIRECT_ALIGNMENT
            segments.append(read_scattered(run, at if lies_in_place else None))
    return sorted(segments, key=lambda segment: (str(segment.path), segment.offset))

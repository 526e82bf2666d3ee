"""Layers of experts that compute only with the experts that a token is routed to.

A call evaluates its indices, asks the pool for the experts and computes with the rows of the pool's slots: the module's
own code, on arrays that have a slot where it expects an expert. The next layer's router is asked which experts it would
choose now, and they are read early. Where rows may be computed one by one, experts in memory compute while others are
read.

A stack is computed at its full shape where kernels depend on the number of experts. Its matrices pass one after
another through the stage, which is the memory of the pool's first slots. A matrix lies there as in its file, but only
with the needed experts. Those in the pool are copied, the others are read, each once, in the order of the file.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, compress
from operator import itemgetter
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_flash import enginethread
from mlx_flash.compat.expertstacks import SORTED_SIZE, answered_by
from mlx_flash.experts.pool import ABSENT, Bytes, ExpertPool, Numbers, PoolLayer, Slots, pool_layer, stack_layers
from mlx_flash.layout.parts import ExpertStack
from mlx_flash.layout.reachable import arrays_in
from mlx_flash.layout.swap import SwappedClass, clone_tree, own_class, swap_class
from mlx_flash.layout.units import expert_records, matrices_of, place_matrix, scores_of
from mlx_flash.memory.arena import SlotArena, StackArena
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT
from mlx_flash.storage.placement import Placement, Segment, grouped, read_scattered
from mlx_flash.storage.prefetcher import Ticket
from mlx_flash.storage.safetensors import TensorRecord
from mlx_flash.streaming.stream import POISON, GuessEndedError, WeightStream, hand_in

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

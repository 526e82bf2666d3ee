"""Modules that compute with weights which are in memory only while they run.

A module is changed by giving it a subclass of its own class, and changed back by giving it its class back. Attribute
access, ``isinstance``, parameter names and the model's own forward loop, masks and caches stay what they were; no
forward pass is written again here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_flash import enginethread
from mlx_flash.layout.parts import Parameter, Unit
from mlx_flash.layout.reachable import arrays_in
from mlx_flash.layout.swap import (
    SwappedClass,
    clone_with,
    own_class,
    restore_class,
    swap_class,
)
from mlx_flash.memory.arena import Arena
from mlx_flash.memory.driver import has_own_memory
from mlx_flash.storage.placement import Piece, Segment
from mlx_flash.storage.prefetcher import BackgroundPrefetcher
from mlx_flash.streaming.stream import GuessEndedError


class StreamedLayer(SwappedClass):
    """A layer or tile that runs once its weights have arrived and lets them go when its effects are computed.

    The outputs alone are not enough: a recurrent state or an indexer's keys do not feed them, and would later be
    computed from whatever the slot holds by then. Where the stream computes ahead, a layer's effects are waited for
    once the next unit has begun.

    Its state is its number in the stream, the stream, its own class, and the name of the method that computes. The
    method is looked up in each call, since ``verify`` replaces it later.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (work := enginethread.here.call) is None:
            return hand_in(self, *args, **kwargs)
        if work.is_to_end:
            enginethread.check()
        index, stream, kind, method = self._flash_state
        if stream.is_guessing:
            raise GuessEndedError
        if stream.wait_turn is not None:
            compute(args, kwargs)  # now, or the pinned layers of all calls would take memory at once
            stream.wait_turn(index)
            result = getattr(kind, method)(self, *args, **kwargs)
            compute(result, args, kwargs)
            return result
        # What comes before is computed while we wait. MLX holds what is evaluated until it is computed, and copies a
        # cache that it holds when a layer adds to it. So caches are left out.
        is_matrix = len(args) == 1 and not kwargs and isinstance(args[0], mx.array)
        inputs = args if is_matrix else [each for each in (*args, *kwargs.values()) if isinstance(each, mx.array)]
        stream.acquire(index, inputs)
        wait: Callable[[], None] | None = None
        try:
            result = getattr(kind, method)(self, *args, **kwargs)
            if is_matrix and isinstance(result, mx.array):
                effects = [result, *inputs]  # a search takes too long
            else:
                effects = arrays_in(result, args, kwargs)
            if stream.computes_ahead:
                mx.async_eval(effects)
                wait = partial(mx.eval, effects)
            else:
                mx.eval(effects)
                if stream.lets_go_late:
                    mx.synchronize()
        finally:
            stream.release(index, wait)
        return result


def hand_in(module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module in the engine thread: a program calls it alone."""
    compute(args, kwargs)  # only this thread can

    def call() -> Any:
        result = module(*args, **kwargs)
        compute(result)
        return result

    return enginethread.run(call)


def compute(*roots: Any) -> None:
    """Compute the arrays in some objects, and wait until MLX has let go of their intermediate results.

    On CUDA, MLX lets go of them some time after the results are there, and the next layer's would come meanwhile.
    """
    mx.eval(arrays_in(*roots))
    if has_own_memory():
        mx.synchronize()


class PinnedLayers:
    """The layers in memory that calls may have to wait for, on a GPU that MLX records work for far ahead.

    MLX keeps the intermediate results of recorded work until it is done: those of all layers, if nobody waits.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.num_at_once: int | None = None  # layers that are computed before the next one begins; None for all

    def compute_at_once(self, number: int | None) -> None:
        """Change :attr:`num_at_once`. Layers that nobody waits for are as they were."""
        if number == self.num_at_once:
            return
        for position, module in enumerate(self.modules, 1):
            is_last = number is not None and position % number == 0
            if is_last and not isinstance(module, ComputedModule):
                swap_class(module, ComputedModule, None)
            elif not is_last and isinstance(module, ComputedModule):
                restore_class(module)
        self.num_at_once = number


class ComputedModule(SwappedClass):
    """A module that is computed, and those before it, before the next one begins."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(*args, **kwargs)  # type: ignore[misc]
        compute(result, args, kwargs)
        return result


@dataclass(slots=True)
class HeadState:
    """A head that is computed tile by tile."""

    tiles: Sequence[nn.Module]  # modules that have some of its rows, each a :class:`StreamedLayer`
    whole: nn.Module  # the module with its lazily loaded arrays
    # whether the outputs of the calls to come are not looked at. Then they are not computed: what is returned could be,
    # by MLX alone, reading the whole head.
    is_dropped: bool = False

    def apply(self, method: Callable[[nn.Module, mx.array], mx.array], x: mx.array) -> mx.array:
        """Compute the head with a method of its class. Return the outputs of all tiles, ``(..., rows)``."""
        if self.is_dropped:
            return method(self.whole, x)
        return mx.concatenate([cast(Any, tile)(x) for tile in self.tiles], axis=-1)


class TiledLinear(SwappedClass):
    """A linear layer whose output rows pass through the slots, tile by tile."""

    def __call__(self, x: mx.array) -> mx.array:
        if not enginethread.check():
            return cast(mx.array, hand_in(self, x))
        state: HeadState = self._flash_state
        return state.apply(cast(Any, own_class(cast(nn.Module, self)).__call__), x)


@dataclass(frozen=True, slots=True)
class TableState:
    """An embedding table on disk; ``head`` is set when it serves as the output head too."""

    parameters: Sequence[Parameter]
    reader: BackgroundPrefetcher
    head: HeadState | None


class EmbeddingRows(SwappedClass):
    """An embedding that reads just the rows it looks up."""

    def __call__(self, ids: mx.array) -> mx.array:
        if not enginethread.check():
            return cast(mx.array, hand_in(self, ids))
        state: TableState = self._flash_state
        module = cast(nn.Module, self)
        wanted, positions = np.unique(_checked_ids(ids, module["weight"].shape[0]), return_inverse=True)
        rows = dict(zip([p.key for p in state.parameters], _read_rows(state, wanted), strict=True))
        local = mx.array(positions.reshape(ids.shape).astype(np.uint32))
        return cast(mx.array, own_class(module).__call__(clone_with(module, rows), local))

    def as_linear(self, x: mx.array) -> mx.array:
        if not enginethread.check():
            return cast(mx.array, hand_in(self.as_linear, x))
        state: TableState = self._flash_state
        own: Any = own_class(cast(nn.Module, self))
        if state.head is None:
            return cast(mx.array, own.as_linear(self, x))
        return state.head.apply(own.as_linear, x)


def _checked_ids(ids: mx.array, num_rows: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return row numbers, negative ones counted from the end. Raises: IndexError; MLX would read what lies there."""
    found = np.array(ids).astype(np.int64)
    found = np.where(found < 0, found + num_rows, found)
    if found.size and not (0 <= found.min() and found.max() < num_rows):
        raise IndexError(f"token ids from {found.min()} to {found.max()}: the embedding has rows 0 to {num_rows - 1}")
    return found


def _read_rows(state: TableState, wanted: np.ndarray[Any, np.dtype[Any]]) -> list[mx.array]:
    """Read rows ``wanted`` (ascending, distinct) of every parameter of the table."""
    arenas, tickets, arrays = [], [], []
    for parameter in state.parameters:
        row_bytes = parameter.nbytes // parameter.array.shape[0]
        arena = Arena(len(wanted) * row_bytes)
        segments = row_segments(parameter, [int(i) for i in wanted], state.reader.queue_depth)
        tickets.append(state.reader.submit(segments, arena.memory, caching="kept"))
        arenas.append(arena)
    for ticket in tickets:
        ticket.wait()
    for parameter, arena in zip(state.parameters, arenas, strict=True):
        arrays.append(arena.view(0, (len(wanted), *parameter.array.shape[1:]), parameter.array.dtype))
    return arrays


def row_segments(parameter: Parameter, rows: Sequence[int], num_tasks: int) -> list[Segment]:
    """Return reads that put some rows of a table one after another, in about ``num_tasks`` tasks."""
    assert parameter.record is not None
    record = parameter.record
    row_bytes = parameter.nbytes // parameter.array.shape[0]
    pieces = [
        Piece(record.name, record.offset + row * row_bytes, row_bytes, i * row_bytes) for i, row in enumerate(rows)
    ]
    step = max(1, -(-len(pieces) // num_tasks))
    groups = [tuple(pieces[i : i + step]) for i in range(0, len(pieces), step)]
    return [Segment(record.path, group[0].offset, group[-1].end - group[0].offset, None, group) for group in groups]


def tile_module(unit: Unit, start: int, stop: int, views: dict[str, mx.array]) -> nn.Module:
    """The part of a linear layer or embedding that has rows ``start`` to ``stop``: ``views`` of the large parameters,
    slices of the small ones that have a value a row (a bias)."""
    num_rows = unit.module["weight"].shape[0]
    small = {p.key: p.array for p in unit.small if p.array.ndim and p.array.shape[0] == num_rows}
    arrays = {key: array[start:stop] for key, array in small.items()}
    mx.eval(arrays)
    return clone_with(unit.module, {**arrays, **views})

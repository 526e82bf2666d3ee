"""Towers for pictures and sound: their layers are in memory while they compute, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from weakref import ref

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from mlx_flash.compat.arrays import result_bytes, tape_of
from mlx_flash.engine.engine import bind_views
from mlx_flash.engine.lifecycle import Lifecycle
from mlx_flash.engine.passes import Passes
from mlx_flash.errors import BudgetError
from mlx_flash.layout.parts import Unit
from mlx_flash.layout.reachable import arrays_in
from mlx_flash.layout.swap import SwappedClass, own_class, restore_class, swap_class
from mlx_flash.layout.trace import zeros_like
from mlx_flash.memory.arena import Arena, kernel_alignment
from mlx_flash.memory.footprint import footprint, release_freed_memory
from mlx_flash.residency.plan import in_gb
from mlx_flash.storage.placement import Segment, place
from mlx_flash.streaming.stream import compute

MARGIN = 1.25
"""Allocators leave holes, and matrix products copy some inputs. Measured on the CPU back end: 0.99 to 1.2 times."""


@dataclass(slots=True)
class TowerRehearsal:
    """Notes of one rehearsal."""

    # the units without units inside them: the unit, what calls it, and its arguments
    calls: list[tuple[Unit, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    retained_bytes: int = 0  # results of units that something still held when a later unit was called, at most
    _results: list[ref[mx.array]] = field(default_factory=list)

    def call(self, unit: Unit, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        held = [array.nbytes for result in self._results if (array := result()) is not None]
        self.retained_bytes = max(self.retained_bytes, sum(held))
        before = len(self.calls)
        result = run(*args, **kwargs)
        if len(self.calls) == before:  # else the units inside it count
            self.calls.append((unit, run, args, kwargs))
            self._results += map(ref, arrays_in(result))
        return result


def needed_bytes(call: Callable[..., Any], inputs: dict[str, Any], rehearsal: TowerRehearsal) -> int:
    """Return the memory that results take while a model makes embeddings of pictures, weights not counted.

    Units are computed one after another. So only the largest of them counts, what others keep of them, and what is
    computed outside of them. Raises: ValueError, if the model looks at the numbers of pictures.
    """
    total = _traced(call, (), inputs)
    known: dict[Any, int] = {}
    parts = []
    for unit, run, args, kwargs in rehearsal.calls:
        key = (_signature(unit.large), _signature((args, kwargs)))
        if key not in known:
            known[key] = _traced(run, args, kwargs)
        parts.append(known[key])
    outside = max(0, total - sum(parts))
    return int(MARGIN * (outside + max(parts, default=0) + rehearsal.retained_bytes))


def _signature(value: Any) -> Any:
    if isinstance(value, list):
        return tuple((parameter.key, parameter.array.shape, parameter.array.dtype) for parameter in value)
    return tuple((array.shape, str(array.dtype)) for array in arrays_in(value))


def _traced(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the memory of a call's results. Arrays of numbers that are not whole count by their shape alone."""
    tree: Any = [list(args), kwargs]
    flat: Any = tree_flatten(tree)
    floats: list[mx.array] = list({id(leaf): leaf for _, leaf in flat if _is_floating(leaf)}.values())

    def called(*arrays: mx.array) -> list[mx.array]:
        places = {id(leaf): array for leaf, array in zip(floats, arrays, strict=True)}
        given: Any = tree_map(lambda leaf: places.get(id(leaf), leaf), tree)
        positional, named = given
        return arrays_in(run(*positional, **named))

    return result_bytes(tape_of(called, [zeros_like(array) for array in floats]))


def _is_floating(leaf: object) -> bool:
    return isinstance(leaf, mx.array) and bool(mx.issubdtype(leaf.dtype, mx.floating))


class Towers:
    """The units beside a language model.

    A unit gets new memory for each of its calls, and its lazily loaded arrays back afterwards. So whatever else refers
    to its weights has the right ones, and no architecture has to be known.
    """

    def __init__(self, units: list[Unit], life: Lifecycle) -> None:
        self._units = units
        self._life = life
        self.rehearsal: TowerRehearsal | None = None  # takes calls, in which units have no weights
        self.has_room = False  # room was made for the calls that come, after a rehearsal
        self._resident: set[int] = set()
        # Called with the weights of each unit after its call, and the parts of files that they came from.
        self.before_release: Callable[[Sequence[Segment], memoryview], None] | None = None
        for unit in units:
            swap_class(unit.module, TowerUnit, partial(self.call, unit))

    def call(self, unit: Unit, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Read a unit, call it, evaluate what it computed, and let go of its weights."""
        if self.rehearsal is not None:
            return self.rehearsal.call(unit, run, args, kwargs)
        if id(unit) in self._resident:
            return run(*args, **kwargs)

        def call(_: Passes) -> Any:
            with self._in_memory(unit, _largest(args, kwargs)):
                result = run(*args, **kwargs)
                compute(result, args, kwargs)
            return result

        return self._life.run(call, args, kwargs)

    @contextmanager
    def _in_memory(self, unit: Unit, given: mx.array | None) -> Iterator[None]:
        engine = self._life.engine
        assert engine is not None
        if not self.has_room:
            size = "" if given is None else f" for an input of {tuple(given.shape)}"
            self.make_room(unit.nbytes + _activation_bytes(unit, given), f"{unit.name}{size}")
        placement = place([parameter.records for parameter in unit.large], kernel_alignment())
        arena = Arena(placement.nbytes)
        engine.reader.submit(placement.segments, arena.memory, caching="found", urgent=True).wait()
        self._resident.add(id(unit))
        try:
            bind_views([(unit.large, placement, arena)])
            yield
            if self.before_release is not None:
                self.before_release(placement.segments, arena.memory)
        finally:
            self._resident.discard(id(unit))
            for parameter in unit.large:
                parameter.bind(parameter.array)

    def make_room(self, need: int, words: str) -> None:
        """End loans where memory is short."""
        budget, engine = self._life.plan.budget_bytes, self._life.engine
        assert engine is not None
        if footprint() + need > budget:
            release_freed_memory()
        missing = footprint() + need - budget
        if missing > 0:
            missing -= engine.lending.recall(missing)
            release_freed_memory()
        if missing > 0 and (total := footprint() + need) > budget:
            raise BudgetError(
                f"{words} of {self._life.name} needs {need / 1e6:.1f} MB, which takes the process to {in_gb(total)} "
                f"GB; the budget is {in_gb(budget)} GB. Hint: raise ram_budget_gb, or give smaller pictures.",
                total,
            )

    def close(self) -> None:
        for unit in self._units:
            restore_class(unit.module)
        self._units = []


class TowerUnit(SwappedClass):
    """A module of a tower that is read when it is called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = self._flash_state
        return call(partial(own_class(cast(nn.Module, self)).__call__, self), args, kwargs)


def _largest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> mx.array | None:
    return max(arrays_in(args, kwargs), key=lambda array: array.size, default=None)


def _activation_bytes(unit: Unit, given: mx.array | None) -> int:
    """Return what the linear layers of a unit compute from an input, in bytes. Attention scores do not count."""
    if given is None or given.ndim < 2:
        return 0
    outputs = sum(int(p.array.shape[-2]) for p in unit.large if p.key == "weight" and p.array.ndim == 2)
    return 2 * max(4, given.itemsize) * outputs * int(given.size) // int(given.shape[-1])

"""The memory that pictures take in a model, found before anything of them is computed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from mlx_flash.compat.tape import result_bytes, tape_of
from mlx_flash.layout.parts import Parameter, Unit
from mlx_flash.layout.reachable import arrays_in
from mlx_flash.layout.swap import remember

MARGIN = 1.25
"""Allocators leave holes, and matrix products copy some inputs. Measured on the CPU back end: 0.99 to 1.2 times."""

_OWN_REFERENCES = 3
"""References to an object in a list while it is asked for: the list's, the loop's, and the argument."""


@dataclass(slots=True)
class TowerRehearsal:
    """Notes of one rehearsal.

    Attributes:
        calls: the units without units inside them: the unit, what calls it, and its arguments.
        retained_bytes: results of units that something still held when a later unit was called, at most.
    """

    calls: list[tuple[Unit, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    retained_bytes: int = 0
    _results: list[mx.array] = field(default_factory=list)

    def call(self, unit: Unit, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a unit, and note it."""
        held = (array.nbytes for array in self._results if sys.getrefcount(array) > _OWN_REFERENCES)
        self.retained_bytes = max(self.retained_bytes, sum(held))
        before = len(self.calls)
        result = run(*args, **kwargs)
        if len(self.calls) == before:  # else the units inside it count
            self.calls.append((unit, run, args, kwargs))
            self._results += arrays_in(result)
        return result


def needed_bytes(call: Callable[..., Any], inputs: dict[str, Any], rehearsal: TowerRehearsal) -> int:
    """Return the memory that results take while a model makes embeddings of pictures, weights not counted.

    Units are computed one after another. So only the largest of them counts, what others keep of them, and what is
    computed outside of them.

    Args:
        call: called with the inputs; units that it calls are to be noted in ``rehearsal``.
        inputs: of the model's ``get_input_embeddings``; nothing in it is changed.
        rehearsal: for the units.

    Raises:
        ValueError: the model looks at the numbers of pictures, so that a rehearsal cannot run.
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

    return result_bytes(tape_of(called, [_zeros(array) for array in floats]))


def _is_floating(leaf: object) -> bool:
    return isinstance(leaf, mx.array) and bool(mx.issubdtype(leaf.dtype, mx.floating))


def _zeros(array: mx.array) -> mx.array:
    return mx.broadcast_to(mx.zeros((), array.dtype), array.shape)


def weightless(model: nn.Module, parameters: Sequence[Parameter]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return what puts zeros, which take no memory, in the place of some weights, and what leaves a model as it was."""
    modules = {id(module): module for _, module in model.named_modules()}

    def begin() -> None:
        for parameter in parameters:
            parameter.bind(_zeros(parameter.array))

    return begin, remember(modules.values())

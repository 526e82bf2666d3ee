"""The memory that a call holds while it waits for a unit: hidden states, and what its callers still refer to.

It is measured. The model is called with zeros for weights, and each of the smallest units returns zeros instead of a
product. So everything between units is computed, for a few tokens, and MLX's own count says what a call holds when it
comes to a unit.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from types import FrameType
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlx_flash.compat.caches import entries_of
from mlx_flash.compat.require import installed
from mlx_flash.layout.load import LoadedModel
from mlx_flash.layout.parts import Held, ModelLayout, Parameter, Unit
from mlx_flash.layout.reachable import arrays_in, nbytes_in
from mlx_flash.layout.swap import SwappedClass, own_class, restore_class, swap_class
from mlx_flash.layout.trace import as_it_was, zeros_for
from mlx_flash.storage.measured import Measurements

RESULTS = Measurements("held.json")

FORM = 2
"""Number of the way of measuring. Results of other ways are not used."""

NUM_TOKENS = 16

_MOST_COMPUTED_BYTES = 1 << 20
"""Parameters that are in no unit are computed with, as zeros that MLX may copy to memory. Larger ones are not tried."""

_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of an architecture that cannot compute zeros, or of a compiler of kernels that is missing."""


@dataclass(slots=True)
class _Trial:
    """A call, and the bytes that it holds at each unit, by the ``id`` of the unit's module."""

    leaves: set[int]
    layers: set[int]
    cache: list[Any] = field(default_factory=list)
    is_measured: bool = False
    caller: FrameType | None = None
    before: int = 0
    found: dict[int, int] = field(default_factory=dict)
    has_keys: bool = False  # whoever calls a layer holds keys and values

    def start(self, loaded: LoadedModel) -> list[Any]:
        """Return a new prompt cache."""
        self.cache = loaded.make_cache(loaded.called)
        for entry in entries_of(self.cache):
            if isinstance(getattr(entry, "step", None), int):
                entry.step = NUM_TOKENS  # no room for tokens to come
        return self.cache


class _Waiting(SwappedClass):
    """A unit that notes what the call holds. One of the smallest returns zeros."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trial: _Trial = self._flash_state
        call = partial(own_class(cast(nn.Module, self)).__call__, self)
        if trial.is_measured:
            trial.has_keys |= id(self) in trial.layers and _holds_keys(trial.cache, trial.caller)
            return call(*args, **kwargs)
        mx.eval(arrays_in(args, kwargs))
        mx.synchronize()
        held = int(mx.get_active_memory()) - trial.before - nbytes_in(trial.cache)
        least = nbytes_in(list(_arrays([*args, *kwargs.values()])))  # another thread may have freed memory meanwhile
        trial.found[id(self)] = max(held, least, trial.found.get(id(self), 0))
        result = call(*args, **kwargs)
        if id(self) in trial.leaves:
            result = tree_map(lambda value: mx.zeros_like(value) if isinstance(value, mx.array) else value, result)
            mx.eval(arrays_in(result))
        return result


def _arrays(values: Iterable[Any]) -> Iterator[mx.array]:
    """Yield the arrays among some values, and in collections of them, but not those in caches."""
    for value in values:
        if isinstance(value, mx.array):
            yield value
        elif isinstance(value, list | tuple):
            yield from _arrays(value)
        elif isinstance(value, dict) and not isinstance(value, nn.Module):
            yield from _arrays(value.values())


def _holds_keys(cache: Sequence[Any], caller: FrameType | None) -> bool:
    """Return whether a function that is running, up to a caller of the model, refers to keys or values of a cache."""
    cached, frame = {id(array) for array in arrays_in(cache)}, sys._getframe(2)
    while frame is not caller:
        if any(id(array) in cached for array in _arrays(frame.f_locals.values())):
            return True
        frame = cast(FrameType, frame.f_back)
    return False


def measure_held(loaded: LoadedModel, layout: ModelLayout, parameters: Sequence[Parameter]) -> Held:
    """Return what a call holds while it waits for a unit. It is measured once for each kind of model.

    Args:
        loaded: the model, lazily loaded.
        layout: its units.
        parameters: every array in it.
    """
    key = _key(loaded, layout)
    match RESULTS.load().get(key):
        case {"per_token": [*numbers], "has_keys": bool(has_keys)} if len(numbers) in (0, 1 + len(layout.finer)):
            if all(isinstance(number, int) and number >= 0 for number in numbers):
                return Held(tuple(numbers), has_keys)
    found = _measured(loaded, layout, parameters)
    RESULTS.save(key, asdict(found))
    return found


def _measured(loaded: LoadedModel, layout: ModelLayout, parameters: Sequence[Parameter]) -> Held:
    cuts = [layout.layers, *layout.finer]
    leaves = [*cuts[-1], *layout.heads, *(stack.unit for stack in layout.experts)]
    inside = {id(p) for unit in [*leaves, *layout.embeddings] for p in [*unit.large, *unit.small]}
    if any(p.nbytes > _MOST_COMPUTED_BYTES for p in parameters if id(p) not in inside):
        return Held()
    try:
        trial = _try(loaded, cuts, leaves, parameters)
    except _ERRORS:
        return Held()
    most = [max([trial.found.get(id(unit.module), 0) for unit in cut], default=0) for cut in cuts]
    return Held(tuple(-(-nbytes // NUM_TOKENS) for nbytes in most), trial.has_keys)


def _try(
    loaded: LoadedModel, cuts: Sequence[Sequence[Unit]], leaves: Sequence[Unit], parameters: Sequence[Parameter]
) -> _Trial:
    """Call the model with zeros."""
    trial = _Trial({id(unit.module) for unit in leaves}, {id(unit.module) for unit in cuts[0]})
    modules = {id(unit.module): unit.module for cut in [*cuts, leaves] for unit in cut}
    tokens = mx.zeros((1, NUM_TOKENS), mx.int32)
    with as_it_was(loaded.called), zeros_for(parameters):
        for module in modules.values():
            swap_class(module, _Waiting, trial)
        try:
            mx.eval(tokens)
            mx.synchronize()
            trial.before = int(mx.get_active_memory())
            loaded.called(tokens, cache=trial.start(loaded))
            trial.is_measured = True  # looking at a function's variables keeps some of them
            trial.caller = sys._getframe()
            loaded.called(tokens, cache=trial.start(loaded))
        finally:
            trial.caller = None
            for module in modules.values():
                restore_class(module)
    return trial


def _key(loaded: LoadedModel, layout: ModelLayout) -> str:
    """Return a name for everything that decides what calls hold."""
    modules = [(name, type(module).__module__, type(module).__name__) for name, module in loaded.model.named_modules()]
    units = [[unit.name for unit in cut] for cut in (layout.layers, *layout.finer)]
    device = str(mx.default_device())
    text = json.dumps([FORM, loaded.config, modules, units, device, installed("mlx"), installed("mlx-lm")], default=str)
    return hashlib.sha256(text.encode()).hexdigest()

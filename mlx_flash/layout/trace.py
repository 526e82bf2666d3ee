"""A rehearsal: which modules a model calls, in what order, and what that leaves in its cache.

The model is called with zeros for weights, and since MLX is lazy nothing is computed; an architecture that looks at
numbers while it runs computes a token or two with zeros. No weights are read. A module whose arrays are used by others
without calling it (an attention that takes a projection's ``weight``) cannot be made resident by its own calls; that
shows too.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlx_flash.compat.arrays import num_nodes, observed_attention
from mlx_flash.compat.caches import entries_of, is_recurrent
from mlx_flash.compat.expertstacks import is_expert_stack
from mlx_flash.compat.require import installed
from mlx_flash.layout.cachesizes import CacheEntry, first_sizes, num_growing, sizes_of
from mlx_flash.layout.load import LoadedModel
from mlx_flash.layout.parts import CallTrace, Held, ModelLayout, Parameter, Place, Route, Unit, bind_all, is_embedding
from mlx_flash.layout.reachable import arrays_in, nbytes_in
from mlx_flash.layout.swap import SwappedClass, own_class, remember, restore_class, swap_class
from mlx_flash.memory.driver import has_own_memory
from mlx_flash.storage.probe import Measurements

_MORE_TOKENS = 8
"""Tokens by which two calls differ whose recorded operations are compared."""


@dataclass(slots=True)
class _Watch:
    """The notes of all watched modules."""

    trace: CallTrace
    under_way: list[_Call] = field(default_factory=list)
    outputs: dict[int, tuple[mx.array, nn.Module]] = field(default_factory=dict)  # holds them, so that ids are unique
    given: dict[int, set[int]] = field(default_factory=dict)  # modules that were given an object, by its id


@dataclass(slots=True)
class _Call:
    """A call under way."""

    module: nn.Module  # the module that is called
    arguments: tuple[Any, ...]  # its arguments
    inside: frozenset[int]  # ids of this module, and of those whose calls this one is a part of
    used: set[Place] = field(default_factory=set)  # so far, also in inner calls that have ended
    returned: list[tuple[nn.Module, Any]] = field(default_factory=list)  # what modules returned to it


class _Watched(SwappedClass):
    """A module that notes its calls."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watch: _Watch = self._flash_state
        watch.trace.called.setdefault(id(self), cast(nn.Module, self))
        return self._noted(super().__call__, args, kwargs)  # type: ignore[misc]

    def _noted(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the module's own class."""
        watch: _Watch = self._flash_state
        module: Any = self
        weight, x = dict.get(module, "weight"), args[0] if args else None
        if isinstance(weight, mx.array) and isinstance(x, mx.array) and weight.dtype != x.dtype:
            _note_widened(watch.trace, module, weight, x)
        outer = watch.under_way[-1] if watch.under_way else None
        call = _Call(module, (*args, *kwargs.values()), frozenset([id(self)]).union(outer.inside if outer else ()))
        watch.under_way.append(call)
        for value in call.arguments:
            watch.given.setdefault(id(value), set()).add(id(self))
        try:
            result = method(*args, **kwargs)
        finally:
            watch.under_way.pop()
        if isinstance(result, mx.array):
            watch.outputs[id(result)] = result, module
        if outer is not None:
            outer.used |= call.used
            outer.returned.append((module, result))
        return result


class _WatchedArrays(_Watched):
    """A module with arrays of its own, which notes their uses, too."""

    def __getattr__(self, key: str) -> Any:
        value = super().__getattr__(key)  # type: ignore[misc]
        return self[key] if isinstance(value, mx.array) else value

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)  # type: ignore[misc]
        if isinstance(value, mx.array):
            watch: _Watch = self._flash_state
            users, place = watch.trace.users, (id(self), key)
            inside = watch.under_way[-1].inside if watch.under_way else frozenset()
            users[place] = users.get(place, inside) & inside
            if watch.under_way:
                watch.under_way[-1].used.add(place)
        return value


class _WatchedStack(_WatchedArrays):
    """A stack of experts, which notes who chooses them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _note_route(self._flash_state, cast(nn.Module, self), *args, **kwargs)
        return super().__call__(*args, **kwargs)


class _WatchedTable(_WatchedArrays):
    """An embedding that notes its calls as the output head, too."""

    def as_linear(self, x: mx.array) -> mx.array:
        watch: _Watch = self._flash_state
        watch.trace.heads.add(id(self))
        return cast(mx.array, self._noted(super().as_linear, (x,), {}))  # type: ignore[misc]


def _note_widened(trace: CallTrace, module: nn.Module, weight: mx.array, x: mx.array) -> None:
    """Note the copy of a weight whose input has a wider type, such as a bf16 matrix after a layer in fp32."""
    if weight.ndim > 1 and mx.issubdtype(weight.dtype, mx.floating) and mx.issubdtype(x.dtype, mx.floating):
        wider = mx.result_type(x, weight)
        if wider != weight.dtype:
            trace.widened[id(module)] = weight.size * wider.size


def _note_route(watch: _Watch, experts: nn.Module, x: mx.array, indices: mx.array, *more: Any, **named: Any) -> None:
    call = watch.under_way[-1] if watch.under_way else None
    route = Route(indices.shape[-1])
    if call is not None and len(call.arguments) == 1 and call.used:
        _, norm = watch.outputs.get(id(call.arguments[0]), (None, None))
        modules = [child for _, child in experts.named_modules()]
        arrays = [value for child in modules for value in dict.values(child) if isinstance(value, mx.array)]
        num_experts = max(array.shape[0] for array in arrays if array.ndim)
        gates = [module for module, said in call.returned if scores_of(said, indices, num_experts) is not None]
        gate = gates[0] if gates else None
        route = replace(route, block=call.module, norm=norm, router=frozenset(call.used), gate=gate)
    watch.trace.routes[id(experts)] = route


def scores_of(returned: object, indices: mx.array, num_experts: int) -> mx.array | None:
    """Return a router's scores of the experts ``(..., top_k)`` it has chosen, in fp32 as ``(tokens, top_k)``, not
    evaluated; None when a module returned no scores.
    """
    top_k = indices.shape[-1]
    for array in returned if isinstance(returned, tuple) else (returned,):
        if not isinstance(array, mx.array) or not mx.issubdtype(array.dtype, mx.floating):
            continue
        if array.size * top_k == indices.size * num_experts and array.shape[-1] == num_experts:
            chosen = indices.reshape(-1, top_k)
            return mx.take_along_axis(array.reshape(-1, num_experts), chosen, axis=-1).astype(mx.float32)
        if array.size == indices.size and array.shape[-1] == top_k:
            return array.reshape(-1, top_k).astype(mx.float32)
    return None


def rehearse(
    model: nn.Module, parameters: Sequence[Parameter], make_cache: Callable[[nn.Module], list[Any]]
) -> CallTrace:
    """Call a model with one token, again with one, then with two, and leave it as it was.

    A module that is not called again for the same kind of input is called from a compiled function: there it cannot
    wait for its weights, and does not count as called.
    """
    watch = _Watch(CallTrace({}, {}))
    called = watch.trace.called
    with as_it_was(model) as modules, zeros_for(parameters), _watched(modules, watch):
        model(mx.zeros((1, 1), mx.int32), cache=make_cache(model))
        once = set(called)
        called.clear()
        watch.outputs.clear()
        cache = make_cache(model)
        watch.given.clear()
        output = model(mx.zeros((1, 1), mx.int32), cache=cache)
        compiled = once - set(called)
        first = first_sizes(cache)
        logits = getattr(output, "logits", output)
        watch.trace.logits_bytes = logits.nbytes if isinstance(logits, mx.array) else 0
        if has_own_memory():  # counting takes milliseconds, and other devices do not need it
            watch.trace.num_operations = num_nodes(*arrays_in(output))
        with observed_attention() as attention:
            model(mx.zeros((1, 2), mx.int32), cache=cache)
        watch.trace.attention = tuple(attention)
        watch.trace.has_own_attention = len(attention) < num_growing(cache) or any(
            call.has_own_scores for call in attention
        )
        watch.trace.cache_entries = [
            CacheEntry(
                sizes_of(entry, first),
                frozenset().union(*(watch.given.get(id(part), ()) for part in (entry, *entries_of([entry])))),
            )
            for entry in cache
        ]
        watch.trace.nodes_per_token = _nodes_per_token(model, make_cache)
    for key in compiled:
        called.pop(key, None)
    return watch.trace


def _nodes_per_token(model: nn.Module, make_cache: Callable[[nn.Module], list[Any]]) -> int:
    """Return how many operations a model with recurrent layers records more for each further token."""
    counts = []
    for num_tokens in (2, 2 + _MORE_TOKENS):
        cache = make_cache(model)
        if not any(map(is_recurrent, entries_of(cache))):
            return 0
        counts.append(num_nodes(*arrays_in(model(mx.zeros((1, num_tokens), mx.int32), cache=cache))))
    return max(0, -(-(counts[1] - counts[0]) // _MORE_TOKENS))


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield a model's modules, each once. Take away what calls leave in them."""
    modules = list({id(module): module for _, module in model.named_modules()}.values())
    put_back = remember(modules)
    try:
        yield modules
    finally:
        put_back()


def zeros_like(array: mx.array) -> mx.array:
    """Return zeros that take no memory."""
    return mx.broadcast_to(mx.zeros((), array.dtype), array.shape)


@contextmanager
def zeros_for(parameters: Sequence[Parameter]) -> Iterator[None]:
    """Put zeros, which take no memory, in the place of all arrays."""
    arrays = [parameter.array for parameter in parameters]
    try:
        bind_all(parameters, [mx.broadcast_to(mx.zeros((), array.dtype), array.shape) for array in arrays])
        yield
    finally:
        bind_all(parameters, arrays)


@contextmanager
def _watched(modules: Sequence[nn.Module], watch: _Watch) -> Iterator[None]:
    own = [module for module in modules if module]  # all models share one empty module, the default of an argument
    kinds = {type(module): module for module in own}
    mixins: dict[type, type[_Watched]] = {kind: _WatchedTable for kind, module in kinds.items() if is_embedding(module)}
    mixins |= {kind: _WatchedStack for kind, module in kinds.items() if is_expert_stack(module)}
    try:
        for module in own:
            has_arrays = mx.array in map(type, module.values())
            swap_class(module, mixins.get(type(module), _WatchedArrays if has_arrays else _Watched), watch)
        yield
    finally:
        for module in own:
            restore_class(module)


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
    """Return the memory that a call holds while it waits for a unit: hidden states, and what its callers refer to.

    It is measured once for each kind of model. The model is called with zeros for weights, and each of the smallest
    units returns zeros instead of a product. So everything between units is computed, for a few tokens, and MLX's own
    count says what a call holds when it comes to a unit.
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

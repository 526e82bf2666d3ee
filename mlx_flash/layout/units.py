"""The parts of a model that are made resident together: its layers, finer cuts of them, and stacks of experts.

A module can be a unit when its arrays are used during its own calls only. That is seen in a rehearsal, so no
architecture has to be known: which modules a model calls, in what order, and what that leaves in its cache. The model
is called with zeros for weights, and since MLX is lazy nothing is computed; an architecture that looks at numbers while
it runs computes a token or two with zeros. No weights are read. A module whose arrays are used by others without
calling it (an attention that takes a projection's ``weight``) cannot be made resident by its own calls; that shows too.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from types import FrameType
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlx_flash.compat.arrays import num_nodes, observed_attention, result_bytes, tape_of
from mlx_flash.compat.caches import entries_of, is_recurrent
from mlx_flash.compat.expertstacks import computes_as_expert_stack, is_expert_stack
from mlx_flash.compat.loaders import ADAPTED, adapted_part, adapted_product
from mlx_flash.compat.require import installed
from mlx_flash.errors import CheckpointError
from mlx_flash.layout.load import LoadedModel, iter_parameters
from mlx_flash.layout.parts import (
    CacheEntry,
    CallTrace,
    ExpertPlacement,
    ExpertStack,
    Held,
    ModelLayout,
    Parameter,
    Place,
    Route,
    Unit,
    add_sizes,
    bind_all,
    first_sizes,
    is_embedding,
    is_linear,
    num_growing,
    sizes_of,
)
from mlx_flash.layout.reachable import arrays_in, nbytes_in
from mlx_flash.layout.swap import SwappedClass, own_class, remember, restore_class, swap_class
from mlx_flash.memory.arena import kernel_alignment
from mlx_flash.memory.driver import has_own_memory
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, round_up
from mlx_flash.storage.placement import COPY_ALIGNMENT, Placement, place, place_rows
from mlx_flash.storage.probe import Measurements
from mlx_flash.storage.safetensors import TensorRecord

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


SMALL_BYTES = 64 * 1024
"""A tensor at most this large, and a small part of its unit, is kept in memory always: reading it costs a disk access
and saves nothing. One-dimensional ones (norms, biases) are kept whatever their size; some models use those of the next
layer."""

SMALL_SHARE = 1 / 1024

_LAYER = re.compile(r"\.\d+$")
"""The end of the name of a module in a list."""

REST_SHARE = 1 / 20
"""A unit is not cut when more than this share of it would be left over, to stay in memory."""


def make_layout(loaded: LoadedModel) -> ModelLayout:
    """Find the units of a model and the source of each of its parameters. Reads no weights."""
    layers_of_model = layers_of(loaded.called)
    tree = _Tree(loaded)
    roots = [tree.names[id(layer)] for layer in layers_of_model if id(layer) in tree.names]
    layers = [unit for root in roots for unit in tree.cover(root)]
    tower_names = tree.tower_names(loaded)
    towers = [unit for name in tower_names for unit in tree.towers(name)]
    inner = {*roots, *tower_names}
    apart = [tree.whole(name) for name in tree.modules if inner.isdisjoint([name, *tree.above[name]])]
    heads = [unit for unit in apart if is_linear(unit.module) and tree.is_covered(unit)]
    embeddings = [unit for unit in apart if is_embedding(unit.module) and tree.is_enclosed(unit)]
    units = [unit for unit in [*layers, *heads, *embeddings, *towers] if unit.large]
    small = {id(parameter) for unit in towers for parameter in unit.small}
    taken = {id(parameter) for unit in units for parameter in [*unit.large, *unit.small]} - small
    adapted = find_adapted(list(tree.modules.values()), tree.trace)
    layout = ModelLayout(
        layers=[unit for unit in layers if unit.large],
        heads=[unit for unit in heads if unit.large],
        embeddings=[unit for unit in embeddings if unit.large],
        resident=[parameter for parameter in tree.parameters if id(parameter) not in taken],
        trace=tree.trace,
        tied={unit.name for unit in embeddings if id(unit.module) in tree.trace.heads},
        finer=tree.finer([unit for unit in layers if unit.large]),
        cache=add_sizes([entry.sizes for entry in tree.trace.cache_entries]),
        experts=find_experts(layers, tree.parameters, tree.trace),
        adapted=adapted,
        made_bytes=adapted_bytes(adapted, tree.parameters) + tree.widened_bytes(roots),
        towers=[unit for unit in towers if unit.large],
    )
    return replace(layout, held=measure_held(loaded, layout, tree.parameters))


def find_adapted(modules: Sequence[nn.Module], trace: CallTrace) -> tuple[nn.Module, ...]:
    """Return the adapters that make a whole matrix in each call. An embedding that only looks up rows makes none."""
    parts = [(module, adapted_part(module)) for module in modules if isinstance(module, ADAPTED)]
    return tuple(
        module
        for module, part in parts
        if id(module) in trace.called and not trace.covers(part, [(id(part), "weight")])
    )


def adapted_bytes(modules: Sequence[nn.Module], parameters: Sequence[Parameter]) -> int:
    """Return the most bytes of the results of one adapter. Nothing is computed."""
    if not modules:
        return 0
    found: dict[object, int] = {}
    with zeros_for(parameters):
        for module in modules:
            key = str(tree_map(lambda array: (array.shape, array.dtype), module.parameters()))
            if key not in found:
                product, x = adapted_product(module)
                found[key] = result_bytes(tape_of(product, [x]))
    return max(found.values())


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the model's layers, each once. Raises: CheckpointError: it has none."""
    layers = getattr(model, "layers", None)
    if layers is None:
        raise CheckpointError(
            f"{type(model).__module__}.{type(model).__name__} has no 'layers': nothing can be streamed"
        )
    return list({id(layer): layer for layer in layers if isinstance(layer, nn.Module)}.values())


def _is_inside(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}.")


class _Tree:
    """A model's modules by name, with the parameters below each of them."""

    def __init__(self, loaded: LoadedModel) -> None:
        named, sources = loaded.model.named_modules(), loaded.sources
        self.names = {id(module): name for name, module in reversed(named)}
        self.modules = {name: module for name, module in named if self.names[id(module)] == name}
        self.parameters = [
            Parameter(name, container, key, array, array.nbytes, sources.get(id(array), ()))
            for name, container, key, array in iter_parameters(loaded.model)
        ]
        self._below: dict[str, list[Parameter]] = {name: [] for name in self.modules}
        self._children: dict[str, list[str]] = {name: [] for name in self.modules}
        self._large: set[int] | None = None  # parameters of the layers that are large, once these are cut
        self.above: dict[str, tuple[str, ...]] = {"": ()}  # of each module, those that it is in, the innermost first
        for name in self.modules:
            if outer := name:
                while (outer := outer.rpartition(".")[0]) not in self.modules:
                    pass
                self.above[name] = outer, *self.above[outer]
                self._children[outer].append(name)
        for parameter in self.parameters:
            outer = parameter.name
            while (outer := outer.rpartition(".")[0]) not in self.modules:
                pass
            for ancestor in (outer, *self.above[outer]):
                self._below[ancestor].append(parameter)
        self.trace = rehearse(loaded.called, self.parameters, loaded.make_cache)

    def widened_bytes(self, layers: Collection[str]) -> int:
        """Return the most bytes of copies of weights in a wider type that MLX holds at once: those of a layer."""
        found = Counter[str]()
        for name, module in self.modules.items():
            if nbytes := self.trace.widened.get(id(module)):
                found[next((outer for outer in (name, *self.above[name]) if outer in layers), name)] += nbytes
        return max(found.values(), default=0)

    def tower_names(self, loaded: LoadedModel) -> list[str]:
        """Names of the parts beside the one that is called with tokens."""
        called = self.names[id(loaded.called)]
        on_the_way = {called, *self.above[called]}
        return [
            name for name in self.modules if name not in on_the_way and self.above[name][0] in on_the_way - {called}
        ]

    def towers(self, name: str) -> list[Unit]:
        """The layers in a part beside the language model, and what is left of it, as units."""
        inner = [self.whole(child) for child in self.modules if _is_inside(child, name) and _LAYER.search(child)]
        layers = [unit for unit in inner if not any(_LAYER.search(above) for above in self.above[unit.name])]
        taken = {id(parameter) for unit in layers for parameter in [*unit.large, *unit.small]}
        whole = self.whole(name)
        rest = [parameter for parameter in whole.large if id(parameter) not in taken]
        return [*layers, Unit(name, whole.module, rest, [p for p in whole.small if id(p) not in taken])]

    def whole(self, name: str) -> Unit:
        """A module with everything below it as a unit."""
        unit, below = Unit(name, self.modules[name]), self._below[name]
        limit = min(SMALL_BYTES, SMALL_SHARE * sum([parameter.nbytes for parameter in below]))
        for parameter in below:
            if self._large is not None:
                large = id(parameter) in self._large
            else:
                large = bool(parameter.records) and parameter.array.ndim > 1 and parameter.nbytes > limit
            (unit.large if large else unit.small).append(parameter)
        return unit

    def is_enclosed(self, unit: Unit) -> bool:
        """Return True if no other module takes the unit's large parameters, as some heads take those of a table."""
        return self.trace.encloses(unit.module, [(id(each.container), each.key) for each in unit.large])

    def is_covered(self, unit: Unit) -> bool:
        """Return True if the unit's large parameters are needed during its module's calls only.

        A module that nothing was seen of may have its time with other inputs.
        """
        if id(unit.module) in self.trace.called:
            return self.is_enclosed(unit)
        below = (name for name in self.modules if _is_inside(name, unit.name))
        is_unseen = not any(id(self.modules[name]) in self.trace.called for name in below)
        is_unseen = is_unseen and self.trace.users.keys().isdisjoint([(id(p.container), p.key) for p in unit.large])
        return is_unseen and callable(unit.module)

    def cover(self, name: str) -> list[Unit]:
        """The module as a unit or, where it cannot be one, those below it that can."""
        unit = self.whole(name)
        is_one = not unit.large or self.is_covered(unit)
        return [unit] if is_one else [part for child in self._children[name] for part in self.cover(child)]

    def finer(self, units: list[Unit]) -> list[list[Unit]]:
        """Finer and finer cuts of some units, in calling order. What is small in these stays so."""
        self._large = {id(parameter) for unit in units for parameter in unit.large}
        cuts = _side_by_side([self._cuts(unit) for unit in units])[1:]
        order = {key: i for i, key in enumerate(self.trace.called)}
        for cut in cuts:
            places = [(order.get(id(unit.module), -1), i) for i, unit in enumerate(cut)]
            cut[:] = [cut[i] for _, i in sorted(places)]
        return cuts

    def _cuts(self, unit: Unit) -> list[list[Unit]]:
        """The unit, and finer and finer cuts of it; none of which too much would be left over."""
        assert self._large is not None
        parts = list[Unit]()
        for child in self._children[unit.name]:
            if not self._large.isdisjoint(map(id, self._below[child])):
                parts += [part for part in self.cover(child) if part.large]
        rest = unit.nbytes - sum([part.nbytes for part in parts])
        if not parts or rest > REST_SHARE * unit.nbytes:
            return [[unit]]
        inner = [self._cuts(part) if self._children[part.name] else [[part]] for part in parts]
        return [[unit], *_side_by_side(inner)]


def _side_by_side(cuts: Sequence[list[list[Unit]]]) -> list[list[Unit]]:
    """Return the cuts of some units together. One that cannot be cut further stays in the finer ones."""
    depth = max(map(len, cuts), default=0)
    return [[unit for each in cuts for unit in each[min(i, len(each) - 1)]] for i in range(depth)]


def find_experts(layers: Iterable[Unit], parameters: Iterable[Parameter], trace: CallTrace) -> list[ExpertStack]:
    """Return the stacks of experts that can be read expert by expert: all arrays, adapters included, have a row an
    expert.

    Anything else stays part of its layer, which is read whole.
    """
    if not trace.routes:
        return []
    places = {(id(parameter.container), parameter.key): parameter for parameter in parameters}
    names = {id(module): f"{unit.name}.{name}" for unit in layers for name, module in unit.module.named_modules()}
    large = {id(parameter) for unit in layers for parameter in unit.large}
    order = {key: i for i, key in enumerate(trace.called)}
    stacks = []
    for key, route in trace.routes.items():
        module = trace.called.get(key)
        if module is None or key not in names or not computes_as_expert_stack(module):
            continue
        keys = [(id(child), key) for _, child in module.named_modules() for key in child]
        below = [places[place] for place in keys if place in places]
        below.sort(key=lambda parameter: order.get(id(parameter.container), -1))
        unit = Unit(names[key], module, [p for p in below if id(p) in large], [p for p in below if id(p) not in large])
        num_experts = _num_experts(unit)
        if num_experts and trace.covers(module, [(id(p.container), p.key) for p in unit.large]):
            router = [places[place] for place in sorted(route.router, key=str) if place in places]
            is_widened = not trace.widened.keys().isdisjoint([id(child) for _, child in module.named_modules()])
            stack = ExpertStack(unit, num_experts, route.top_k, route.block, route.norm, router, route.gate, is_widened)
            stacks.append(stack)
    return stacks


def _num_experts(unit: Unit) -> int:
    """Return the number of rows of all arrays of a unit; 0 when they differ, or cannot be read row by row."""
    counts = {parameter.array.shape[0] if parameter.array.ndim else 0 for parameter in [*unit.large, *unit.small]}
    if len(counts) != 1 or not unit.large or not all(expert_records(parameter) for parameter in unit.large):
        return 0
    return counts.pop()


def expert_records(parameter: Parameter) -> tuple[TensorRecord, ...]:
    """Return the place of each row of a stack; empty if a row is not one run of bytes."""
    return _rows(parameter.records, parameter.array.shape[0], parameter.nbytes)


@lru_cache(maxsize=4096)  # finding experts takes seconds in large mixtures
def _rows(records: tuple[TensorRecord, ...], num_rows: int, nbytes: int) -> tuple[TensorRecord, ...]:
    found: list[TensorRecord] = []
    row_bytes = nbytes // num_rows
    for record in records:
        if record.nbytes == row_bytes:
            found.append(record)
        elif record.shape and record.nbytes == record.shape[0] * row_bytes:
            what = record.name, record.dtype, (1, *record.shape[1:]), record.path
            starts = range(record.offset, record.offset + record.nbytes, row_bytes)
            found += [TensorRecord(*what, at, row_bytes) for at in starts]
        else:
            return ()
    return tuple(found) if len(found) == num_rows else ()


def place_experts(stack: ExpertStack) -> ExpertPlacement:
    """Return the places of the arrays of an expert in a slot. They are found once: plan and engine both need them."""
    if stack.placement is None:
        rows = list(zip(*map(expert_records, stack.unit.large), strict=True))
        read, kept = place_rows(rows, kernel_alignment()), []
        cursor = read.nbytes + DIRECT_ALIGNMENT
        for parameter in stack.unit.small:
            kept.append(cursor - DIRECT_ALIGNMENT)
            cursor += round_up(parameter.nbytes // stack.num_experts, COPY_ALIGNMENT)
        stack.placement = ExpertPlacement(read, tuple(kept), round_up(cursor, DIRECT_ALIGNMENT))
    return stack.placement


def matrices_of(stack: ExpertStack) -> list[list[int]]:
    """The modules of a stack that hold weights to read, in calling order: which of its large parameters are whose."""
    columns: dict[int, list[int]] = {}
    for i, parameter in enumerate(stack.unit.large):
        columns.setdefault(id(parameter.container), []).append(i)
    return list(columns.values())


def place_matrix(stack: ExpertStack, columns: Iterable[int]) -> Placement:
    """Lays one of :func:`matrices_of` out in a buffer, with all experts."""
    return place([stack.unit.large[i].records for i in columns], kernel_alignment())


def trunk_of(layout: ModelLayout) -> ModelLayout:
    """The model without its experts. Routers count as small parameters: choosing experts never waits for a disk."""
    experts = {id(p) for stack in layout.experts for p in [*stack.unit.large, *stack.unit.small]}
    routers = {id(p) for stack in layout.experts for p in stack.router if p.nbytes <= stack.expert_bytes} - experts
    moved, left = experts | routers, dict[int, Unit]()
    for unit in [unit for cut in (layout.layers, *layout.finer) for unit in cut]:
        if moved.isdisjoint(map(id, [*unit.large, *unit.small])):
            left[id(unit)] = unit
        elif id(unit) not in left:  # finer cuts have units of coarser ones
            kept = left[id(unit)] = Unit(unit.name, unit.module)
            kept.small += [parameter for parameter in unit.small if id(parameter) not in experts]
            for parameter in unit.large:
                if id(parameter) not in experts:
                    (kept.small if id(parameter) in routers else kept.large).append(parameter)
    dropped = [parameter for unit in layout.layers if not left[id(unit)].large for parameter in left[id(unit)].small]
    small = [parameter for stack in layout.experts for parameter in stack.unit.small]
    layers, *finer = [
        [left[id(unit)] for unit in cut if left[id(unit)].large] for cut in (layout.layers, *layout.finer)
    ]
    return replace(layout, layers=layers, resident=[*layout.resident, *dropped, *small], finer=finer)

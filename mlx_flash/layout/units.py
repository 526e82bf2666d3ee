"""The parts of a model that are made resident together: its layers, and finer cuts of them.

A module can be a unit when its arrays are used during its own calls only. That is seen in a traced call, so no
architecture has to be known.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace

import mlx.nn as nn

from mlx_flash.errors import CheckpointError
from mlx_flash.layout.adapterfiles import adapted_bytes, find_adapted
from mlx_flash.layout.cachesizes import add_sizes
from mlx_flash.layout.experts import find_experts
from mlx_flash.layout.load import LoadedModel, iter_parameters
from mlx_flash.layout.parts import ModelLayout, Parameter, Place, Unit, is_embedding, is_linear
from mlx_flash.layout.trace import measure_held, rehearse

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
    """Find the units of a model and the source of each of its parameters. Reads no weights.

    Raises:
        CheckpointError: the model has no list of layers.
    """
    layers_of_model = layers_of(loaded.called)
    tree = _Tree(loaded)
    roots = tree.names_of(layers_of_model)
    layers = [unit for root in roots for unit in tree.cover(root)]
    outside = tree.names_outside([*roots, *tree.tower_names(loaded)])
    towers = [unit for name in tree.tower_names(loaded) for unit in tree.towers(name)]
    heads = [unit for unit in map(tree.whole, outside) if is_linear(unit.module) and tree.is_covered(unit)]
    tables = [unit for unit in map(tree.whole, outside) if is_embedding(unit.module)]
    embeddings = [unit for unit in tables if tree.encloses(unit)]
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
        finer=list(tree.finer([unit for unit in layers if unit.large])),
        cache=add_sizes([entry.sizes for entry in tree.trace.cache_entries]),
        experts=find_experts(layers, tree.parameters, tree.trace),
        adapted=adapted,
        made_bytes=adapted_bytes(adapted, tree.parameters) + tree.widened_bytes(roots),
        towers=[unit for unit in towers if unit.large],
    )
    return replace(layout, held=measure_held(loaded, layout, tree.parameters))


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the model's layers, each once.

    Raises:
        CheckpointError: it has none.
    """
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
        named = loaded.model.named_modules()
        self._names = {id(module): name for name, module in reversed(named)}
        self.modules = {name: module for name, module in named if self._names[id(module)] == name}
        self.parameters = list(_parameters(loaded))
        self._below: dict[str, list[Parameter]] = {name: [] for name in self.modules}
        self._children: dict[str, list[str]] = {name: [] for name in self.modules}
        self._covers: dict[str, list[Unit]] = {}
        self._large: set[int] | None = None  # parameters of the layers that are large, once these are cut
        self._above: dict[str, tuple[str, ...]] = {}  # of each module, those that it is in, the innermost first
        for name in self.modules:
            self._above[name] = self._ancestors(name)
            if name:
                self._children[self._above[name][0]].append(name)
        for parameter in self.parameters:
            for ancestor in self._ancestors(parameter.name):
                self._below[ancestor].append(parameter)
        self.trace = rehearse(loaded.called, self.parameters, loaded.make_cache)
        self._order = {key: i for i, key in enumerate(self.trace.called)}

    def widened_bytes(self, layers: Collection[str]) -> int:
        """Return the most bytes of copies of weights in a wider type that MLX holds at once: those of a layer."""
        found = Counter[str]()
        for name, module in self.modules.items():
            if nbytes := self.trace.widened.get(id(module)):
                found[next((outer for outer in (name, *self._above[name]) if outer in layers), name)] += nbytes
        return max(found.values(), default=0)

    def _ancestors(self, name: str) -> tuple[str, ...]:
        """The modules that something is in, the innermost first. Those of the module around it are known."""
        while name:
            name = name.rpartition(".")[0]
            if name in self.modules:
                return name, *(self._above.get(name) or self._ancestors(name))
        return ()

    def names_of(self, modules: list[nn.Module]) -> list[str]:
        """Names of those modules that can be found in the tree."""
        return [self._names[id(module)] for module in modules if id(module) in self._names]

    def names_outside(self, names: list[str]) -> list[str]:
        """Names of all modules except some, and except those inside them."""
        found = set(names)
        return [name for name in self.modules if name not in found and found.isdisjoint(self._above[name])]

    def tower_names(self, loaded: LoadedModel) -> list[str]:
        """Names of the parts beside the one that is called with tokens."""
        called = self._names[id(loaded.called)]
        on_the_way = {called, *self._above[called]}
        return [
            name for name in self.modules if name not in on_the_way and self._above[name][0] in on_the_way - {called}
        ]

    def towers(self, name: str) -> list[Unit]:
        """The layers in a part beside the language model, and what is left of it, as units."""
        inner = [self.whole(child) for child in self.modules if _is_inside(child, name) and _LAYER.search(child)]
        layers = [unit for unit in inner if not any(_LAYER.search(above) for above in self._above[unit.name])]
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

    def encloses(self, unit: Unit) -> bool:
        """Return True if no other module takes the unit's large parameters, as some heads take those of a table."""
        return self.trace.encloses(unit.module, _places(unit))

    def is_covered(self, unit: Unit) -> bool:
        """Return True if the unit's large parameters are needed during its module's calls only.

        A module that nothing was seen of may have its time with other inputs.
        """
        places = _places(unit)
        if self.trace.covers(unit.module, places):
            return True
        below = (name for name in self.modules if _is_inside(name, unit.name))
        is_unseen = not any(id(self.modules[name]) in self.trace.called for name in below)
        is_unseen = is_unseen and not any(place in self.trace.users for place in places)
        return is_unseen and callable(unit.module)

    def cover(self, name: str) -> list[Unit]:
        """The module as a unit or, where it cannot be one, those below it that can."""
        found = self._covers.get(name)
        if found is None:
            unit = self.whole(name)
            is_one = not unit.large or self.is_covered(unit)
            found = [unit] if is_one else [unit for child in self._children[name] for unit in self.cover(child)]
            self._covers[name] = found
        return found

    def finer(self, units: list[Unit]) -> Iterator[list[Unit]]:
        """Finer and finer cuts of some units. What is small in these stays so."""
        self._large, self._covers = {id(parameter) for unit in units for parameter in unit.large}, {}
        while True:
            cut = [part for unit in units for part in self._cut(unit)]
            if [unit.name for unit in cut] == [unit.name for unit in units]:
                return
            cut.sort(key=lambda unit: self._order.get(id(unit.module), -1))
            units = cut
            yield cut

    def _cut(self, unit: Unit) -> list[Unit]:
        """The next smaller units of one; itself, when there are none or too much would be left over."""
        parts = [part for child in self._children[unit.name] for part in self.cover(child) if part.large]
        rest = unit.nbytes - sum([part.nbytes for part in parts])
        return parts if parts and rest <= REST_SHARE * unit.nbytes else [unit]


def _places(unit: Unit) -> list[Place]:
    return [(id(parameter.container), parameter.key) for parameter in unit.large]


def _parameters(loaded: LoadedModel) -> Iterator[Parameter]:
    for name, container, key, array in iter_parameters(loaded.model):
        yield Parameter(name, container, key, array, loaded.sources.get(id(array), ()))

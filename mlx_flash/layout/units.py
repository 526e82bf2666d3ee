"""The parts of a model that are made resident together: its layers, finer cuts of them, and stacks of experts.

A module can be a unit when its arrays are used during its own calls only. That is seen in a traced call, so no
architecture has to be known.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

import mlx.nn as nn

from mlx_flash.compat.expertstacks import computes_as_expert_stack
from mlx_flash.errors import CheckpointError
from mlx_flash.layout.adapterfiles import adapted_bytes, find_adapted
from mlx_flash.layout.cachesizes import add_sizes
from mlx_flash.layout.load import LoadedModel, iter_parameters
from mlx_flash.layout.parts import (
    CallTrace,
    ExpertPlacement,
    ExpertStack,
    ModelLayout,
    Parameter,
    Unit,
    is_embedding,
    is_linear,
)
from mlx_flash.layout.trace import measure_held, rehearse
from mlx_flash.memory.arena import kernel_alignment
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, round_up
from mlx_flash.storage.placement import COPY_ALIGNMENT, Placement, place, place_rows
from mlx_flash.storage.safetensors import TensorRecord

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

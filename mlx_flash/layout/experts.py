"""Stacks of experts, of which each token needs a few, and what is left of a model without them."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace
from functools import lru_cache

import mlx.nn as nn

from mlx_flash.compat.expertstacks import computes_as_expert_stack
from mlx_flash.layout.parts import CallTrace, ExpertPlacement, ExpertStack, ModelLayout, Parameter, Unit
from mlx_flash.memory.arena import kernel_alignment
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, round_up
from mlx_flash.storage.placement import COPY_ALIGNMENT, Placement, place, place_rows
from mlx_flash.storage.safetensors import TensorRecord


def find_experts(layers: Iterable[Unit], parameters: Iterable[Parameter], trace: CallTrace) -> list[ExpertStack]:
    """Return the stacks of experts that can be read expert by expert.

    A stack is a ``SwitchGLU`` or ``SwitchMLP`` whose arrays, those of adapters included, all have one row an
    expert. Anything else stays part of its layer, which is read whole.
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
        below = [places[place] for place in _places(module) if place in places]
        below.sort(key=lambda parameter: order.get(id(parameter.container), -1))
        unit = Unit(names[key], module, [p for p in below if id(p) in large], [p for p in below if id(p) not in large])
        num_experts = _num_experts(unit)
        if num_experts and trace.covers(module, [(id(p.container), p.key) for p in unit.large]):
            router = [places[place] for place in sorted(route.router, key=str) if place in places]
            is_widened = not trace.widened.keys().isdisjoint([id(child) for _, child in module.named_modules()])
            stack = ExpertStack(unit, num_experts, route.top_k, route.block, route.norm, router, route.gate, is_widened)
            stacks.append(stack)
    return stacks


def _places(module: nn.Module) -> list[tuple[int, str]]:
    return [(id(child), key) for _, child in module.named_modules() for key in child]


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
            found += (record.rows(i, i + 1) for i in range(record.shape[0]))
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
    layers = [_without(unit, experts, routers) for unit in layout.layers]
    dropped = [parameter for unit in layers if not unit.large for parameter in unit.small]
    small = [parameter for stack in layout.experts for parameter in stack.unit.small]
    cuts = [[_without(unit, experts, routers) for unit in cut] for cut in layout.finer]
    return replace(
        layout,
        layers=[unit for unit in layers if unit.large],
        resident=[*layout.resident, *dropped, *small],
        finer=[[unit for unit in cut if unit.large] for cut in cuts],
    )


def _without(unit: Unit, experts: Set[int], routers: Set[int]) -> Unit:
    ids = set(map(id, [*unit.large, *unit.small]))
    if ids.isdisjoint(experts) and ids.isdisjoint(routers):
        return unit
    kept = [parameter for parameter in unit.large if id(parameter) not in experts]
    small = [parameter for parameter in unit.small if id(parameter) not in experts]
    return Unit(
        unit.name,
        unit.module,
        [parameter for parameter in kept if id(parameter) not in routers],
        small + [parameter for parameter in kept if id(parameter) in routers],
    )

"""The numbers a plan is made of, taken from a model's layout and configuration. Nothing is read or computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

from mlx_flash.layout.cachesizes import CacheSizes
from mlx_flash.layout.parts import ExpertStack, ModelLayout, Unit
from mlx_flash.layout.units import matrices_of, place_experts, place_matrix, trunk_of
from mlx_flash.memory.arena import kernel_alignment
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT
from mlx_flash.residency.activations import ActivationSizes, measure_activations
from mlx_flash.storage.placement import must_copy, padded_bytes

DEFAULT_HITS = (0.0, 0.33, 0.55, 0.7, 0.8, 0.87, 0.93, 0.97, 1.0)
"""Expected hit rates of pools of 0, 1/8, 2/8 ... of many experts. Measured with random models whose routing is as
skewed as that of trained ones."""

EVEN_EXPERTS, UNEVEN_EXPERTS = 8, 32
"""Experts of a layer up to which all are chosen about equally often, and from which some are chosen far more often than
others. Measured with models of 8, 32 and 64 experts: benchmarks/results/matrix-mixtures-few-many-fp32.json."""


@dataclass(frozen=True, slots=True)
class TensorSize:
    """A tensor that can be pinned or streamed.

    Attributes:
        name: the parameter's path in the model.
        nbytes: its bytes on disk and in memory.
        buffer_bytes: what it takes of a buffer at most, padding included.
    """

    name: str
    nbytes: int
    buffer_bytes: int


@dataclass(frozen=True)
class UnitSize:
    """A unit in numbers.

    Attributes:
        name: its path in the model.
        tensors: its large parameters.
        num_rows: output rows, for a unit that can be cut into row tiles; else None.
        copies: whether its direct reads go through a bounce buffer.
        idle_bytes: of experts that a token is not routed to: they are read with the rest, not computed with.
        is_tied: for an embedding table, whether it serves as the head too, which needs all of it for every output.
    """

    name: str
    tensors: tuple[TensorSize, ...]
    num_rows: int | None = None
    copies: bool = False
    idle_bytes: int = 0
    is_tied: bool = False

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(map(attrgetter("nbytes"), self.tensors))

    @cached_property
    def buffer_bytes(self) -> int:
        """Memory for all its tensors."""
        return sum(map(attrgetter("buffer_bytes"), self.tensors))

    @cached_property
    def computed_bytes(self) -> int:
        """Bytes that a token is computed with."""
        return self.nbytes - self.idle_bytes

    @cached_property
    def largest_first(self) -> list[TensorSize]:
        """Its tensors by size."""
        return sorted(self.tensors, key=attrgetter("nbytes"), reverse=True)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of an output row of a unit with such."""
        return -(-self.nbytes // (self.num_rows or 1))


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """A model's experts in numbers.

    Attributes:
        num_experts: of each layer that has any.
        slot_bytes: memory for one in the pool.
        least_slots: the smallest pool that works.
        nbytes: of all experts.
        token_bytes: of those that compute one token.
        copies: whether direct reads of them go through a bounce buffer.
    """

    num_experts: tuple[int, ...]
    slot_bytes: int
    least_slots: int
    nbytes: int
    token_bytes: int
    copies: bool

    def hit_rate(self, num_slots: int) -> float:
        """Return the share of the experts of a token that a pool of so many slots is expected to hold."""
        return expected_hits(num_slots / sum(self.num_experts), max(self.num_experts))


def expected_hits(share: float, num_experts: int) -> float:
    """Return the share of the experts of a token that a pool is expected to hold, with slots for a share of all."""
    share = min(1.0, share)
    at = share * (len(DEFAULT_HITS) - 1)
    low = min(int(at), len(DEFAULT_HITS) - 2)
    uneven = DEFAULT_HITS[low] + (at - low) * (DEFAULT_HITS[low + 1] - DEFAULT_HITS[low])
    even, many = math.log2(EVEN_EXPERTS), math.log2(UNEVEN_EXPERTS)
    unevenness = min(1.0, max(0.0, (math.log2(num_experts) - even) / (many - even)))
    return share + unevenness * (uneven - share)


@dataclass(frozen=True)
class ModelSizes:
    """A model in numbers.

    Attributes:
        layers: in calling order.
        heads: linear layers outside the layers.
        tables: embedding tables, whose rows can be read one by one.
        resident_bytes: everything that is always in memory.
        cache: sizes of the caches of all layers.
        activations: what a forward call allocates.
        finer: the layers cut into smaller units, each cut finer than the one before, in calling order.
        kept: parts of layers that stay in memory, between those that are streamed.
        experts: what is read expert by expert, and is in no layer then.
        trunk: the same model with its experts read so, if it has any.
        num_operations: operations of a call for one token, as far as the time to start them matters.
        own_head: bytes of the head that guesses tokens, and of its keys and values for a token; None without one.
        guesses: whether that is in memory.
    """

    layers: tuple[UnitSize, ...]
    heads: tuple[UnitSize, ...]
    tables: tuple[UnitSize, ...]
    resident_bytes: int
    cache: CacheSizes
    activations: ActivationSizes
    finer: tuple[tuple[UnitSize, ...], ...] = ()
    kept: tuple[UnitSize, ...] = ()
    experts: ExpertSizes | None = None
    trunk: ModelSizes | None = None
    num_operations: int = 0
    own_head: tuple[int, int] | None = None
    guesses: bool = False

    @cached_property
    def guessing(self) -> ModelSizes:
        """The same model with the head that guesses in memory, and the one that makes its logits, which they share."""
        tables, heads = tuple([table for table in self.tables if not table.is_tied]), self.all_heads
        trunk = None if self.trunk is None else self.trunk.guessing
        return replace(self, heads=(), tables=tables, kept=(*self.kept, *heads), trunk=trunk, guesses=True)

    def cut(self, units: tuple[UnitSize, ...]) -> ModelSizes:
        """Return the same model with smaller units instead of its layers. The rest of the layers stays in memory."""
        rest = self.layer_bytes - sum([unit.nbytes for unit in units])
        return replace(self, layers=units, resident_bytes=self.resident_bytes + rest, finer=())

    @cached_property
    def sums(self) -> dict[tuple[int, bool], Any]:
        """Sums of :meth:`Task.streamed`, which tasks with the same model ask for again."""
        return {}

    @cached_property
    def cuts(self) -> tuple[ModelSizes, ...]:
        """The model with whole layers, then with smaller and smaller units in their place."""
        return self, *map(self.cut, self.finer)

    @cached_property
    def linears(self) -> tuple[UnitSize, ...]:
        """The linear layers in the finest cut."""
        return tuple([unit for unit in (self.finer[-1] if self.finer else self.layers) if unit.num_rows])

    def tiled(self, names: Collection[str]) -> ModelSizes:
        """Return the same model in its finest cut, with the linear layers of these names in row tiles."""
        finest = self.finer[-1] if self.finer else self.layers
        streamed = tuple([unit for unit in self.linears if unit.name in names])
        others = tuple([unit for unit in finest if not unit.num_rows])
        kept = tuple([unit for unit in self.linears if unit.name not in names])
        return replace(self.cut(finest), layers=others, heads=(*streamed, *self.heads), kept=(*self.kept, *kept))

    @cached_property
    def all_heads(self) -> tuple[UnitSize, ...]:
        """The units that every output needs whole: heads, and embedding tables that serve as one."""
        return (*self.heads, *(table for table in self.tables if table.is_tied))

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of all layers."""
        return sum([unit.nbytes for unit in self.layers])

    @cached_property
    def layer_buffer_bytes(self) -> int:
        """Memory for all layers, and for what of them stays in memory anyway."""
        return sum([unit.buffer_bytes for unit in [*self.layers, *self.kept]])

    @cached_property
    def head_buffer_bytes(self) -> int:
        """Memory for all heads."""
        return sum([unit.buffer_bytes for unit in self.all_heads])

    @cached_property
    def table_buffer_bytes(self) -> int:
        """Memory for the tables that are no heads."""
        return sum([unit.buffer_bytes for unit in self.tables if not unit.is_tied])

    @cached_property
    def copies(self) -> bool:
        """True when direct reads of any unit go through a bounce buffer."""
        return True in [unit.copies for unit in [*self.layers, *self.heads, *self.tables]]

    @cached_property
    def nbytes(self) -> int:
        """All weights."""
        units = [*self.layers, *self.kept, *self.heads, *self.tables]
        experts = self.experts.nbytes if self.experts else 0
        return sum([unit.nbytes for unit in units]) + self.resident_bytes + experts


def measure(layout: ModelLayout, config: dict[str, Any]) -> ModelSizes:
    """Return the numbers of a model. Reads no weights.

    Args:
        layout: its units.
        config: its configuration, with the key names Hugging Face uses.
    """
    activations = measure_activations(layout, config.get("text_config", config))
    size_of = _unit_sizes(layout)
    sizes = _measure(layout, activations, size_of)
    if not layout.experts:
        return sizes
    trunk = _measure(trunk_of(layout), activations, size_of)
    return replace(sizes, trunk=replace(trunk, experts=_expert_sizes(layout.experts)))


def _unit_sizes(layout: ModelLayout) -> Callable[[Unit], UnitSize]:
    """Return what gives units of a model, and of all its cuts, in numbers."""
    large, alignment = [parameter for unit in layout.units for parameter in unit.large], kernel_alignment()
    sizes = {id(p): TensorSize(p.name, p.nbytes, padded_bytes(p.nbytes)) for p in large}
    copied = {id(p) for p in large if must_copy([p.records], alignment)}
    idle = {
        id(p): p.nbytes * max(0, stack.num_experts - stack.top_k) // stack.num_experts
        for stack in layout.experts
        for p in stack.unit.large
    }
    found: dict[tuple[object, ...], UnitSize] = {}  # several cuts have the same units

    def unit_size(unit: Unit) -> UnitSize:
        ids = list(map(id, unit.large))
        key = (unit.name, *ids)
        if key not in found:
            tensors, idle_bytes = tuple(map(sizes.__getitem__, ids)), sum([idle[i] for i in idle.keys() & ids])
            found[key] = UnitSize(unit.name, tensors, unit.num_rows, not copied.isdisjoint(ids), idle_bytes)
        return found[key]

    return unit_size


def _measure(layout: ModelLayout, activations: ActivationSizes, size_of: Callable[[Unit], UnitSize]) -> ModelSizes:
    small = [parameter for unit in layout.units for parameter in unit.small]
    return ModelSizes(
        layers=tuple(map(size_of, layout.layers)),
        heads=tuple(map(size_of, layout.heads)),
        tables=tuple([replace(size_of(unit), is_tied=unit.name in layout.tied) for unit in layout.embeddings]),
        resident_bytes=sum([parameter.nbytes for parameter in [*small, *layout.resident]]) + layout.tower_bytes,
        cache=layout.cache,
        activations=activations,
        finer=tuple(tuple(map(size_of, cut)) for cut in layout.finer),
        num_operations=layout.trace.num_operations,
        own_head=None if layout.head is None else (layout.head.nbytes, layout.head.row_bytes),
    )


def _expert_sizes(stacks: Sequence[ExpertStack]) -> ExpertSizes:
    placed = [place_experts(stack) for stack in stacks]
    slot_bytes = max([placement.nbytes for placement in placed])
    staged = [place_matrix(stack, columns) for stack in stacks for columns in matrices_of(stack)]
    stage_bytes = max([placement.nbytes for placement in staged]) + DIRECT_ALIGNMENT
    return ExpertSizes(
        num_experts=tuple([stack.num_experts for stack in stacks]),
        slot_bytes=slot_bytes,
        least_slots=max(-(-stage_bytes // slot_bytes), *(stack.top_k for stack in stacks)),
        nbytes=sum([stack.unit.nbytes for stack in stacks]),
        token_bytes=sum([min(stack.top_k, stack.num_experts) * stack.expert_bytes for stack in stacks]),
        copies=any(placement.read[0].copies for placement in placed) or any(placement.copies for placement in staged),
    )

"""Carries a plan out on a model, and undoes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_flash.config import FlashConfig
from mlx_flash.engine.lending import Lending
from mlx_flash.experts.expertlayers import Experts
from mlx_flash.experts.pool import READS_PAST_CACHE, ExpertPool
from mlx_flash.experts.pooledstacks import make_pooled
from mlx_flash.layout.parts import ExpertStack, ModelLayout, Parameter, Unit, is_embedding
from mlx_flash.layout.swap import SwappedClass, clone_with, remember, swap_class
from mlx_flash.layout.units import trunk_of
from mlx_flash.memory.arena import Arena, kernel_alignment, views_of
from mlx_flash.memory.driver import has_own_memory
from mlx_flash.residency.plan import Pool, ResidencyPlan
from mlx_flash.storage.placement import Placement, place
from mlx_flash.storage.prefetcher import BackgroundPrefetcher, Ticket
from mlx_flash.streaming.layers import (
    ComputedModule,
    EmbeddingRows,
    HeadState,
    PinnedLayers,
    StreamedLayer,
    TableState,
    TiledLinear,
    tile_module,
)
from mlx_flash.streaming.loans import Lendable, Loans
from mlx_flash.streaming.stream import WeightStream

Progress = Callable[[int, int], None]
"""Called with what is done and what there is to do: bytes of weights, or tokens of a prompt."""


_PART_BYTES = 64 << 20
"""Least size of a part of the pinned weights, if there are so many bytes."""


class Engine:
    """The weights of one model, on their way.

    Args:
        layout: the model's units.
        plan: what to do with them.
        reader: reads the checkpoint; closed by :meth:`close`.
        config: the settings.
        exact_rows: as in :class:`~mlx_flash.experts.expertlayers.Experts`.

    Attributes:
        stream: the ring of streamed units.
        loans: the streamed weights that are in memory for as long as nothing else needs it.
        lending: these, and experts.
        pinned: the layers in memory that calls may have to wait for; none where MLX lets go of results early.
        units: of each unit in the ring, the unit of the layout that it is, or is a tile of.
        experts: what computes experts that are read one by one; None when there are none, and after :meth:`close`.
        reader: the reader.
        has_own_head: the head that guesses tokens is in memory.
    """

    def __init__(
        self,
        layout: ModelLayout,
        plan: ResidencyPlan,
        reader: BackgroundPrefetcher,
        config: FlashConfig,
        exact_rows: bool,
    ) -> None:
        self.reader = reader
        self.stream = WeightStream([], reader, poison=False, num_units=0)
        self.loans = Loans(self.stream)
        self.lending = Lending(self.loans, None, grows=False)
        self.pinned = PinnedLayers()
        self.units: list[Unit] = []
        self.experts: Experts | None = None
        self._heads: list[HeadState] = []
        units = [*layout.units, *(unit for cut in layout.finer for unit in cut)]
        modules = {id(module): module for unit in units for module in unit.module.modules()}
        self._put_back = remember(modules.values())
        self._classes = [(module, type(module)) for module in modules.values()]
        self._bound: list[Parameter] = []
        self._streamed: set[tuple[int, object]] = set()
        self._layout, self._plan = layout, plan
        self._own_head = [] if layout.head is None or not plan.mtp_bytes else layout.head.parameters
        self.has_own_head = bool(self._own_head)
        self._config, self._exact_rows = config, exact_rows

    def start(self, progress: Progress | None = None) -> None:
        """Read the pinned weights, and change the modules. If that fails, it is closed.

        Args:
            progress: called with (bytes done, bytes to do) while weights are loaded.
        """
        layout, plan, reader = self._layout, self._plan, self.reader
        trunk = layout if plan.pool is None else trunk_of(layout)
        try:
            small = [*(p for unit in trunk.units for p in unit.small), *trunk.resident, *self._own_head]
            for parameter in small:
                if not parameter.records:
                    mx.eval(parameter.array)
            direct = [parameter for parameter in small if parameter.records]  # an error of MLX would not name them
            parts = [*([direct] if direct else []), *_pinned_parts(trunk, plan)]
            self._pin(parts, progress or (lambda done, total: None))
            slots = [Arena(plan.streaming.slot_bytes) for _ in range(plan.streaming.num_slots)]
            self.stream = WeightStream(slots, reader, self._config.poison_released_slots, plan.streaming.num_units)
            self.loans = Loans(self.stream)
            self._start_streaming(trunk, plan)
            for module in layout.adapted:  # their matrices would be in memory together
                if not isinstance(module, SwappedClass):
                    swap_class(module, ComputedModule, None)
            if has_own_memory():
                layers = [unit.module for unit in trunk.layers]
                self.pinned.modules += [module for module in layers if not isinstance(module, SwappedClass)]
            if plan.pool is not None:
                self._start_experts(layout.experts, plan.pool)
            self.lending = Lending(self.loans, self.experts, grows=self._config.expert_pool_gb is None)
        except BaseException:
            self.close()
            raise

    def _pin(self, parts: list[list[Parameter]], progress: Progress) -> None:
        """Read the pinned weights. While one part is read, modules get the arrays of the next ones."""
        done, total = 0, sum(parameter.nbytes for part in parts for parameter in part)
        progress(done, total)
        under_way: deque[tuple[Ticket, int]] = deque()

        def finish_first() -> None:
            nonlocal done
            ticket, nbytes = under_way[0]
            ticket.wait()
            under_way.popleft()
            done += nbytes
            progress(done, total)

        try:
            for part in parts:
                under_way.append((self._begin_pinning(part), sum(parameter.nbytes for parameter in part)))
                while under_way and under_way[0][0].done():
                    finish_first()
            while under_way:
                finish_first()
        finally:
            for ticket, _ in under_way:
                ticket.cancel()
        self.reader.cached.leave_out(total)

    def _begin_pinning(self, parameters: list[Parameter]) -> Ticket:
        placement = place([parameter.records for parameter in parameters], kernel_alignment())
        arena = Arena(placement.nbytes, is_read_once=True)
        self._bound += parameters
        bind_views([(parameters, placement, arena)])
        return self.reader.submit(placement.segments, arena.memory, caching="found")

    def _start_streaming(self, layout: ModelLayout, plan: ResidencyPlan) -> None:
        layers, heads, tables = dict(plan.streaming.layers), dict(plan.streaming.heads), set(plan.streaming.tables)
        streamed: list[tuple[int, Unit, _Placed]] = []
        for unit in [*layout.cut(plan.streaming.cut), *layout.heads]:
            if unit.name in layers:
                streamed.append(self._place_layer(unit, set(layers[unit.name])))
            elif unit.name in heads:
                tiles = self._tile(unit, heads[unit.name])
                self._swap(unit, TiledLinear, tiles, unit.large)
                if unit in layout.heads:
                    self._heads.append(tiles)
        for unit in layout.embeddings:
            if unit.name in tables:
                head = self._tile(unit, heads[unit.name]) if unit.name in heads else None
                self._swap(unit, EmbeddingRows, TableState(unit.large, self.reader, head), unit.large)
                self._heads += [head] if head is not None else []
        self._stream_layers(streamed)
        self.loans.settle()
        self.stream.start()

    def _place_layer(self, unit: Unit, names: set[str]) -> tuple[int, Unit, _Placed]:
        """Add a unit to the ring. Return its number and what it reads."""
        parameters = [parameter for parameter in unit.large if parameter.name in names]
        placement = place([parameter.records for parameter in parameters], kernel_alignment())
        index, arena = self.stream.add(unit.name, placement)
        self.units.append(unit)
        return index, unit, (parameters, placement, arena)

    def _stream_layers(self, units: Sequence[tuple[int, Unit, _Placed]]) -> None:
        self._bound += [parameter for _, _, (parameters, *_) in units for parameter in parameters]
        views_of_units = bind_views([placed for *_, placed in units])
        for (index, unit, (parameters, placement, _)), views in zip(units, views_of_units, strict=True):
            self._swap(unit, StreamedLayer, (index, self.stream, type(unit.module).__call__), parameters)
            places = zip(placement.offsets, views, parameters, strict=True)
            self.loans.add(unit.module, placement, [Lendable(index, at, view, p.bind) for at, view, p in places])

    def _tile(self, unit: Unit, rows: int) -> HeadState:
        num_rows = unit.module["weight"].shape[0]
        ranges = [(start, min(start + rows, num_rows)) for start in range(0, num_rows, rows)]
        tiles = [self._stream_tile(unit, start, stop) for start, stop in ranges]
        whole = clone_with(unit.module, {parameter.key: parameter.array for parameter in unit.large})
        return HeadState(tiles, whole)

    def _stream_tile(self, unit: Unit, start: int, stop: int) -> nn.Module:
        records = [parameter.record for parameter in unit.large if parameter.record is not None]
        placement = place([[record.rows(start, stop)] for record in records], kernel_alignment())
        index, arena = self.stream.add(f"{unit.name}[{start}:{stop}]", placement)
        self.units.append(unit)
        views = {
            parameter.key: arena.view(offset, (stop - start, *parameter.array.shape[1:]), parameter.array.dtype)
            for parameter, offset in zip(unit.large, placement.offsets, strict=True)
        }
        module = tile_module(unit, start, stop, views)
        kind: Any = type(module)
        swap_class(
            module, StreamedLayer, (index, self.stream, kind.as_linear if is_embedding(module) else kind.__call__)
        )
        places = zip(placement.offsets, views.items(), strict=True)
        self.loans.add(
            module,
            placement,
            [Lendable(index, at, view, partial(dict.__setitem__, module, key)) for at, (key, view) in places],
        )
        return module

    def _start_experts(self, stacks: Sequence[ExpertStack], plan: Pool) -> None:
        poison = self._config.poison_released_slots
        slots = plan.num_slots, plan.slot_bytes, plan.num_experts
        reads_past_cache = READS_PAST_CACHE if self._exact_rows else 0
        make_pool = partial(ExpertPool, reader=self.reader, poison=poison, reads_past_cache=reads_past_cache)
        pooled = make_pooled(stacks, slots, make_pool)
        self.experts = Experts(
            stacks,
            pooled,
            self.stream,
            exact_rows=self._exact_rows,
            lookahead=self._config.expert_lookahead,
        )
        self._streamed.update((id(p.container), p.key) for stack in stacks for p in stack.unit.large)

    def _swap(self, unit: Unit, mixin: type[SwappedClass], state: object, streamed: list[Parameter]) -> None:
        swap_class(unit.module, mixin, state)
        self._streamed.update((id(parameter.container), parameter.key) for parameter in streamed)

    def drop_logits(self, is_dropped: bool) -> None:
        """Set whether the logits of the next calls are dropped. Streamed heads are not read then."""
        for head in self._heads:
            head.is_dropped = is_dropped

    def recover(self) -> None:
        """Put right what an exception in a pass, or in a change of what is lent, has cut in two."""
        self.stream.recover()
        if self.experts is not None:
            self.experts.recover()

    @property
    def is_resident(self) -> bool:
        """True if all weights are in memory all the time."""
        return not self._streamed

    def is_streamed(self, container: object, key: object) -> bool:
        """Return True if the array that a module holds under a key is not in memory all the time."""
        return (id(container), key) in self._streamed

    def close(self) -> None:
        """Stops reading, gives every module its own class and its lazily loaded arrays back. Harmless when repeated."""
        self.stream.close()
        self.loans.close()
        if self.experts is not None:
            self.experts.pool.close()
        self.pinned.compute_at_once(None)
        for module, kind in self._classes:
            object.__setattr__(module, "__class__", kind)
        if self._classes:
            self._put_back()
        for parameter in self._bound:
            parameter.bind(parameter.array)
        self._heads.clear()
        self._classes.clear()
        self._bound.clear()
        self._streamed.clear()
        stats = self.stream.stats
        self.stream = WeightStream([], self.reader, poison=False, num_units=0)  # lets go of the slots
        self.stream.stats = stats
        self.loans, self.experts = Loans(self.stream), None
        self.lending = Lending(self.loans, None, grows=False)
        self.reader.close()


def _pinned_parts(layout: ModelLayout, plan: ResidencyPlan) -> list[list[Parameter]]:
    """Return the large pinned parameters in parts. Each part gets one buffer.

    Small units share a part, since each part takes about a millisecond.
    """
    streamed = plan.streaming.parameters(layout)
    parts: list[list[Parameter]] = []
    nbytes = _PART_BYTES
    for unit in layout.units:
        if nbytes >= _PART_BYTES:
            parts.append([])
            nbytes = 0
        kept = [p for p in unit.large if p.name not in streamed]
        parts[-1] += kept
        nbytes += sum(p.nbytes for p in kept)
    return [part for part in parts if part]


_Placed = tuple[list[Parameter], Placement, Arena]
"""Parameters, their places in a buffer, and the buffer."""


def bind_views(placed: Sequence[_Placed]) -> list[list[mx.array]]:
    """Make modules hold views of arenas, one for each parameter of a placement. Return those of each."""
    places = [
        (arena, offset, parameter.array.shape, parameter.array.dtype)
        for parameters, placement, arena in placed
        for offset, parameter in zip(placement.offsets, parameters, strict=True)
    ]
    views = iter(views_of(places))
    bound = [[next(views) for _ in parameters] for parameters, *_ in placed]
    for (parameters, *_), arrays in zip(placed, bound, strict=True):
        for parameter, array in zip(parameters, arrays, strict=True):
            parameter.bind(array)
    return bound

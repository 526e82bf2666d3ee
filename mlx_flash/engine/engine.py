"""A plan that is carried out on a model, and undone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from mlx_flash.config import FlashConfig
from mlx_flash.engine.prepare import Prepared
from mlx_flash.enginethread import Progress
from mlx_flash.experts.expertlayers import Experts, make_pooled
from mlx_flash.experts.pool import READS_PAST_CACHE, ExpertPool
from mlx_flash.kv.disk import WriteGovernor
from mlx_flash.kv.kvpool import KVPool, KVUsage
from mlx_flash.layout.load import reads_explained
from mlx_flash.layout.parts import ExpertStack, ModelLayout, Parameter, Unit, bind_all, is_embedding
from mlx_flash.layout.swap import SwappedClass, clone_with, remember, swap_class
from mlx_flash.layout.units import trunk_of
from mlx_flash.logs import log
from mlx_flash.memory.arena import Arena, kernel_alignment, views_of
from mlx_flash.memory.driver import has_own_memory
from mlx_flash.memory.footprint import (
    FREE_SHARE,
    available_memory,
    end_limit,
    footprint,
    limit_buffers,
    release_freed_memory,
    total_memory,
)
from mlx_flash.prefixes.prefixcache import PrefixCache, open_prefixes
from mlx_flash.residency.plan import Pool, ResidencyPlan, largest_page
from mlx_flash.storage.placement import Placement, place
from mlx_flash.storage.prefetcher import BackgroundPrefetcher, ReadStats, Ticket
from mlx_flash.storage.probe import doubt_profile
from mlx_flash.streaming.stream import (
    ComputedModule,
    EmbeddingRows,
    HeadState,
    Lendable,
    Loans,
    PinnedLayers,
    StreamedLayer,
    TableState,
    TiledLinear,
    WeightStream,
    tile_module,
)
from mlx_flash.telemetry import Json, Publisher


class Lending:
    """Lends memory to streamed weights, and what these leave to experts. Experts give it back first.

    A byte of a streamed weight saves a byte on every pass, a byte of an expert only when that is chosen. Experts may
    give more than was lent: all but the slots that the pool cannot do without. The caller
    has the passes to itself.
    """

    def __init__(self, loans: Loans, experts: Experts | None) -> None:
        self._loans = loans
        self._experts = experts
        self._planned = 0 if experts is None else experts.pool.slots.num_slots
        self._most = 0 if experts is None else experts.pool.slots.capacity

    @property
    def nbytes(self) -> int:
        """Memory that weights have beyond the plan, in bytes. It is negative when they have less."""
        if self._experts is None:
            return self._loans.nbytes
        slots = self._experts.pool.slots
        return self._loans.nbytes + slots.committed - self._planned * slots.pitch

    @property
    def recallable(self) -> int:
        """Memory that weights can give back, in bytes."""
        if self._experts is None or not self._experts.pool.slots.can_resize:
            return self._loans.nbytes
        slots = self._experts.pool.slots
        return self._loans.nbytes + max(0, slots.committed - self._experts.least_slots * slots.pitch)

    def lend(self, nbytes: int) -> None:
        """Allow so much more memory. Weights take it in the next pass. Replaces the last call's."""
        left = self._loans.lend(nbytes)
        has_lent = left < nbytes
        if self._experts is not None:
            slots = self._experts.pool.slots
            wanted = min(slots.num_within(slots.committed + max(0, left)), self._most)
            self._resize(max(wanted, slots.num_touched))
            has_lent |= slots.num_slots > slots.num_touched
        if has_lent:
            release_freed_memory()  # what the last call has left in the heap takes room

    def recall(self, nbytes: int) -> int:
        """Free at least so much memory now, or all that can be freed. Return the bytes that were freed."""
        before = self.nbytes
        if self._experts is not None:
            slots = self._experts.pool.slots
            wanted = slots.num_within(max(0, slots.committed - nbytes))
            self._resize(min(slots.num_touched, max(wanted, self._experts.least_slots)))
        self._loans.recall(nbytes - (before - self.nbytes))
        return before - self.nbytes

    def adapt(self, plan: ResidencyPlan, budget_bytes: int) -> ResidencyPlan | None:
        """Return the plan for another budget, with fewer experts if it is smaller; None when that is not enough."""
        over, pool = plan.peak_bytes - budget_bytes, plan.pool
        if over > 0 and pool is not None and self._experts is not None and self._experts.pool.slots.can_resize:
            num_slots = max(pool.num_slots - -(-over // pool.slot_bytes), self._experts.least_slots)
            pool = replace(pool, num_slots=min(num_slots, pool.num_slots))
        adapted = replace(plan, budget_bytes=budget_bytes, pool=pool)
        if adapted.peak_bytes > budget_bytes:
            return None
        if pool is not None and self._experts is not None:
            self._planned = min(pool.num_slots, self._experts.pool.slots.capacity)
        return adapted

    def end(self) -> None:
        self._loans.recall(self._loans.nbytes)
        if self._experts is not None:
            self._resize(self._planned)

    def _resize(self, num_slots: int) -> None:
        assert self._experts is not None
        slots = self._experts.pool.slots
        is_right = num_slots == slots.num_slots and slots.num_touched <= num_slots
        if slots.can_resize and not is_right:
            self._experts.resize(num_slots)


_PART_BYTES = 64 << 20
"""Least size of a part of the pinned weights, if there are so many bytes."""


_CACHED_SIZE, _CACHED_DEPTH = 4 << 20, 2
"""Read size and queue depth for experts that all lie in the page cache. Such reads are copies by the processor, between
which threads wait for Python's lock. A 4-bit mixture of 8.6 GB at 4.4 GB on an H200 with 16 cores made 13.3 tokens/s
with 4 threads, 14.4 to 14.6 with 2, and 14.7 with one, all with reads of 2 MiB; 2 threads with reads of 4 MiB made
14.7. A disk is faster with more in flight."""

MIN_READ_BYTES = 64 << 20
"""Less that was read says little of a disk."""

HALF = 0.5
"""A disk that gives less than this share of its probed speed is probed once more. So is one that gives more than the
inverse: other programs were busy when it was probed."""


class Engine:
    """A plan in force: the weights of one model, on their way, and what caches and publishes beside them.

    It knows nothing of the object that is called, whose end ends it. ``pinned`` are the layers in memory that calls may
    have to wait for, ``units`` those of the layout that each unit in the ring is, or is a tile of.
    """

    def __init__(
        self, prepared: Prepared, config: FlashConfig, name: str, kv: KVPool | None, governor: WriteGovernor
    ) -> None:
        self._prepared, self._config, self._name, self._governor = prepared, config, name, governor
        self.plan, self.kv, self.chain = prepared.plan, kv, prepared.chain
        self.prefixes: PrefixCache | None = None
        self._publisher: Publisher | None = None
        self._read_at_start: ReadStats | None = None
        self.reader = _reader(prepared, config)
        self.stream = WeightStream([], self.reader, poison=False, num_units=0)
        self.loans = Loans(self.stream)
        self.lending = Lending(self.loans, None)
        self.pinned = PinnedLayers()
        self.units: list[Unit] = []
        self.experts: Experts | None = None
        self.heads: list[HeadState] = []
        layout = prepared.layout
        units = [*layout.units, *(unit for cut in layout.finer for unit in cut)]
        modules = {id(module): module for unit in units for module in unit.module.modules()}
        self._put_back = remember(modules.values())
        self._classes = [(module, type(module)) for module in modules.values()]
        self._bound: list[Parameter] = []
        self._streamed: set[tuple[int, object]] = set()
        self._own_head = [] if layout.head is None or not self.plan.mtp_bytes else layout.head.parameters
        self.has_own_head = bool(self._own_head)
        self._exact_rows = prepared.machine.exact_tiles

    def start(self, progress: Progress | None = None) -> None:
        """Read the pinned weights, and change the modules. If that fails, it is closed."""
        prepared, config, plan, name = self._prepared, self._config, self.plan, self._name
        parts = ", ".join(f"{words}: {nbytes}" for words, nbytes in plan.parts() if nbytes)
        if prepared.layout.head is not None and plan.read_bytes and not plan.mtp_bytes:
            log.info("the head of %s for multi-token prediction is not used: weights use its memory better", name)
        log.info("%s starts in a budget of %d bytes: %s", name, plan.budget_bytes, parts)
        try:
            with reads_explained(prepared.loaded.streams, prepared.checkpoint.directory):
                fingerprint = _fingerprint(prepared, name)  # while modules have the classes that they were loaded with
                self._start_weights(progress)
            self._read_at_start = self.reader.stats
            if fingerprint is not None:
                queue_bytes = plan.prefix_bytes - largest_page(plan.cache, plan.context_length)
                self.prefixes = open_prefixes(config, fingerprint, name, queue_bytes, self._governor)
            limit_buffers(self, plan.cache_limit)
        except BaseException:
            self.close()
            raise

    def _start_weights(self, progress: Progress | None) -> None:
        layout, plan, reader = self._prepared.layout, self.plan, self.reader
        trunk = layout if plan.pool is None else trunk_of(layout)
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
        self.lending = Lending(self.loans, self.experts)

    def publish(self, collect: Callable[[], Json]) -> None:
        """Publish the state for flash-monitor, until the end."""
        self._publisher = Publisher(collect)
        self._publisher.start()

    def adapt(self, plan: ResidencyPlan) -> None:
        self.plan = plan
        self.reader.cached.room = _room(self._config, plan)

    def _pin(self, parts: list[list[Parameter]], progress: Progress) -> None:
        """Read the pinned weights. While a part is read, modules get the arrays of the next ones."""
        done, total = 0, sum(parameter.nbytes for part in parts for parameter in part)
        progress(done, total)
        tickets: list[Ticket] = []
        try:
            for part in parts:
                tickets.append(self._begin_pinning(part))
            for ticket, part in zip(tickets, parts, strict=True):
                ticket.wait()
                done += sum(parameter.nbytes for parameter in part)
                progress(done, total)
        finally:
            for ticket in tickets:
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
                    self.heads.append(tiles)
        for unit in layout.embeddings:
            if unit.name in tables:
                head = self._tile(unit, heads[unit.name]) if unit.name in heads else None
                table = TableState(unit.module, unit.large, self.reader, head)
                self._swap(unit, EmbeddingRows, table, unit.large)
                self.heads += [head] if head is not None else []
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
            self._swap(unit, StreamedLayer, (index, self.stream, type(unit.module), "__call__"), parameters)
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
        method = "as_linear" if is_embedding(module) else "__call__"
        swap_class(module, StreamedLayer, (index, self.stream, type(module), method))
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

    def recover(self) -> None:
        """Put right what an exception in a pass, or in a change of what is lent, has cut in two."""
        self.stream.recover()
        if self.experts is not None:
            self.experts.recover()

    @property
    def is_resident(self) -> bool:
        return not self._streamed

    def is_streamed(self, container: object, key: object) -> bool:
        """Return True if the array that a module holds under a key is not in memory all the time."""
        return (id(container), key) in self._streamed

    @property
    def usage(self) -> KVUsage:
        """The memory of its KV caches; none where they are mlx-lm's own."""
        return KVUsage() if self.kv is None else self.kv.usage

    @property
    def pool_bytes(self) -> int:
        return 0 if self.experts is None else self.experts.pool.slots.committed

    @property
    def weight_bytes(self) -> int:
        plan = self.plan
        weights = plan.resident_bytes + plan.pinned_bytes + plan.mtp_bytes + plan.slots_bytes
        return weights + self.pool_bytes + self.loans.nbytes

    def end(self) -> None:
        """Stop everything that has a thread or a file; modules keep what they hold. Also if it never started."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None  # it refers to the engine, whose memory goes with its last reference
        if self.prefixes is not None:
            self.prefixes.close()
        if self._read_at_start is not None and self._is_unlike_probe(self._read_at_start, self.reader.stats):
            doubt_profile(self._prepared.checkpoint.shards[0].path)
        self.reader.close()
        end_limit(self)

    def _is_unlike_probe(self, before: ReadStats, now: ReadStats) -> bool:
        """Return whether the disk gave half of its probed speed, or twice, if enough came from it to tell."""
        plan = self._prepared.plan
        nbytes, seconds = now.nbytes - before.nbytes, now.busy_seconds - before.busy_seconds
        if plan.pool is not None or nbytes < MIN_READ_BYTES or now.cached_bytes > before.cached_bytes:
            return False  # experts come as fast as calls need them
        return not HALF < nbytes / (seconds * plan.disk_bytes_per_second) < 1 / HALF

    def close(self) -> None:
        """End it, and give every module its own class and its lazily loaded arrays back. Harmless when repeated."""
        self.end()
        self.stream.close()
        self.loans.close()
        if self.experts is not None:
            self.experts.pool.close()
        self.pinned.compute_at_once(None)
        for module, kind in self._classes:
            object.__setattr__(module, "__class__", kind)
        if self._classes:
            self._put_back()
        bind_all(self._bound, [parameter.array for parameter in self._bound])
        self.heads.clear()
        self._classes.clear()
        self._bound.clear()
        self._streamed.clear()
        stats = self.stream.stats
        self.stream = WeightStream([], self.reader, poison=False, num_units=0)  # lets go of the slots
        self.stream.stats = stats
        self.loans, self.experts = Loans(self.stream), None
        self.lending = Lending(self.loans, None)


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
        bind_all(parameters, arrays)
    return bound


def _fingerprint(prepared: Prepared, name: str) -> str | None:
    """Return that of the model, its adapters included; None when its prompts are not to be cached, or cannot be."""
    if prepared.fingerprint is None:
        return None
    changes = prepared.identity.changes()
    if changes is None:
        log.warning("prompts of %s are not remembered: too much of it is not as it was loaded.", name)
        return None
    return prepared.fingerprint + changes


def _reader(prepared: Prepared, config: FlashConfig) -> BackgroundPrefetcher:
    plan = prepared.plan
    layout, checkpoint = prepared.layout, prepared.checkpoint
    parameters = [p for unit in [*layout.units, *layout.towers] for p in [*unit.large, *unit.small]]
    parameters += [*layout.resident, *([] if layout.head is None else layout.head.parameters)]
    records = [record for p in parameters for record in p.records]
    paths = sorted({record.path for record in records})
    read_size, queue_depth = plan.read_size, plan.queue_depth
    is_free = config.io == "auto" and config.queue_depth is None and config.read_size_mb is None
    if is_free and plan.pool is not None and _spare_memory(plan.budget_bytes) >= sum(p.stat().st_size for p in paths):
        size, depth = max(read_size, _CACHED_SIZE), min(queue_depth, _CACHED_DEPTH)
        if size * depth <= read_size * queue_depth:  # in no more memory
            read_size, queue_depth = size, depth
    return BackgroundPrefetcher(
        paths,
        direct=prepared.machine.disk.direct,
        read_size=read_size,
        queue_depth=queue_depth,
        arrival=prepared.machine.arrival,
        shards=checkpoint.shards,
        room=_room(config, plan),
    )


def _room(config: FlashConfig, plan: ResidencyPlan) -> Callable[[], int]:
    """Return what tells the memory that the page cache may use for the files."""
    return partial(_spare_memory, plan.budget_bytes) if config.io == "auto" else lambda: 0


def _spare_memory(budget_bytes: int) -> int:
    """Return the bytes of memory that neither this process's budget nor other programs need."""
    return available_memory() - max(0, budget_bytes - footprint()) - int(FREE_SHARE * total_memory())

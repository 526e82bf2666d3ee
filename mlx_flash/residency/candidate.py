"""A candidate for a plan: one choice of pinned and streamed weights. Its memory is added up before its plan is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mlx_flash.residency.ledger import reader_bytes
from mlx_flash.residency.machine import Machine
from mlx_flash.residency.plan import ResidencyPlan, Streaming
from mlx_flash.residency.selection import Streamed, Tiles, cut_heads, spread
from mlx_flash.residency.sizes import ExpertSizes, ModelSizes, UnitSize
from mlx_flash.residency.task import Task, Tokens
from mlx_flash.residency.timing import pass_seconds, pool_of, prompt_seconds, with_kv_seconds


@dataclass(frozen=True)
class Weights:
    """The weights of a model that is cut in some way, on a machine.

    Attributes:
        sizes: the model.
        machine: the machine.
        num_slots: buffers that were asked for; None leaves that open.
        pool_slots: of the pool of experts that was asked for; 0 leaves that open.
        cut: the way its layers are cut, as in ``Streaming.cut``.
        is_tiled: whether some linear layers pass through the slots in tiles of rows.
    """

    sizes: ModelSizes
    machine: Machine
    num_slots: int | None = None
    pool_slots: int = 0
    cut: int = 0
    is_tiled: bool = False

    @cached_property
    def cuts(self) -> tuple[Weights, ...]:
        """The weights in whole layers, then in smaller and smaller units."""
        finer = enumerate(self.sizes.cuts[1:], 1)
        return (self, *[replace(self, sizes=sizes, cut=i) for i, sizes in finer])

    @cached_property
    def _kept(self) -> dict[Any, Any]:
        """Results of the methods below, by what they were asked for: bisections ask for the same often."""
        return {}

    def tiled(self, units: Sequence[UnitSize]) -> Weights:
        """Return the weights in their finest cut, with some linear layers in row tiles."""
        key, sizes = tuple([unit.name for unit in units]), self.sizes
        found: Weights | None = self._kept.get(key)
        if found is None:
            found = self._kept[key] = replace(self, sizes=sizes.tiled(set(key)), cut=len(sizes.finer), is_tiled=True)
        return found

    def candidate(
        self, num_slots: int, target: int, *, whole_layers: bool = True, tile_bytes: int | None = None
    ) -> Candidate:
        """Return the candidate with slots at most, and so many bytes of the layers streamed.

        ``tile_bytes`` is the smallest slot for tiles of the heads; None pins heads.
        """
        sizes, key = self.sizes, (target, whole_layers)
        layers: Streamed | None = sizes.sums.get(key)
        if layers is None:
            layers = sizes.sums[key] = spread(sizes.layers, target, whole_layers)
        tiles: Tiles | None = self._kept.get((layers.largest, tile_bytes))
        if tiles is None:
            heads = () if tile_bytes is None else sizes.all_heads
            tiles = cut_heads(heads, layers.largest, tile_bytes or 0, is_exact=self.machine.exact_tiles)
            self._kept[layers.largest, tile_bytes] = tiles
        return Candidate(self, num_slots, layers, tiles)

    @cached_property
    def bounce_bytes(self) -> int:
        """The reader's own buffers."""
        machine, experts = self.machine, self.sizes.experts
        copies = self.sizes.copies or machine.arrival != "in place" or (experts is not None and experts.copies)
        bounces = machine.arrival == "copied by the driver" or (machine.disk.direct and copies)
        num_readers = 1 if experts is None else 2  # urgent reads have threads and buffers of their own
        decodes = machine.compression is not None
        return num_readers * reader_bytes(machine.disk, bounces=bounces, decodes=decodes)

    @cached_property
    def least_bytes(self) -> int:
        """Memory that none of its candidates does without: small weights, the smallest pool, the reader's buffers."""
        experts = self.sizes.experts
        pool = 0 if experts is None else (self.pool_slots or experts.least_slots) * experts.slot_bytes
        return self.sizes.resident_bytes + pool + self.bounce_bytes

    def most_slots(self, experts: ExpertSizes) -> int:
        """Return the most slots that a pool may have: it is one array."""
        return min(sum(experts.num_experts), self.machine.largest_array // experts.slot_bytes)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One choice of pinned and streamed weights.

    Attributes:
        weights: the model, its layers cut in some way.
        num_slots: slots at most.
        layers: what is streamed of the layers.
        tiles: the heads that are streamed: all of them or none.
        pins_tables: whether embedding tables that are no heads stay in memory.
    """

    weights: Weights
    num_slots: int
    layers: Streamed
    tiles: Tiles
    pins_tables: bool = False

    @property
    def num_units(self) -> int:
        """Layers and tiles of heads that take turns in the slots."""
        return self.layers.num_layers + self.tiles.number

    @property
    def slots_bytes(self) -> int:
        """Memory of the slots."""
        return min(self.num_slots, self.num_units) * self.tiles.slot_bytes

    @property
    def pinned_bytes(self) -> int:
        """Memory of the layers, heads and tables that stay."""
        sizes = self.weights.sizes
        heads = 0 if self.tiles.heads else sizes.head_buffer_bytes
        tables = sizes.table_buffer_bytes if self.pins_tables else 0
        return sizes.layer_buffer_bytes - self.layers.buffer_bytes + heads + tables

    @property
    def nbytes(self) -> int:
        """Memory of all weights, with the smallest pool of experts, and of what reads them."""
        return self.weights.least_bytes + self.pinned_bytes + self.slots_bytes

    def plan(self, task: Task, tokens: Tokens, budget: int = 0) -> ResidencyPlan:
        """Return its plan, with the predicted time, but without the names of what is streamed: see :meth:`named`.

        A pool of experts of open size gets what is left of the budget.
        """
        weights, machine, sizes = self.weights, self.weights.machine, self.weights.sizes
        experts, pool = sizes.experts, None
        if experts is not None:
            left = 0 if weights.pool_slots else budget - task.process_bytes - tokens.nbytes - self.nbytes
            num_slots = weights.pool_slots or experts.least_slots
            more = max(0, min(max(0, left) // experts.slot_bytes, weights.most_slots(experts) - num_slots))
            pool = pool_of(machine, experts, num_slots + more)
        plan = ResidencyPlan(
            budget_bytes=budget,
            minimum_bytes=0,
            model_bytes=sizes.nbytes,
            base_bytes=machine.base_bytes + machine.runtime_bytes,
            active_bytes=machine.active_bytes,
            context_bytes=machine.context_bytes,
            resident_bytes=sizes.resident_bytes,
            pinned_bytes=self.pinned_bytes,
            streaming=self._streaming(),
            pool=pool,
            kv=tokens.kv,
            prefix_bytes=tokens.prefix_bytes,
            activation_bytes=tokens.activation_bytes,
            spare_bytes=tokens.spare_bytes,
            mtp_bytes=tokens.mtp_bytes,
            bounce_bytes=weights.bounce_bytes,
            read_size=machine.disk.read_size,
            queue_depth=machine.disk.queue_depth,
            disk_bytes_per_second=machine.disk.bytes_per_second,
            cache_limit=task.cache_limit,
            prefill_step_size=tokens.ledger.step,
            context_length=tokens.reserve.context_length,
            kv_bytes_per_token=sizes.cache.token_bytes,
            activations=sizes.activations,
            cache=sizes.cache,
            prompt_seconds_per_token=prompt_seconds(sizes, machine, self.num_units),
            compression=machine.compression,
            keeps_states=tokens.ledger.keeps_states,
        )
        return with_kv_seconds(plan, machine)

    def named(self, plan: ResidencyPlan) -> ResidencyPlan:
        """Return its plan with the names. They take longer than all else, so only the plan that is taken has them."""
        return replace(plan, streaming=replace(plan.streaming, layers=self.layers.names))

    def _streaming(self) -> Streaming:
        weights, sizes, layers, tiles = self.weights, self.weights.sizes, self.layers, self.tiles
        num_slots = min(self.num_slots, self.num_units)
        pins = {True: not tiles.heads, False: self.pins_tables}
        seconds, compute_seconds = pass_seconds(sizes, weights.machine, layers, tiles, num_slots)
        return Streaming(
            heads=tuple([(head.name, rows) for head, rows in zip(tiles.heads, tiles.rows, strict=True)]),
            tables=tuple([table.name for table in sizes.tables if not pins[table.is_tied]]),
            num_units=self.num_units,
            num_slots=num_slots,
            slot_bytes=tiles.slot_bytes if self.num_units else 0,
            read_bytes=sum(layers.reads) + sum([head.nbytes for head in tiles.heads]),
            seconds=seconds,
            compute_seconds=compute_seconds,
            cut=weights.cut,
            is_tiled=weights.is_tiled,
        )


def all_streamed(weights: Weights, num_slots: int) -> list[Candidate]:
    """Return the candidates with no layer in memory: of each cut, with heads in tiles or pinned."""
    return [
        cut.candidate(num_slots, cut.sizes.layer_bytes, tile_bytes=tile_bytes)
        for cut in weights.cuts
        for tile_bytes in (0, None)
    ]

"""A candidate for a plan: one choice of pinned and streamed weights. Its memory is added up before its plan is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, round_up
from mlx_flash.residency.plan import ResidencyPlan, Streaming
from mlx_flash.residency.selection import Streamed
from mlx_flash.residency.sizes import UnitSize
from mlx_flash.residency.task import Reserve, Task
from mlx_flash.residency.timing import pool_of, with_times

MAX_TILES = 60
"""Each tile is waited for."""

TILE_ROW_MULTIPLE = 64
TILE_SLACK_BYTES = 12 * DIRECT_ALIGNMENT
"""Padding to pages and alignment that a tile may need beside its rows."""


@dataclass(frozen=True)
class Candidate:
    """One choice of pinned and streamed weights.

    Attributes:
        task: the model, its layers cut in some way.
        reserve: tokens that memory is set aside for.
        num_slots: slots at most.
        whole_layers: whether a layer is streamed whole or not at all.
        tile_bytes: the smallest slot for tiles of the heads; None pins heads.
        target: bytes of the layers to stream, spread evenly over them.
        pins_tables: whether embedding tables that are no heads stay in memory.
    """

    task: Task
    reserve: Reserve
    num_slots: int = 0
    whole_layers: bool = True
    tile_bytes: int | None = None
    target: int = 0
    pins_tables: bool = False

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of its plan, with the smallest pool of experts."""
        return self.peak_of(self.target)

    @cached_property
    def peak_of(self) -> Callable[[int], int]:
        """The predicted peak for any target. A search asks for thousands: what all have in common is added up once."""
        task, whole_layers, most_slots = self.task, self.whole_layers, self.num_slots
        common = task.bare(self.reserve).peak_bytes + task.sizes.layer_buffer_bytes
        common += sum([unit.buffer_bytes for unit in self._pinned])
        slots: dict[int, tuple[int, int]] = {}  # tiles of heads and bytes of a slot, by the largest part of a layer

        def peak(target: int) -> int:
            layers = task.streamed(target, whole_layers)
            if layers.largest not in slots:
                slots[layers.largest] = self._slots(layers.largest)[2:]
            in_heads, slot_bytes = slots[layers.largest]
            return common - layers.buffer_bytes + min(most_slots, layers.num_layers + in_heads) * slot_bytes

        return peak

    @property
    def pinned_bytes(self) -> int:
        """Memory of the layers, heads and tables that stay."""
        layers = self.task.sizes.layer_buffer_bytes - self._layers.buffer_bytes
        return layers + sum([unit.buffer_bytes for unit in self._pinned])

    @property
    def streaming(self) -> Streaming:
        """The part that passes through the slots."""
        task, layers = self.task, self._layers
        heads, rows, in_heads, slot_bytes = self._slots(layers.largest)
        num_units = layers.num_layers + in_heads
        pinned = {unit.name for unit in self._pinned}
        return Streaming(
            layers=layers.names,
            heads=tuple(zip([head.name for head in heads], rows, strict=True)),
            tables=tuple([table.name for table in task.sizes.tables if table.name not in pinned]),
            num_units=num_units,
            num_slots=min(self.num_slots, num_units),
            slot_bytes=slot_bytes if num_units else 0,
            read_bytes=layers.nbytes + sum([head.nbytes for head in heads]),
            cut=task.cut,
            is_tiled=task.is_tiled,
        )

    def plan(self, budget: int | None = None) -> ResidencyPlan:
        """Return its plan, with the predicted time. Of a budget, a pool of experts of open size gets what is left."""
        task, experts = self.task, self.task.sizes.experts
        bare = task.bare(self.reserve)
        pool = bare.pool
        if pool is not None and experts is not None and not task.pool_slots and budget is not None:
            more = max(0, budget - self.peak_bytes) // experts.slot_bytes
            num_slots = min(pool.num_slots + more, task.most_slots(experts))
            pool = pool_of(task.machine, experts, max(num_slots, pool.num_slots))
        plan = replace(bare, pinned_bytes=self.pinned_bytes, streaming=self.streaming, pool=pool)
        return with_times(task.sizes, task.machine, plan)

    def _slots(self, largest_layer: int) -> tuple[Sequence[UnitSize], list[int], int, int]:
        """Return the heads in tiles, the rows of their tiles, the number of tiles, and the size of a slot."""
        heads = [] if self.tile_bytes is None else self.task.sizes.all_heads
        is_exact = self.task.machine.exact_tiles
        slot_bytes = _slot_bytes(largest_layer, heads, self.tile_bytes or 0, is_exact=is_exact)
        rows = [tile_rows(head.num_rows or 0, head.row_bytes, slot_bytes) for head in heads]
        in_heads = sum([-(-(head.num_rows or 0) // each) for head, each in zip(heads, rows, strict=True)])
        return heads, rows, in_heads, slot_bytes

    @property
    def _layers(self) -> Streamed:
        return self.task.streamed(self.target, self.whole_layers)

    @property
    def _pinned(self) -> list[UnitSize]:
        """Heads and tables that stay in memory."""
        sizes = self.task.sizes
        tables = [table for table in sizes.tables if self.pins_tables and not table.is_tied]
        return tables if self.tile_bytes is not None else [*sizes.all_heads, *tables]


def all_streamed(task: Task, reserve: Reserve, num_slots: int) -> list[Candidate]:
    """Return the candidates with no layer in memory: of each cut, with heads in tiles or pinned."""
    return [
        Candidate(cut, reserve, num_slots, True, tile_bytes, cut.sizes.layer_bytes)
        for cut in task.cuts
        for tile_bytes in (0, None)
    ]


def _slot_bytes(largest_layer: int, heads: Sequence[UnitSize], tile_bytes: int, *, is_exact: bool) -> int:
    """Return the size of a slot: for what is streamed of a layer, and for a tile of each head."""
    if not heads:
        return largest_layer
    whole = max([head.nbytes for head in heads])
    least = max([max(TILE_ROW_MULTIPLE * head.row_bytes, head.nbytes // MAX_TILES) for head in heads])
    tile = max(least, min(tile_bytes, whole) if is_exact else whole)
    return max(largest_layer, tile + TILE_SLACK_BYTES)


@lru_cache(1024)  # a search asks for thousands, and layers are alike
def tile_rows(num_rows: int, row_bytes: int, slot_bytes: int) -> int:
    """Return the rows in one tile of a head with so many: few equal tiles that fit the slot, aligned."""
    most = max(TILE_ROW_MULTIPLE, (slot_bytes - TILE_SLACK_BYTES) // row_bytes)
    rows = min(round_up(-(-num_rows // -(-num_rows // most)), TILE_ROW_MULTIPLE), num_rows)
    return rows if rows <= most else most // TILE_ROW_MULTIPLE * TILE_ROW_MULTIPLE

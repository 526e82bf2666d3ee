"""A candidate for a plan: one choice of pinned and streamed weights, with its memory and its predicted time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

from mlx_flash.compat.caches import CACHE_STEP
from mlx_flash.config import FlashConfig
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, round_up
from mlx_flash.residency.ledger import KVShare, Ledger, in_memory, ledger_of, on_disk, prefix_bytes, reader_bytes
from mlx_flash.residency.machine import Machine
from mlx_flash.residency.plan import MB, PREFILL_STEPS, Pool, ResidencyPlan, Streaming
from mlx_flash.residency.sizes import ExpertSizes, ModelSizes, TensorSize, UnitSize
from mlx_flash.streaming.stream import take_turns


class Reserve(NamedTuple):
    """Tokens that memory is set aside for."""

    prefill_step_size: int
    context_length: int


class Tokens(NamedTuple):
    """The memory that is set aside for the tokens of a reserve, in bytes, named as in a plan."""

    reserve: Reserve
    ledger: Ledger
    kv: KVShare
    prefix_bytes: int
    activation_bytes: int
    spare_bytes: int
    mtp_bytes: int

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.kv.nbytes + self.prefix_bytes + self.activation_bytes + self.spare_bytes + self.mtp_bytes


@dataclass(frozen=True)
class Task:
    """The input of a plan."""

    sizes: ModelSizes
    config: FlashConfig
    machine: Machine
    promised_bytes: int  # for keys, values and activations of a long context
    cache_limit: int  # what MLX may keep of freed buffers
    kv_on_disk: bool = False  # whether the KV cache is planned to be on disk
    kv_room: int = 0  # memory that it may take then, if that is of use

    @property
    def process_bytes(self) -> int:
        """The process without weights and tokens."""
        return self.machine.base_bytes + self.machine.runtime_bytes + self.cache_limit

    @cached_property
    def _tokens(self) -> dict[Reserve, Tokens]:
        """Results of :meth:`tokens`: a search asks for the same often."""
        return {}

    def tokens(self, reserve: Reserve) -> Tokens:
        """Return the memory for a reserve."""
        found = self._tokens.get(reserve)
        if found is None:
            found = self._tokens[reserve] = self._set_aside(reserve)
        return found

    def _set_aside(self, reserve: Reserve) -> Tokens:
        sizes, config, (step, context) = self.sizes, self.config, reserve
        ledger, in_steps = ledger_of(sizes, config, context, step), round_up(context, CACHE_STEP)
        kv = on_disk(ledger, context, self.kv_room, config.kv_ram_gb) if self.kv_on_disk else in_memory(ledger, context)
        # the larger of a prefill step without logits and a short call with all of them
        activations = ledger.computing(min(PREFILL_STEPS[-1], step), in_steps)
        own_head, row = sizes.own_head if sizes.own_head is not None and sizes.guesses else (0, 0)
        return Tokens(
            reserve,
            ledger,
            kv,
            prefix_bytes=prefix_bytes(sizes.cache, config, context),
            activation_bytes=activations,
            spare_bytes=max(0, self.promised_bytes - kv.nbytes - activations),
            mtp_bytes=own_head + row * in_steps,
        )


def cache_limit_of(machine: Machine, budget: int) -> int:
    """Return the bytes of freed buffers that MLX may keep. Of CUDA's driver it gets others at once."""
    most = 64 * MB if machine.context_bytes else 256 * MB
    return min(max(64 * MB, budget // 20), most) if machine.has_buffer_cache else 0


MAX_TILES = 60
"""Each tile is waited for."""

TILE_ROW_MULTIPLE = 64
TILE_SLACK_BYTES = 12 * DIRECT_ALIGNMENT
"""Padding to pages and alignment that a tile may need beside its rows."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """The streamed tensors of some layers. Sizes in bytes."""

    layers: Sequence[UnitSize]  # all of them
    pieces: Sequence[Sequence[TensorSize | UnitSize]]  # those of each layer, or the layer itself for all of them
    reads: Sequence[int]  # bytes that are read of each layer
    num_layers: int  # layers of which anything is streamed
    buffer_bytes: int  # memory that all of it would take
    largest: int  # buffer bytes of the layer that takes most

    @property
    def names(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The name of each layer of which anything is streamed, and the names of these tensors, in their order."""
        found, name_of = list[tuple[str, tuple[str, ...]]](), attrgetter("name")
        for unit, pieces, nbytes in zip(self.layers, self.pieces, self.reads, strict=True):
            if pieces:
                is_whole = nbytes == unit.nbytes
                chosen = unit.tensors if is_whole else [tensor for tensor in unit.tensors if tensor in pieces]
                found.append((unit.name, tuple(map(name_of, chosen))))
        return tuple(found)


def spread(layers: Sequence[UnitSize], target: int, whole_layers: bool) -> Streamed:
    """Choose the streamed tensors of each layer, so that every stretch of layers has its share of the target bytes.

    With ``whole_layers`` a layer is streamed whole or not at all; fewer layers are waited for then. Otherwise the
    largest tensors of a layer come first.
    """
    total = max(sum(map(attrgetter("nbytes"), layers)), 1)
    chosen: list[list[TensorSize | UnitSize]] = []
    reads, buffers, passed, done = list[int](), list[int](), 0, 0
    for unit in layers:
        passed += unit.nbytes
        due = target * passed // total - done
        found: list[TensorSize | UnitSize] = []
        read = taken = 0
        for piece in (unit,) if whole_layers else unit.largest_first:
            if 2 * due >= piece.nbytes:
                found.append(piece)
                read += piece.nbytes
                taken += piece.buffer_bytes
                due -= piece.nbytes
        done += read
        chosen.append(found)
        reads.append(read)
        buffers.append(taken)
    return Streamed(layers, chosen, reads, len(buffers) - buffers.count(0), sum(buffers), max(buffers, default=0))


@dataclass(frozen=True, slots=True)
class Tiles:
    """The heads that are streamed, in tiles of rows."""

    heads: Sequence[UnitSize]
    rows: Sequence[int]  # of a tile of each
    number: int  # of all tiles
    slot_bytes: int  # size of a slot, for tiles and for what is streamed of a layer


def cut_heads(heads: Sequence[UnitSize], largest_layer: int, tile_bytes: int, *, is_exact: bool) -> Tiles:
    """Cut heads into tiles of some bytes at least, beside layers of which the largest takes so much of a slot.

    A head is one tile unless ``is_exact``: some rows are computed as in the whole product.
    """
    if not heads:
        return Tiles((), (), 0, largest_layer)
    whole = max([head.nbytes for head in heads])
    least = max([max(TILE_ROW_MULTIPLE * head.row_bytes, head.nbytes // MAX_TILES) for head in heads])
    tile = max(least, min(tile_bytes, whole) if is_exact else whole)
    slot_bytes = max(largest_layer, tile + TILE_SLACK_BYTES)
    rows = [tile_rows(head.num_rows or 0, head.row_bytes, slot_bytes) for head in heads]
    number = sum([-(-(head.num_rows or 0) // each) for head, each in zip(heads, rows, strict=True)])
    return Tiles(heads, rows, number, slot_bytes)


@lru_cache(1024)  # a search asks for thousands, and layers are alike
def tile_rows(num_rows: int, row_bytes: int, slot_bytes: int) -> int:
    """Return the rows in one tile of a head with so many: few equal tiles that fit the slot, aligned."""
    most = max(TILE_ROW_MULTIPLE, (slot_bytes - TILE_SLACK_BYTES) // row_bytes)
    rows = min(round_up(-(-num_rows // -(-num_rows // most)), TILE_ROW_MULTIPLE), num_rows)
    return rows if rows <= most else most // TILE_ROW_MULTIPLE * TILE_ROW_MULTIPLE


DISK_UNEVENNESS = 0.3
"""Disks do not deliver evenly; a third slot evens that out. Measured: docs/lab-notes.md."""

DECODING_BESIDE_OTHERS = 1.5
"""A thread that decodes beside others takes so many times as long as alone. Measured: docs/lab-notes.md."""


def pass_seconds(
    sizes: ModelSizes, machine: Machine, layers: Streamed, tiles: Tiles, num_slots: int
) -> tuple[float, float]:
    """Return the predicted time of a pass that decodes one token, experts aside, and the part not spent reading."""
    steps = _steps(sizes, machine, layers, tiles)
    starting = sizes.num_operations * machine.operation_seconds  # while the GPU computes those before
    late, compression = 0.0, machine.compression
    if compression is not None:
        late = DECODING_BESIDE_OTHERS * machine.disk.read_size / compression.decode_bytes_per_second
    seconds = simulate(steps, num_slots, unevenness=DISK_UNEVENNESS, late=late)
    return max(starting, seconds), max(starting, sum([seconds for _, seconds in steps]))


def with_kv_seconds(plan: ResidencyPlan, machine: Machine) -> ResidencyPlan:
    """Return the plan with the time that keys and values on disk add to a pass."""
    if not plan.kv.num_on_disk:
        return plan
    # Pages are read while layers compute, from the disk that weights are read from.
    reading = (plan.read_bytes + plan.kv.disk_bytes) / machine.disk.bytes_per_second
    waiting = max(0.0, reading - plan.weights_seconds) + plan.kv.num_on_disk * machine.barrier_seconds
    return replace(plan, kv_seconds=waiting)


def _steps(sizes: ModelSizes, machine: Machine, layers: Streamed, tiles: Tiles) -> list[tuple[float, float]]:
    """Return (seconds to read, seconds to compute) of each unit in calling order."""
    compute, kept, barrier = machine.compute_bytes_per_second, machine.kept_bytes_per_second, machine.barrier_seconds
    disk = machine.disk.bytes_per_second
    late = 1 / compute - 1 / kept  # what a streamed byte takes longer
    steps = []
    for unit, nbytes in zip(sizes.layers, layers.reads, strict=True):
        seconds = unit.computed_bytes / kept
        if nbytes:
            seconds += late * unit.computed_bytes * nbytes / unit.nbytes + barrier
        steps.append((nbytes / disk, seconds))
    for head, rows in zip(tiles.heads, tiles.rows, strict=True):
        count = -(-(head.num_rows or 0) // rows)
        steps += [(head.nbytes / disk / count, head.nbytes / compute / count + barrier)] * count
    if not tiles.heads:
        steps += [(0.0, head.nbytes / kept) for head in sizes.all_heads]
    # The kept parts of layers are computed between the streamed units.
    between = sum([unit.nbytes for unit in sizes.kept]) / kept / max(1, len(steps))
    return [(read, seconds + between) for read, seconds in steps]


SIMULATED_PASSES = 5
"""Enough for the steady state, of which the mean of the last two is taken."""


def simulate(
    steps: Sequence[tuple[float, float]],
    num_slots: int,
    unevenness: float = 0.0,
    late: float = 0.0,
) -> float:
    """Return the seconds of one pass in the steady state.

    Args:
        steps: (seconds to read, seconds to compute) of each unit in calling order; nothing to read means pinned.
        num_slots: units that are read take turns in this many slots; a slot is filled again once it was released.
        unevenness: every other read takes longer by this share of its time, the others as much less; in the next pass
            it is the other way round.
        late: seconds from the end of a unit's reads until it can be computed: its last bytes are decoded.
    """
    if num_slots == 0:
        return sum([compute for _, compute in steps])
    turns = take_turns(sum([read > 0 for read, _ in steps]), num_slots)
    released = [0.0] * num_slots
    disk = now = 0.0
    ends = []
    for number in range(SIMULATED_PASSES):
        turn = 0
        for read, compute in steps:
            if not read:
                now += compute
                continue
            slot = turns[turn]
            slower = unevenness if (turn + number) % 2 else -unevenness
            disk = max(disk, released[slot]) + read * (1 + slower)
            now = released[slot] = max(now, disk + late) + compute
            turn += 1
        ends.append(now)
    return (ends[-1] - ends[-3]) / 2


def prompt_seconds(sizes: ModelSizes, machine: Machine, num_units: int) -> float:
    """Return the time for each token of a prompt, from that of a token decoded with weights just read."""
    nbytes = sum([unit.computed_bytes for unit in [*sizes.layers, *sizes.kept, *sizes.all_heads]])
    nbytes += 0 if sizes.experts is None else sizes.experts.token_bytes
    seconds = nbytes / machine.compute_bytes_per_second + num_units * machine.barrier_seconds
    return seconds / machine.prompt_speedup


def pool_of(machine: Machine, experts: ExpertSizes, num_slots: int) -> Pool:
    """Return a pool of so many slots, with its hit rate and time."""
    hit_rate = experts.hit_rate(num_slots)
    read_bytes = round((1 - hit_rate) * experts.token_bytes)
    # Experts in memory compute while the others are read.
    there = hit_rate * experts.token_bytes / machine.kept_bytes_per_second
    read = read_bytes / machine.disk.bytes_per_second
    late = read_bytes / machine.compute_bytes_per_second
    seconds = max(there, read) + late + len(experts.num_experts) * machine.barrier_seconds
    return Pool(num_slots, experts.slot_bytes, sum(experts.num_experts), hit_rate, read_bytes, seconds)


@dataclass(frozen=True)
class Weights:
    """The weights of a model that is cut in some way, on a machine."""

    sizes: ModelSizes
    machine: Machine
    num_slots: int | None = None  # buffers that were asked for; None leaves that open
    pool_slots: int = 0  # of the pool of experts that was asked for; 0 leaves that open
    cut: int = 0  # the way its layers are cut, as in ``Streaming.cut``
    is_tiled: bool = False  # whether some linear layers pass through the slots in tiles of rows

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
    """One choice of pinned and streamed weights."""

    weights: Weights  # the model, its layers cut in some way
    num_slots: int
    layers: Streamed
    tiles: Tiles  # the heads that are streamed: all of them or none
    pins_tables: bool = False  # whether embedding tables that are no heads stay in memory

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

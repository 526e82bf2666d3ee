"""The choice of weights that stay in memory: a pure function from sizes, settings and machine to a plan that adds up.

A forward pass reads in a cycle: a least-recently-used cache hits nothing there, a fixed pinned part hits its share.
What is streamed is spread evenly over the layers, so that reading overlaps computing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter, itemgetter
from typing import NamedTuple

from mlx_flash.compat.caches import CACHE_STEP
from mlx_flash.config import GB, FlashConfig, Profile
from mlx_flash.errors import BudgetError, ConfigError
from mlx_flash.memory.footprint import MemoryReading
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, round_up
from mlx_flash.residency.machine import BASE_STEP, Machine
from mlx_flash.residency.plan import (
    KV_SHARE,
    MB,
    PREFILL_STEPS,
    PROMISED_CONTEXT,
    KVShare,
    Ledger,
    Pool,
    ResidencyPlan,
    Streaming,
    check_kv,
    in_gb,
    in_memory,
    ledger_of,
    on_disk,
    prefix_bytes,
    promised_bytes,
    reader_bytes,
    round_up_to_mb,
)
from mlx_flash.residency.sizes import ExpertSizes, ModelSizes, TensorSize, UnitSize
from mlx_flash.speculation import OwnGuesses, worth_guessing
from mlx_flash.storage.blocks import BLOCK_BYTES
from mlx_flash.storage.probe import SMALL_QUEUE_DEPTH, SMALL_READ_SIZE, SMALL_READS_SHARE
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
        return {}

    def tokens(self, reserve: Reserve) -> Tokens:
        """Return the memory for a reserve. A search asks for the same often."""
        if reserve in self._tokens:
            return self._tokens[reserve]
        sizes, config, (step, context) = self.sizes, self.config, reserve
        ledger, in_steps = ledger_of(sizes, config, step), round_up(context, CACHE_STEP)
        kv = on_disk(ledger, context, self.kv_room, config.kv_ram_gb) if self.kv_on_disk else in_memory(ledger, context)
        # the larger of a prefill step without logits and a short call with all of them
        activations = ledger.computing(min(PREFILL_STEPS[-1], step), in_steps)
        own_head, row = sizes.own_head if sizes.own_head is not None and sizes.guesses else (0, 0)
        found = self._tokens[reserve] = Tokens(
            reserve,
            ledger,
            kv,
            prefix_bytes=prefix_bytes(sizes.cache, config, context),
            activation_bytes=activations,
            spare_bytes=max(0, self.promised_bytes - kv.nbytes - activations),
            mtp_bytes=own_head + row * in_steps,
        )
        return found


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
    steps = _unit_times(sizes, machine, layers, tiles)
    starting = sizes.num_operations * machine.operation_seconds  # while the GPU computes those before
    late, compression = 0.0, machine.compression
    if compression is not None:
        late = DECODING_BESIDE_OTHERS * machine.disk.read_size / compression.decode_bytes_per_second
    seconds = simulate(steps, num_slots, unevenness=DISK_UNEVENNESS, late=late)
    return max(starting, seconds), max(starting, sum([seconds for _, seconds in steps]))


def _unit_times(sizes: ModelSizes, machine: Machine, layers: Streamed, tiles: Tiles) -> list[tuple[float, float]]:
    """Return (seconds to read, seconds to compute) of each unit in calling order."""
    compute, kept, barrier = machine.compute_bytes_per_second, machine.kept_bytes_per_second, machine.barrier_seconds
    disk = machine.read_bytes_per_second
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
    read = read_bytes / machine.read_bytes_per_second
    late = read_bytes / machine.compute_bytes_per_second
    seconds = max(there, read) + late + len(experts.num_experts) * machine.barrier_seconds
    return Pool(num_slots, experts.slot_bytes, sum(experts.num_experts), hit_rate, read_bytes, seconds)


@dataclass(frozen=True)
class Weights:
    """The weights of a model that is cut in some way, on a machine."""

    sizes: ModelSizes
    machine: Machine
    num_slots: int | None = None  # buffers that were asked for; None leaves that open
    cut: int = 0  # the way its layers are cut, as in ``Streaming.cut``
    is_tiled: bool = False  # whether some linear layers pass through the slots in tiles of rows

    @cached_property
    def cuts(self) -> tuple[Weights, ...]:
        """The weights in whole layers, then in smaller and smaller units."""
        finer = enumerate(self.sizes.cuts[1:], 1)
        return (self, *[replace(self, sizes=sizes, cut=i) for i, sizes in finer])

    def tiled(self, units: Sequence[UnitSize]) -> Weights:
        """Return the weights in their finest cut, with some linear layers in row tiles."""
        sizes = self.sizes.tiled({unit.name for unit in units})
        return replace(self, sizes=sizes, cut=len(self.sizes.finer), is_tiled=True)

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
        heads = () if tile_bytes is None else sizes.all_heads
        tiles = cut_heads(heads, layers.largest, tile_bytes or 0, is_exact=self.machine.exact_tiles)
        return Candidate(self, num_slots, layers, tiles)

    @cached_property
    def bounce_bytes(self) -> int:
        """The reader's own buffers."""
        machine, experts = self.machine, self.sizes.experts
        copies = self.sizes.copies or machine.arrival != "in place"
        bounces = machine.arrival == "copied by the driver" or (machine.disk.direct and copies)
        num_readers = 1 if experts is None else 2  # urgent reads have threads and buffers of their own
        decodes = machine.compression is not None
        return num_readers * reader_bytes(machine.disk, bounces=bounces, decodes=decodes)

    @cached_property
    def least_bytes(self) -> int:
        """Memory that none of its candidates does without: small weights, the smallest pool, the reader's buffers."""
        experts = self.sizes.experts
        pool = 0 if experts is None else experts.least_slots * experts.slot_bytes
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

        A pool of experts gets what is left of the budget.
        """
        weights, machine, sizes = self.weights, self.weights.machine, self.weights.sizes
        experts, pool = sizes.experts, None
        if experts is not None:
            left = budget - task.process_bytes - tokens.nbytes - self.nbytes
            more = max(0, min(max(0, left) // experts.slot_bytes, weights.most_slots(experts) - experts.least_slots))
            pool = pool_of(machine, experts, experts.least_slots + more)
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
        if not plan.kv.num_on_disk:
            return plan
        # pages are read while layers compute, from the disk that weights are read from
        reading = plan.read_bytes / machine.read_bytes_per_second
        reading += plan.kv.disk_bytes / machine.disk.bytes_per_second
        waiting = max(0.0, reading - plan.weights_seconds) + plan.kv.num_on_disk * machine.barrier_seconds
        return replace(plan, kv_seconds=waiting)

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


ACTIVATION_SHARE = 0.2
"""Share of the budget that a forward call's activations may take when the plan chooses the prefill step."""

CONTEXT_LENGTHS = (4096, 2048, 1024, 512, 256)
CONTEXT_LENGTHS_ON_DISK = (131072, 65536, 32768, 16384, 8192)
"""To try besides when the KV cache is to be on disk, and the length of the context was left open."""

DISK_SHARE = 0.5
"""Share of the free disk that it may take then."""

PROCESS_BYTES = 128_000_000
"""The process without models, as the choice counts it. The real one differs a little from run to run."""

SLOTS_FIRST = 2
"""Tokens get only the least context, and steps up to `LEAST_STEP`, where the budget has no room for so many layers."""

LEAST_STEP = 128
"""A prefill step is not made smaller for the sake of fewer passes, or of one more slot: many small parts are slow."""

DRIVER_STEP = 256_000_000
"""With a GPU that has memory of its own, its libraries take most of the process. They count in such steps."""

WORTH_MORE_TOKENS = 1.25
"""A longer context or prefill step may make a token read so many times as much."""


def least_reserve(config: FlashConfig) -> Reserve:
    """Return the shortest prefill step and context, where unset. A cache grows by ``CACHE_STEP`` anyway."""
    step = config.prefill_step_size or PREFILL_STEPS[-1]
    context = config.context_length or max(CACHE_STEP, step)
    return Reserve(min(step, context), context)


def reserves(task: Task, weights: Weights, budget: int) -> Iterator[Tokens]:
    """Yield the tokens to plan with, then fewer ones, for a process that leaves less room than expected."""
    config, machine, least = task.config, task.machine, task.tokens(least_reserve(task.config))
    beside = budget - machine.runtime_bytes - weights.sizes.resident_bytes - task.cache_limit
    room = beside - PROCESS_BYTES
    most_read = WORTH_MORE_TOKENS * _read_bytes(weights, room - least.nbytes)
    is_tight = room - least.nbytes < SLOTS_FIRST * max([unit.nbytes for unit in weights.sizes.layers], default=0)
    for context in _contexts(task, budget):
        good: list[Tokens] = []
        for tokens in [task.tokens(Reserve(step, context)) for step in _steps(config, least.reserve, context)]:
            is_more = context > least.reserve.context_length or tokens.reserve.prefill_step_size > LEAST_STEP
            if is_tight and is_more and tokens.nbytes > least.nbytes:
                continue  # a slot more brings more
            by_step = tokens.activation_bytes - task.sizes.activations.per_call  # what a smaller step would lower
            by_step += task.sizes.cache.call_bytes * tokens.reserve.prefill_step_size
            is_modest = config.prefill_step_size or by_step <= ACTIVATION_SHARE * budget
            if is_modest and _read_bytes(weights, room - tokens.nbytes) <= most_read:
                good.append(tokens)
        if len(good) > 1 and config.lend_reserves and weights.sizes.experts is None:
            process = PROCESS_BYTES
            if machine.arrival == "copied by the driver":
                process = round_up(machine.base_bytes - machine.active_bytes, DRIVER_STEP)
            taken = [  # by weights at least: what is pinned, and the slots
                min([each.pinned_bytes + each.slots_bytes for each in all_streamed(weights, num_slots)])
                for num_slots in (SLOTS_FIRST, 1)
            ]
            good.sort(key=partial(_prompt_passes, beside - process, taken))  # of equals the largest comes first
        yield from good
    yield least


def _contexts(task: Task, budget: int) -> list[int]:
    """Return the lengths to try, the longest first, that leave weights their room, and others theirs on the disk."""
    config = task.config
    if config.context_length:
        return [config.context_length]
    lengths = (*CONTEXT_LENGTHS_ON_DISK, *CONTEXT_LENGTHS) if task.kv_on_disk else CONTEXT_LENGTHS
    return [each for each in lengths if each <= CONTEXT_LENGTHS[-1] or _has_room(task, budget, each)]


def _has_room(task: Task, budget: int, context: int) -> bool:
    """Return whether keys and values of a context take no more than their shares of the budget and the disk."""
    sizes, config = task.sizes, task.config
    if not task.kv_on_disk:
        return sizes.cache.nbytes(context) <= KV_SHARE * budget
    if sum(sizes.cache.rows) * context > DISK_SHARE * task.machine.kv_disk_bytes:
        return False
    room = KV_SHARE * budget if config.kv_ram_gb is None else config.kv_ram_gb * GB
    ledger = ledger_of(sizes, config, PREFILL_STEPS[0])
    return ledger.least_rows(context, ledger.step) <= room


def _steps(config: FlashConfig, least: Reserve, context: int) -> list[int]:
    """Return the prefill steps to try with a context, the largest first. A value that the user set is kept."""
    if config.prefill_step_size:
        return [least.prefill_step_size] if least.prefill_step_size <= context else []
    longest = next((step for step in reversed(PREFILL_STEPS) if step >= context), PREFILL_STEPS[0])
    return [step for step in PREFILL_STEPS if step <= longest]


def _prompt_passes(room: int, taken: Sequence[int], tokens: Tokens) -> float:
    """Return about how many passes a prompt of the planned length takes; infinity for a step below the least one.

    Its parts share passes as far as they have room beside the weights: beside the first number of bytes in ``taken``
    that fits.
    """
    step, context = tokens.reserve
    num_parts = -(-context // step)
    if step < LEAST_STEP:
        return math.inf
    if tokens.kv.num_on_disk and not tokens.ledger.shares_on_disk:
        return num_parts
    room -= tokens.nbytes
    room -= next((nbytes for nbytes in taken if nbytes <= room), room)
    return -(-num_parts // tokens.ledger.parts_together(room, context))


def _read_bytes(weights: Weights, room: int) -> float:
    """Return about how much a token reads: the weights that the room does not hold.

    Of a mixture, the trunk is held first, and the pool of experts gets what is left.
    """
    sizes, experts = weights.sizes, weights.sizes.experts
    if experts is None:
        total = sizes.layer_bytes + sum([unit.nbytes for unit in [*sizes.heads, *sizes.tables]])
        return min(total, max(0, total - room))
    trunk = sizes.layer_bytes + sum([unit.nbytes for unit in sizes.all_heads])
    least = experts.least_slots * experts.slot_bytes
    pool = max(least, room - trunk)
    missing = (1 - experts.hit_rate(pool // experts.slot_bytes)) * experts.token_bytes
    return min(trunk, max(0, trunk + least - room)) + missing


MAX_SLOTS = 4

WORTH_A_SLOT = 0.99
"""More slots and smaller units must bring the predicted time below this share of what it is without."""

NEARLY = 1.25
"""Row tiles are tried where other plans take so many times the least that is possible."""

TILE_BYTES = (32 << 20, 8 << 20, 2 << 20, 0)
"""Smallest tiles of a streamed head to try: small ones leave memory, but each is waited for."""

LEAST_TILE_BYTES = 8 << 20
"""Smallest tile of a layer: small reads are slow, and each tile is waited for."""

PARTS_SHARE = 0.75
"""Share of their memory that pinned weights leave to parts at most: lent memory is copied to, and read again later."""


UNFORESEEN_SHARE = 0.4
"""Share of the missing experts that look-ahead does not read early. Fitted to one model (docs/lab-notes.md)."""

Tried = tuple[ResidencyPlan, Candidate]
"""A candidate and its plan."""


def smallest(weights: Weights) -> Candidate:
    """Return the smallest candidate: the fewest slots and no pinned layer, or a tiny model in memory."""
    candidates = all_streamed(weights, weights.num_slots or 1)
    if _can_be_tiled(weights):  # two slots, so that reading and computing overlap, cost little here
        candidates.append(_tiled(weights, weights.num_slots or 2))
    return min([*candidates, everything(weights)], key=attrgetter("nbytes"))


def everything(weights: Weights) -> Candidate:
    """Return the candidate with all weights but experts in memory."""
    return replace(weights.candidate(0, 0), pins_tables=True)


def best(task: Task, weights: Weights, tokens: Tokens, budget: int) -> ResidencyPlan | None:
    """Return the fastest plan with memory for tokens; None if the budget has no room for it."""
    room = budget - task.process_bytes - tokens.nbytes
    tried = [(candidate.plan(task, tokens, budget), candidate) for candidate in _candidates(weights, room)]
    is_good = tried and _fastest(tried)[0].weights_seconds <= NEARLY * _least_seconds(weights, budget)
    if not is_good and _can_be_tiled(weights):
        tried += [(candidate.plan(task, tokens, budget), candidate) for candidate in _tiled_candidates(weights, room)]
    if not tried:
        return None
    plan, candidate = _fastest(tried)
    return candidate.named(plan)


def _candidates(weights: Weights, room: int) -> Iterator[Candidate]:
    """Yield everything in memory if that fits; else the most pinned for each cut and number of slots."""
    whole = everything(weights)
    if whole.nbytes > room:
        for cut in weights.cuts:
            yield from _candidates_of_cut(cut, room)
        return
    yield whole
    if weights.sizes.experts is not None:  # a token needs one row of a table, and more than one expert
        yield replace(whole, pins_tables=False)


def _candidates_of_cut(weights: Weights, room: int) -> Iterator[Candidate]:
    """Yield the most pinned for each number of slots, of whole layers or tensors, beside heads in tiles or pinned."""
    if weights.least_bytes > room:
        return
    tilings: tuple[int | None, ...] = (None,)
    if heads := weights.sizes.all_heads:  # and the smallest tiles, but for those that give the same as a smaller one
        whole = max([head.nbytes for head in heads]) if weights.machine.exact_tiles else 0
        tilings = (None, *{min(tile_bytes, whole): tile_bytes for tile_bytes in TILE_BYTES}.values())
    for num_slots in [weights.num_slots] if weights.num_slots else range(1, MAX_SLOTS + 1):
        has_room = False
        for whole_layers in (False,) if weights.cut else (True, False):
            for tile_bytes in tilings:
                make = partial(weights.candidate, num_slots, whole_layers=whole_layers, tile_bytes=tile_bytes)
                if (found := _most_pinned(make, weights.sizes.layers, room)) is not None:
                    has_room = True
                    yield found
                    if tile_bytes and found.num_units and found.tiles.slot_bytes > tile_bytes + TILE_SLACK_BYTES:
                        break  # the layers' slots are larger anyway
        if not has_room:
            break  # nor for more slots


def _tiled_candidates(weights: Weights, room: int) -> Iterator[Candidate]:
    """Yield linear layers in row tiles, as few of them as there is room for, for each number of slots."""
    for num_slots in [weights.num_slots] if weights.num_slots else range(2, MAX_SLOTS + 1):
        found = _most_pinned(partial(_tiled, weights, num_slots), weights.sizes.linears, room)
        if found is None:
            break  # more slots take more
        yield found


def _most_pinned(make: Callable[[int], Candidate], units: Sequence[UnitSize], room: int) -> Candidate | None:
    """Find by bisection how few bytes of units can be streamed; None if there is no room even with all streamed.

    It ends when less than the smallest tensor is left to decide.
    """
    low, high = 0, sum(map(attrgetter("nbytes"), units))
    found = make(high)
    if found.nbytes > room:
        return None
    least = min([piece.nbytes for unit in units for piece in unit.tensors], default=0)
    while high - low > max(1, least):
        middle = (low + high) // 2
        tried = make(middle)
        if tried.nbytes <= room:
            high, found = middle, tried
        else:
            low = middle
    return found


def _can_be_tiled(weights: Weights) -> bool:
    """Return whether there are linear layers whose row tiles are exact."""
    return bool(weights.sizes.linears) and weights.machine.exact_tiles


def _tiled(weights: Weights, num_slots: int, target: int | None = None) -> Candidate:
    """Return the candidate with linear layers in row tiles: so many bytes, spread evenly, or all of them."""
    chosen = weights.sizes.linears
    if target is not None:
        chosen = tuple([unit for unit, some in zip(chosen, spread(chosen, target, True).reads, strict=True) if some])
    tiled = weights.tiled(chosen)
    return tiled.candidate(num_slots, tiled.sizes.layer_bytes, tile_bytes=LEAST_TILE_BYTES)


def _least_seconds(weights: Weights, budget: int) -> float:
    """Return a time that no choice is below: all weights are computed with, and what the budget cannot hold is read."""
    sizes, machine = weights.sizes, weights.machine
    units = [*sizes.layers, *sizes.all_heads]
    read = max(0, sum([unit.nbytes for unit in units]) - (budget - machine.base_bytes))
    computed = sum([unit.computed_bytes for unit in units])
    trunk = max(computed / machine.kept_bytes_per_second, read / machine.read_bytes_per_second)
    experts = sizes.experts
    if experts is None:
        return trunk
    most = max(experts.least_slots, (budget - machine.base_bytes) // experts.slot_bytes)
    return trunk + pool_of(machine, experts, most).seconds


def _fastest(tried: Sequence[Tried]) -> Tried:
    """Return the first that is nearly as fast as the fastest: coarse cuts and few slots come first."""
    enough = min([plan.seconds for plan, _ in tried]) / WORTH_A_SLOT
    return next(each for each in tried if each[0].seconds <= enough)


def with_room_for_parts(task: Task, weights: Weights, plan: ResidencyPlan) -> ResidencyPlan:
    """Return a plan with the room in which a prompt of the planned length reads least, for parts that share a pass.

    Pinned weights leave that room. It holds weights between prompts, so the predicted time of a token stays. A prompt
    reads a little more in each of its passes, and takes fewer of them.
    """
    step, context, streaming = plan.prefill_step_size, plan.context_length, plan.streaming
    is_tight = not streaming.num_units or not plan.pinned_bytes or streaming.is_tiled
    shares_parts = plan.pool is None and (not plan.kv.num_on_disk or plan.ledger.shares_on_disk)
    if is_tight or not shares_parts or not task.config.lend_reserves:  # a pool on a GPU could not grow into it again
        return plan
    like = replace(weights.cuts[streaming.cut], num_slots=weights.num_slots or streaming.num_slots)
    tokens, num_parts = task.tokens(Reserve(step, context)), -(-context // step)
    free = plan.room_bytes - plan.kv_bytes - plan.activation_bytes
    choices = []
    for num_together in {-(-num_parts // num_passes) for num_passes in range(1, plan.prompt_passes(context))}:
        waiting = plan.ledger.parts_waiting(num_together - 1, context)
        if (taken := max(0, waiting - free)) <= PARTS_SHARE * plan.pinned_bytes:
            choices.append((-(-num_parts // num_together) * (plan.read_bytes + taken), waiting))
    for _, waiting in sorted(choices, key=itemgetter(0)):
        more = tokens._replace(spare_bytes=max(tokens.spare_bytes, waiting))
        room = plan.budget_bytes - task.process_bytes - more.nbytes
        tried = [(each.plan(task, more, plan.budget_bytes), each) for each in _candidates_of_cut(like, room)]
        if not tried:
            continue
        found, candidate = _fastest(tried)
        if found.prompt_read_bytes(context) < plan.prompt_read_bytes(context):
            saved = max(0.0, found.weights_seconds - plan.weights_seconds)
            found = replace(candidate.named(found), minimum_bytes=plan.minimum_bytes)
            return replace(found, opening_seconds=plan.opening_seconds, lent_seconds=saved)
    return plan


def opening_seconds(task: Task, weights: Weights, plan: ResidencyPlan) -> float:
    """Return the predicted time of a pass that decodes one token when a conversation begins.

    Streamed weights get the lent memory first, and need not be read then. Experts get the rest, where the memory of the
    pool can grow. Look-ahead reads most of the missing experts while everything else computes. The others are waited
    for. Those that were missing compute last.
    """
    machine, streaming, experts = weights.machine, plan.streaming, weights.sizes.experts
    first = task.tokens(Reserve(1, min(CACHE_STEP, plan.context_length)))
    unused = plan.room_bytes - first.kv.nbytes - first.activation_bytes
    lent = max(0, unused - plan.unlent_bytes)
    of_weights = min(lent, streaming.read_bytes)
    read_bytes = streaming.read_bytes - of_weights
    seconds = max(streaming.compute_seconds, streaming.seconds - of_weights / machine.read_bytes_per_second)
    if plan.pool is None or experts is None:
        return seconds
    # on GPUs stacks grow, too: not known here
    more = 0 if machine.has_buffer_cache else (lent - of_weights) // experts.slot_bytes
    most = max(plan.pool.num_slots, weights.most_slots(experts))
    pool = pool_of(machine, experts, min(plan.pool.num_slots + more, most))
    seconds += (experts.token_bytes - pool.read_bytes) / machine.kept_bytes_per_second
    seconds += len(experts.num_experts) * machine.barrier_seconds
    waiting = UNFORESEEN_SHARE * pool.read_bytes / machine.read_bytes_per_second
    reading = (read_bytes + pool.read_bytes) / machine.read_bytes_per_second
    return max(seconds + waiting, reading) + pool.read_bytes / machine.compute_bytes_per_second


PROFILE_SHARES: dict[Profile, tuple[float, float]] = {
    "safe": (0.5, 0.4),
    "balanced": (0.7, 0.7),
    "performance": (0.9, 0.8),
}
"""The most that each profile takes: this share of the memory that is free, and this share of the machine's. The second
counts on a machine where little runs yet: what is started later needs room too."""

Option = tuple[Weights, Candidate]
"""A way to read the model, layer by layer or expert by expert, and its smallest candidate."""


def make_plan(sizes: ModelSizes, config: FlashConfig, machine: Machine) -> ResidencyPlan:
    """Decide what stays in memory.

    A budget gets small reads if it has no room for the buffers of those that the disk likes best, or makes more of that
    memory. So the smallest one is enough in the next run, too, in which a probe may find other reads to be the best.

    Raises:
        BudgetError: the budget, or the machine, is too small; it names the smallest workable budget.
        ConfigError: settings contradict each other, or the disk has no room for the KV cache.
    """
    plan = _plain_plan(sizes, config, machine)
    if sizes.own_head is None or not plan.read_bytes:
        return plan
    with suppress(BudgetError):
        step = plan.prefill_step_size  # on which last bits depend
        same = replace(config, ram_budget_gb=plan.budget_bytes / GB, prefill_step_size=step)
        guessing = _plain_plan(sizes.guessing, same, machine)
        worth = worth_guessing(OwnGuesses.expected[1], guessing.seconds, guessing.row_seconds, 1)
        if guessing.read_bytes and worth.speed * plan.seconds > 1:
            return replace(guessing, minimum_bytes=plan.minimum_bytes)
    return plan


def _plain_plan(sizes: ModelSizes, config: FlashConfig, machine: Machine) -> ResidencyPlan:
    """Return the plan of a model whose own head is in memory, or is not there."""
    task = Task(sizes, config, machine, promised_bytes(sizes, config), cache_limit_of(machine, 0))
    tasks = [replace(task, kv_on_disk=place) for place in _places_of_kv(sizes, config, machine)]
    options, reached = _options(sizes, config, machine), machine.reached_bytes
    needs = [_needs(task, options) for task in tasks]
    least = min(map(min, needs))
    minimum = max(_told(reached), least)
    # A word is never a budget at which whole layers would be read because a pool is a little too large for it.
    of_word = max(_told(reached), min([of_options[0] for of_options in needs]))
    memory = MemoryReading(machine.total_memory, machine.available_memory)
    budget = budget_of(config, memory, machine.base_bytes, of_word)
    if budget < reached and least < _told(reached):
        raise BudgetError(
            f"ram_budget_gb is {budget / GB:g}, but loading the tokenizer took this process to {in_gb(reached)} GB. "
            f"Hint: give {in_gb(minimum)} or more, or 'min'.",
            minimum,
        )
    if budget < least:
        task = tasks[needs.index(min(needs, key=min))]
        _, candidate = min(options, key=lambda option: option[1].nbytes)
        raise BudgetError(_too_small(budget, candidate.plan(task, task.tokens(least_reserve(config)))), minimum)
    is_number = isinstance(config.budget_bytes, int)
    for task, of_options in zip(tasks, needs, strict=True):
        if budget < (min(of_options) if is_number else of_options[0]):
            continue
        plan = _plan(task, options, of_options, budget)
        if plan.peak_bytes <= machine.total_memory:
            break
    if plan.peak_bytes > machine.total_memory:
        hint = "a smaller context_length or prefill_step_size needs less"
        hint = f"the smallest workable budget is {in_gb(minimum)} GB" if minimum <= machine.total_memory else hint
        raise BudgetError(
            f"the plan needs {plan.peak_bytes / GB:.2f} GB, but this process can have at most "
            f"{machine.total_memory / GB:.2f} GB. Hint: {hint}.",
            minimum,
        )
    return replace(plan, minimum_bytes=minimum)


def _needs(task: Task, options: Sequence[Option]) -> list[int]:
    """Return the smallest budget of each way to read the model."""
    beside = task.process_bytes + task.tokens(least_reserve(task.config)).nbytes
    return [beside + candidate.nbytes for _, candidate in options]


def _with_small_reads(config: FlashConfig, machine: Machine) -> Machine:
    """Return the machine with the smallest reads and queue that are worth it, unless the settings name others.

    Threads that decode compressed weights are not fewer.
    """
    disk, least = machine.disk, SMALL_READ_SIZE if machine.compression is None else max(SMALL_READ_SIZE, BLOCK_BYTES)
    read_size = disk.read_size if config.read_size_mb else min(disk.read_size, least)
    keeps_depth = config.queue_depth is not None or machine.compression is not None
    queue_depth = disk.queue_depth if keeps_depth else min(disk.queue_depth, SMALL_QUEUE_DEPTH)
    if (read_size, queue_depth) == (disk.read_size, disk.queue_depth):
        return machine
    speed = SMALL_READS_SHARE * disk.bytes_per_second
    return replace(machine, disk=replace(disk, bytes_per_second=speed, read_size=read_size, queue_depth=queue_depth))


def _places_of_kv(sizes: ModelSizes, config: FlashConfig, machine: Machine) -> tuple[bool, ...]:
    """Return the places of the KV cache to plan with: False for memory, True for the disk."""
    check_kv(config)
    if not sizes.cache.rows or config.kv_cache == "stock" or config.writes_nothing:
        return (False,)
    needed = sum(sizes.cache.rows) * (config.context_length or 0)
    if config.kv_cache is None and config.kv_ram_gb is None:
        return (False, True) if 0 < needed <= machine.kv_disk_bytes else (False,)
    if needed > machine.kv_disk_bytes:
        raise ConfigError(
            f"the KV cache of {config.context_length} tokens takes {needed / GB:.3f} GB on disk, where "
            f"{machine.kv_disk_bytes / GB:.3f} GB are free. Hint: make room, set kv_directory, or a smaller "
            "context_length."
        )
    return (True,)


def _plan(task: Task, options: Sequence[Option], needs: Sequence[int], budget: int) -> ResidencyPlan:
    """Return the fastest plan for a budget, given the place of the KV cache.

    The options have small reads; the task has the machine with those that the disk likes best. ``needs`` are their
    smallest budgets.
    """
    machine, least = task.machine, task.tokens(least_reserve(task.config))
    smallest_budget = max([need for need in needs if need <= budget])  # of both options, unless the budget is below one
    if budget - smallest_budget >= (limit := cache_limit_of(machine, budget)) - task.cache_limit:
        task = replace(task, cache_limit=limit)
    wanted, room, plans = list(reserves(task, options[0][0], budget)), budget - task.process_bytes, []
    for weights, candidate in _usable(options, room - least.nbytes, room - wanted[0].nbytes):
        tokens = next(each for each in wanted if each.nbytes <= room - candidate.nbytes)
        chosen = _with_reads(weights, machine, room - tokens.nbytes)
        if task.sizes.trunk is None:  # experts are read one by one, at a speed that nobody has probed
            chosen = replace(chosen, machine=chosen.machine.beside(budget, chosen.sizes.nbytes))
        for kv_room in (int(KV_SHARE * budget), 0) if task.kv_on_disk else (0,):
            each = replace(task, kv_room=kv_room)
            plan = best(each, chosen, each.tokens(tokens.reserve), budget)
            plans += [] if plan is None else [(plan, each, chosen)]
    plan, task, weights = min(plans, key=lambda entry: entry[0].seconds)
    return with_room_for_parts(task, weights, replace(plan, opening_seconds=opening_seconds(task, weights, plan)))


def _with_reads(weights: Weights, liked: Machine, room: int) -> Weights:
    """Return the weights with the reads that the disk likes best, if their buffers have room, and are worth it.

    They are if reading the weights that the room does not hold takes no longer.
    """
    if weights.machine is liked:
        return weights
    other, experts = replace(weights, machine=liked), weights.sizes.experts
    if smallest(other).nbytes > room:
        return weights
    held = room - (experts.nbytes if experts is not None else 0)
    small, large = (
        max(0, everything(each).nbytes - held) / each.machine.disk.bytes_per_second for each in (weights, other)
    )
    return other if large <= small else weights


def _options(sizes: ModelSizes, config: FlashConfig, machine: Machine) -> list[Option]:
    """Return the ways to read the model: expert by expert if it has any, then layer by layer, in small reads."""
    whole = Weights(sizes, _with_small_reads(config, machine), config.num_slots)
    by_expert = [] if sizes.trunk is None or not config.expert_pool else [replace(whole, sizes=sizes.trunk)]
    return [(weights, smallest(weights)) for weights in [*by_expert, whole]]


def _usable(options: Sequence[Option], room: int, room_beside_more: int) -> list[Option]:
    """Return the options to choose from within some room, beside the fewest tokens and beside those that are wanted.

    If all weights fit beside the latter, the model is read layer by layer.
    """
    if everything(options[-1][0]).nbytes <= room_beside_more:
        return [options[-1]]
    return [option for option in options if option[1].nbytes <= room]


def budget_of(config: FlashConfig, memory: MemoryReading, held: int, least: int) -> int:
    """Return the budget in bytes, in a process that holds some already. A word never stands for less than the least."""
    budget = config.budget_bytes
    if isinstance(budget, int):
        return budget
    if budget == "min":
        return least
    if budget == "auto":
        return max(least, memory.room(held))
    of_free, of_all = PROFILE_SHARES[budget]
    return max(least, min(int(memory.available * of_free), int(memory.total * of_all)))


def _told(reached_bytes: int) -> int:
    """Return the peak of loading a tokenizer as a budget that is enough next time too: it varies a little."""
    return round_up(reached_bytes, BASE_STEP) + BASE_STEP if reached_bytes else 0


def _too_small(budget: int, least: ResidencyPlan) -> str:
    minimum = least.peak_bytes
    parts = ", ".join(f"{name} {nbytes / MB:.0f} MB" for name, nbytes in least.parts() if nbytes >= MB)
    others = " A model takes what those before it left: load the largest last." if least.active_bytes >= MB else ""
    return (
        f"ram_budget_gb is {budget / GB:g}, but this model needs at least {in_gb(minimum)} with these settings: "
        f"{parts}. Hint: give {in_gb(minimum)} or more, or 'min'; a smaller context_length or prefill_step_size "
        f"lowers it.{others}"
    )


NUM_BUDGETS = 6
CONTEXTS = tuple(1024 << i for i in range(11))
"""Context lengths to try, up to a million tokens."""

_ENDLESS_GB = 1e6


def table_of_budgets(sizes: ModelSizes, config: FlashConfig, machine: Machine) -> Iterator[tuple[ResidencyPlan, int]]:
    """Yield plans from the smallest budget to the first that reads nothing, or to the machine's memory.

    Each comes with the longest of :data:`CONTEXTS` that its budget holds, in memory or on disk, or the promised one.
    """
    promised = PROMISED_CONTEXT if promised_bytes(sizes, config) else 0
    least_for = partial(_least_for, sizes, config, machine)
    contexts = {length: least_for(length) for length in CONTEXTS}
    for budget in _budgets(sizes, config, machine, least_for(config.context_length)):
        try:
            plan = make_plan(sizes, replace(config, ram_budget_gb=budget / GB), machine)
        except BudgetError:
            continue
        fitting = [length for length, least in contexts.items() if least is not None and least <= budget]
        yield plan, max([promised, *fitting])
        if not plan.read_bytes:
            return


def _budgets(sizes: ModelSizes, config: FlashConfig, machine: Machine, least: int | None) -> list[int]:
    """Return budgets at equal ratios, in whole MB."""
    if least is None:
        return []
    whole = make_plan(sizes, replace(config, ram_budget_gb=_ENDLESS_GB), replace(machine, total_memory=1 << 62))
    most = max(least, min(whole.peak_bytes, machine.total_memory))
    ratio = (most / least) ** (1 / (NUM_BUDGETS - 1))
    rounded = {round_up_to_mb(int(least * ratio**i)) for i in range(NUM_BUDGETS)}
    return sorted({min(budget, max(least, machine.total_memory)) for budget in rounded})


def _least_for(sizes: ModelSizes, config: FlashConfig, machine: Machine, context: int | None) -> int | None:
    """Return the smallest budget for a context; None where no disk holds it."""
    step = config.prefill_step_size
    step = step if step is None or context is None else min(step, context)
    asked = replace(config, ram_budget_gb="min", context_length=context, prefill_step_size=step)
    try:
        return make_plan(sizes, asked, machine).minimum_bytes
    except BudgetError as error:  # the machine has no room to read expert by expert, or for anything
        return error.minimum_bytes
    except ConfigError:
        return None

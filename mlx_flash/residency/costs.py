"""The memory of a plan, added up, and its time, from a simulation of a pass over the streamed units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from mlx_flash.config import FlashConfig
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, round_up
from mlx_flash.residency.kv import KVShare, in_memory, on_disk, prefix_bytes, promised_bytes
from mlx_flash.residency.ledger import Ledger, reader_bytes
from mlx_flash.residency.plan import MB, PREFILL_STEPS, Machine, Pool, ResidencyPlan
from mlx_flash.residency.selection import Streamed, add_up, choose
from mlx_flash.residency.simulation import simulate
from mlx_flash.residency.sizes import CACHE_STEP, ExpertSizes, ModelSizes, TensorSize, UnitSize
from mlx_flash.residency.streamed_part import Streaming

DISK_UNEVENNESS = 0.3
"""Disks do not deliver evenly; a third slot evens that out. Measured: docs/lab/weights.md."""

LEAST_TILE_BYTES = 8 << 20
"""Smallest tile of a layer: small reads are slow, and each tile is waited for."""

MAX_TILES = 60
"""Each tile is waited for."""

TILE_ROW_MULTIPLE = 64
TILE_SLACK_BYTES = 12 * DIRECT_ALIGNMENT
"""Padding to pages and alignment that a tile may need beside its rows."""


@dataclass(frozen=True)
class Task:
    """The input of a plan.

    Attributes:
        sizes: the model.
        config: the settings.
        machine: the machine.
        cache_limit: what MLX may keep of freed buffers.
        pool_slots: of the pool of experts that was asked for; 0 leaves that open.
        kv_on_disk: whether the KV cache is planned to be on disk.
        kv_room: memory that it may take then, if that is of use.
        cut: the way its layers are cut, as in ``Streaming.cut``.
        is_tiled: whether some linear layers pass through the slots in tiles of rows.
    """

    sizes: ModelSizes
    config: FlashConfig
    machine: Machine
    cache_limit: int
    pool_slots: int = 0
    kv_on_disk: bool = False
    kv_room: int = 0
    cut: int = 0
    is_tiled: bool = False

    @cached_property
    def promised_bytes(self) -> int:
        """Memory for keys, values and activations of a long context."""
        return promised_bytes(self.sizes, self.config)

    @cached_property
    def finer(self) -> tuple[Task, ...]:
        """The task with smaller and smaller units in the place of its layers."""
        return tuple(replace(self, sizes=self.sizes.cut(units), cut=i) for i, units in enumerate(self.sizes.finer, 1))

    @cached_property
    def streamed(self) -> Callable[[int, bool], Streamed]:
        """Sums for a number of bytes spread over the layers. Bisections ask for the same again and again."""
        layers = self.sizes.layers
        return cache(lambda target, whole_layers: add_up(choose(layers, target, whole_layers)))

    @cached_property
    def for_tokens(self) -> Callable[[Reserve], tuple[KVShare, int, int]]:
        """The KV cache's share, and the bytes of activations and of the prefix cache, for a reserve."""

        def add_up_tokens(reserve: Reserve) -> tuple[KVShare, int, int]:
            prefixes = prefix_bytes(self.sizes, self.config, reserve.context_length)
            return kv_share(self, reserve), activation_bytes(self, reserve), prefixes

        return cache(add_up_tokens)

    @cached_property
    def fixed_bytes(self) -> Callable[[Reserve], int]:
        """The peak without the weights of layers and heads, for a reserve."""
        return cache(lambda reserve: _add_up(self, reserve, 0, Streaming()).peak_bytes)


@dataclass(frozen=True, slots=True)
class Reserve:
    """Tokens that memory is set aside for, and how many parts of a prompt share a pass over the weights."""

    prefill_step_size: int
    context_length: int
    num_parts: int = 1


def activation_bytes(task: Task, reserve: Reserve) -> int:
    """Return the larger of a prefill step without logits and a short call with all of them."""
    context = round_up(reserve.context_length, CACHE_STEP)
    step = reserve.prefill_step_size
    ledger = Ledger(task.sizes.cache, task.sizes.activations)
    return ledger.computing(step, min(PREFILL_STEPS[-1], step), context)


def kv_share(task: Task, reserve: Reserve) -> KVShare:
    """Return the share of the KV cache. Raises: ConfigError: the share that was asked for is too small."""
    sizes, config, context, step = task.sizes, task.config, reserve.context_length, reserve.prefill_step_size
    if task.kv_on_disk:
        return on_disk(sizes, config, context, step, task.kv_room)
    return in_memory(sizes, config, context, step)


def parts_bytes(task: Task, reserve: Reserve) -> int:
    """Return the memory of the parts of a prompt that wait while another one computes."""
    ledger = Ledger(task.sizes.cache, task.sizes.activations, cut=task.cut, is_tiled=task.is_tiled)
    return ledger.parts_waiting(reserve.num_parts - 1, reserve.prefill_step_size, reserve.context_length)


def everything_pinned(task: Task, reserve: Reserve, *, tables: bool = True) -> ResidencyPlan:
    """Return the plan with all weights but experts in memory. Embedding tables that are no heads may stay on disk."""
    sizes = task.sizes
    left = [] if tables else [table.unit for table in sizes.tables if not table.is_head]
    others = [*sizes.heads, *(table.unit for table in sizes.tables if table.unit not in left)]
    pinned = sizes.layer_buffer_bytes + sum(unit.buffer_bytes for unit in others)
    return _add_up(task, reserve, pinned, Streaming(tables=tuple(unit.name for unit in left)))


def assemble(task: Task, reserve: Reserve, num_slots: int, streamed: Streamed, tile_bytes: int | None) -> ResidencyPlan:
    """Return the plan of a choice. Heads are pinned, or in tiles if ``tile_bytes`` gives the smallest slot.

    The plan does not say which tensors of the layers are streamed: see ``named``.
    """
    return _add_up(task, reserve, *_chosen(task, num_slots, streamed, tile_bytes))


def assembled_bytes(task: Task, reserve: Reserve, num_slots: int, streamed: Streamed, tile_bytes: int | None) -> int:
    """Return the predicted peak of a choice: that of its plan, which takes longer to assemble."""
    pinned, streaming = _chosen(task, num_slots, streamed, tile_bytes)
    return task.fixed_bytes(reserve) + pinned + streaming.num_slots * streaming.slot_bytes


def _chosen(task: Task, num_slots: int, streamed: Streamed, tile_bytes: int | None) -> tuple[int, Streaming]:
    """Return the bytes of pinned weights, and what is streamed."""
    sizes = task.sizes
    heads = heads_of(sizes)
    tiled = [] if tile_bytes is None else heads
    if tiled and not task.machine.exact_tiles:
        tile_bytes = max(head.nbytes for head in tiled)
    slot = _slot_bytes(streamed.largest, tiled, tile_bytes or 0)
    tiles = {head.name: tile_rows(head, slot) for head in tiled}
    num_units = streamed.num_layers + sum([_num_tiles(head, tiles[head.name]) for head in tiled])
    kept = {head.name for head in heads} - tiles.keys()
    pinned = sizes.layer_buffer_bytes - streamed.buffer_bytes
    pinned += sum([unit.buffer_bytes for unit in heads if unit.name in kept])
    return pinned, Streaming(
        heads=tuple(tiles.items()),
        tables=tuple([table.unit.name for table in sizes.tables if table.unit.name not in kept]),
        num_units=num_units,
        num_slots=min(num_slots, num_units),
        slot_bytes=slot if num_units else 0,
        read_bytes=streamed.nbytes + sum([head.nbytes for head in tiled]),
        cut=task.cut,
        is_tiled=task.is_tiled,
    )


def named(task: Task, plan: ResidencyPlan, chosen: Sequence[tuple[TensorSize, ...]]) -> ResidencyPlan:
    """Return the plan with the names of the streamed tensors of each layer."""
    layers = zip(task.sizes.layers, chosen, strict=True)
    names = tuple([(unit.name, tuple([tensor.name for tensor in tensors])) for unit, tensors in layers if tensors])
    return replace(plan, streaming=replace(plan.streaming, layers=names))


def heads_of(sizes: ModelSizes) -> list[UnitSize]:
    """Return the units that every output needs whole."""
    return [*sizes.heads, *(table.unit for table in sizes.tables if table.is_head)]


def _slot_bytes(layers: int, tiled: Sequence[UnitSize], tile_bytes: int) -> int:
    least = max((max(TILE_ROW_MULTIPLE * _row_bytes(head), head.nbytes // MAX_TILES) for head in tiled), default=0)
    whole = max((head.nbytes for head in tiled), default=0)
    tile = max(least, min(tile_bytes, whole))
    return max(layers, tile + TILE_SLACK_BYTES if tiled else 0)


def _num_tiles(head: UnitSize, rows: int) -> int:
    return -(-(head.num_rows or 0) // rows)


def tile_rows(head: UnitSize, slot_bytes: int) -> int:
    """Return the rows of a head in one tile: few equal tiles that fit the slot, aligned."""
    assert head.num_rows
    most = max(TILE_ROW_MULTIPLE, (slot_bytes - TILE_SLACK_BYTES) // _row_bytes(head))
    num_tiles = -(-head.num_rows // most)
    rows = min(round_up(-(-head.num_rows // num_tiles), TILE_ROW_MULTIPLE), head.num_rows)
    return rows if rows <= most else most // TILE_ROW_MULTIPLE * TILE_ROW_MULTIPLE


def _row_bytes(head: UnitSize) -> int:
    assert head.num_rows
    return -(-head.nbytes // head.num_rows)


def _add_up(task: Task, reserve: Reserve, pinned_bytes: int, streaming: Streaming) -> ResidencyPlan:
    sizes, machine = task.sizes, task.machine
    experts = sizes.experts
    copies = sizes.copies or machine.arrival != "in place" or (experts is not None and experts.copies)
    bounce = machine.arrival == "copied by the driver" or (machine.disk.direct and copies)
    num_readers = 1 if experts is None else 2  # urgent reads have threads and buffers of their own
    kv, activations, prefixes = task.for_tokens(reserve)
    return ResidencyPlan(
        budget_bytes=0,
        minimum_bytes=0,
        model_bytes=sizes.nbytes,
        base_bytes=machine.base_bytes + machine.runtime_bytes,
        active_bytes=machine.active_bytes,
        resident_bytes=sizes.resident_bytes,
        pinned_bytes=pinned_bytes,
        streaming=streaming,
        pool=None if experts is None else pool_of(task, experts, task.pool_slots or experts.least_slots),
        kv=kv,
        prefix_bytes=prefixes,
        activation_bytes=activations,
        spare_bytes=max(0, task.promised_bytes - kv.nbytes - activations, parts_bytes(task, reserve)),
        bounce_bytes=num_readers * reader_bytes(machine.disk, bounces=bounce, decodes=machine.compression is not None),
        read_size=machine.disk.read_size,
        queue_depth=machine.disk.queue_depth,
        disk_bytes_per_second=machine.disk.bytes_per_second,
        cache_limit=task.cache_limit,
        prefill_step_size=reserve.prefill_step_size,
        context_length=reserve.context_length,
        kv_bytes_per_token=sizes.cache.token_bytes,
        activations=sizes.activations,
        cache=sizes.cache,
        compression=machine.compression,
    )


def pool_of(task: Task, experts: ExpertSizes, num_slots: int) -> Pool:
    """Return a pool of so many slots, with its hit rate and time."""
    hit_rate = experts.hit_rate(num_slots)
    read_bytes = round((1 - hit_rate) * experts.token_bytes)
    machine = task.machine
    # Experts in memory compute while the others are read.
    there = hit_rate * experts.token_bytes / machine.kept_bytes_per_second
    read = read_bytes / machine.disk.bytes_per_second
    late = read_bytes / machine.compute_bytes_per_second
    seconds = max(there, read) + late + len(experts.num_experts) * machine.barrier_seconds
    return Pool(num_slots, experts.slot_bytes, sum(experts.num_experts), hit_rate, read_bytes, seconds)


def most_slots(task: Task, experts: ExpertSizes) -> int:
    """Return the most slots that a pool may have: it is one array."""
    return min(sum(experts.num_experts), task.machine.largest_array // experts.slot_bytes)


def finished(task: Task, plan: ResidencyPlan, budget: int) -> ResidencyPlan:
    """Return the plan with its predicted time and, for a mixture, the rest of the budget in the pool."""
    experts = task.sizes.experts
    if experts is not None and plan.pool is not None and not task.pool_slots:
        more = max(0, budget - plan.peak_bytes) // experts.slot_bytes
        num_slots = min(plan.pool.num_slots + more, most_slots(task, experts))
        plan = replace(plan, pool=pool_of(task, experts, max(num_slots, plan.pool.num_slots)))
    return timed(task, plan)


def cache_limit_of(machine: Machine, budget: int) -> int:
    """Return the bytes of freed buffers that MLX may keep."""
    return min(max(64 * MB, budget // 20), 256 * MB) if machine.has_buffer_cache else 0


def timed(task: Task, plan: ResidencyPlan) -> ResidencyPlan:
    """Return the plan with the predicted time of a decoding pass, from a simulation of the ring."""
    streaming, machine = plan.streaming, task.machine
    compute, kept, barrier = machine.compute_bytes_per_second, machine.kept_bytes_per_second, machine.barrier_seconds
    disk = machine.disk.bytes_per_second
    late = 1 / compute - 1 / kept  # what a streamed byte takes longer
    layers, tiles = dict(streaming.layers), dict(streaming.heads)
    steps = []
    for unit in task.sizes.layers:
        names = layers.get(unit.name, ())
        whole = len(names) == len(unit.tensors)
        nbytes = unit.nbytes if whole else sum([tensor.nbytes for tensor in unit.tensors if tensor.name in names])
        seconds = unit.computed_bytes / kept
        if names:
            seconds += late * unit.computed_bytes * nbytes / unit.nbytes + barrier
        steps.append((nbytes / disk, seconds))
    for head in heads_of(task.sizes):
        if head.name in tiles:
            count = _num_tiles(head, tiles[head.name])
            steps += [(head.nbytes / disk / count, head.nbytes / compute / count + barrier)] * count
        else:
            steps.append((0.0, head.nbytes / kept))
    # The kept parts of layers are computed between the streamed units.
    between = sum(unit.nbytes for unit in task.sizes.kept) / kept / max(1, len(steps))
    steps = [(read, seconds + between) for read, seconds in steps]
    starting = task.sizes.num_operations * machine.operation_seconds  # while the GPU computes those before
    seconds = max(starting, simulate(steps, streaming.num_slots, unevenness=DISK_UNEVENNESS))
    computing = max(starting, sum([seconds for _, seconds in steps]))
    plan = replace(
        plan,
        streaming=replace(streaming, seconds=seconds, compute_seconds=computing),
        prompt_seconds_per_token=machine.prompt_seconds_per_token or _prompt_seconds(task, streaming),
        is_measured=machine.is_measured,
    )
    if not plan.kv.num_on_disk:
        return plan
    # Pages are read while layers compute, from the disk that weights are read from.
    reading = (plan.read_bytes + plan.kv.disk_bytes) / disk
    waiting = max(0.0, reading - plan.weights_seconds) + plan.kv.num_on_disk * barrier
    return replace(plan, kv_seconds=waiting)


def _prompt_seconds(task: Task, streaming: Streaming) -> float:
    """Return the time for each token of a prompt, from that of a token decoded with weights just read."""
    sizes, machine = task.sizes, task.machine
    nbytes = sum([unit.computed_bytes for unit in [*sizes.layers, *sizes.kept, *heads_of(sizes)]])
    nbytes += 0 if sizes.experts is None else sizes.experts.token_bytes
    seconds = nbytes / machine.compute_bytes_per_second + streaming.num_units * machine.barrier_seconds
    return seconds / machine.prompt_speedup

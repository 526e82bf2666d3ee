"""What stays in memory: a pure function from sizes, settings and machine to a plan that adds up.

A forward pass reads in a cycle: a least-recently-used cache hits nothing there, a fixed pinned part hits its share.
What is streamed is spread evenly over the layers, so that reading overlaps computing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mlx_flash.config import GB, FlashConfig, Profile
from mlx_flash.errors import BudgetError
from mlx_flash.residency.sizes import CACHE_STEP, ActivationSizes, ModelSizes, TensorSize, UnitSize
from mlx_flash.storage.pagecache import DIRECT_ALIGNMENT
from mlx_flash.storage.probe import DiskProfile
from mlx_flash.streaming.stream import take_turns

MB = 1_000_000
PROFILE_SHARES: dict[Profile, tuple[float, float]] = {
    "safe": (0.5, 0.4),
    "balanced": (0.7, 0.7),
    "performance": (0.9, 0.8),
}
"""What each profile takes at most: this share of the memory that is free, and this share of the machine's. The second
counts on a machine where little runs yet: what is started later needs room too."""

ACTIVATION_SHARE = 0.2
"""Share of the budget that a forward call's activations may take when the plan chooses the prefill step."""

KV_SHARE = 0.25
"""Share of the budget that the KV cache may take when the plan chooses the context length."""

CONTEXT_LENGTHS = (4096, 2048, 1024, 512, 256)

ENOUGH_CONTEXT = 1024
"""Everything in memory with this many tokens beats more tokens and weights that have to be read."""

DEFAULT_PREFILL_STEP_SIZE = 2048
"""mlx-lm's own. Its name for it is newer than the oldest mlx-lm supported."""

PREFILL_STEPS = (DEFAULT_PREFILL_STEP_SIZE, 1024, 512, 256, 128, 64, 32, 16)

MAX_SLOTS = 4
DISK_UNEVENNESS = 0.3
"""Disks do not deliver evenly; a third slot evens that out. Measured: docs/lab-notes.md."""

WORTH_A_SLOT = 0.99
"""More slots and smaller units must bring the predicted time below this share of what it is without."""

WORTH_MORE_TOKENS = 1.25
"""A longer context or prefill step may make the predicted time of a token this much longer."""

SEARCH_STEPS = 16

TILE_BYTES = (32 << 20, 8 << 20, 2 << 20, 0)
"""How large the tiles of a streamed head are at least, to try: small ones leave memory, but each is waited for."""

LEAST_TILE_BYTES = 8 << 20
"""How large the tiles of layers are at least: small reads are slow, and each tile is waited for."""

MAX_TILES = 60
"""Each tile is waited for."""

TILE_ROW_MULTIPLE = 64
TILE_SLACK_BYTES = 12 * DIRECT_ALIGNMENT
"""Padding to pages and alignment that a tile may need beside its rows."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the plan has to work with.

    Attributes:
        total_memory: bytes this process could ever have.
        available_memory: bytes that are free now.
        base_bytes: footprint of the process before any weight.
        active_bytes: the part of it that MLX arrays of others take.
        runtime_bytes: what a running model adds to it beside its arrays: code pages touched first, thread stacks, heap.
        disk: how the checkpoint's disk reads.
        compute_bytes_per_second: weight bytes the processor works through when decoding.
        barrier_seconds: what it costs to wait for a layer's result before the next layer is begun.
        has_buffer_cache: whether MLX keeps freed buffers (GPU back ends do).
        exact_tiles: whether some rows of a matrix product are, bit for bit, those rows of the whole product. If not, a
            head that is streamed passes through a slot whole.
    """

    total_memory: int
    available_memory: int
    base_bytes: int
    active_bytes: int
    runtime_bytes: int
    disk: DiskProfile
    compute_bytes_per_second: float
    barrier_seconds: float
    has_buffer_cache: bool
    exact_tiles: bool


@dataclass(frozen=True, slots=True)
class Streaming:
    """What flows through the slots on every pass.

    Attributes:
        layers: of each layer that is not in memory whole, its name and the names of the parameters that are read.
        heads: rows a tile of each head, or embedding table serving as head, that is computed tile by tile.
        tables: names of the embedding tables of which rows are read on demand.
        num_units: number of units that take turns in the slots: layers, and tiles of heads.
        num_slots: number of slots.
        slot_bytes: size of each.
        read_bytes: bytes read on a pass that decodes one token, embedding rows aside.
        seconds: predicted time of that pass.
    """

    layers: tuple[tuple[str, tuple[str, ...]], ...] = ()
    heads: tuple[tuple[str, int], ...] = ()
    tables: tuple[str, ...] = ()
    num_units: int = 0
    num_slots: int = 0
    slot_bytes: int = 0
    read_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """What stays in memory, what is streamed, and what all of it takes. Sizes in bytes.

    Attributes:
        budget_bytes: the promise.
        minimum_bytes: the smallest budget that would do for these settings.
        model_bytes: all weights.
        base_bytes: the process before any weight, and what running adds to it.
        active_bytes: the part of it that MLX arrays of others took when the plan was made.
        resident_bytes: small and derived parameters, always in memory.
        pinned_bytes: layers, heads and tables that stay in memory.
        streaming: the rest.
        kv_bytes: set aside for the KV cache.
        activation_bytes: set aside for a forward call's intermediate results.
        bounce_bytes: the reader's own buffers.
        read_size: bytes of one read.
        queue_depth: reads in flight at once.
        disk_bytes_per_second: what the disk was probed to give.
        cache_limit: what MLX may keep of freed buffers.
        prefill_step_size: new tokens in a call that ``activation_bytes`` is enough for.
        context_length: tokens that ``kv_bytes`` is enough for.
        kv_bytes_per_token: what one more token adds to the KV cache of all layers.
        activations: what a forward call allocates, by its size.
    """

    budget_bytes: int
    minimum_bytes: int
    model_bytes: int
    base_bytes: int
    active_bytes: int
    resident_bytes: int
    pinned_bytes: int
    streaming: Streaming
    kv_bytes: int
    activation_bytes: int
    bounce_bytes: int
    read_size: int
    queue_depth: int
    disk_bytes_per_second: float
    cache_limit: int
    prefill_step_size: int
    context_length: int
    kv_bytes_per_token: int
    activations: ActivationSizes

    @property
    def slots_bytes(self) -> int:
        """Memory of all slots."""
        return self.streaming.num_slots * self.streaming.slot_bytes

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the process."""
        return sum(nbytes for _, nbytes in self.parts())

    def parts(self) -> list[tuple[str, int]]:
        """What the predicted peak is made of: (words for people, bytes)."""
        return [
            ("process (interpreter, libraries)", self.base_bytes),
            ("small and derived parameters", self.resident_bytes),
            ("pinned weights", self.pinned_bytes),
            (f"slots ({self.streaming.num_slots} x {self.streaming.slot_bytes / MB:.1f} MB)", self.slots_bytes),
            (f"KV cache ({self.context_length} tokens)", self.kv_bytes),
            (f"activations ({self.prefill_step_size} tokens a call)", self.activation_bytes),
            ("read buffers", self.bounce_bytes),
            ("MLX buffer cache", self.cache_limit),
        ]


@dataclass(frozen=True, slots=True)
class _Task:
    """What is given."""

    sizes: ModelSizes
    config: FlashConfig
    machine: Machine
    cache_limit: int


@dataclass(frozen=True, slots=True)
class _Reserve:
    """What is set aside for tokens."""

    prefill_step_size: int
    context_length: int


def make_plan(sizes: ModelSizes, config: FlashConfig, machine: Machine) -> ResidencyPlan:
    """Decides what stays in memory.

    Args:
        sizes: the model in numbers.
        config: the settings.
        machine: the machine in numbers.

    Raises:
        BudgetError: the budget, or the machine, is too small; it names the smallest workable budget.
    """
    task = _Task(sizes, config, machine, _cache_limit(machine, 0))
    smallest = _smallest(task, _least(config))
    minimum = smallest.peak_bytes
    budget = _budget(config, machine, minimum)
    if budget < minimum:
        raise BudgetError(_too_small(budget, minimum, smallest), minimum)
    task = replace(task, cache_limit=_cache_limit(machine, budget))
    plan = replace(_best(task, budget) or _timed(task, smallest), budget_bytes=budget, minimum_bytes=minimum)
    if plan.peak_bytes > machine.total_memory:
        raise BudgetError(
            f"the plan needs {plan.peak_bytes / GB:.2f} GB, but this process can have at most "
            f"{machine.total_memory / GB:.2f} GB. Hint: {_smaller(minimum, machine)}.",
            minimum,
        )
    return plan


def _budget(config: FlashConfig, machine: Machine, minimum: int) -> int:
    """The budget in bytes. A word never stands for less than the minimum."""
    budget = config.budget_bytes
    if isinstance(budget, int):
        return budget
    if budget == "min":
        return minimum
    of_free, of_all = PROFILE_SHARES[budget]
    return max(minimum, min(int(machine.available_memory * of_free), int(machine.total_memory * of_all)))


def _smaller(minimum: int, machine: Machine) -> str:
    if minimum <= machine.total_memory:
        return f"the smallest workable budget is {in_gb(minimum)} GB"
    return "a smaller context_length or prefill_step_size needs less"


def in_gb(nbytes: int) -> str:
    """A size in GB that is not below it when it is typed back in."""
    return f"{_round_up(nbytes, MB) / GB:.3f}"


def _too_small(budget: int, minimum: int, smallest: ResidencyPlan) -> str:
    parts = ", ".join(f"{name} {nbytes / MB:.0f} MB" for name, nbytes in smallest.parts() if nbytes >= MB)
    return (
        f"ram_budget_gb is {budget / GB:g}, but this model needs at least {in_gb(minimum)} with these settings: "
        f"{parts}. Hint: give {in_gb(minimum)} or more, or 'min'; a smaller context_length or prefill_step_size "
        "lowers it."
    )


def _smallest(task: _Task, reserve: _Reserve) -> ResidencyPlan:
    """As few slots as allowed, no layer pinned; or everything in memory, for a tiny model."""
    plans = [plan for cut in _cuts(task) for plan in _smallest_of_cut(cut, reserve)]
    plans.append(_everything(task, reserve))
    tiled = _tiled(task)
    if tiled is not None:  # two slots, so that reading and computing overlap, cost little here
        streamed = [unit.tensors for unit in tiled.sizes.layers]
        plans.append(_assemble(tiled, reserve, task.config.num_slots or 2, streamed, LEAST_TILE_BYTES))
    return min(plans, key=lambda plan: plan.peak_bytes)


def _smallest_of_cut(task: _Task, reserve: _Reserve) -> list[ResidencyPlan]:
    streamed = [unit.tensors for unit in task.sizes.layers]
    return [_assemble(task, reserve, task.config.num_slots or 1, streamed, tile_bytes) for tile_bytes in (0, None)]


def _cuts(task: _Task) -> list[_Task]:
    """The task with whole layers, then with smaller and smaller units."""
    return [task, *(replace(task, sizes=task.sizes.cut(units)) for units in task.sizes.finer)]


def _tiled(task: _Task, target: int | None = None) -> _Task | None:
    """The task with linear layers in row tiles, where that is exact.

    Args:
        task: with whole layers.
        target: bytes of linear layers to stream, spread evenly; None for all.
    """
    linears = task.sizes.linears
    if not linears or not task.machine.exact_tiles:
        return None
    chosen = linears if target is None else spread_whole(linears, target)
    return replace(task, sizes=task.sizes.tiled({unit.name for unit in chosen}))


def _least(config: FlashConfig) -> _Reserve:
    """The shortest prefill step and context, as far as they were left open. A cache grows by ``CACHE_STEP`` anyway."""
    step = config.prefill_step_size or PREFILL_STEPS[-1]
    context = config.context_length or max(CACHE_STEP, step)
    return _Reserve(min(step, context), context)


def _best(task: _Task, budget: int) -> ResidencyPlan | None:
    """The plan with the longest context and prefill step that is nearly as fast as one with the shortest."""
    reserves = list(_reserves(task, budget))
    for reserve in reserves:
        everything = _everything(task, reserve)
        if everything.peak_bytes <= budget and reserve.context_length >= ENOUGH_CONTEXT:
            return _timed(task, everything)
    good = _least_seconds(task, budget) * WORTH_MORE_TOKENS
    plans = list(_candidates(task, budget, reserves[0]))
    if plans and (plan := _fastest(plans)).streaming.seconds <= good:
        return plan
    least = _least(task.config)
    plans = list(_candidates(task, budget, least))
    if task.machine.exact_tiles and task.sizes.linears:
        plans += _candidates_with_tiles(task, budget, least)
    if not plans:
        return None
    fastest = _fastest(plans)
    for reserve in reserves:
        plans = list(_candidates(task, budget, reserve))
        if plans and (plan := _fastest(plans)).streaming.seconds <= fastest.streaming.seconds * WORTH_MORE_TOKENS:
            return plan
    return fastest


def _least_seconds(task: _Task, budget: int) -> float:
    """No plan is faster: all weights are computed with, and what the budget cannot hold is read."""
    machine = task.machine
    nbytes = sum(unit.nbytes for unit in [*task.sizes.layers, *_heads(task.sizes)])
    read = max(0, nbytes - (budget - machine.base_bytes))
    return max(nbytes / machine.compute_bytes_per_second, read / machine.disk.bytes_per_second)


def _reserves(task: _Task, budget: int) -> Iterator[_Reserve]:
    """What to set aside for tokens, most first. What the user asked for is not cut; what was left open is."""
    config, least = task.config, _least(task.config)
    for context in [config.context_length] if config.context_length else CONTEXT_LENGTHS:
        kv_bytes = task.sizes.kv_bytes(context)
        if context < least.prefill_step_size:
            continue
        if not config.context_length and context > CONTEXT_LENGTHS[-1] and kv_bytes > KV_SHARE * budget:
            continue
        longest = next((s for s in reversed(PREFILL_STEPS) if s >= context), PREFILL_STEPS[0])
        steps = [step for step in PREFILL_STEPS if step <= longest]
        for step in [least.prefill_step_size] if config.prefill_step_size else steps:
            reserve = _Reserve(step, context)
            if _is_modest(task, budget, reserve):
                yield reserve
    yield least


def _is_modest(task: _Task, budget: int, reserve: _Reserve) -> bool:
    """Whether the activations leave the weights their room, or are as small as they can be."""
    if task.config.prefill_step_size or reserve == _least(task.config):
        return True
    return _activation_bytes(task, reserve) <= ACTIVATION_SHARE * budget


def _activation_bytes(task: _Task, reserve: _Reserve) -> int:
    """For a prefill step, whose logits nobody looks at, or a short call whose logits all are."""
    context = _round_up(reserve.context_length, CACHE_STEP)
    activations, short = task.sizes.activations, min(PREFILL_STEPS[-1], reserve.prefill_step_size)
    prefill = activations.nbytes(reserve.prefill_step_size, context, all_logits=False)
    return max(prefill, activations.nbytes(short, context, all_logits=True))


def _candidates(task: _Task, budget: int, reserve: _Reserve) -> Iterator[ResidencyPlan]:
    """Everything in memory if that fits; else, for each way to cut layers and number of slots, the most pinned."""
    everything = _everything(task, reserve)
    if everything.peak_bytes <= budget:
        yield _timed(task, everything)
        return
    for cut in _cuts(task):
        if all(plan.peak_bytes > budget for plan in _smallest_of_cut(cut, reserve)):
            continue
        yield from _candidates_of_cut(cut, budget, reserve, may_skip_layers=cut is task)


def _candidates_of_cut(
    task: _Task, budget: int, reserve: _Reserve, *, may_skip_layers: bool
) -> Iterator[ResidencyPlan]:
    tilings = TILE_BYTES if _heads(task.sizes) else ()
    for num_slots in [task.config.num_slots] if task.config.num_slots else range(1, MAX_SLOTS + 1):
        for whole_layers in (True, False) if may_skip_layers else (False,):
            for tile_bytes in (None, *tilings):
                plan = _most_pinned(task, budget, reserve, num_slots, whole_layers, tile_bytes)
                if plan is not None:
                    yield _timed(task, plan)
                    if tile_bytes and plan.streaming.slot_bytes > tile_bytes + TILE_SLACK_BYTES:
                        break  # the layers' slots are larger anyway


def _candidates_with_tiles(task: _Task, budget: int, reserve: _Reserve) -> Iterator[ResidencyPlan]:
    """Linear layers in row tiles; as few of them as the budget allows."""
    for num_slots in [task.config.num_slots] if task.config.num_slots else range(2, MAX_SLOTS + 1):
        best, low, high = None, 0, sum(unit.nbytes for unit in task.sizes.linears)
        for _ in range(SEARCH_STEPS):
            target = high if best is None else (low + high) // 2
            tiled = _tiled(task, target)
            assert tiled is not None
            streamed = [unit.tensors for unit in tiled.sizes.layers]
            plan = _assemble(tiled, reserve, num_slots, streamed, LEAST_TILE_BYTES)
            if plan.peak_bytes <= budget:
                best, high = _timed(tiled, plan), target
            elif best is None:
                break
            else:
                low = target
        if best is not None:
            yield best


def _most_pinned(
    task: _Task, budget: int, reserve: _Reserve, num_slots: int, whole_layers: bool, tile_bytes: int | None
) -> ResidencyPlan | None:
    """Finds by bisection how few of the layers' bytes can be streamed within the budget."""
    total = sum(unit.nbytes for unit in task.sizes.layers)
    best, low, high = None, 0, total
    for _ in range(SEARCH_STEPS):
        streamed = spread(task.sizes.layers, high if best is None else (low + high) // 2, whole_layers)
        plan = _assemble(task, reserve, num_slots, streamed, tile_bytes)
        fits = plan.peak_bytes <= budget
        if best is None and not fits:
            return None
        middle = high if best is None else (low + high) // 2
        if fits:
            best, high = plan, middle
        else:
            low = middle
    return best


def _fastest(plans: Sequence[ResidencyPlan]) -> ResidencyPlan:
    """The first that is nearly as fast as the fastest: coarse cuts and few slots come first."""
    enough = min(plan.streaming.seconds for plan in plans) / WORTH_A_SLOT
    return next(plan for plan in plans if plan.streaming.seconds <= enough)


def spread(layers: Sequence[UnitSize], target: int, whole_layers: bool) -> list[tuple[TensorSize, ...]]:
    """Chooses which tensors of each layer are streamed, so that every stretch of layers has its share of the target.

    Args:
        layers: the layers.
        target: bytes to stream, over all layers.
        whole_layers: stream a layer whole or not at all; fewer layers are waited for then.
    """
    total = sum(unit.nbytes for unit in layers)
    chosen, passed, done = [], 0, 0
    for unit in layers:
        passed += unit.nbytes
        due = target * passed // max(total, 1) - done
        tensors = _whole(unit, due) if whole_layers else _some(unit, due)
        done += sum(tensor.nbytes for tensor in tensors)
        chosen.append(tensors)
    return chosen


def spread_whole(units: Sequence[UnitSize], target: int) -> list[UnitSize]:
    """Chooses units to stream whole, of together about ``target`` bytes, evenly over all of them."""
    return [unit for unit, tensors in zip(units, spread(units, target, True), strict=True) if tensors]


def _whole(unit: UnitSize, due: int) -> tuple[TensorSize, ...]:
    return unit.tensors if 2 * due >= unit.nbytes else ()


def _some(unit: UnitSize, due: int) -> tuple[TensorSize, ...]:
    """Tensors of together about ``due`` bytes, the largest first."""
    kept = set()
    for tensor in unit.largest_first:
        if 2 * due >= tensor.nbytes:
            kept.add(tensor.name)
            due -= tensor.nbytes
    return tuple(tensor for tensor in unit.tensors if tensor.name in kept)


def _everything(task: _Task, reserve: _Reserve) -> ResidencyPlan:
    """All weights in memory: nothing is streamed, the model runs as mlx-lm's own."""
    sizes = task.sizes
    pinned = sum(u.buffer_bytes for u in [*sizes.layers, *sizes.heads, *(table.unit for table in sizes.tables)])
    return _add_up(task, reserve, pinned, Streaming())


def _assemble(
    task: _Task,
    reserve: _Reserve,
    num_slots: int,
    streamed: Sequence[tuple[TensorSize, ...]],
    tile_bytes: int | None,
) -> ResidencyPlan:
    """Adds up what a choice takes. Heads are pinned, or tiled if ``tile_bytes`` says how large slots are at least."""
    sizes = task.sizes
    heads = _heads(sizes)
    tiled = [] if tile_bytes is None else heads
    if tiled and not task.machine.exact_tiles:
        tile_bytes = max(head.nbytes for head in tiled)
    slot = _slot_bytes(streamed, tiled, tile_bytes or 0)
    tiles = {head.name: tile_rows(head, slot) for head in tiled}
    num_units = sum(map(bool, streamed)) + sum(_num_tiles(head, tiles[head.name]) for head in tiled)
    kept = {head.name for head in heads} - tiles.keys()
    pinned = sum(unit.buffer_bytes for unit in [*sizes.layers, *sizes.kept, *heads])
    pinned -= sum(unit.buffer_bytes for unit in tiled)
    streaming = Streaming(
        layers=tuple((u.name, tuple(t.name for t in ts)) for u, ts in zip(sizes.layers, streamed, strict=True) if ts),
        heads=tuple(tiles.items()),
        tables=tuple(table.unit.name for table in sizes.tables if table.unit.name not in kept),
        num_units=num_units,
        num_slots=min(num_slots, num_units),
        slot_bytes=slot if num_units else 0,
        read_bytes=sum(tensor.nbytes for ts in streamed for tensor in ts) + sum(head.nbytes for head in tiled),
    )
    return _add_up(task, reserve, pinned - sum(t.buffer_bytes for ts in streamed for t in ts), streaming)


def _heads(sizes: ModelSizes) -> list[UnitSize]:
    return [*sizes.heads, *(table.unit for table in sizes.tables if table.is_head)]


def _slot_bytes(streamed: Sequence[tuple[TensorSize, ...]], tiled: Sequence[UnitSize], tile_bytes: int) -> int:
    layers = max((sum(tensor.buffer_bytes for tensor in tensors) for tensors in streamed), default=0)
    least = max((max(TILE_ROW_MULTIPLE * _row_bytes(head), head.nbytes // MAX_TILES) for head in tiled), default=0)
    whole = max((head.nbytes for head in tiled), default=0)
    tile = max(least, min(tile_bytes, whole))
    return max(layers, tile + TILE_SLACK_BYTES if tiled else 0)


def _num_tiles(head: UnitSize, rows: int) -> int:
    return -(-(head.num_rows or 0) // rows)


def tile_rows(head: UnitSize, slot_bytes: int) -> int:
    """Rows of a head in one tile: as few equal tiles as fit the slot, cut at multiples that keep rows aligned."""
    assert head.num_rows
    most = max(TILE_ROW_MULTIPLE, (slot_bytes - TILE_SLACK_BYTES) // _row_bytes(head))
    num_tiles = -(-head.num_rows // most)
    rows = min(_round_up(-(-head.num_rows // num_tiles), TILE_ROW_MULTIPLE), head.num_rows)
    return rows if rows <= most else most // TILE_ROW_MULTIPLE * TILE_ROW_MULTIPLE


def _row_bytes(head: UnitSize) -> int:
    assert head.num_rows
    return -(-head.nbytes // head.num_rows)


def _add_up(task: _Task, reserve: _Reserve, pinned_bytes: int, streaming: Streaming) -> ResidencyPlan:
    sizes, machine = task.sizes, task.machine
    context = _round_up(reserve.context_length, CACHE_STEP)
    units = [*sizes.layers, *sizes.heads, *(table.unit for table in sizes.tables)]
    bounce = machine.disk.direct and any(unit.copies for unit in units)
    num_layers = max(1, len(sizes.layers))
    return ResidencyPlan(
        budget_bytes=0,
        minimum_bytes=0,
        model_bytes=sizes.nbytes,
        base_bytes=machine.base_bytes + machine.runtime_bytes,
        active_bytes=machine.active_bytes,
        resident_bytes=sizes.resident_bytes,
        pinned_bytes=pinned_bytes,
        streaming=streaming,
        # A cache that grows holds its old and its new arrays for a moment, one layer at a time.
        kv_bytes=sizes.kv_bytes(context) * (num_layers + 1) // num_layers,
        activation_bytes=_activation_bytes(task, reserve),
        bounce_bytes=machine.disk.read_size * machine.disk.queue_depth if bounce else 0,
        read_size=machine.disk.read_size,
        queue_depth=machine.disk.queue_depth,
        disk_bytes_per_second=machine.disk.bytes_per_second,
        cache_limit=task.cache_limit,
        prefill_step_size=reserve.prefill_step_size,
        context_length=reserve.context_length,
        kv_bytes_per_token=sizes.kv_bytes_per_token,
        activations=sizes.activations,
    )


def _cache_limit(machine: Machine, budget: int) -> int:
    return min(max(64 * MB, budget // 20), 256 * MB) if machine.has_buffer_cache else 0


def _timed(task: _Task, plan: ResidencyPlan) -> ResidencyPlan:
    """The plan with the predicted time of a decoding pass, from a simulation of the ring."""
    streaming, machine = plan.streaming, task.machine
    compute, barrier = machine.compute_bytes_per_second, machine.barrier_seconds
    disk = machine.disk.bytes_per_second
    layers, tiles = dict(streaming.layers), dict(streaming.heads)
    steps = []
    for unit in task.sizes.layers:
        names = set(layers.get(unit.name, ()))
        read = sum(tensor.nbytes for tensor in unit.tensors if tensor.name in names) / disk
        steps.append((read, unit.nbytes / compute + (barrier if names else 0.0)))
    for head in _heads(task.sizes):
        if head.name in tiles:
            count = _num_tiles(head, tiles[head.name])
            steps += [(head.nbytes / disk / count, head.nbytes / compute / count + barrier)] * count
        else:
            steps.append((0.0, head.nbytes / compute))
    # What is kept of layers is computed between what is streamed.
    between = sum(unit.nbytes for unit in task.sizes.kept) / compute / max(1, len(steps))
    steps = [(read, seconds + between) for read, seconds in steps]
    return replace(
        plan, streaming=replace(streaming, seconds=simulate(steps, streaming.num_slots, unevenness=DISK_UNEVENNESS))
    )


def simulate(
    steps: Sequence[tuple[float, float]], num_slots: int, num_passes: int = 4, unevenness: float = 0.0
) -> float:
    """Seconds of one pass in the steady state.

    Args:
        steps: (seconds to read, seconds to compute) of each unit in calling order; nothing to read means pinned.
        num_slots: units that are read take turns in this many slots; a slot is filled again once it was released.
        num_passes: passes to run before the last two are taken, whose mean is returned.
        unevenness: every other read takes longer by this share of its time, the others as much less; in the next pass
            it is the other way round.
    """
    if num_slots == 0:
        return sum(compute for _, compute in steps)
    turns = take_turns(sum(read > 0 for read, _ in steps), num_slots)
    released = [0.0] * num_slots
    disk = now = 0.0
    ends = []
    for number in range(num_passes + 1):
        turn = 0
        for read, compute in steps:
            if not read:
                now += compute
                continue
            slot = turns[turn]
            late = unevenness if (turn + number) % 2 else -unevenness
            disk = max(disk, released[slot]) + read * (1 + late)
            now = released[slot] = max(now, disk) + compute
            turn += 1
        ends.append(now)
    return (ends[-1] - ends[-3]) / 2


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

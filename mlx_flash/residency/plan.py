"""What stays in memory: a pure function from sizes, settings and machine to a plan that adds up.

The access pattern of a forward pass is a cycle, where a least-recently-used cache hits nothing; a fixed pinned part hits
its share. Pinned layers are spread evenly between streamed ones, so that reading overlaps computing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mlx_flash.config import GB, FlashConfig
from mlx_flash.errors import BudgetError
from mlx_flash.residency.sizes import CACHE_STEP, ModelSizes, UnitSize
from mlx_flash.storage.probe import DiskProfile

MB = 1_000_000
RUNTIME_BYTES = 40 * MB
"""What a running model adds to the process beside its arrays: code pages touched first, thread stacks, heap."""

AUTO_SHARE = 0.7
"""Share of the free memory that a budget of None takes."""

ACTIVATION_SHARE = 0.25
"""Share of the budget that a forward call's activations may take when the plan chooses the prefill step."""

PREFILL_STEPS = (2048, 1024, 512, 256, 128, 64, 32, 16)
"""2048 is mlx-lm's default."""

MAX_SLOTS = 3
WORTH_A_SLOT = 0.98
"""One more slot must bring the predicted time below this share of what it was."""

HEAD_TILE_BYTES = 32 << 20
"""Tile size for a head that is streamed while no layer is."""

TILE_ROW_MULTIPLE = 64
TILE_SLACK_BYTES = 128 * 1024
"""Padding to pages and alignment that a tile may need beside its rows."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the plan has to work with.

    Attributes:
        total_memory: bytes this process could ever have.
        available_memory: bytes that are free now.
        base_bytes: footprint of the process before any weight.
        disk: how the checkpoint's disk reads.
        compute_bytes_per_second: weight bytes the processor works through when decoding.
        has_buffer_cache: whether MLX keeps freed buffers (GPU back ends do).
    """

    total_memory: int
    available_memory: int
    base_bytes: int
    disk: DiskProfile
    compute_bytes_per_second: float
    has_buffer_cache: bool


@dataclass(frozen=True, slots=True)
class Streaming:
    """What flows through the slots on every pass.

    Attributes:
        layers: names of the streamed layers.
        heads: rows a tile of each head, or embedding table serving as head, that is computed tile by tile.
        tables: names of the embedding tables of which rows are read on demand.
        num_slots: number of slots.
        slot_bytes: size of each.
        read_bytes: bytes read on a pass that decodes one token, embedding rows aside.
        seconds: predicted time of that pass.
    """

    layers: tuple[str, ...] = ()
    heads: tuple[tuple[str, int], ...] = ()
    tables: tuple[str, ...] = ()
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
    """

    budget_bytes: int
    minimum_bytes: int
    model_bytes: int
    base_bytes: int
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


def make_plan(sizes: ModelSizes, config: FlashConfig, machine: Machine) -> ResidencyPlan:
    """Decides what stays in memory.

    Args:
        sizes: the model in numbers.
        config: the settings.
        machine: the machine in numbers.

    Raises:
        BudgetError: the budget, or the machine, is too small; it names the smallest workable budget.
    """
    smallest = _smallest(sizes, config, machine)
    minimum = _round_up(smallest.peak_bytes, MB)
    budget = config.budget_bytes
    if budget == "min":
        budget = minimum
    elif budget is None:
        budget = max(minimum, int(machine.available_memory * AUTO_SHARE))
    if budget < minimum:
        raise BudgetError(_too_small(budget, minimum, smallest), minimum)
    best = _best(sizes, config, machine, budget) or smallest
    plan = replace(best, budget_bytes=budget, minimum_bytes=minimum)
    if plan.peak_bytes > machine.total_memory:
        raise BudgetError(
            f"the plan needs {plan.peak_bytes / GB:.2f} GB, but this process can have {machine.total_memory / GB:.2f} GB "
            f"at most. Hint: the smallest workable budget is {minimum / GB:.3f} GB.",
            minimum,
        )
    return plan


def _too_small(budget: int, minimum: int, smallest: ResidencyPlan) -> str:
    parts = ", ".join(f"{name} {nbytes / MB:.0f} MB" for name, nbytes in smallest.parts() if nbytes >= MB)
    return (
        f"ram_budget_gb is {budget / GB:g}, but this model needs at least {minimum / GB:.3f} with these settings: {parts}. "
        f"Hint: give {minimum / GB:.3f} or more, or 'min'; a smaller context_length or prefill_step_size lowers it."
    )


def _smallest(sizes: ModelSizes, config: FlashConfig, machine: Machine) -> ResidencyPlan:
    """One slot, nothing pinned, the shortest prefill step."""
    step = config.prefill_step_size or min(PREFILL_STEPS[-1], config.context_length)
    slots = config.num_slots or 1
    return _assemble(sizes, config, machine, step, slots, frozenset(), head_pinned=False)


def _best(sizes: ModelSizes, config: FlashConfig, machine: Machine, budget: int) -> ResidencyPlan | None:
    """The fastest plan that fits, with the longest prefill step that leaves the weights their room."""
    for step in _prefill_steps(config):
        plans = list(_candidates(sizes, config, machine, budget, step))
        affordable = [p for p in plans if config.prefill_step_size or p.activation_bytes <= ACTIVATION_SHARE * budget]
        if affordable:
            return _fastest(affordable)
    return None


def _prefill_steps(config: FlashConfig) -> Iterator[int]:
    if config.prefill_step_size is not None:
        yield config.prefill_step_size
        return
    longest = next((s for s in reversed(PREFILL_STEPS) if s >= config.context_length), PREFILL_STEPS[0])
    yield from (step for step in PREFILL_STEPS if step <= longest)


def _candidates(
    sizes: ModelSizes, config: FlashConfig, machine: Machine, budget: int, step: int
) -> Iterator[ResidencyPlan]:
    """For each number of slots, fewest first, the plan that pins the most."""
    everything = _everything(sizes, config, machine, step)
    if everything.peak_bytes <= budget:
        yield everything
        return
    for num_slots in [config.num_slots] if config.num_slots else range(1, MAX_SLOTS + 1):
        for head_pinned in (True, False):
            plan = _most_pinned(sizes, config, machine, budget, step, num_slots, head_pinned)
            if plan is not None:
                yield plan
                break


def _most_pinned(
    sizes: ModelSizes, config: FlashConfig, machine: Machine, budget: int, step: int, num_slots: int, head_pinned: bool
) -> ResidencyPlan | None:
    for count in range(len(sizes.layers), -1, -1):
        pinned = frozenset(sizes.layers[i].name for i in spread(count, len(sizes.layers)))
        plan = _assemble(sizes, config, machine, step, num_slots, pinned, head_pinned=head_pinned)
        if plan.peak_bytes <= budget:
            return plan
    return None


def _fastest(plans: Sequence[ResidencyPlan]) -> ResidencyPlan:
    best = plans[0]
    for plan in plans[1:]:
        if plan.streaming.seconds < best.streaming.seconds * WORTH_A_SLOT:
            best = plan
    return best


def spread(count: int, total: int) -> list[int]:
    """``count`` of ``total`` positions, as evenly apart as whole numbers allow."""
    return [(2 * j + 1) * total // (2 * count) for j in range(count)]


def _everything(sizes: ModelSizes, config: FlashConfig, machine: Machine, step: int) -> ResidencyPlan:
    """All weights in memory: nothing is streamed, the model runs as mlx-lm's own."""
    units = [*sizes.layers, *sizes.heads, *(table.unit for table in sizes.tables)]
    seconds = sizes.nbytes / machine.compute_bytes_per_second
    return _add_up(sizes, config, machine, step, units, Streaming(seconds=seconds))


def _assemble(
    sizes: ModelSizes,
    config: FlashConfig,
    machine: Machine,
    step: int,
    num_slots: int,
    pinned_layers: frozenset[str],
    *,
    head_pinned: bool,
) -> ResidencyPlan:
    streamed = [unit for unit in sizes.layers if unit.name not in pinned_layers]
    pinned = [unit for unit in sizes.layers if unit.name in pinned_layers]
    heads = [*sizes.heads, *(table.unit for table in sizes.tables if table.is_head)]
    if head_pinned:
        pinned, heads = [*pinned, *heads], []
    slot = max((unit.buffer_bytes for unit in streamed), default=HEAD_TILE_BYTES if heads else 0)
    slot = max([slot, *(TILE_ROW_MULTIPLE * _row_bytes(head) + TILE_SLACK_BYTES for head in heads)])
    tiles = {head.name: tile_rows(head, slot) for head in heads}
    num_units = len(streamed) + sum(-(-(h.num_rows or 0) // tiles[h.name]) for h in heads)
    num_slots = min(num_slots, num_units)
    kept = {unit.name for unit in pinned}
    streaming = Streaming(
        layers=tuple(unit.name for unit in streamed),
        heads=tuple(tiles.items()),
        tables=tuple(table.unit.name for table in sizes.tables if table.unit.name not in kept),
        num_slots=num_slots,
        slot_bytes=slot if num_slots else 0,
        read_bytes=sum(unit.read_bytes for unit in [*streamed, *heads]),
        seconds=_predict(sizes.layers, pinned_layers, pinned, heads, tiles, num_slots, machine),
    )
    return _add_up(sizes, config, machine, step, pinned, streaming)


def tile_rows(head: UnitSize, slot_bytes: int) -> int:
    """Rows of a head in one tile: as few equal tiles as fit the slot, cut at multiples that keep rows aligned."""
    assert head.num_rows
    most = max(TILE_ROW_MULTIPLE, (slot_bytes - TILE_SLACK_BYTES) // _row_bytes(head))
    num_tiles = -(-head.num_rows // most)
    rows = _round_up(-(-head.num_rows // num_tiles), TILE_ROW_MULTIPLE)
    return min(rows, head.num_rows) if rows <= most else most // TILE_ROW_MULTIPLE * TILE_ROW_MULTIPLE


def _row_bytes(head: UnitSize) -> int:
    assert head.num_rows
    return -(-head.nbytes // head.num_rows)


def _add_up(
    sizes: ModelSizes, config: FlashConfig, machine: Machine, step: int, pinned: list[UnitSize], streaming: Streaming
) -> ResidencyPlan:
    context = _round_up(config.context_length, CACHE_STEP)
    units = [*sizes.layers, *sizes.heads, *(table.unit for table in sizes.tables)]
    bounce = machine.disk.direct and any(unit.copies for unit in units)
    num_layers = max(1, len(sizes.layers))
    return ResidencyPlan(
        budget_bytes=0,
        minimum_bytes=0,
        model_bytes=sizes.nbytes,
        base_bytes=machine.base_bytes + RUNTIME_BYTES,
        resident_bytes=sizes.resident_bytes,
        pinned_bytes=sum(unit.buffer_bytes for unit in pinned),
        streaming=streaming,
        # A cache that grows holds its old and its new arrays for a moment, one layer at a time.
        kv_bytes=sizes.kv_bytes_per_token * context * (num_layers + 1) // num_layers,
        activation_bytes=sizes.activations.nbytes(step, context, all_logits=bool(streaming.heads)),
        bounce_bytes=machine.disk.read_size * machine.disk.queue_depth if bounce else 0,
        read_size=machine.disk.read_size,
        queue_depth=machine.disk.queue_depth,
        disk_bytes_per_second=machine.disk.bytes_per_second,
        cache_limit=_cache_limit(config, machine),
        prefill_step_size=step,
        context_length=config.context_length,
    )


def _cache_limit(config: FlashConfig, machine: Machine) -> int:
    if not machine.has_buffer_cache:
        return 0
    budget = config.budget_bytes
    return min(256 * MB, budget // 20) if isinstance(budget, int) else 64 * MB


def _predict(
    layers: Sequence[UnitSize],
    pinned_layers: frozenset[str],
    pinned: Sequence[UnitSize],
    heads: Sequence[UnitSize],
    tiles: dict[str, int],
    num_slots: int,
    machine: Machine,
) -> float:
    """Seconds of a decoding pass, from a simulation of the ring."""
    disk, compute = machine.disk.bytes_per_second, machine.compute_bytes_per_second
    steps = [(0.0 if unit.name in pinned_layers else unit.read_bytes / disk, unit.nbytes / compute) for unit in layers]
    names = {unit.name for unit in layers}
    steps += [(0.0, unit.nbytes / compute) for unit in pinned if unit.name not in names]
    for head in heads:
        count = -(-(head.num_rows or 0) // tiles[head.name])
        steps += [(head.read_bytes / disk / count, head.nbytes / compute / count)] * count
    return simulate(steps, num_slots)


def simulate(steps: Sequence[tuple[float, float]], num_slots: int, num_passes: int = 4) -> float:
    """Seconds of one pass in the steady state.

    Args:
        steps: (seconds to read, seconds to compute) of each unit in calling order; nothing to read means pinned.
        num_slots: units that are read take turns in this many slots; a slot is filled again once it was released.
        num_passes: passes to run before the last one is taken.
    """
    if num_slots == 0:
        return sum(compute for _, compute in steps)
    released = [0.0] * num_slots
    disk = now = before = 0.0
    turn = 0
    for _ in range(num_passes):
        before, turn = now, 0
        for read, compute in steps:
            if not read:
                now += compute
                continue
            slot = turn % num_slots
            disk = max(disk, released[slot]) + read
            now = released[slot] = max(now, disk) + compute
            turn += 1
    return now - before


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

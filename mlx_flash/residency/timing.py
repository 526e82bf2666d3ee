"""The predicted time of a candidate: a simulation of the ring of slots, and the misses of a pool of experts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlx_flash.residency.machine import Machine
from mlx_flash.residency.plan import Pool, ResidencyPlan
from mlx_flash.residency.selection import Streamed, Tiles
from mlx_flash.residency.sizes import ExpertSizes, ModelSizes
from mlx_flash.streaming.stream import take_turns

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


def simulate(
    steps: Sequence[tuple[float, float]],
    num_slots: int,
    num_passes: int = 4,
    unevenness: float = 0.0,
    late: float = 0.0,
) -> float:
    """Return the seconds of one pass in the steady state.

    Args:
        steps: (seconds to read, seconds to compute) of each unit in calling order; nothing to read means pinned.
        num_slots: units that are read take turns in this many slots; a slot is filled again once it was released.
        num_passes: passes to run before the last two are taken, whose mean is returned.
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
    for number in range(num_passes + 1):
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

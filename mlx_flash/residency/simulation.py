"""A simulation of a pass over the streamed units, with a ring of slots. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_flash.streaming.stream import take_turns


def simulate(
    steps: Sequence[tuple[float, float]], num_slots: int, num_passes: int = 4, unevenness: float = 0.0
) -> float:
    """Return the seconds of one pass in the steady state.

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

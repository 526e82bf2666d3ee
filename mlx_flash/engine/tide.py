"""The budget that follows the machine's free memory: a pure decision, from one reading to the next.

It falls at once and rises late, to the least room of a whole calm period. So a program that comes and goes makes no
waves. A rise that is followed by a fall doubles the next calm period.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mlx_flash.memory.footprint import MemoryReading

DEADBAND = 0.05
"""Changes of less than this share of the budget are not made."""

HIGH_PRESSURE = 0.1
"""Share of time that tasks wait for memory from which on the budget falls, however much seems to be free."""

PRESSURE_STEP = 0.1
"""Share of the budget that goes then."""

PRESSURE_SECONDS = 10.0
"""Time between two such steps: the pressure is an average over as long."""

CALM_SECONDS = 30.0
MOST_CALM_SECONDS = 960.0


@dataclass(frozen=True, slots=True)
class Tide:
    """The budget and what it depends on.

    Attributes:
        budget: bytes.
        since: when the calm period began, in seconds.
        lowest: the least room since then.
        calm: length of a calm period.
        raised_at, fallen_at: when the budget last rose and fell.
    """

    budget: int
    since: float
    lowest: float = math.inf
    calm: float = CALM_SECONDS
    raised_at: float = -math.inf
    fallen_at: float = -math.inf

    def after(self, reading: MemoryReading, held: int, now: float) -> Tide:
        """Return the tide after a look at the machine, given the footprint of this process and the time in seconds."""
        room = reading.room(held)
        if reading.pressure >= HIGH_PRESSURE:
            is_due = now - self.fallen_at >= PRESSURE_SECONDS
            room = min(room, int(self.budget * (1 - PRESSURE_STEP * is_due)))
        if room < self.budget * (1 - DEADBAND):
            return self._fallen(room, now)
        lowest = min(self.lowest, room)
        if now - self.since < self.calm:
            return replace(self, lowest=lowest)
        if lowest > self.budget * (1 + DEADBAND):
            return self._raised(int(lowest), now)
        return replace(self, since=now, lowest=math.inf)

    def at(self, budget: int) -> Tide:
        """Return the tide with the budget that was set."""
        return replace(self, budget=budget)

    def _fallen(self, budget: int, now: float) -> Tide:
        has_just_risen = now - self.raised_at < 2 * self.calm
        calm = min(2 * self.calm, MOST_CALM_SECONDS) if has_just_risen else self.calm
        return replace(self, budget=budget, since=now, lowest=math.inf, calm=calm, fallen_at=now)

    def _raised(self, budget: int, now: float) -> Tide:
        calm = CALM_SECONDS if now - self.fallen_at > MOST_CALM_SECONDS else self.calm
        return replace(self, budget=budget, since=now, lowest=math.inf, calm=calm, raised_at=now)

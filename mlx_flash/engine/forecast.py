"""A forecast for a running model: the gain of a larger budget, at the speeds that the run has reached."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from mlx_flash.config import FlashConfig
from mlx_flash.engine.meter import SpeedMeter
from mlx_flash.residency.budgets import Outlook, outlook
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.residency.sizes import ModelSizes
from mlx_flash.residency.speed import Machine


@dataclass(slots=True)
class Forecast:
    """A forecast, made once for a plan, after enough passes to measure. Any thread may ask; it works on numbers.

    Args:
        sizes: the model in numbers.
        config: the settings.
        machine: with the speeds that the plan was made with.
        plan: the plan in force; replaced with the budget.
        meter: knows the speeds that the run has reached.
    """

    sizes: ModelSizes
    config: FlashConfig
    machine: Machine
    plan: ResidencyPlan
    meter: SpeedMeter
    _made: tuple[ResidencyPlan, Outlook | None] | None = field(default=None, init=False)

    def outlook(self) -> Outlook | None:
        """Return the gain of a larger budget; None while the run is too short, and where there is no gain."""
        made, plan = self._made, self.plan
        if made is None or made[0] is not plan:
            speed = self.meter.speed(self.machine.speed)
            if speed is None:
                return None
            made = self._made = plan, outlook(self.sizes, self.config, self.machine.at_speed(speed), plan)
        return made[1]

    def telemetry(self) -> dict[str, Any]:
        """Return the forecast for the published state."""
        found = self.outlook()
        return {} if found is None else asdict(found)

"""Plans of one model for several budgets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mlx_flash.config import GB, FlashConfig
from mlx_flash.errors import BudgetError, ConfigError
from mlx_flash.residency.kv import PROMISED_CONTEXT, promised_bytes
from mlx_flash.residency.machine import Machine
from mlx_flash.residency.plan import ResidencyPlan, round_up_to_mb
from mlx_flash.residency.planner import make_plan
from mlx_flash.residency.sizes import ModelSizes

NUM_BUDGETS = 6
CONTEXTS = tuple(1024 << i for i in range(11))
"""Context lengths to try, up to a million tokens."""

_ENDLESS_GB = 1e6


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """A budget and its plan.

    Attributes:
        plan: the plan.
        longest_context: the longest of ``CONTEXTS`` that the budget holds, in memory or on disk, or the promised one.
    """

    plan: ResidencyPlan
    longest_context: int


def table_of_budgets(sizes: ModelSizes, config: FlashConfig, machine: Machine) -> Iterator[BudgetRow]:
    """Yield plans from the smallest budget to the first that reads nothing, or to the machine's memory."""
    promised = PROMISED_CONTEXT if promised_bytes(sizes, config) else 0
    contexts = {length: _minimum(sizes, config, machine, length) for length in CONTEXTS}
    for budget in _budgets(sizes, config, machine):
        try:
            plan = make_plan(sizes, replace(config, ram_budget_gb=budget / GB), machine)
        except BudgetError:
            continue
        fitting = [length for length, least in contexts.items() if least is not None and least <= budget]
        yield BudgetRow(plan, max([promised, *fitting]))
        if not plan.read_bytes:
            return


def _budgets(sizes: ModelSizes, config: FlashConfig, machine: Machine) -> list[int]:
    """Return budgets at equal ratios, in whole MB."""
    least = _minimum(sizes, config, machine, config.context_length)
    if least is None:
        return []
    whole = make_plan(sizes, replace(config, ram_budget_gb=_ENDLESS_GB), replace(machine, total_memory=1 << 62))
    most = max(least, min(whole.peak_bytes, machine.total_memory))
    ratio = (most / least) ** (1 / (NUM_BUDGETS - 1))
    rounded = {round_up_to_mb(int(least * ratio**i)) for i in range(NUM_BUDGETS)}
    return sorted({min(budget, max(least, machine.total_memory)) for budget in rounded})


def _minimum(sizes: ModelSizes, config: FlashConfig, machine: Machine, context: int | None) -> int | None:
    """Return the smallest budget for a context; None where no memory or disk of the machine holds it."""
    step = config.prefill_step_size
    step = step if step is None or context is None else min(step, context)
    try:
        config = replace(config, ram_budget_gb="min", context_length=context, prefill_step_size=step)
        return make_plan(sizes, config, machine).minimum_bytes
    except ConfigError:  # a budget error is one too
        return None

"""Plans of one model for several budgets, and the gain of a larger one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mlx_flash.config import GB, FlashConfig, KVMode
from mlx_flash.errors import BudgetError, ConfigError
from mlx_flash.residency.kv import PROMISED_CONTEXT, promised_bytes
from mlx_flash.residency.plan import ResidencyPlan, round_up_to_mb
from mlx_flash.residency.planner import make_plan
from mlx_flash.residency.sizes import ModelSizes
from mlx_flash.residency.speed import Machine

WORTH_SAYING = 1.02
"""A smaller gain of speed is within what a plan can tell."""

NUM_BUDGETS = 6
CONTEXTS = tuple(1024 << i for i in range(11))
"""Context lengths to try, up to a million tokens."""

_ENDLESS_GB = 1e6


@dataclass(frozen=True, slots=True)
class Outlook:
    """The predicted gain of a larger budget.

    Attributes:
        more_bytes: added to the budget.
        times: the speed of generation with it, over the speed without it.
    """

    more_bytes: int
    times: float


def outlook(sizes: ModelSizes, config: FlashConfig, machine: Machine, plan: ResidencyPlan) -> Outlook | None:
    """Return the gain of about a quarter more, at the same context and prefill step.

    Args:
        sizes: the model in numbers.
        config: the settings of the plan.
        machine: with the speeds that a run reached, where they are known.
        plan: the plan in force.

    Returns:
        None where nothing is streamed, where the machine has no more memory, and where speed would not rise.
    """
    more = round_number(plan.budget_bytes // 4)
    if not plan.read_bytes or plan.budget_bytes + more > machine.total_memory:
        return None
    slots = plan.streaming.num_slots
    now = plan_with(sizes, _like(plan, config, slots), machine, plan.budget_bytes)
    tried = [plan_with(sizes, _like(plan, config, n), machine, plan.budget_bytes + more) for n in (slots, slots + 1)]
    seconds = min((larger.opening_seconds for larger in tried if larger is not None), default=0.0)
    if now is None or not seconds or now.opening_seconds < WORTH_SAYING * seconds:
        return None
    return Outlook(more, now.opening_seconds / seconds)


def plan_with(sizes: ModelSizes, config: FlashConfig, machine: Machine, budget: int) -> ResidencyPlan | None:
    """Return the plan for a budget in bytes; None where it is too small."""
    try:
        return make_plan(sizes, replace(config, ram_budget_gb=budget / GB), machine)
    except BudgetError:
        return None


def _like(plan: ResidencyPlan, config: FlashConfig, num_slots: int) -> FlashConfig:
    """Return settings that leave little to search: what the plan chose is kept."""
    place: KVMode | None = "disk" if plan.kv.num_on_disk else "stock"
    if config.kv_ram_gb is not None or config.kv_max_tokens is not None:
        place = None  # mlx-lm's own caches keep to neither
    return replace(
        config,
        context_length=plan.context_length,
        prefill_step_size=plan.prefill_step_size,
        num_slots=config.num_slots or num_slots or None,
        kv_cache=config.kv_cache or place,
    )


def round_number(nbytes: int) -> int:
    """Return the largest 1, 2 or 5 times a power of ten that is not above a number of bytes."""
    power = int(10 ** (len(str(nbytes)) - 1))
    return max(times * power for times in (1, 2, 5) if times * power <= nbytes)


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
        plan = plan_with(sizes, config, machine, budget)
        if plan is not None:
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

"""The table of budgets of ``mlx-flash plan --budgets`` and ``mlx-flash doctor``."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from mlx_flash.commands.report import Json, ratio
from mlx_flash.config import FlashConfig
from mlx_flash.engine.prepare import Prepared
from mlx_flash.monitor.words import duration, rate, size
from mlx_flash.residency.budgets import BudgetRow, table_of_budgets

PROMPT_TOKENS = 2_000
"""Length of the prompt for which the time to the first token is shown."""


def budget_rows(prepared: Prepared, config: FlashConfig) -> list[BudgetRow]:
    """Return the plans of a model from its smallest budget to the one that holds it whole."""
    return list(table_of_budgets(prepared.sizes, config, prepared.machine))


def render_budgets(rows: Sequence[BudgetRow]) -> Table:
    """Return the table for people."""
    table = Table(box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("budget GB", "peak GB", "read per token", "tokens/s", f"first of {PROMPT_TOKENS}", "context"):
        table.add_column(heading, justify="right")
    for row in rows:
        plan = row.plan
        table.add_row(
            f"{plan.budget_bytes / 1e9:.3f}",
            f"{plan.peak_bytes / 1e9:.3f}",
            size(plan.read_bytes) if plan.read_bytes else "nothing",
            rate(ratio(1, plan.opening_seconds)),
            duration(plan.seconds_to_first_token(PROMPT_TOKENS)),
            str(row.longest_context or "-"),
        )
    return table


def budgets_to_json(rows: Sequence[BudgetRow]) -> list[Json]:
    """Return the table for programs."""
    return [
        {
            "budget_bytes": row.plan.budget_bytes,
            "peak_bytes": row.plan.peak_bytes,
            "read_bytes": row.plan.read_bytes,
            "tokens_per_second": ratio(1, row.plan.opening_seconds),
            "seconds_to_first_token": row.plan.seconds_to_first_token(PROMPT_TOKENS),
            "prompt_tokens": PROMPT_TOKENS,
            "longest_context": row.longest_context,
        }
        for row in rows
    ]

"""``mlx-flash plan``: what would stay in memory. Reads no weights, and downloads none."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from huggingface_hub import constants
from rich import box
from rich.console import RenderableType
from rich.table import Table

from mlx_flash.commands.common import emit, make_config, tokenizer_if_any
from mlx_flash.commands.models import is_remote, preview
from mlx_flash.commands.report import Json, planning_to_json, render_plan
from mlx_flash.commands.vision import prepare_model
from mlx_flash.config import FlashConfig
from mlx_flash.engine.layershares import layer_bytes, share_equally
from mlx_flash.engine.prepare import Prepared, resolve
from mlx_flash.monitor.words import duration, layer_runs, rate, size
from mlx_flash.ranks import needed_files, runs
from mlx_flash.residency.budgets import BudgetRow, table_of_budgets
from mlx_flash.storage.probe import sample_in
from mlx_flash.telemetry import ratio


def rank_parts(prepared: Prepared, num_ranks: int) -> list[Json]:
    """Return the part of each rank, if machines like this one share a model.

    It has the first layer and the one after the last of each run of its layers, the bytes of these, and the shards with
    them, or with what every machine computes.
    """
    owners = share_equally(prepared.loaded, prepared.plan, prepared.machine, num_ranks)
    nbytes = layer_bytes(prepared.loaded)
    needed = needed_files(len(nbytes), prepared.checkpoint)
    parts = []
    for rank in range(num_ranks):
        own = [number for number, owner in enumerate(owners) if owner == rank]
        total = sum(nbytes[number] for number in own)
        parts.append({"rank": rank, "layers": runs(owners, rank), "nbytes": total, "files": needed.of(own)})
    return parts


def render_ranks(parts: Sequence[Json], num_files: int) -> RenderableType:
    """Return a table of the ranks.

    Args:
        parts: theirs.
        num_files: shards of the model.
    """
    table = Table("Rank", "Layers", box=box.SIMPLE_HEAD)
    table.add_column("Weights", justify="right")
    table.add_column("Shards to copy, with all files that are no shards")
    for part in parts:
        files = f"all {num_files}" if 1 < num_files == len(part["files"]) else ", ".join(part["files"])
        table.add_row(str(part["rank"]), layer_runs(part["layers"]), size(part["nbytes"]), files)
    return table


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


def plan(args: argparse.Namespace, out: TextIO) -> int:
    """``mlx-flash plan``: reads no weights."""
    with ExitStack() as stack:
        probe = None
        if is_remote(args.model):
            path = stack.enter_context(preview(args.model))
            probe = stack.enter_context(sample_in(Path(constants.HF_HUB_CACHE)))  # where it would be downloaded to
        else:
            path = resolve(args.model)
        return _plan(args, path, probe, out)


def _plan(args: argparse.Namespace, path: Path, probe: Path | None, out: TextIO) -> int:
    tokenizer = tokenizer_if_any(path, args)
    config = make_config(args)
    prepared = prepare_model(args, path, config, probe)
    del tokenizer
    rows = budget_rows(prepared, config) if args.budgets else []
    parts = rank_parts(prepared, args.ranks) if args.ranks > 1 else []
    facts = planning_to_json(args.model, prepared.layout, prepared.plan)
    facts |= {"budgets": budgets_to_json(rows)} if args.budgets else {}
    facts |= {"ranks": parts} if parts else {}
    words = [render_budgets(rows) if args.budgets else render_plan(args.model, prepared.layout, prepared.plan)]
    words += [render_ranks(parts, len(prepared.checkpoint.shards))] if parts else []
    emit(args, facts, words, out)
    return 0

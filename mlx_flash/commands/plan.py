"""``mlx-flash plan``: what would stay in memory. Reads no weights, and downloads none."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TextIO

from rich.console import RenderableType

from mlx_flash.commands.common import emit, make_config, tabled, tokenizer_if_any
from mlx_flash.commands.models import headers_of, use_name
from mlx_flash.commands.report import Json, planning_to_json, render_plan
from mlx_flash.commands.vision import is_vision, prepare_model
from mlx_flash.config import FlashConfig
from mlx_flash.engine.layershares import layer_bytes, share_equally
from mlx_flash.engine.prepare import Prepared
from mlx_flash.monitor.words import layer_runs
from mlx_flash.ranks import needed_files, runs
from mlx_flash.residency.planner import table_of_budgets
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


RANKS = {
    "Rank": "{rank}",
    "Layers": "{runs}",
    "Weights": "{nbytes:size}",
    "Shards to copy, with all files that are no shards": "{shards}",
}
"""A table of ranks."""


def render_ranks(parts: Sequence[Json], num_files: int) -> RenderableType:
    """Return a table of the ranks, whose model has some number of shards."""

    def shards(files: Sequence[str]) -> str:
        return f"all {num_files}" if 1 < num_files == len(files) else ", ".join(files)

    rows = ({**part, "runs": layer_runs(part["layers"]), "shards": shards(part["files"])} for part in parts)
    return tabled(RANKS, rows)


PROMPT_TOKENS = 2_000
"""Length of the prompt for which the time to the first token is shown."""


BUDGETS = {
    "budget GB": "{budget_bytes:billions}",
    "peak GB": "{peak_bytes:billions}",
    "read per token": "{read_bytes:read}",
    "tokens/s": "{tokens_per_second:rate}",
    f"first of {PROMPT_TOKENS}": "{seconds_to_first_token:duration}",
    "context": "{longest_context:whole}",
}
"""A table of budgets."""


def budgets_of(prepared: Prepared, config: FlashConfig) -> list[Json]:
    """Return the plans of a model from its smallest budget to the one that holds it whole."""
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
        for row in table_of_budgets(prepared.sizes, config, prepared.machine)
    ]


def plan(args: argparse.Namespace, out: TextIO) -> int:
    """``mlx-flash plan``: reads no weights."""
    use_name(args)
    with headers_of(args.model) as (path, probe):
        tokenizer = tokenizer_if_any(path, args)
        config = make_config(args)
        prepared = prepare_model(path, config, probe, with_vlm=is_vision(args, path, prefers=True))
        del tokenizer
    budgets = budgets_of(prepared, config) if args.budgets else []
    parts = rank_parts(prepared, args.ranks) if args.ranks > 1 else []
    facts = planning_to_json(args.model, prepared.layout, prepared.plan)
    facts |= {"budgets": budgets} if args.budgets else {}
    facts |= {"ranks": parts} if parts else {}
    words = [tabled(BUDGETS, budgets) if args.budgets else render_plan(args.model, prepared.layout, prepared.plan)]
    words += [render_ranks(parts, len(prepared.checkpoint.shards))] if parts else []
    emit(args, facts, words, out)
    return 0

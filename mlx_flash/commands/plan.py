"""``mlx-flash plan``: what would stay in memory. Reads no weights, and downloads none."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from huggingface_hub import constants

from mlx_flash.commands.budgettable import budget_rows, budgets_to_json, render_budgets
from mlx_flash.commands.common import make_config, print_json, print_rich, tokenizer_if_any
from mlx_flash.commands.preview import is_remote, preview
from mlx_flash.commands.rankparts import rank_parts, render_ranks
from mlx_flash.commands.render import render_plan
from mlx_flash.commands.report import planning_to_json
from mlx_flash.commands.vision import prepare_model
from mlx_flash.engine.prepare import resolve
from mlx_flash.storage.probe import sample_in


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
    if args.json:
        more = {"budgets": budgets_to_json(rows)} if args.budgets else {}
        more |= {"ranks": [asdict(part) for part in parts]} if parts else {}
        print_json({**planning_to_json(args.model, prepared.layout, prepared.plan), **more}, out)
        return 0
    print_rich(render_budgets(rows) if args.budgets else render_plan(args.model, prepared.layout, prepared.plan), out)
    if parts:
        print_rich(render_ranks(parts, len(prepared.checkpoint.shards)), out)
    return 0

"""What several commands do."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, TextIO

from mlx_lm import utils as mlx_lm_utils
from rich.console import Console, RenderableType

from mlx_flash.commands.arguments import DIAL
from mlx_flash.commands.report import Json
from mlx_flash.config import FlashConfig
from mlx_flash.layout.load import load_config


def dial(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of streaming that the flags give; None is one that was not given."""
    return {name: getattr(args, name) for name in DIAL}


def make_config(args: argparse.Namespace) -> FlashConfig:
    """The settings of streaming, from flags, environment and settings file."""
    return FlashConfig.resolve(**dial(args))


def load_tokenizer(path: Path, args: argparse.Namespace) -> Any:
    """mlx-lm's tokenizer, as ``mlx_lm.generate`` loads it."""
    eos_token_ids = load_config(path).get("eos_token_id")
    settings = {"trust_remote_code": args.trust_remote_code}
    return mlx_lm_utils.load_tokenizer(path, settings, eos_token_ids=eos_token_ids)


def shows_progress(args: argparse.Namespace) -> bool:
    """Whether somebody is looking who wants to see it."""
    return bool(args.verbose) and sys.stderr.isatty()


def print_json(value: Json, out: TextIO) -> None:
    """One object on one line."""
    print(json.dumps(value, allow_nan=False), file=out, flush=True)


def print_rich(value: RenderableType, out: TextIO) -> None:
    """For people: as wide as the terminal, 80 columns without one."""
    Console(file=out, markup=False, highlight=False, emoji=False).print(value)

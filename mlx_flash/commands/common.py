"""Helpers of several commands."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from mlx_lm import utils as mlx_lm_utils
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

from mlx_flash.commands.arguments import SETTINGS
from mlx_flash.commands.report import Json
from mlx_flash.config import FlashConfig
from mlx_flash.layout.load import load_config


def dial(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that flags give; None is unset."""
    return {name: getattr(args, name) for name in SETTINGS}


def make_config(args: argparse.Namespace) -> FlashConfig:
    """Return the settings from flags, environment and settings file."""
    return FlashConfig.resolve(**dial(args))


def load_tokenizer(path: Path, args: argparse.Namespace, settings: Mapping[str, Any] | None = None) -> Any:
    """Return mlx-lm's tokenizer, as ``mlx_lm.generate`` loads it."""
    eos_token_ids = load_config(path).get("eos_token_id")
    settings = {**(settings or {}), "trust_remote_code": args.trust_remote_code}
    return mlx_lm_utils.load_tokenizer(path, settings, eos_token_ids=eos_token_ids)


def shows_progress(args: argparse.Namespace) -> bool:
    """Return whether to draw progress: stderr is a terminal and ``--verbose`` is not False."""
    return bool(args.verbose) and sys.stderr.isatty()


def print_json(value: Json, out: TextIO) -> None:
    """Print one object on one line."""
    print(json.dumps(value, allow_nan=False), file=out, flush=True)


def print_rich(value: RenderableType, out: TextIO) -> None:
    """Print for people, as wide as the terminal; 80 columns without one."""
    Console(file=out, markup=False, highlight=False, emoji=False).print(value)


class ProgressBar:
    """A progress bar on stderr, from the first report to the last.

    Args:
        words: name of the work.
        column: column that shows the amount.
        shown: draw it. False draws nothing.
    """

    def __init__(self, words: str, column: ProgressColumn, shown: bool) -> None:
        self._words = words
        self._columns = (TextColumn("{task.description}"), BarColumn(), column)
        self._shown = shown
        self._progress: Progress | None = None

    def __call__(self, done: int, total: int) -> None:
        """Draw the bar; remove it when all is done."""
        if done >= total or not self._shown:
            self.close()
            return
        if self._progress is None:
            self._progress = Progress(*self._columns, console=Console(file=sys.stderr), transient=True)
            self._progress.add_task(self._words)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=done, total=total)

    def close(self) -> None:
        """Remove the bar. Harmless when repeated."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""Helpers of several commands. Importing them does not import MLX, which takes seconds."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.console import Console, RenderableType
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from mlx_flash.commands.arguments import DEFAULT_PROMPT, SETTINGS
from mlx_flash.config import FlashConfig
from mlx_flash.errors import ConfigError
from mlx_flash.modelfile.parse import Modelfile, check_text
from mlx_flash.monitor.words import formatted, size
from mlx_flash.telemetry import Json


class Status(Progress):
    """A line on stderr that is removed at the end. Nothing is drawn where stderr is no terminal."""

    def __init__(self, words: str, is_shown: bool = True) -> None:
        self._words, is_drawn = words, is_shown and sys.stderr.isatty()
        console = Console(file=sys.stderr, highlight=False, quiet=not is_drawn)
        columns = (SpinnerColumn("line", style=""), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        options = {"transient": True, "redirect_stdout": False, "redirect_stderr": False, "refresh_per_second": 8}
        super().__init__(*columns, console=console, disable=not is_drawn, **options)  # type: ignore[arg-type]
        self._task = self.add_task(words, total=None)

    def show_bytes(self, done: int, total: int) -> None:
        """Show how many bytes are done. A ``progress`` of ``load()``."""
        self.show(done, total, size)

    def show(self, done: int, total: int, unit: Callable[[int], str] = str) -> None:
        """Show how much is done. A ``prompt_progress_callback`` of mlx-lm. The line is removed when all is."""
        self.update(self._task, description=f"{self._words}: {unit(done)} of {unit(total)}")
        if done < total:
            self.start()
        else:
            self.stop()


LOOP_FLAGS = ("max_tokens", "max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start")
"""Flags that mlx-lm's and mlx-vlm's loops take under the same names."""


def make_config(args: argparse.Namespace, modelfile: Mapping[str, str] | None = None) -> FlashConfig:
    """Return the settings from flags, environment, Modelfile and settings file. Flags that are None are unset.

    The Modelfile is that with the name of the command's model, unless the settings of another one are given.
    """
    flags = vars(args)  # commands that load no model have fewer
    idle = {name: flags.get(name) for name in ("tile_size", "pipelined_execution", "expert_pool_gb")}
    modelfile = flags.get("flash") if modelfile is None else modelfile
    config = FlashConfig.resolve(modelfile=modelfile, **{name: flags.get(name) for name in SETTINGS}, **idle)
    if config.kv_max_tokens is not None and flags.get("kv_bits") is not None:
        raise ConfigError(
            f"kv_max_tokens is {config.kv_max_tokens} and --kv-bits is {flags['kv_bits']}: mlx-lm quantizes no cache "
            "that drops tokens. Hint: leave one of them unset."
        )
    return config


def prompt_text(args: argparse.Namespace, read: Callable[[TextIO], str]) -> str:
    r"""Return the text of ``--prompt``; for ``-``, standard input. ``\n`` and ``\t`` are replaced, as mlx-lm does.

    Without the flag it is what is piped in. If that is nothing, it is mlx-lm's default, with a note.
    """
    for name, text in (("--system-prompt", args.system_prompt), ("--prefill-response", args.prefill_response)):
        check_text(text or "", name)
    if args.prompt == "-":
        return check_text(read(sys.stdin), "standard input")
    if args.prompt is not None:
        return check_text(args.prompt.replace("\\n", "\n").replace("\\t", "\t"), "--prompt")
    if piped := read(io.StringIO() if sys.stdin.isatty() else sys.stdin):
        return check_text(piped, "standard input")
    note(f"mlx-flash: there is no --prompt: the prompt is {DEFAULT_PROMPT!r}, as with mlx_lm.generate")
    return DEFAULT_PROMPT


def turns(args: argparse.Namespace, prompt: str) -> list[dict[str, str]]:
    """Return a prompt as a chat: system prompt, user's turn, beginning of the answer."""
    found = [("system", args.system_prompt), ("user", prompt), ("assistant", args.prefill_response)]
    return [{"role": role, "content": content} for role, content in found if content is not None]


def load_tokenizer(path: Path, args: argparse.Namespace, config: FlashConfig | None = None) -> Any:
    """Return mlx-lm's tokenizer, as ``mlx_lm.generate`` loads it. With a config, its budget is checked first."""
    from mlx_flash.engine import prepare

    trust = vars(args).get("trust_remote_code", False)  # commands without the flag do not
    return prepare.load_tokenizer(path, {"trust_remote_code": trust}, config)


def tokenizer_if_any(path: Path, args: argparse.Namespace) -> Any:
    """Return the tokenizer of a folder, or None. Plans count it: it is part of the process when text is generated."""
    with contextlib.suppress(OSError, ValueError):  # a folder without one can be planned for too
        return load_tokenizer(path, args)
    return None


def note(words: str) -> None:
    """Print a note on stderr, unless ``--quiet`` silences it."""
    if logging.getLogger("mlx_flash").isEnabledFor(logging.WARNING):
        print(words, file=sys.stderr)


def note_lines(modelfile: Modelfile) -> None:
    """Print the lines of a Modelfile that have no effect."""
    for found in modelfile.notes:
        note(f"{modelfile.path}:{found.line}: {found.text}")


def emit(args: argparse.Namespace, facts: Json, words: RenderableType | list[RenderableType], out: TextIO) -> None:
    """Print facts: as JSON with ``--json``, in words for people otherwise."""
    if args.json:
        print_json(facts, out)
        return
    for part in words if isinstance(words, list) else [words]:
        print_rich(part, out)


def labelled(lines: Iterable[tuple[str, str]]) -> Table:
    """Return a table of labels and texts."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # a path is not cut
    for label, text in lines:
        table.add_row(f"{label}:", text)
    return table


def tabled(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]], **options: Any) -> Table:
    """Return a table of facts, whose columns are templates of :func:`formatted` by heading."""
    table = Table(box=box.SIMPLE_HEAD, **options)
    for heading, template in columns.items():
        table.add_column(heading, justify="right" if ":" in template else "left", overflow="fold")
    for facts in rows:
        table.add_row(*(formatted(template, facts) for template in columns.values()))
    return table


def print_json(value: Json, out: TextIO) -> None:
    """Print one object on one line. Paths become texts."""
    print(json.dumps(value, allow_nan=False, default=os.fspath), file=out, flush=True)


def print_rich(value: RenderableType, out: TextIO) -> None:
    """Print for people, as wide as the terminal; 80 columns without one. A text of its own is not wrapped."""
    Console(file=out, markup=False, highlight=False, emoji=False).print(value, soft_wrap=isinstance(value, str))

"""The parser of the command line: short help, the whole help of ``--help-tuning``, and errors of one shape.

Help shows the default of every flag, as the parser has it.
"""

from __future__ import annotations

import argparse
import shutil
from typing import Any, NoReturn

from mlx_flash.aliases import FLAGS

EXIT_USAGE = 2

WIDTH, HELP_COLUMN = 80, 32

SHOWN = frozenset(
    {
        *("--help", "--help-tuning", "--model", "--ram-budget-gb", "--context-length", "--prefill-step-size"),
        *("--prompt", "--max-tokens", "--system-prompt", "--temp", "--top-p", "--seed", "--adapter-path"),
        *("--draft-model", "--json", "--resident", "--host", "--port", "--api-key-file", "--no-auth", "--models-dir"),
        *(
            "--file",
            "--serve",
            "--image",
            "--format",
            "--resume",
            "--keep-alive",
            "--verbose",
            "--quiet",
            "--traceback",
        ),
    }
)
"""Flags in the short help of commands with many flags."""


class _Formatter(argparse.HelpFormatter):
    """A formatter that leaves flags more room, and is no wider than :data:`WIDTH`."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, WIDTH)
        super().__init__(prog, max_help_position=HELP_COLUMN, width=width - 2)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        is_known = default is None or default is argparse.SUPPRESS or default in ((), [], {}, "") or action.nargs == 0
        return text if is_known or "default:" in text else f"{text} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """A parser whose help may be short.

    Attributes:
        shown: flags in help; None shows all of them.
    """

    shown: frozenset[str] | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Formatter, **options)

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        names = (*names, *(other for other, own in FLAGS.items() if own in names))
        if self.shown is not None and str(names[0]).startswith("-") and not self.shown & set(names):
            options["help"] = argparse.SUPPRESS
        return super().add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith(("?", ".")) else "."
        self.exit(EXIT_USAGE, f"mlx-flash: error: {message}{end} Hint: {self.prog} --help\n")

"""The command line: ``mlx-flash generate``, ``plan``, ``run``, ``serve``, ``chat``, ``exec``, ``pack``, ``cache``.

What was asked for goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import cast

from mlx_flash.commands.arguments import Commands, make_parser
from mlx_flash.commands.cache import cache
from mlx_flash.commands.generate import generate
from mlx_flash.commands.mlx_lm import chat, execute, serve
from mlx_flash.commands.pack import pack
from mlx_flash.commands.plan import plan
from mlx_flash.commands.run import run
from mlx_flash.errors import FlashError

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 2, 130, 141
"""The last two are what a shell reports of programs that the signals end."""

TRACEBACK_VARIABLE = "MLX_FLASH_TRACEBACK"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the arguments; None takes the process's.

    Returns:
        The exit status.
    """
    commands = Commands(
        generate=generate, plan=plan, run=run, serve=serve, chat=chat, execute=execute, pack=pack, cache=cache
    )
    parser = make_parser(commands)
    args, rest = parser.parse_known_args(argv)
    args.rest = rest
    if rest and not args.passes_on:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if args.command is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    out = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):  # libraries print warnings
            return cast(int, args.command(args, out))
    except KeyboardInterrupt:
        print("mlx-flash: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # for the flush when Python ends
        return EXIT_BROKEN_PIPE
    except Exception as error:  # noqa: BLE001 the last line of defence; nothing is swallowed, only worded
        return _tell(error, args.traceback or bool(os.environ.get(TRACEBACK_VARIABLE)))


def _tell(error: Exception, with_traceback: bool) -> int:
    if with_traceback:
        traceback.print_exception(error)
    print(f"mlx-flash: error: {_one_line(error)}", file=sys.stderr)
    return EXIT_ERROR


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {error.filename}"
    text = " ".join(str(error).split())
    if isinstance(error, FlashError | ValueError | OSError):
        return text
    return f"{type(error).__name__}: {text}. Hint: --traceback, or {TRACEBACK_VARIABLE}=1, shows where it came from."

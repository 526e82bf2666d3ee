"""The command line, ``mlx-flash COMMAND``.

Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TextIO

from mlx_flash.commands.arguments import EXIT_USAGE, make_parser, parse_arguments
from mlx_flash.errors import FlashError

EXIT_ERROR, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 130, 141
"""The last two are what a shell reports for programs that the signals end."""

TRACEBACK_VARIABLE = "MLX_FLASH_TRACEBACK"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the arguments; None takes those of the process.

    Returns:
        The exit status.
    """
    args = parse_arguments(list(sys.argv[1:] if argv is None else argv))
    if args.command is None:
        make_parser()[0].print_help(sys.stderr)
        return EXIT_USAGE
    out = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):  # libraries print warnings
            return _load_commands()[args.command](args, out)
    except KeyboardInterrupt:
        print("mlx-flash: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # for the flush when Python ends
        return EXIT_BROKEN_PIPE
    except Exception as error:  # noqa: BLE001 the last line of defence: every error is printed
        return _report(error, args.traceback or bool(os.environ.get(TRACEBACK_VARIABLE)))


def _load_commands() -> dict[str, Callable[[argparse.Namespace, TextIO], int]]:
    """Import the commands, and with them MLX, which takes seconds, and return them by name."""
    from mlx_flash.commands.bench import bench
    from mlx_flash.commands.cache import cache
    from mlx_flash.commands.doctor import doctor
    from mlx_flash.commands.generate import generate
    from mlx_flash.commands.mlx_lm import chat, execute, serve
    from mlx_flash.commands.pack import pack
    from mlx_flash.commands.plan import plan
    from mlx_flash.commands.run import run
    from mlx_flash.commands.verify import verify

    return {
        "generate": generate,
        "run": run,
        "chat": chat,
        "serve": serve,
        "plan": plan,
        "bench": bench,
        "verify": verify,
        "doctor": doctor,
        "exec": execute,
        "pack": pack,
        "cache": cache,
    }


def _report(error: Exception, with_traceback: bool) -> int:
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
    return f"{type(error).__name__}: {text}. Hint: --traceback or {TRACEBACK_VARIABLE}=1 shows its origin."

"""``mlx-flash exec``: programs that use mlx-lm, under the patch."""

from __future__ import annotations

import argparse
import contextlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TextIO

from mlx_flash.commands.common import make_config
from mlx_flash.errors import ConfigError
from mlx_flash.forks import joined_to_the_end
from mlx_flash.integration.mlx_lm import apply_flash_patch


def execute(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash exec``: a program that uses mlx-lm, in this process."""
    command = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not command:
        raise ConfigError("exec: no program is named. Hint: mlx-flash exec -- mlx_lm.generate --model MODEL")
    with apply_flash_patch(make_config(args)), contextlib.redirect_stdout(out), joined_to_the_end():
        return run_program(command)


def run_program(command: Sequence[str]) -> int:
    """Run a Python program in this process, as if typed in a shell. Return its exit status.

    It is a console script of this installation, such as ``mlx_lm.generate``; ``python -m MODULE``; or a Python file.
    """
    name, *arguments = command
    if Path(name).stem.startswith("python") and arguments[:1] == ["-m"] and len(arguments) > 1:
        with _arguments(arguments[1:]):
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return 0
    if Path(name).stem.startswith("python") and arguments and not arguments[0].startswith("-"):
        return run_program(arguments)
    scripts = list(entry_points(group="console_scripts", name=name))
    if scripts:
        with _arguments(command):
            result = scripts[0].load()()
            return result if isinstance(result, int) else 0
    if Path(name).is_file():
        with _arguments(command):
            runpy.run_path(name, run_name="__main__")
        return 0
    raise ConfigError(
        f"exec {name!r}: there is no such Python program. Hint: name a console script such as mlx_lm.generate, "
        "'python -m MODULE', or a Python file."
    )


@contextlib.contextmanager
def _arguments(command: Sequence[str]) -> Iterator[None]:
    """Set ``sys.argv`` and the import path as the program expects them."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = list(command)
    if Path(command[0]).is_file():
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path

"""``mlx-flash exec`` and ``chat``: mlx-lm's own programs, under the patch."""

from __future__ import annotations

import argparse
import contextlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TextIO

from mlx_flash.commands.chat import HELP, chat_habits
from mlx_flash.commands.common import dial, make_config, note
from mlx_flash.config import GB, FlashConfig
from mlx_flash.engine.prepare import prepare, resolve
from mlx_flash.engine.tokenizer import load_tokenizer
from mlx_flash.errors import ConfigError
from mlx_flash.integration.mlx_lm import apply_flash_patch
from mlx_flash.monitor.words import size, speed


def execute(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash exec``: a program that uses mlx-lm, in this process."""
    command = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not command:
        raise ConfigError("exec: no program is named. Hint: mlx-flash exec -- mlx_lm.generate --model MODEL")
    with apply_flash_patch(make_config(args)), contextlib.redirect_stdout(out):
        return run_program(command)


def chat(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash chat``: mlx-lm's chat."""
    config, flags = make_config(args), _with_prefill_step(args)
    _plan(_model_of(flags), config)
    note(HELP)
    with apply_flash_patch(config), chat_habits(), contextlib.redirect_stdout(out):
        return run_program(["mlx_lm.chat", *flags])


def _with_prefill_step(args: argparse.Namespace) -> list[str]:
    """Return the flags for mlx-lm's own parser. ``--prefill-step-size`` goes to both parsers."""
    step = dial(args)["prefill_step_size"]
    return [*args.rest, *(() if step is None else ("--prefill-step-size", str(step)))]


def _model_of(flags: Sequence[str]) -> str | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model")
    model: str | None = parser.parse_known_args(list(flags))[0].model
    return model


def _plan(model: str | None, config: FlashConfig) -> None:
    """Plan ahead, to refuse an impossible budget at once, and print the plan in one line.

    Raises:
        ConfigError: the model has no chat template.
        BudgetError: the budget cannot hold the model.
    """
    if model is None or not config.enabled:
        return
    path = resolve(model)
    tokenizer = load_tokenizer(path, config=config)  # takes memory too
    if not tokenizer.has_chat_template:
        raise ConfigError(
            f"chat: the tokenizer of {path} has no chat template, so it cannot tell who speaks. Hint: continue a text "
            "with `mlx-flash generate`, or add the chat_template.jinja of the model's repository."
        )
    plan = prepare(path, config, writes=False).plan
    del tokenizer
    expected = f", about {speed(1 / plan.opening_seconds)}" if plan.opening_seconds else ""
    note(
        f"mlx-flash: {size(plan.model_bytes)} of weights in a budget of {plan.budget_bytes / GB:.3f} GB: "
        f"{size(plan.read_bytes)} read for each token{expected}"
    )


def run_program(command: Sequence[str]) -> int:
    """Run a Python program in this process, as if typed in a shell.

    Args:
        command: a console script of this installation, such as ``mlx_lm.generate``; ``python -m MODULE``; or a
            path to a Python file; then its arguments.

    Returns:
        Its exit status, unless it raises ``SystemExit``.

    Raises:
        ConfigError: the program is unknown.
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

"""Flags of the command line. Flags that mlx-lm has too keep its names and defaults.

Nothing here imports MLX, so that help appears at once.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from mlx_flash import __version__
from mlx_flash.commands.borrowed import borrow_flags
from mlx_flash.commands.ranges import (
    boolean,
    count,
    json_object,
    max_tokens,
    port,
    prompt_tokens,
    ranks,
    seconds,
    setting,
)
from mlx_flash.commands.serve_flags import add_model_flags, add_serve_flags
from mlx_flash.config import FlashConfig, did_you_mean, setting_kinds

EXIT_USAGE = 2

SETTINGS = tuple(field.name for field in fields(FlashConfig) if field.name not in {"enabled", "poison_released_slots"})
"""The fields of ``FlashConfig`` that are flags of every command."""

BASICS = ("ram_budget_gb", "context_length", "prefill_step_size")
"""The settings that help shows first; the others are for tuning."""

LOG = 2
"""Value of ``args.verbose`` that asks for the log, too."""

Parser = argparse.ArgumentParser
Flag = tuple[tuple[str, ...], dict[str, Any]]
"""The arguments of ``add_argument``."""


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand.

    Attributes:
        usage: the arguments in a usage line.
        help: one line about the command.
        flags: its own flags; or a function that adds them; or the program of mlx-lm that has them.
        more: further flags, beside those of mlx-lm's program.
        first: adds flags before all others.
        streams: the command loads models, so it takes the flags of all settings.
        model: the command requires ``--model``.
    """

    usage: str
    help: str
    flags: Sequence[Flag] | Callable[[Parser], None] | str
    more: Sequence[Flag] = ()
    first: Callable[[Parser], None] | None = None
    streams: bool = True
    model: bool = True


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Return the parsed arguments. Errors and help end the program, as argparse does.

    ``args.command`` is a name in :data:`COMMANDS`, or None; ``args.rest`` has the flags for mlx-lm's own parser.
    """
    if argv[:1] == ["help"]:
        argv = [*argv[1:2], "--help"]
    name = argv[0] if argv and not argv[0].startswith("-") else None
    parser, command = make_parser(name)
    args, unknown = parser.parse_known_args(argv)
    if command is not None and unknown:
        command.error(_unrecognized(unknown, re.findall(r"--[a-z][a-z-]+", command.format_help())))
    if command is not None and COMMANDS[args.command].model and args.model is None:
        command.error("the following arguments are required: --model")
    return args


def _unrecognized(unknown: list[str], known: Iterable[str]) -> str:
    """Return an error that suggests the nearest flag for the first unknown one."""
    flag = next((word for word in unknown if word.startswith("-")), unknown[0])
    return f"unrecognized arguments: {' '.join(unknown)}{did_you_mean(flag.partition('=')[0], known)}"


def make_parser(chosen: str | None = None) -> tuple[Parser, Parser | None]:
    """Return the parser of the command line, and the parser of the chosen command, the only one that gets flags."""
    parser = Parser(prog="mlx-flash", description="Run mlx-lm models larger than memory, bit for bit.")
    parser.add_argument("-V", "--version", action="version", version=f"mlx-flash {__version__}")
    parser.set_defaults(command=None, traceback=False, verbose=True, quiet=False, rest=[])
    if chosen is not None and chosen not in COMMANDS:
        parser.error(f"there is no command {chosen!r}{did_you_mean(chosen, COMMANDS)}")
    adding = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    found = None
    for name, command in COMMANDS.items():
        words = f"{command.help[0].upper()}{command.help[1:]}."
        usage = f"mlx-flash {name} {command.usage}"
        made = adding.add_parser(name, help=command.help, description=words, usage=usage, allow_abbrev=False)
        if name == chosen:
            _add_flags(found := made, command)
    return parser, found


def _add_flags(parser: Parser, command: Command) -> None:
    """Add all flags of a command: the basics first, those for tuning last."""
    help_texts = setting_help() if command.streams else {}
    if command.model:
        parser.add_argument("--model", help="model directory, or Hugging Face repository")
    if command.first is not None:
        command.first(parser)
    if isinstance(command.flags, str):
        borrow_flags(parser, command.flags, "--model")
    for name in BASICS if command.streams else ():
        _add_setting(parser, name, help_texts.get(name, ""))
    if isinstance(command.flags, str):
        borrow_flags(parser, command.flags)
    elif callable(command.flags):
        command.flags(parser)
    else:
        for names, options in command.flags:
            parser.add_argument(*names, **options)
    for names, options in command.more:
        parser.add_argument(*names, **options)
    _add_loudness(parser, has_log=not isinstance(command.flags, str))
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    tuning = parser.add_argument_group("tuning")
    for name in SETTINGS if command.streams else ():
        if name not in BASICS:
            _add_setting(tuning, name, help_texts.get(name, ""))


def _add_loudness(parser: Parser, *, has_log: bool) -> None:
    """Add ``--quiet``, and ``--verbose`` where mlx-lm's program has no log of its own."""
    parser.add_argument("--quiet", action="store_true", help="results and errors alone: no progress, notes or warnings")
    with contextlib.suppress(argparse.ArgumentError):  # the command has a flag of that name
        if has_log:
            parser.add_argument("--verbose", action="store_const", const=LOG, default=True, help="print the log, too")


def setting_help() -> dict[str, str]:
    """Return the first sentence of each setting's documentation, by field of ``FlashConfig``."""
    text = inspect.cleandoc(FlashConfig.__doc__ or "")
    entries = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", text, re.MULTILINE)
    return {name: re.split(r"\.\s", " ".join(words.split()) + " ")[0].replace("`", "") for name, words in entries}


def _add_setting(parser: Any, name: str, words: str) -> None:
    """Add the flag of a field of ``FlashConfig``: its type and choices are the field's, and it has no default."""
    kind, default = setting_kinds(name)[0], getattr(FlashConfig, name)
    if default is not None:
        words += f" (default: {('off', 'on')[default] if isinstance(default, bool) else default})"
    options: dict[str, Any] = {"help": words, "default": None}
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif get_origin(kind) is Literal:
        options["choices"] = get_args(kind)
    else:
        metavar = {int: "N", Path: "DIR", str: "NAME"}.get(kind, name.rpartition("_")[2].upper())
        options |= {"metavar": "GB" if name == "ssd_write_gb_per_day" else metavar}
        options |= {"type": setting(name)}
    parser.add_argument(f"--{name.replace('_', '-')}", **options)


def _flag(*names: str, **options: Any) -> Flag:
    return names, options


def _add_generate_flags(parser: Parser) -> None:
    """Add mlx-lm's own flags after those that we check more strictly."""
    words = "tokens to generate at most; -1: no limit"
    add = parser.add_argument
    add("--prompt", "-p", default="hello", metavar="TEXT", help="the prompt ('-' reads it from stdin)")
    add("--max-tokens", "-m", type=max_tokens, default=100, metavar="N", help=words)
    words = "False: text alone on stdout; without a value: print the log, too"
    add("--verbose", type=boolean, nargs="?", const=LOG, default=True, metavar="BOOL", help=words)
    add("--chat-template-config", type=json_object, default=None, metavar="JSON", help="for the chat template")
    borrow_flags(parser, "generate", parse=True, without=("--image", "--quantize-activations"))
    add("--json", action="store_true", help="write one JSON object to stdout")
    add("--resident", action="store_true", help="keep everything in memory, by mlx-lm alone, to compare with")
    add("--routing-trace", type=Path, metavar="FILE", help="record the experts of each token, for benchmarks")


def _add_chat_flags(parser: Parser) -> None:
    """Add mlx-lm's own flags. Those that a Modelfile may give have no default."""
    borrow_flags(parser, "chat", parse=True)
    parser.set_defaults(temp=None, top_p=None, max_tokens=None)
    parser.add_argument(
        "--verbose", action="store_const", const=LOG, default=False, help="print the log, and all measurements"
    )


_JSON = _flag("--json", action="store_true", help="write one JSON object to stdout")
_ACCESS = (
    _flag("--api-key-file", type=Path, metavar="FILE", help="a key that clients must send (also MLX_FLASH_API_KEY)"),
    _flag("--no-auth", action="store_true", help="let other machines connect without a key"),
)
_RUN = (
    _flag("words", nargs="*", metavar="MODEL | PROMPT", help="a model to run without a Modelfile; a prompt to answer"),
    _flag("-f", "--file", metavar="MODELFILE", help="default: ./Modelfile"),
    _flag("--max-tokens", "-m", type=max_tokens, metavar="N", help="overrides num_predict of the Modelfile"),
    _flag(
        "--verbose",
        action="store_const",
        const=LOG,
        default=False,
        help="print the log, and budget, speed and peak memory after each answer",
    ),
    _flag("--serve", action="store_true", help="serve it, as mlx-flash serve does"),
    _flag("--host", default="127.0.0.1", help="for --serve"),
    _flag("--port", type=port, default=8080, help="for --serve"),
    *_ACCESS,
)
_PLAN = (
    _JSON,
    _flag("--budgets", action="store_true", help="compare budgets: peak, speed, first token, longest context"),
    _flag("--ranks", type=ranks, default=1, metavar="N", help="show the layers of each of N machines like this one"),
    _flag("--trust-remote-code", action="store_true", help="run the code that comes with a tokenizer"),
)
_BENCH = (
    _flag("--prompt-tokens", type=prompt_tokens, default=64, metavar="N", help="length of the prompt (default: 64)"),
    _flag("--max-tokens", "-m", type=count, default=16, metavar="N", help="tokens to generate (default: 16)"),
    _JSON,
)
_VERIFY = (
    _flag("--prompt-tokens", type=prompt_tokens, default=16, metavar="N", help="length of the prompt (default: 16)"),
    _flag("--max-tokens", "-m", type=count, default=4, metavar="N", help="tokens after it (default: 4)"),
    _flag(
        "--reference",
        choices=("resident", "layers"),
        help="mlx-lm's model whole in memory, or one layer at a time; unset: whole where memory allows",
    ),
    _flag("--output", "-o", type=Path, metavar="FILE", help="save the receipt"),
    _flag("--against", type=Path, metavar="FILE", help="compare with another receipt"),
    _JSON,
)
_DOCTOR = (
    _flag("--model", help="model directory, or Hugging Face repository: compare budgets, and measure a short run"),
    _flag(
        "--prompt-tokens",
        type=prompt_tokens,
        default=16,
        metavar="N",
        help="prompt of the measured run (default: 16)",
    ),
    _flag(
        "--max-tokens",
        "-m",
        type=count,
        default=12,
        metavar="N",
        help="tokens of the measured run (default: 12)",
    ),
    _JSON,
)
_EXEC = (_flag("program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="such as: mlx_lm.generate --model MODEL"),)
_PACK = (
    _flag("source", help="model directory, or Hugging Face repository"),
    _flag("target", help="directory to make"),
    _flag("--verify", action="store_true", help="read everything back and compare"),
    _JSON,
)
_LIST = (
    _flag("folders", nargs="*", type=Path, metavar="FOLDER", help="folders to look in, beside Hugging Face's cache"),
    _JSON,
)
_STOP = (
    _flag("engine", metavar="PID | MODEL", help="process or model, as ps shows it"),
    _flag("--timeout", type=seconds, default=30.0, metavar="S", help="seconds to wait for its end (default: 30)"),
)
_COMPLETION = (_flag("shell", choices=("bash", "zsh", "fish"), help="the shell that runs the printed code"),)
_CACHE = (_flag("action", choices=("list", "clear"), help="clear removes everything that is not in use"), _JSON)

COMMANDS = {
    "generate": Command("--model MODEL [flags]", "generate text", _add_generate_flags),
    "run": Command(
        "[MODEL] [PROMPT] | -f MODELFILE [PROMPT]",
        "chat with, prompt, or serve a model or a Modelfile",
        _RUN,
        model=False,
    ),
    "chat": Command("--model MODEL [flags]", "chat, with the flags of mlx-lm's chat", _add_chat_flags, model=False),
    "serve": Command(
        "--model MODEL [flags]",
        "answer requests in OpenAI's dialect",
        add_serve_flags,
        _ACCESS,
        first=add_model_flags,
        model=False,
    ),
    "plan": Command("--model MODEL [flags]", "show what stays in memory, and the expected speed", _PLAN),
    "bench": Command("--model MODEL [flags]", "measure a model against its plan", _BENCH),
    "verify": Command("--model MODEL [flags]", "compare streamed output with mlx-lm's, bit for bit", _VERIFY),
    "doctor": Command(
        "[--model MODEL] [flags]", "look at machine, disk and MLX, and compare budgets of a model", _DOCTOR, model=False
    ),
    "list": Command("[FOLDER ...]", "list models here: size, fit, and expected speed", _LIST, model=False),
    "ps": Command("[--json]", "list running engines", (_JSON,), streams=False, model=False),
    "stop": Command("PID | MODEL", "end a running engine", _STOP, streams=False, model=False),
    "exec": Command(
        "[flags] -- PROGRAM [its flags]", "run any program that uses mlx-lm, streaming", _EXEC, model=False
    ),
    "pack": Command(
        "SOURCE TARGET",
        "rewrite a checkpoint in the order in which it is read",
        _PACK,
        streams=False,
        model=False,
    ),
    "cache": Command(
        "list|clear",
        "list models and cached data, or remove the cached data",
        _CACHE,
        streams=False,
        model=False,
    ),
    "completion": Command(
        "bash|zsh|fish", "print code that completes commands, flags and models", _COMPLETION, streams=False, model=False
    ),
}
"""The commands by name, in the order of help."""

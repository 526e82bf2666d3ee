"""Flags of the command line. Flags that mlx-lm has too keep its names and defaults.

Nothing here imports MLX, so that help appears at once.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from mlx_flash import __version__
from mlx_flash.commands import flags
from mlx_flash.commands.borrowed import DRAFTED, borrow_flags, default_of
from mlx_flash.commands.flags import JSON, LOG, VISION, Flag
from mlx_flash.commands.flagtypes import boolean, json_object, max_tokens, setting
from mlx_flash.commands.parser import SHOWN, Parser
from mlx_flash.commands.serve_flags import add_model_flags, add_serve_flags
from mlx_flash.config import FlashConfig, did_you_mean, setting_kinds

SETTINGS = tuple(field.name for field in fields(FlashConfig) if field.name not in {"enabled", "poison_released_slots"})
"""The fields of ``FlashConfig`` that are flags of every command."""

BASICS = ("ram_budget_gb", "context_length", "prefill_step_size")
"""The settings that help shows first; the others are for tuning."""

_ALL_HELP = "--help-tuning"


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand.

    Attributes:
        usage: the arguments after the model in a usage line.
        help: one line about the command.
        flags: its own flags; or a function that adds them.
        more: further flags.
        first: adds flags before all others.
        streams: the command loads models, so it takes the flags of all settings.
        model: the model in a usage line, in brackets if it may be left out, with ``...`` if there may be several; empty
            for a command without one. It is the first argument, or ``--model``.
    """

    usage: str
    help: str
    flags: Sequence[Flag] | Callable[[Parser], None]
    more: Sequence[Flag] = ()
    first: Callable[[Parser], None] | None = None
    streams: bool = True
    model: str = ""


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Return the parsed arguments. Errors and help end the program, as argparse does.

    ``args.command`` is a name in :data:`COMMANDS`, or None. Flags without a command are those of ``generate``, or of
    ``run`` if one is ``--modelfile``.
    """
    if argv[:1] == ["help"]:
        argv = [*argv[1:2], "--help"]
    elif argv and argv[0].startswith("--") and argv[0] not in ("--", "--help", "--version"):
        has_file = any(word.startswith("--modelfile") for word in argv)
        argv = ["run" if has_file else "generate", *argv]
    name = argv[0] if argv and not argv[0].startswith("-") else None
    parser, command = make_parser(name)
    if name is not None and _ALL_HELP in itertools.takewhile(lambda word: word != "--", argv):
        print(_whole_help(name), end="")
        parser.exit()
    if name is None or command is None:
        return parser.parse_args(argv)
    parse = command.parse_known_args if name == "exec" else command.parse_known_intermixed_args
    args, unknown = parse(argv[1:], argparse.Namespace(command=name))
    if unknown:
        command.error(_unrecognized(unknown, re.findall(r"--[a-z][a-z-]+", _whole_help(name))))
    if kind := COMMANDS[name].model:
        if args.first and args.model and "..." not in kind:
            command.error(f"two models are given, {args.first} and --model {args.model}")
        args.model = [*args.first, *args.model] if "..." in kind else args.first or args.model
        if not args.model and not kind.startswith("["):
            command.error(f"the following arguments are required: {kind}, as the first argument or by --model")
    return args


def _unrecognized(unknown: list[str], known: Iterable[str]) -> str:
    """Return an error that suggests the nearest flag for the first unknown one."""
    flag = next((word for word in unknown if word.startswith("-")), unknown[0])
    return f"unrecognized arguments: {' '.join(unknown)}{did_you_mean(flag.partition('=')[0], known)}"


def _whole_help(command: str) -> str:
    parser = make_parser(command, is_whole=True)[1]
    return "" if parser is None else parser.format_help()


def make_parser(chosen: str | None = None, *, is_whole: bool = False) -> tuple[Parser, Parser | None]:
    """Return the parser of the command line, and the parser of the chosen command, the only one that gets flags.

    Args:
        chosen: the command.
        is_whole: show all flags in its help.
    """
    parser = Parser(prog="mlx-flash", description="Run mlx-lm models larger than memory, bit for bit.")
    parser.add_argument("-V", "--version", action="version", version=f"mlx-flash {__version__}")
    parser.set_defaults(command=None, traceback=False, verbose=True, quiet=False)
    if chosen is not None and chosen not in COMMANDS:
        parser.error(f"there is no command {chosen!r}{did_you_mean(chosen, COMMANDS)}")
    adding = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    found = None
    for name, command in COMMANDS.items():
        words = f"{command.help[0].upper()}{command.help[1:]}."
        usage = " ".join(["mlx-flash", name, *command.model.split(), command.usage])
        made = adding.add_parser(name, help=command.help, description=words, usage=usage, allow_abbrev=False)
        if name == chosen:
            found = made
            own = [] if callable(command.flags) else [names for names, _ in (*command.flags, *command.more)]
            found.shown = None if is_whole else SHOWN.union(*own)
            _add_flags(found, command)
    return parser, found


def _add_flags(parser: Parser, command: Command) -> None:
    """Add all flags of a command: the basics first, those for tuning last."""
    help_texts = setting_help() if command.streams else {}
    if command.model:
        nargs, options = ("*", {"action": "append", "default": []}) if "..." in command.model else ("?", {})
        parser.add_argument("first", nargs=nargs, metavar="MODEL", help="folder, Hugging Face repository, or name")
        parser.add_argument("--model", metavar="MODEL", help="the same, at any place", **options)
    if command.first is not None:
        command.first(parser)
    for name in BASICS if command.streams else ():
        _add_setting(parser, name, help_texts.get(name, ""))
    if callable(command.flags):
        command.flags(parser)
    else:
        for names, options in command.flags:
            parser.add_argument(*names, **options)
    for names, options in command.more:
        parser.add_argument(*names, **options)
    _add_loudness(parser)
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    if command.streams or callable(command.flags):
        parser.add_argument(_ALL_HELP, action="store_true", help="show all flags")
    tuning = parser if parser.shown is not None else parser.add_argument_group("tuning")
    for name in SETTINGS if command.streams else ():
        if name not in BASICS:
            _add_setting(tuning, name, help_texts.get(name, ""))


def _add_loudness(parser: Parser) -> None:
    """Add ``--quiet`` and ``--verbose``."""
    parser.add_argument("--quiet", action="store_true", help="results and errors alone: no progress, notes or warnings")
    with contextlib.suppress(argparse.ArgumentError):  # the command has a flag of that name
        parser.add_argument("--verbose", action="store_const", const=LOG, default=True, help="print the log, too")


def setting_help() -> dict[str, str]:
    """Return help by field of ``FlashConfig``: the first sentence of its documentation, and the default.

    The default of an unset field is what the sentence that begins with None says.
    """
    text = inspect.cleandoc(FlashConfig.__doc__ or "")
    found = {}
    for name, entry in re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", text, re.MULTILINE):
        sentences = re.split(r"\.\s", " ".join(entry.replace("`", "").split()) + " ")
        unset = next((words[5:].removeprefix("is ") for words in sentences if words.startswith("None ")), "none")
        default = getattr(FlashConfig, name)
        value = unset if default is None else ("off", "on")[default] if isinstance(default, bool) else default
        found[name] = f"{sentences[0]} (default: {value})"
    return found


def _add_setting(parser: Any, name: str, words: str) -> None:
    """Add the flag of a field of ``FlashConfig``: its type and choices are the field's, and it is None if unset."""
    kind = setting_kinds(name)[0]
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


def _add_generate_flags(parser: Parser) -> None:
    """Add mlx-lm's own flags after those that we check more strictly."""
    words = "tokens to generate at most; -1: no limit"
    add = parser.add_argument
    text = "the prompt; '-' reads it from standard input (default: what is piped in, or"
    add("--prompt", "-p", metavar="TEXT", help=f"{text} {default_of('generate', '--prompt')!r})")
    add("--max-tokens", "-m", type=max_tokens, default=100, metavar="N", help=words)
    words = "False: text alone on stdout; without a value: print the log, too"
    add("--verbose", type=boolean, nargs="?", const=LOG, default=True, metavar="BOOL", help=words)
    add("--chat-template-config", type=json_object, default=None, metavar="JSON", help="for the chat template")
    words = "pictures for the prompt, in their order; needs mlx-vlm"
    add("--image", type=Path, nargs="+", metavar="FILE", help=words)
    add(*DRAFTED[0], **DRAFTED[1])
    parser.add_argument(*VISION[0], **VISION[1])
    _add_idle_flags(parser)
    borrow_flags(parser, "generate", without=("--quantize-activations",))
    add("--json", action="store_true", help="write one JSON object to stdout")
    add("--resident", action="store_true", help="keep everything in memory, by mlx-lm alone, to compare with")
    add("--routing-trace", type=Path, metavar="FILE", help="record the experts of each token, for benchmarks")


def _add_run_flags(parser: Parser) -> None:
    """Add the flags of prompts and Modelfiles, and those of conversations."""
    _add_talk_flags(parser, *flags.RUN)
    parser.set_defaults(seed=None)


def _add_chat_flags(parser: Parser) -> None:
    """Add the flags of conversations."""
    _add_talk_flags(parser)
    parser.set_defaults(words=(), prompt=None, file=None, serve=False)


def _add_talk_flags(parser: Parser, *more: Flag) -> None:
    """Add our flags and mlx-lm's. A Modelfile may give some of their values."""
    for names, options in (*more, *flags.CHAT):
        parser.add_argument(*names, **options)
    _add_idle_flags(parser)
    borrow_flags(parser, "chat", without=["--model"], described=["--temp", "--top-p"])


def _add_idle_flags(parser: Parser) -> None:
    """Add flags of other programs that only cause a warning (:data:`mlx_flash.aliases.IDLE`)."""
    parser.add_argument("--tile-size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--no-pipeline", action="store_true", dest="pipelined_execution", help=argparse.SUPPRESS)


COMMANDS = {
    "generate": Command("[flags]", "generate text", _add_generate_flags, model="MODEL"),
    "run": Command(
        "[MODEL] [PROMPT] | -f MODELFILE [PROMPT]",
        "chat with, prompt, or serve a model or a Modelfile",
        _add_run_flags,
    ),
    "chat": Command("[flags]", "chat, with the flags of mlx-lm's chat", _add_chat_flags, model="[MODEL]"),
    "serve": Command(
        "[flags]",
        "answer requests in OpenAI's, Ollama's and Anthropic's dialects",
        add_serve_flags,
        flags.ACCESS,
        first=add_model_flags,
        model="[[NAME=]MODEL ...]",
    ),
    "plan": Command("[flags]", "show what stays in memory, and the expected speed", flags.PLAN, model="MODEL"),
    "bench": Command("[flags]", "measure a model against its plan", flags.BENCH, model="MODEL"),
    "verify": Command("[flags]", "compare streamed output with mlx-lm's, bit for bit", flags.VERIFY, model="MODEL"),
    "doctor": Command(
        "[flags]", "look at machine, disk and MLX, and compare budgets of a model", flags.DOCTOR, model="[MODEL]"
    ),
    "list": Command("[FOLDER ...]", "list models here: size, fit, and expected speed", flags.LIST),
    "pull": Command("[flags]", "download a model, after showing its plan", flags.PULL, model="REPOSITORY"),
    "show": Command("[flags]", "show a model's files and its plan, or a Modelfile", flags.SHOW, model="MODEL"),
    "create": Command("NAME [-f MODELFILE]", "give a Modelfile a name", flags.CREATE, streams=False),
    "rm": Command(
        "[--yes]", "remove downloaded models and named Modelfiles", flags.RM, streams=False, model="NAME ..."
    ),
    "ps": Command("[--json]", "list running engines", (JSON,), streams=False),
    "stop": Command("[flags]", "end a running engine", flags.STOP, streams=False, model="PID|MODEL"),
    "exec": Command("[flags] -- PROGRAM [its flags]", "run any program that uses mlx-lm, streaming", flags.EXEC),
    "pack": Command(
        "TARGET", "rewrite a checkpoint in the order in which it is read", flags.PACK, streams=False, model="SOURCE"
    ),
    "cache": Command(
        "list|clear", "list models and cached data, or remove the cached data", flags.CACHE, streams=False
    ),
    "completion": Command(
        "bash|zsh|fish", "print code that completes commands, flags and models", flags.COMPLETION, streams=False
    ),
}
"""The commands by name, in the order of help."""

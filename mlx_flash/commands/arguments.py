"""Flags of the command line. Flags that mlx-lm has too keep its names and defaults.

Nothing here imports MLX, so that help appears at once.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib.util
import inspect
import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from mlx_flash import __version__
from mlx_flash.config import FLAGS, FlashConfig, did_you_mean, parse_setting, setting_kinds
from mlx_flash.errors import ConfigError
from mlx_flash.modelfile.parse import DEFAULT_MAX_TOKENS
from mlx_flash.monitor.words import seconds_of

Type = Callable[[str], Any]

LARGEST = 2**31 - 1
"""The greatest number of tokens: MLX counts places in 32 bits."""

_LONGEST_PROMPT = 10_000_000
_MOST_RANKS = 4096


def whole(least: int, most: int = LARGEST) -> Type:
    """Return a type of whole numbers."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text} is not between {least} and {most}")
        return number

    return parse


def real(least: float, most: float) -> Type:
    """Return a type of numbers."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if math.isnan(number) or not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text} is not between {least:g} and {most:g}")
        return number

    return parse


def one_of(*numbers: int) -> Type:
    """Return a type of some numbers."""

    def parse(text: str) -> int:
        if text not in map(str, numbers):
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(map(str, numbers))}")
        return int(text)

    return parse


def setting(name: str) -> Type:
    """Return the type of a field of ``FlashConfig``."""

    def parse(text: str) -> Any:
        try:
            return parse_setting(name, text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def duration(text: str) -> float:
    """Return a time in seconds, as Ollama takes it: ``300``, ``5m``; negative without end."""
    try:
        return seconds_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def max_tokens(text: str) -> int:
    """Return a number of tokens to generate; -1 is no limit."""
    return -1 if text == "-1" else _tokens(text)


def boolean(text: str) -> bool:
    """Return False for ``false`` and ``f``, as mlx-lm does."""
    return text.lower() not in {"false", "f"}


def json_object(text: str) -> dict[str, Any]:
    """Return a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _tokens(text: str) -> int:
    try:
        number: int = whole(1)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; -1 sets no limit") from None
    return number


def kv_bits(text: str) -> int | None:
    """Return the bits of quantized keys and values; None for 0."""
    return None if text == "0" else one_of(2, 3, 4, 5, 6, 8)(text)


count = whole(1)
prompt_tokens = whole(1, _LONGEST_PROMPT)
ranks = whole(1, _MOST_RANKS)
port = whole(1, 65535)
seconds = real(0, 86_400)

OF_MLX_LM: dict[str, Type] = {
    "--temp": real(0, 1000),
    "--top-p": real(0, 1),
    "--min-p": real(0, 1),
    "--top-k": whole(0),
    "--xtc-probability": real(0, 1),
    "--xtc-threshold": real(0, 0.5),
    "--min-tokens-to-keep": count,
    "--seed": whole(0, 2**64 - 1),
    "--max-tokens": max_tokens,
    "--max-kv-size": count,
    "--kv-bits": kv_bits,
    "--kv-group-size": one_of(32, 64, 128),
    "--quantized-kv-start": whole(0),
    "--num-draft-tokens": count,
    "--port": port,
    "--decode-concurrency": count,
    "--prompt-concurrency": count,
    "--prompt-cache-size": whole(0),
}
"""The types of mlx-lm's flags, by name."""


KEEP_ALIVE = ("--keepalive", "--keep-alive")
"""A flag under Ollama's name and ours."""

LOG = 2
"""Value of ``args.verbose`` that asks for the log, too."""

Flag = tuple[tuple[str, ...], dict[str, Any]]
"""The arguments of ``add_argument``."""


def flag(*names: str, **options: Any) -> Flag:
    """Return the arguments of a flag."""
    return names, options


JSON = flag("--json", action="store_true", help="write one JSON object to stdout")
VISION = flag(
    "--vision",
    action=argparse.BooleanOptionalAction,
    default=None,
    help="load a model that sees with mlx-vlm, and not as text alone with mlx-lm",
)
ACCESS = (
    flag("--api-key-file", type=Path, metavar="FILE", help="a key that clients must send (also MLX_FLASH_API_KEY)"),
    flag("--no-auth", action="store_true", help="let other machines connect without a key"),
)
CHAT = (
    flag("--image", type=Path, action="extend", nargs="+", metavar="FILE", help="pictures for the first message"),
    VISION,
    flag("--format", metavar="json|FILE", help="answer in JSON, or by the JSON schema in a file"),
    flag("--resume", action="store_true", help="go on with the last conversation"),
    flag(
        *KEEP_ALIVE,
        type=duration,
        metavar="TIME",
        help="time that the model stays in memory without a message, such as 5m (default: until the end)",
    ),
    flag(
        "--max-tokens",
        "-m",
        type=max_tokens,
        metavar="N",
        help=f"most tokens of an answer; -1: no limit (default: the Modelfile's num_predict, or {DEFAULT_MAX_TOKENS})",
    ),
    flag("--verbose", action="store_const", const=LOG, default=False, help="print the log, and all measurements"),
)
RUN = (
    flag("--model", help="the same, at any place"),
    flag("words", nargs="*", metavar="MODEL | PROMPT", help="a model; a prompt to answer, '-' reads it"),
    flag("--prompt", "-p", metavar="TEXT", help="the prompt, at any place"),
    flag("-f", "--file", metavar="MODELFILE", help="default: ./Modelfile"),
    flag("--serve", action="store_true", help="serve it, as mlx-flash serve does"),
    flag("--host", default="127.0.0.1", help="for --serve"),
    flag("--port", type=port, default=8080, help="for --serve"),
    *ACCESS,
)
PLAN = (
    VISION,
    JSON,
    flag("--budgets", action="store_true", help="compare budgets: peak, speed, first token, longest context"),
    flag("--ranks", type=ranks, default=1, metavar="N", help="show the layers of each of N machines like this one"),
    flag("--trust-remote-code", action="store_true", help="run the code that comes with a tokenizer"),
)


def measured(prompt_length: int, num_tokens: int) -> tuple[Flag, ...]:
    """Return the flags of commands that measure a run, with the defaults of its lengths."""
    return (
        flag("--prompt-tokens", type=prompt_tokens, default=prompt_length, metavar="N", help="length of the prompt"),
        flag("--max-tokens", "-m", type=count, default=num_tokens, metavar="N", help="tokens to generate"),
        VISION,
        JSON,
    )


_WHOLE = "mlx-lm's model whole in memory, or one layer at a time; unset: whole where memory allows"
VERIFY = (
    flag("--reference", choices=("resident", "layers"), help=_WHOLE),
    flag("--output", "-o", type=Path, metavar="FILE", help="save the receipt"),
    flag("--against", type=Path, metavar="FILE", help="compare with another receipt"),
    *measured(16, 4),
)
EXEC = (flag("program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="such as: mlx_lm.generate --model MODEL"),)
PACK = (
    flag("target", help="directory to make"),
    flag("--compress", action="store_true", help="compress what shrinks, if that is expected to pay on this machine"),
    flag("--compress-always", action="store_true", help="compress what shrinks"),
    JSON,
)
LIST = (
    flag("folders", nargs="*", type=Path, metavar="FOLDER", help="folders to look in, beside Hugging Face's cache"),
    JSON,
)
PULL = (
    flag("--revision", metavar="NAME", help="branch, tag or commit (default: main)"),
    JSON,
)
SHOW = (
    flag("--modelfile", action="store_true", help="print the Modelfile"),
    JSON,
)
CREATE = (
    flag("name", metavar="NAME", help="for run, show, list, rm and the server"),
    flag("-f", "--file", default="Modelfile", metavar="MODELFILE", help="the Modelfile"),
)
RM = (flag("-y", "--yes", action="store_true", help="do not ask"),)
STOP = (flag("--timeout", type=seconds, default=30.0, metavar="S", help="seconds to wait for its end"),)
COMPLETION = (flag("shell", choices=("bash", "zsh", "fish"), help="the shell that runs the printed code"),)
CACHE = (flag("action", choices=("list", "clear"), help="clear removes everything that is not in use"), JSON)


EXIT_USAGE = 2

WIDTH, HELP_COLUMN = 80, 32

SHOWN = frozenset(
    {
        *("--help", "--help-tuning", "--model", "--ram-budget-gb", "--context-length", "--prefill-step-size"),
        *("--prompt", "--max-tokens", "--system-prompt", "--temp", "--top-p", "--seed", "--adapter-path"),
        *("--draft-model", "--json", "--resident", "--host", "--port", "--api-key-file", "--no-auth", "--models-dir"),
        *("--file", "--serve", "--image", "--format", "--resume", "--keep-alive", "--verbose", "--quiet"),
        "--traceback",
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

    def add(self, *flags: Flag) -> None:
        """Add flags."""
        for names, options in flags:
            self.add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith(("?", ".")) else "."
        self.exit(EXIT_USAGE, f"mlx-flash: error: {message}{end} Hint: {self.prog} --help\n")


_TYPES = {"int": int, "float": float, "str": str}

_WORDS = "most tokens to guess at a time with a draft model (default: as many as pay)"
DRAFTED = flag("--num-draft-tokens", type=count, metavar="N", help=_WORDS)
"""A flag of mlx-lm that has no default here."""


def borrow_flags(
    parser: argparse.ArgumentParser,
    program: str,
    without: Sequence[str] = (),
    described: Sequence[str] = (),
) -> None:
    """Add the flags of one of mlx-lm's programs that the parser lacks, with mlx-lm's defaults.

    Args:
        parser: the parser.
        program: module of mlx-lm, such as ``server``.
        without: flags to leave out.
        described: flags whose values a Modelfile may give. Their default is None.
    """
    for names, keywords in flags_of(program):
        if names[0] not in without:
            options = {**keywords, **_type_of(names)}
            if names[0] in described:
                words = f"{options['help']} (default: the Modelfile's, or {options['default']})"
                options |= {"default": None, "help": words}
            with contextlib.suppress(argparse.ArgumentError):  # the parser has the flag
                parser.add_argument(*names, **options)


def _type_of(names: Sequence[str]) -> dict[str, Any]:
    return {"type": OF_MLX_LM[names[0]]} if names[0] in OF_MLX_LM else {}


@functools.cache
def flags_of(program: str) -> Sequence[tuple[list[str], dict[str, Any]]]:
    """Return the names and keywords of each ``add_argument`` in the source of a module of mlx-lm."""
    tree = _parse(program)
    constants, found = _TYPES | _constants(tree), []
    for node in _calls(tree.body):
        if isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = [str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)]
            given = {str(keyword.arg): _value(keyword.value, constants) for keyword in node.keywords}
            found.append((names, {name: value for name, value in given.items() if value is not None}))
    return found


def default_of(program: str, flag: str) -> Any:
    """Return mlx-lm's default of a flag."""
    return next(options["default"] for names, options in flags_of(program) if flag in names)


def _parse(module: str) -> ast.Module:
    spec = importlib.util.find_spec("mlx_lm")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return ast.parse((Path(folders[0]) / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Return the constants that a module defines, or imports from its neighbours."""
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            found |= {target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and node.level and node.module:
            names = [alias.name for alias in node.names if alias.name.isupper()]
            imported = _constants(_parse(node.module)) if names else {}
            found |= {name: imported[name] for name in names if name in imported}
    return found


def _calls(statements: Sequence[ast.stmt]) -> Iterator[ast.Call]:
    """Yield the calls that are statements of their own, in blocks too: most nodes are inside other expressions."""
    for statement in statements:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            yield statement.value
        for name in ("body", "orelse", "finalbody"):
            yield from _calls(getattr(statement, name, ()))


def _value(node: ast.expr, constants: dict[str, Any]) -> Any:
    """Return the value of a literal, of a name or an f-string made of module constants; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    if isinstance(node, ast.List | ast.Tuple):
        return tuple(_value(part, constants) for part in node.elts)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(_value(part, constants)) for part in node.values)
    return _value(node.value, constants) if isinstance(node, ast.FormattedValue) else None


_OWN = ("--model", "--max-tokens", "--allowed-origins", "--chat-template-args", "--prompt-cache-bytes")
"""mlx-lm's flags that are checked here."""

_WITHOUT_EFFECT = ("--pipeline", "--use-default-chat-template")
"""mlx-lm's flags that change nothing: ranks always share layers, and no tokenizer has such a template any more."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def _add_serve_flags(parser: Parser) -> None:
    """Add the flags of the server."""
    add = parser.add_argument
    add("--models-dir", type=Path, metavar="DIR", help="a folder of model directories and Modelfiles")
    words = "most tokens of an answer, where a request names none"
    add("--max-tokens", type=count, default=4096, metavar="N", help=words)
    words = "let the first model answer requests for unknown names (default: if it is the only one)"
    add("--any-model-name", action=argparse.BooleanOptionalAction, default=None, help=words)
    add("--strict", action="store_true", help="refuse requests with unknown fields (default: ignore and list them)")
    words = "origins of web pages that may ask, with commas between them; * is any (default: none)"
    add("--allowed-origins", type=_words, default=[], metavar="ORIGINS", help=words)
    add("--chat-template-args", type=json_object, default={}, metavar="JSON", help="variables of the chat template")
    words = "the most memory of prompt caches, such as 2GB (default: half of the memory for keys and values)"
    add("--prompt-cache-bytes", type=_size, metavar="SIZE", help=words)
    words = "time that an idle model stays in memory, such as 5m (default: until another one needs the memory)"
    add(*KEEP_ALIVE, type=duration, metavar="TIME", help=words)
    words = "a folder whose files requests may name as pictures; implies --vision"
    add("--image-folder", type=Path, metavar="DIR", help=words)
    parser.add(VISION, DRAFTED, *ACCESS)
    borrow_flags(parser, "server", without=[*_OWN, *_WITHOUT_EFFECT])
    for name in _WITHOUT_EFFECT:
        add(name, action="store_true", help=argparse.SUPPRESS)


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _size(text: str) -> int:
    """Return the bytes of a size as mlx-lm writes it: ``500000``, ``2G``, ``1.5GB``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 2GB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


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
        streams: the command loads models, so it takes the flags of all settings.
        model: the model in a usage line, in brackets if it may be left out, with ``...`` if there may be several; empty
            for a command without one. It is the first argument, or ``--model``.
    """

    usage: str
    help: str
    flags: Sequence[Flag] | Callable[[Parser], None]
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
            own = [] if callable(command.flags) else [names for names, _ in command.flags]
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
    for name in BASICS if command.streams else ():
        _add_setting(parser, name, help_texts.get(name, ""))
    if callable(command.flags):
        command.flags(parser)
    else:
        parser.add(*command.flags)
    parser.add_argument("--quiet", action="store_true", help="results and errors alone: no progress, notes or warnings")
    with contextlib.suppress(argparse.ArgumentError):  # the command has a flag of that name
        parser.add_argument("--verbose", action="store_const", const=LOG, default=True, help="print the log, too")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    if command.streams or callable(command.flags):
        parser.add_argument(_ALL_HELP, action="store_true", help="show all flags")
    tuning = parser if parser.shown is not None else parser.add_argument_group("tuning")
    for name in SETTINGS if command.streams else ():
        if name not in BASICS:
            _add_setting(tuning, name, help_texts.get(name, ""))


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
    parser.add(DRAFTED, VISION)
    _add_idle_flags(parser)
    borrow_flags(parser, "generate", without=("--quantize-activations",))
    add("--json", action="store_true", help="write one JSON object to stdout")
    add("--resident", action="store_true", help="keep everything in memory, by mlx-lm alone, to compare with")
    add("--routing-trace", type=Path, metavar="FILE", help="record the experts of each token, for benchmarks")


def _add_run_flags(parser: Parser) -> None:
    """Add the flags of prompts and Modelfiles, and those of conversations."""
    _add_talk_flags(parser, *RUN)
    parser.set_defaults(seed=None)


def _add_chat_flags(parser: Parser) -> None:
    """Add the flags of conversations."""
    _add_talk_flags(parser)
    parser.set_defaults(words=(), prompt=None, file=None, serve=False)


def _add_talk_flags(parser: Parser, *more: Flag) -> None:
    """Add our flags and mlx-lm's. A Modelfile may give some of their values."""
    parser.add(*more, *CHAT)
    _add_idle_flags(parser)
    borrow_flags(parser, "chat", without=["--model"], described=["--temp", "--top-p"])


def _add_idle_flags(parser: Parser) -> None:
    """Add flags of other programs that only cause a warning (:data:`mlx_flash.config.IDLE`)."""
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
        _add_serve_flags,
        model="[[NAME=]MODEL ...]",
    ),
    "plan": Command("[flags]", "show what stays in memory, and the expected speed", PLAN, model="MODEL"),
    "bench": Command("[flags]", "measure a model against its plan", measured(64, 16), model="MODEL"),
    "verify": Command("[flags]", "compare streamed output with mlx-lm's, bit for bit", VERIFY, model="MODEL"),
    "doctor": Command(
        "[flags]",
        "look at machine, disk and MLX, and compare budgets of a model",
        measured(16, 12),
        model="[MODEL]",
    ),
    "list": Command("[FOLDER ...]", "list models here: size, fit, and expected speed", LIST),
    "pull": Command("[flags]", "download a model, after showing its plan", PULL, model="REPOSITORY"),
    "show": Command("[flags]", "show a model's files and its plan, or a Modelfile", SHOW, model="MODEL"),
    "create": Command("NAME [-f MODELFILE]", "give a Modelfile a name", CREATE, streams=False),
    "rm": Command("[--yes]", "remove downloaded models and named Modelfiles", RM, streams=False, model="NAME ..."),
    "ps": Command("[--json]", "list running engines", (JSON,), streams=False),
    "stop": Command("[flags]", "end a running engine", STOP, streams=False, model="PID|MODEL"),
    "exec": Command("[flags] -- PROGRAM [its flags]", "run any program that uses mlx-lm, streaming", EXEC),
    "pack": Command(
        "TARGET", "rewrite a checkpoint in the order in which it is read", PACK, streams=False, model="SOURCE"
    ),
    "cache": Command("list|clear", "list models and cached data, or remove the cached data", CACHE, streams=False),
    "completion": Command(
        "bash|zsh|fish", "print code that completes commands, flags and models", COMPLETION, streams=False
    ),
}
"""The commands by name, in the order of help."""

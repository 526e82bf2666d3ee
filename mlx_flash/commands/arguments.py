"""Flags of the command line. Flags that mlx-lm has too keep its names and defaults; tests compare them.

Nothing here imports MLX, so that help appears at once.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from mlx_flash import __version__
from mlx_flash.config import FLAGS, FlashConfig, did_you_mean, parse_setting, setting_kinds
from mlx_flash.modelfile.parse import DEFAULT_MAX_TOKENS
from mlx_flash.monitor.words import seconds_of
from mlx_flash.telemetry import INTERVAL_SECONDS

Type = Callable[[str], Any]

LARGEST = 2**31 - 1
"""The greatest number of tokens: MLX counts places in 32 bits."""


def number(kind: type[int] | type[float], least: float, most: float = LARGEST) -> Type:
    """Return a type of whole or other numbers."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None
        if not least <= value <= most:  # NaN is in no range
            raise argparse.ArgumentTypeError(f"{text} is not between {least} and {most}")
        return value

    return parse


def checked(parse: Callable[[str], Any]) -> Type:
    """Return a type whose ValueErrors are told as they are."""

    def parse_checked(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_checked


def max_tokens(text: str) -> int:
    """Return a number of tokens to generate; -1 is no limit."""
    try:
        return -1 if text == "-1" else int(count(text))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; -1 sets no limit") from None


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


def words(text: str) -> list[str]:
    """Return the words of a text with commas between them."""
    return [word for word in text.split(",") if word]


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def size(text: str) -> int:
    """Return the bytes of a size as mlx-lm writes it: ``500000``, ``2G``, ``1.5GB``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 2GB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def kv_bits(text: str) -> int | None:
    """Return the bits of quantized keys and values; None for 0."""
    if text not in ("0", "2", "3", "4", "5", "6", "8"):
        raise argparse.ArgumentTypeError(f"{text!r} is not one of 2, 3, 4, 5, 6, 8")
    return int(text) or None


count = number(int, 1)
port = number(int, 1, 65535)

LOG = 2
"""Value of ``args.verbose`` that asks for the log, too."""

Flag = tuple[list[str], dict[str, Any]]
"""The arguments of ``add_argument``."""


def flag(form: str, text: str, kind: Type | None = None, **options: Any) -> Flag:
    """Return the arguments of ``add_argument`` for a flag or a positional argument.

    ``form`` has its names and its metavar, such as ``--max-tokens -m N``. A flag without a metavar is a switch. Further
    options of ``add_argument`` win.
    """
    names = [name for name in form.split() if name.startswith("-")]
    (*_, last) = form.split()
    if not names:
        given: dict[str, Any] = {"metavar": last if last.isupper() else None}
        return [last.lower()], {**given, "help": text, "type": kind, **options}
    given = {"action": "store_true"} if last in names else {"metavar": last, "type": kind}
    return names, {**given, "help": text, **options}


_MAYBE = argparse.BooleanOptionalAction

DEFAULT_PROMPT = "hello"
"""The prompt of ``mlx_lm.generate``, where none is given."""

DEFAULT_MODEL = "mlx-community/Llama-3.2-3B-Instruct-4bit"
"""The model of ``mlx_lm.chat``, where none is given."""

JSON = flag("--json", "write one JSON object to stdout")
VISION = flag("--vision", "load a model that sees with mlx-vlm, and not as text alone with mlx-lm", action=_MAYBE)
YES = flag("-y --yes", "download a model without a question")
TRUST = flag("--trust-remote-code", "run the code that comes with a tokenizer")
ADAPTER = flag("--adapter-path DIR", "a LoRA adapter")
SYSTEM = flag("--system-prompt TEXT", "the system prompt")
MAX_KV_SIZE = flag("--max-kv-size N", "tokens that a cache keeps; older ones are dropped (default: all)", count)
DRAFT = (
    flag("--draft-model MODEL", "a smaller model that guesses tokens"),
    flag("--num-draft-tokens N", "most tokens to guess at a time with a draft model (default: as many as pay)", count),
)
_TEMPERATURE, _SHARE = number(float, 0, 1000), number(float, 0, 1)
SAMPLING = (
    flag("--temp T", "temperature of sampling; 0 takes the likeliest token", _TEMPERATURE, default=0.0),
    flag("--top-p P", "keep the likeliest tokens of this share", _SHARE, default=1.0),
    flag("--min-p P", "keep tokens of this share of the likeliest one's probability", _SHARE, default=0.0),
    flag("--top-k N", "keep so many of the likeliest tokens; 0 keeps all", number(int, 0), default=0),
)
XTC = (
    flag("--xtc-probability P", "share of tokens for which XTC leaves out the likeliest", _SHARE, default=0.0),
    flag("--xtc-threshold P", "least probability of what XTC leaves out", number(float, 0, 0.5), default=0.1),
)
SEED = number(int, 0, 2**64 - 1)
QUANTIZED = (
    flag("--kv-bits N", "bits of quantized keys and values (default: not quantized)", kv_bits),
    flag("--kv-group-size N", "numbers with a scale of their own", int, choices=(32, 64, 128), default=64),
    flag("--quantized-kv-start N", "tokens of a cache before it is quantized", number(int, 0), default=5000),
)
ACCESS = (
    flag(
        "--api-key-file FILE",
        "a key that clients must send (also MLX_FLASH_API_KEY), or lines of NAME sha256:HASH",
        Path,
    ),
    flag("--no-auth", "let other machines connect without a key"),
)
IDLE = (
    flag("--tile-size N", argparse.SUPPRESS, int),
    flag("--no-pipeline", argparse.SUPPRESS, dest="pipelined_execution"),
    flag("--expert-pool-gb GB", argparse.SUPPRESS, float),
)
"""Flags that only cause a warning (:data:`mlx_flash.config.IDLE`)."""

_PIPED = f"the prompt; '-' reads it from standard input (default: what is piped in, or {DEFAULT_PROMPT!r})"
_LOUD = "False: text alone on stdout; without a value: print the log, too"
GENERATE = (
    flag("--prompt -p TEXT", _PIPED),
    flag("--max-tokens -m N", "tokens to generate at most; -1: no limit", max_tokens, default=100),
    flag("--verbose BOOL", _LOUD, boolean, nargs="?", const=LOG, default=True),
    SYSTEM,
    flag("--prefill-response TEXT", "the beginning of the answer"),
    flag("--chat-template-config JSON", "for the chat template", json_object),
    flag("--ignore-chat-template", "take the prompt as it is, without the chat template"),
    flag("--use-default-chat-template", "no effect: no tokenizer has such a template any more"),
    flag("--image FILE", "pictures for the prompt, in their order; needs mlx-vlm", Path, nargs="+"),
    VISION,
    ADAPTER,
    TRUST,
    flag("--extra-eos-token TOKEN", "more tokens that end the answer", nargs="+", default=()),
    *SAMPLING,
    flag("--min-tokens-to-keep N", "tokens that --min-p keeps at least", count, default=1),
    *XTC,
    flag("--seed N", "seed of the random numbers (default: another one each time)", SEED),
    *DRAFT,
    MAX_KV_SIZE,
    flag("--prompt-cache-file FILE", "refused: mlx-flash exec -- mlx_lm.generate reads them"),
    *QUANTIZED,
    JSON,
    YES,
)
_ANSWER = f"most tokens of an answer; -1: no limit (default: the Modelfile's num_predict, or {DEFAULT_MAX_TOKENS})"
CHAT = (
    flag("--image FILE", "pictures for the first message", Path, action="extend", nargs="+"),
    VISION,
    flag("--format json|FILE", "answer in JSON, or by the JSON schema in a file"),
    flag("--resume", "go on with the last conversation"),
    YES,
    flag("--max-tokens -m N", _ANSWER, max_tokens),
    flag("--verbose", "print the log, and all measurements", action="store_const", const=LOG, default=False),
    SYSTEM,
    ADAPTER,
    TRUST,
    flag("--temp T", "temperature of sampling (default: the Modelfile's, or 0.0)", _TEMPERATURE),
    flag("--top-p P", "keep the likeliest tokens of this share (default: the Modelfile's, or 1.0)", _SHARE),
    *XTC,
    flag("--seed N", "seed of the random numbers", SEED, default=0),
    MAX_KV_SIZE,
    flag("--pipeline", "refused: a conversation is for one rank"),
)
RUN = (
    flag("--model MODEL", "the same, at any place"),
    flag("words", "a model; a prompt to answer, '-' reads it", nargs="*", metavar="MODEL | PROMPT"),
    flag("--prompt -p TEXT", "the prompt, at any place"),
    flag("-f --file MODELFILE", "default: ./Modelfile"),
    *CHAT,
)
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_CACHES = "the most memory of prompt caches, such as 2GB (default: half of the memory for keys and values)"
_ORIGINS = "origins of web pages that may ask, with commas between them; * is any (default: none)"
_UNLOADED = "time that an idle model stays in memory, such as 5m (default: until another one needs the memory)"
_UNKNOWN = "let the first model answer requests for unknown names (default: if it is the only one)"
SERVE = (
    flag("--models-dir DIR", "a folder of model directories and Modelfiles", Path),
    flag("--host HOST", "address of the server", default="127.0.0.1"),
    flag("--port PORT", "port of the server", port, default=8080),
    flag("--max-tokens N", "most tokens of an answer, where a request names none", count, default=4096),
    flag("--any-model-name", _UNKNOWN, action=_MAYBE),
    flag("--allowed-origins ORIGINS", _ORIGINS, words, default=[]),
    flag("--log-level LEVEL", "what the log has", choices=_LEVELS, default="INFO", metavar=None),
    flag("--chat-template TEXT", "the chat template (default: the tokenizer's)", default=""),
    flag("--chat-template-args JSON", "variables of the chat template", json_object, default={}),
    ADAPTER,
    TRUST,
    *SAMPLING,
    flag("--decode-concurrency N", "most answers that are generated together", count, default=32),
    flag("--prompt-concurrency N", "most prompts that are computed together", count, default=8),
    flag("--prompt-cache-size N", "most prompt caches that are kept", number(int, 0), default=10),
    flag("--prompt-cache-bytes SIZE", _CACHES, size),
    *QUANTIZED,
    flag("--keepalive --keep-alive TIME", _UNLOADED, checked(seconds_of)),
    VISION,
    *DRAFT,
    *ACCESS,
    flag("--pipeline", argparse.SUPPRESS),  # ranks always share layers
    flag("--use-default-chat-template", argparse.SUPPRESS),  # no tokenizer has one any more
)
PLAN = (
    VISION,
    JSON,
    flag("--budgets", "compare budgets: peak, speed, first token, longest context"),
    flag("--ranks N", "show the layers of each of N machines like this one", number(int, 1, 4096), default=1),
    TRUST,
)


def measured(prompt_length: int, num_tokens: int) -> tuple[Flag, ...]:
    """Return the flags of commands that measure a run, with the defaults of its lengths."""
    return (
        flag("--prompt-tokens N", "length of the prompt", number(int, 1, 10_000_000), default=prompt_length),
        flag("--max-tokens -m N", "tokens to generate", count, default=num_tokens),
        VISION,
        JSON,
        YES,
    )


_WHOLE = "mlx-lm's model whole in memory, or one layer at a time; unset: whole where memory allows"
VERIFY = (
    flag("--reference WAY", _WHOLE, choices=("resident", "layers"), metavar=None),
    *measured(16, 4),
)
EXEC = (flag("PROGRAM", "such as: mlx_lm.generate --model MODEL", nargs=argparse.REMAINDER),)
SERVICE = (
    flag("action", "what to do with it", choices=("install", "status", "logs", "remove")),
    flag("arguments", "flags of mlx-flash serve, for install", nargs=argparse.REMAINDER, metavar="FLAGS"),
)
PACK = (
    flag("target", "directory to make"),
    flag("--compress", "compress what shrinks; it pays where the disk is slower than the decoder"),
    JSON,
    YES,
)
_FOLDERS = "folders to look in, beside Hugging Face's cache"
MODELS = (flag("folders", _FOLDERS, Path, nargs="*", metavar="FOLDER"), JSON)
PULL = (flag("--revision NAME", "branch, tag or commit (default: main)"), JSON)
CREATE = (
    flag("NAME", "to name the model by"),
    flag("-f --file MODELFILE", "the Modelfile", default="Modelfile"),
)
MONITOR = (
    flag("--once", "print one frame and exit; exit status 1 when no engine runs"),
    flag("--json", "print one JSON object for each engine and look, instead of frames"),
    flag("--interval SECONDS", "time between two looks", number(float, 0.05, 3600), default=INTERVAL_SECONDS),
)
COMPLETION = (flag("shell", "the shell that runs the printed code", choices=("bash", "zsh", "fish")),)
CACHE = (flag("action", "clear removes everything that is not in use", choices=("list", "clear")), JSON)


EXIT_USAGE = 2

WIDTH, HELP_COLUMN = 80, 32

SHOWN = frozenset(
    {
        *("--help", "--help-tuning", "--model", "--ram-budget-gb", "--context-length", "--prefill-step-size"),
        *("--prompt", "--max-tokens", "--system-prompt", "--temp", "--top-p", "--seed", "--adapter-path"),
        *("--draft-model", "--json", "--host", "--port", "--api-key-file", "--no-auth", "--models-dir"),
        *("--file", "--image", "--format", "--resume", "--keep-alive", "--verbose", "--quiet"),
        *("--traceback", "--yes"),
    }
)
"""Flags in the short help of commands with many flags."""

MANY = 10
"""Commands with more flags of their own than this have many."""


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
    """A parser that takes other names of flags, too."""

    shown: frozenset[str] | None = None
    """Flags in help; None for all."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Formatter, **options)

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        if self.shown is not None and names[0].startswith("-") and not self.shown & {*names}:
            options["help"] = argparse.SUPPRESS
        return super().add_argument(*names, *(other for other, own in FLAGS.items() if own in names), **options)

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith(("?", ".")) else "."
        self.exit(EXIT_USAGE, f"mlx-flash: error: {message}{end} Hint: {self.prog} --help\n")


SETTINGS = tuple(field.name for field in fields(FlashConfig) if field.name not in {"enabled", "poison_released_slots"})
"""The fields of ``FlashConfig`` that are flags of every command."""

BASICS = ("ram_budget_gb", "context_length", "prefill_step_size")
"""The settings that help shows first; the others are for tuning."""

_ALL_HELP = "--help-tuning"


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand."""

    help: str  # one line
    flags: Sequence[Flag]  # its own
    model: str = ""  # in a usage line: in brackets if it may be left out, with ``...`` if there may be several
    place: str = ""  # its module and function in this folder; both have the command's name if this is empty
    usage: str = "[flags]"  # the arguments after the model
    streams: bool = True  # it loads models, so it takes the flags of all settings
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of arguments without a flag, or other ones


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
    is_full = _ALL_HELP in itertools.takewhile(lambda word: word != "--", argv)
    parser, command = make_parser(name, is_full=is_full)
    if name is None or command is None:
        return parser.parse_args(argv)
    if is_full:
        command.print_help()
        command.exit()
    has_rest = name in ("exec", "service")  # words that are another program's
    parse = command.parse_known_args if has_rest else command.parse_known_intermixed_args
    args, unknown = parse(argv[1:], argparse.Namespace(command=name))
    if unknown:
        flag = next((word for word in unknown if word.startswith("-")), unknown[0])
        _, full = make_parser(name)
        assert full is not None
        known = re.findall(r"--[a-z][a-z-]+", full.format_help())
        nearest = did_you_mean(flag.partition("=")[0], known)
        command.error(f"unrecognized arguments: {' '.join(unknown)}{nearest}")
    if kind := COMMANDS[name].model:
        if args.first and args.model and "..." not in kind:
            command.error(f"two models are given, {args.first} and --model {args.model}")
        args.model = [*args.first, *args.model] if "..." in kind else args.first or args.model
        if not args.model and not kind.startswith("["):
            command.error(f"the following arguments are required: {kind}, as the first argument or by --model")
    return args


def make_parser(chosen: str | None = None, *, is_full: bool = True) -> tuple[Parser, Parser | None]:
    """Return the parser of the command line, and the parser of the chosen command, the only one that gets flags.

    Unless ``is_full``, its help leaves out what few users need.
    """
    parser = Parser(prog="mlx-flash", description="Run mlx-lm models larger than memory, bit for bit.")
    parser.add_argument("-V", "--version", action="version", version=f"mlx-flash {__version__}")
    parser.set_defaults(command=None, traceback=False, verbose=True, quiet=False)
    if chosen in REPLACED:
        parser.exit(
            EXIT_USAGE, f"mlx-flash: error: there is no command {chosen!r} any more. Hint: {REPLACED[chosen]}\n"
        )
    if chosen is not None and chosen not in COMMANDS:
        parser.error(f"there is no command {chosen!r}{did_you_mean(chosen, COMMANDS)}")
    adding = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    found = None
    for name, command in COMMANDS.items():
        text = f"{command.help[0].upper()}{command.help[1:]}."
        usage = " ".join(["mlx-flash", name, *command.model.split(), command.usage])
        made = adding.add_parser(name, help=command.help, description=text, usage=usage, allow_abbrev=False)
        if name == chosen:
            found = made
            own = [names for names, _ in command.flags] if len(command.flags) <= MANY else []
            found.shown = None if is_full else SHOWN.union(*own)
            _add_flags(found, command)
    return parser, found


def _add_flags(parser: Parser, command: Command) -> None:
    """Add all flags of a command: the basics first, those for tuning last."""
    help_texts = setting_help() if command.streams else {}
    if command.model:
        nargs, options = ("*", {"action": "append", "default": []}) if "..." in command.model else ("?", {})
        text = "folder, Hugging Face repository, or name: of `mlx-flash models`, or yours"
        parser.add_argument("first", nargs=nargs, metavar="MODEL", help=text)
        parser.add_argument("--model", metavar="MODEL", help="the same, at any place", **options)
    for name in BASICS if command.streams else ():
        _add_setting(parser, name, help_texts[name])
    for names, given in [*command.flags, *(IDLE if command.streams else ())]:
        parser.add_argument(*names, **given)
    parser.add_argument("--quiet", action="store_true", help="results and errors alone: no progress, notes or warnings")
    with contextlib.suppress(argparse.ArgumentError):  # the command has a flag of that name
        parser.add_argument("--verbose", action="store_const", const=LOG, default=True, help="print the log, too")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    if command.streams:
        parser.add_argument(_ALL_HELP, action="store_true", help="show all flags")
    tuning = parser.add_argument_group("tuning")
    for name in SETTINGS if command.streams else ():
        if name not in BASICS:
            _add_setting(tuning, name, help_texts[name] if parser.shown is None else argparse.SUPPRESS)
    parser.set_defaults(**command.defaults)


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
        metavar = {int: "N", Path: "DIR", str: "NAME"}.get(kind, "MB" if name.endswith("_mb") else "GB")
        options |= {"metavar": metavar, "type": checked(partial(parse_setting, name))}
    parser.add_argument(f"--{name.replace('_', '-')}", **options)


REPLACED = {
    "bench": "mlx-flash doctor MODEL",
    "list": "mlx-flash models",
    "ps": "flash-monitor --once",
    "stop": "kill PID, a process that flash-monitor --once shows",
    "show": "mlx-flash plan MODEL",
    "rm": "hf cache rm model/REPOSITORY",
}
"""Replacements of commands of earlier versions."""

COMMANDS = {
    "generate": Command("generate text", GENERATE, "MODEL"),
    "run": Command(
        "chat with, or prompt, a model or a Modelfile",
        RUN,
        usage="[MODEL] [PROMPT] | -f MODELFILE [PROMPT]",
        defaults={"seed": None},
    ),
    "chat": Command(
        "chat, with the flags of mlx-lm's chat",
        CHAT,
        "[MODEL]",
        place="run.run",
        defaults={"words": (), "prompt": None, "file": None},
    ),
    "serve": Command("answer requests in OpenAI's, Ollama's and Anthropic's dialects", SERVE, "[[NAME=]MODEL ...]"),
    "service": Command(
        "keep the server running as a service of this user",
        SERVICE,
        usage="install|status|logs|remove [flags of serve]",
        streams=False,
    ),
    "plan": Command("show what stays in memory, and the expected speed", PLAN, "MODEL", "doctor.plan"),
    "verify": Command("compare streamed output with mlx-lm's, bit for bit", VERIFY, "MODEL"),
    "doctor": Command(
        "look at machine, disk and MLX; measure a model against its plan, and compare budgets",
        measured(16, 12),
        "[MODEL]",
    ),
    "models": Command(
        "list models here and models that people run, with the speed expected here", MODELS, usage="[FOLDER ...]"
    ),
    "pull": Command("download a model, after showing its plan", PULL, "REPOSITORY", "models.pull"),
    "create": Command(
        "give a Modelfile a name", CREATE, place="models.create", usage="NAME [-f MODELFILE]", streams=False
    ),
    "monitor": Command(
        "show running engines, live: q quits, Tab shows the next engine",
        MONITOR,
        place="engines.monitor",
        streams=False,
    ),
    "exec": Command(
        "run any program that uses mlx-lm, streaming",
        EXEC,
        place="programs.execute",
        usage="[flags] -- PROGRAM [its flags]",
    ),
    "pack": Command(
        "rewrite a checkpoint in the order in which it is read",
        PACK,
        "SOURCE",
        place="models.pack",
        usage="TARGET",
        streams=False,
    ),
    "cache": Command(
        "list or remove cached data",
        CACHE,
        place="models.cache",
        usage="list|clear",
        streams=False,
    ),
    "completion": Command(
        "print code that completes commands, flags and models",
        COMPLETION,
        place="dispatch.completion",
        usage="bash|zsh|fish",
        streams=False,
    ),
}
"""The commands by name, in the order of help."""

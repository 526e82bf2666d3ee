"""Flags of single commands, and their types: numbers within bounds, checked while the command line is parsed."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_flash.config import parse_setting
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
    flag(
        "--verbose",
        action="store_const",
        const=LOG,
        default=False,
        help="print the log, and all measurements",
    ),
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

"""Types of flags: numbers within bounds, checked while the command line is parsed."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

from mlx_flash.config import parse_setting
from mlx_flash.errors import ConfigError
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

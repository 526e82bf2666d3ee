"""Flags of ``mlx-flash serve``: those of mlx-lm's server, and those that it does not have."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from mlx_flash.commands.borrowed import DRAFTED, borrow_flags
from mlx_flash.commands.flags import KEEP_ALIVE, VISION
from mlx_flash.commands.flagtypes import count, duration, json_object

_OWN = ("--model", "--max-tokens", "--allowed-origins", "--chat-template-args", "--prompt-cache-bytes")
"""mlx-lm's flags that are checked here."""

_WITHOUT_EFFECT = ("--pipeline", "--use-default-chat-template")
"""mlx-lm's flags that change nothing: ranks always share layers, and no tokenizer has such a template any more."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names a folder of models."""
    parser.add_argument("--models-dir", type=Path, metavar="DIR", help="a folder of model directories and Modelfiles")


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Add all other flags."""
    add = parser.add_argument
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
    parser.add_argument(*VISION[0], **VISION[1])
    words = "a folder whose files requests may name as pictures; implies --vision"
    add("--image-folder", type=Path, metavar="DIR", help=words)
    add(*DRAFTED[0], **DRAFTED[1])
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

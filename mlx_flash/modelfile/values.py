"""Values in Modelfiles: quoted texts, roles, parameters, models and directories. Wrong ones raise a ConfigError."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from mlx_flash.config import did_you_mean
from mlx_flash.errors import ConfigError

DEFAULT_MAX_TOKENS = 512
"""Tokens of an answer where nothing else is said."""

ROLES = ("system", "user", "assistant")

_MOST = 2**31 - 1
"""The greatest number that MLX takes for a length."""

RANGES: dict[str, tuple[type[int] | type[float], float, float, str]] = {
    "num_ctx": (int, 1, math.inf, "at least 1"),
    "num_predict": (int, -2, math.inf, "at least 1, or -1 for no limit, or -2 to fill the context"),
    "temperature": (float, 0, math.inf, "0 or more"),
    "top_p": (float, math.ulp(0), 1, "above 0 and at most 1. Hint: temperature 0 takes the likeliest token"),
    "top_k": (int, 0, _MOST, "0, which keeps all, or more, below 2**31"),
    "min_p": (float, 0, 1, "between 0 and 1"),
    "seed": (int, -1, 2**64 - 1, "0 or more, below 2**64, or -1 for another one each time"),
    "repeat_penalty": (float, math.ulp(0), math.inf, "above 0; 1 is no penalty"),
    "repeat_last_n": (int, -1, _MOST, "0 or more, below 2**31, or -1 for the whole context"),
}
"""The type of each parameter, its bounds, and the bounds in words."""

_SAMPLING = "mlx-flash does not sample that way"
_HARDWARE = "MLX and the plan decide that"
UNUSED_PARAMETERS = {
    **dict.fromkeys(("mirostat", "mirostat_eta", "mirostat_tau", "tfs_z", "typical_p"), _SAMPLING),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "penalize_newline"), _SAMPLING),
    **dict.fromkeys(("num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "use_mmap", "use_mlock"), _HARDWARE),
    **dict.fromkeys(("f16_kv", "logits_all", "vocab_only", "embedding_only", "num_gqa"), _HARDWARE),
    **dict.fromkeys(("rope_frequency_base", "rope_frequency_scale"), "the model's config.json says that"),
    "num_keep": "a context that is full is not shifted",
    "num_batch": "FLASH_PREFILL_STEP_SIZE comes near it",
}


def unquote(text: str, following: Iterator[str]) -> str:
    """Return the value that begins with this text. Lines that its quotes span are taken from ``following``."""
    quote = next((quote for quote in ('"""', '"') if text.startswith(quote)), "")
    if not quote:
        return text.strip()
    lines, end = [text], text.rstrip()
    if quote == '"' and '"' in end[1:-1] and not end.endswith(quote):
        raise ConfigError(f"there is text after the closing quote: {end!r}. Hint: quote it with three quotes")
    while not (end.endswith(quote) and (len(lines) > 1 or len(end) >= 2 * len(quote))):
        if (line := next(following, None)) is None:
            raise ConfigError(f"the text that begins with {quote} has no closing {quote} at the end of a line")
        lines.append(line)
        end = line.rstrip()
    return "\n".join(lines).rstrip()[len(quote) : -len(quote)]


def check_text(text: str, what: str) -> str:
    """Return a text that becomes tokens.

    Args:
        text: the text. Bytes that are not of the terminal's encoding are halves of surrogate pairs in it.
        what: its name in the error.

    Raises:
        ConfigError: there are such bytes.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{what} is no text: it has bytes that are not UTF-8 after {error.start} characters. "
            "Hint: iconv -f ISO-8859-1 -t UTF-8 converts files of Western European languages."
        ) from None
    return text


def parse_role(word: str) -> str:
    """Return the role of a MESSAGE."""
    if word not in ROLES:
        raise ConfigError(f"MESSAGE is of {word!r}: it must be one of {', '.join(ROLES)}{did_you_mean(word, ROLES)}")
    return word


def parse_stop(value: str) -> str:
    """Return a text that ends the generation."""
    if not value:
        raise ConfigError("PARAMETER stop is empty: every text would end before it begins")
    return value


def parse_parameter(name: str, text: str) -> int | float | None:
    """Return the value of a PARAMETER, checked against its bounds."""
    if name not in RANGES:
        raise ConfigError(f"there is no parameter {name!r}{did_you_mean(name, [*RANGES, 'stop', *UNUSED_PARAMETERS])}")
    kind, least, most, words = RANGES[name]
    try:
        number = kind(text)
    except ValueError:
        hint = ". Hint: a comment needs a line of its own" if "#" in text else ""
        wanted = "a number" if kind is float else "a whole number"
        raise ConfigError(f"PARAMETER {name} is {text!r}: it must be {wanted}{hint}") from None
    if not least <= number <= most or number == math.inf or (name == "num_predict" and number == 0):
        raise ConfigError(f"PARAMETER {name} is {text}: it must be {words}")
    return None if name == "seed" and number == -1 else number


def parse_base(value: str, folder: Path) -> str:
    """Return the model of FROM: a directory that exists, or else a Hugging Face repository."""
    is_path = value in (".", "..", "~") or value.startswith(("/", "./", "../", "~/"))
    if value.lower().endswith(".gguf"):
        raise ConfigError(
            f"FROM is {value!r}: GGUF files are not read. Hint: name a model of mlx-community on Hugging Face"
        )
    if is_path or _path(value, folder).is_dir():
        return str(parse_directory(value, folder))
    repository = re.sub(r"^(https?://)?(hf\.co|huggingface\.co)/", "", value)
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", repository, re.ASCII):
        raise ConfigError(
            f"FROM is {value!r}: it is neither a directory nor a Hugging Face repository such as "
            "mlx-community/Llama-3.2-3B-Instruct-4bit"
        )
    return repository


def parse_directory(value: str, folder: Path) -> Path:
    """Return an existing directory as an absolute path."""
    path = _path(value, folder)
    if not path.is_dir():
        raise ConfigError(f"{value!r} is {'not a directory' if path.exists() else 'not there'}: looked at {path}")
    return path.absolute()


def _path(value: str, folder: Path) -> Path:
    """Return a path that is relative to a folder, or to the home of a user."""
    try:
        path = folder / Path(value).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a null character
        raise ConfigError(f"{value!r} is not a path: {error}") from None
    return path

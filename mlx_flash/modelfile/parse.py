"""Modelfiles, as Ollama has them: a model, its prompts and its sampling in one text file, and here its streaming too.

    FROM mlx-community/Llama-3.2-3B-Instruct-4bit
    PARAMETER temperature 0.7
    SYSTEM Answer in one sentence.
    FLASH_RAM_GB 4

Instructions in any case, one to a line; ``#`` at the beginning of a line is a comment. A value is the rest of the line,
or stands in ``"`` or ``\"""`` quotes, which may span lines and end where a line does; nothing is escaped in them. What
has no effect here becomes a :class:`Note`, what is wrong a ConfigError with file and line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mlx_flash.config import FlashConfig, did_you_mean, parse_setting
from mlx_flash.errors import ConfigError
from mlx_flash.modelfile.gotemplate import to_jinja

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Note:
    """Something that is not done, or is done otherwise than Ollama would.

    Attributes:
        line: counted from 1.
        text: for people.
    """

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Message:
    """A message that every conversation begins with.

    Attributes:
        role: ``"system"``, ``"user"`` or ``"assistant"``.
        content: its text.
    """

    role: str
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """What PARAMETER says, in Ollama's names. None is what was not given: mlx-lm's default, not Ollama's.

    Attributes:
        num_ctx: tokens of context.
        num_predict: the most tokens to generate; -1 sets no limit, -2 fills the context.
        temperature: 0 takes the likeliest token.
        top_p: keep the likeliest tokens of this share; 1 keeps all.
        top_k: keep this many of the likeliest; 0 keeps all.
        min_p: keep tokens of this share of the likeliest one's probability.
        seed: of the random numbers. What is written as -1, another seed each time, is None here.
        repeat_penalty: logits of tokens seen lately are divided by it.
        repeat_last_n: how many tokens back counts as lately; 0 means none, -1 all.
    """

    num_ctx: int | None = None
    num_predict: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None

    def max_tokens(self, num_prompt_tokens: int) -> int | None:
        """``num_predict`` as mlx-lm's ``max_tokens`` for a prompt of so many tokens: -1 sets no limit, None is open.

        To fill a context that has no length sets no limit either.
        """
        if self.num_predict != -2:
            return self.num_predict
        return -1 if self.num_ctx is None else max(0, self.num_ctx - num_prompt_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Modelfile:
    """What a Modelfile says.

    Attributes:
        path: the file.
        base: the model: an absolute path of a directory, or a Hugging Face repository.
        adapter: directory of a LoRA adapter.
        parameters: of sampling.
        stop: texts that end the generation.
        system: the system prompt.
        template: the prompt template as it is written.
        chat_template: the same as a Jinja chat template over ``messages``; None where there is none or it cannot be
            translated, and the tokenizer's own counts. One that is translated begins with the tokenizer's BOS token,
            which Ollama adds by itself.
        messages: what every conversation begins with.
        licenses: their texts.
        flash: fields of FlashConfig and their text, for ``FlashConfig.resolve(modelfile=...)``; checked.
        notes: what has no effect, by line.
    """

    path: Path
    base: str
    adapter: Path | None = None
    parameters: Parameters = Parameters()
    stop: tuple[str, ...] = ()
    system: str | None = None
    template: str | None = None
    chat_template: str | None = None
    messages: tuple[Message, ...] = ()
    licenses: tuple[str, ...] = ()
    flash: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()


_OTHER_NAMES = {"enabled": "FLASH", "ram_budget_gb": "FLASH_RAM_GB", "kv_cache": "FLASH_KV"}
FLASH_INSTRUCTIONS = {
    _OTHER_NAMES.get(setting.name, f"FLASH_{setting.name.upper()}"): setting.name for setting in fields(FlashConfig)
}
"""The instructions for streaming, each with the field of FlashConfig it sets."""

_WITHOUT_EFFECT = {
    "REQUIRES": "a version of Ollama means nothing to mlx-flash",
    "RENDERER": "the prompt is made by TEMPLATE or the tokenizer's chat template",
    "PARSER": "mlx-flash gives the text as it is generated",
    "CAPABILITY": "what a model can do is in its own configuration",
}
_INSTRUCTIONS = (
    *("FROM", "PARAMETER", "SYSTEM", "TEMPLATE", "MESSAGE", "ADAPTER", "LICENSE"),
    *_WITHOUT_EFFECT,
    *FLASH_INSTRUCTIONS,
)

_RANGES: dict[str, tuple[type[int] | type[float], float, float, str]] = {
    "num_ctx": (int, 1, math.inf, "at least 1"),
    "num_predict": (int, -2, math.inf, "at least 1, or -1 for no limit, or -2 to fill the context"),
    "temperature": (float, 0, math.inf, "0 or more"),
    "top_p": (float, math.ulp(0), 1, "above 0 and at most 1. Hint: temperature 0 takes the likeliest token"),
    "top_k": (int, 0, math.inf, "0, which keeps all, or more"),
    "min_p": (float, 0, 1, "between 0 and 1"),
    "seed": (int, -1, 2**64 - 1, "0 or more, below 2**64, or -1 for another one each time"),
    "repeat_penalty": (float, math.ulp(0), math.inf, "above 0; 1 is no penalty"),
    "repeat_last_n": (int, -1, math.inf, "0 or more, or -1 for the whole context"),
}
"""Of each parameter its type, the least, the most, and both in words."""

_SAMPLING = "mlx-flash does not sample that way"
_HARDWARE = "MLX and the plan decide that"
_UNUSED_PARAMETERS = {
    **dict.fromkeys(("mirostat", "mirostat_eta", "mirostat_tau", "tfs_z", "typical_p"), _SAMPLING),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "penalize_newline"), _SAMPLING),
    **dict.fromkeys(("num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "use_mmap", "use_mlock"), _HARDWARE),
    **dict.fromkeys(("f16_kv", "logits_all", "vocab_only", "embedding_only", "num_gqa"), _HARDWARE),
    **dict.fromkeys(("rope_frequency_base", "rope_frequency_scale"), "the model's config.json says that"),
    "num_keep": "a context that is full is not shifted",
    "num_batch": "FLASH_PREFILL_STEP_SIZE comes near it",
}


def read_modelfile(path: Path | str) -> Modelfile:
    """Reads a Modelfile.

    Raises:
        ConfigError: it cannot be read, or something in it is wrong.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: the Modelfile cannot be read: {error.strerror}") from error
    try:
        text = data.decode("utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: the Modelfile is not text: {error}") from error
    return parse_modelfile(text, path)


def parse_modelfile(text: str, path: Path | str) -> Modelfile:
    """Parses the text of a Modelfile.

    Args:
        text: the text.
        path: the file it is from; paths in it are relative to the directory of that.

    Raises:
        ConfigError: something in it is wrong; says the line.
    """
    draft = _Draft(Path(path))
    lines = enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), 1)
    for number, line in lines:
        try:
            draft.add(number, line, (following for _, following in lines))
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
    return draft.finish()


class _Draft:
    """What was read so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] = {}  # by instruction; of those that may be said more than once, the last
        self._lines: dict[str, int] = {}
        self._stop: list[str] = []
        self._messages: list[Message] = []
        self._licenses: list[str] = []
        self._notes: list[Note] = []

    def add(self, number: int, line: str, following: Iterator[str]) -> None:
        """Adds what a line says, and as many of those that follow as its quotes span."""
        first, *rest = line.split(None, 1) or [""]
        if not first or first.startswith("#"):
            return
        name = first.upper()
        if name not in _INSTRUCTIONS:
            raise ConfigError(f"there is no instruction {first!r}{did_you_mean(name, _INSTRUCTIONS)}")
        what = name
        if name in ("PARAMETER", "MESSAGE"):
            key, *rest = rest[0].split(None, 1) if rest else [""]
            what = f"{name} {key.lower()}"
        if not rest:
            raise ConfigError(f"{what.strip()} has no value")
        self._put(number, name, what, _unquote(rest[0], following))

    def _put(self, number: int, name: str, what: str, value: str) -> None:
        key = what.removeprefix(name).strip()
        if name == "MESSAGE":
            self._messages.append(Message(_role(key), value))
        elif name == "LICENSE":
            self._licenses.append(value)
        elif what == "PARAMETER stop":
            self._stop.append(_stop(value))
        elif name in _WITHOUT_EFFECT or (name == "PARAMETER" and key in _UNUSED_PARAMETERS):
            reason = _WITHOUT_EFFECT.get(name) or _UNUSED_PARAMETERS[key]
            self._notes.append(Note(number, f"{what} has no effect: {reason}"))
        else:
            self._put_one(number, what, self._parsed(name, key, value))

    def _parsed(self, name: str, key: str, value: str) -> object:
        if name == "PARAMETER":
            return _parameter(key, value)
        if name in ("FROM", "ADAPTER") and not value:
            raise ConfigError(f"{name} is empty")
        if name == "FROM":
            return _base(value, self._path.parent)
        if name == "ADAPTER":
            return _directory(value, self._path.parent)
        if name in FLASH_INSTRUCTIONS:
            parse_setting(FLASH_INSTRUCTIONS[name], value)
        return value

    def _put_one(self, number: int, what: str, value: object) -> None:
        """Something there is one of: the last one counts."""
        if what in self._lines:
            if what == "FROM":
                raise ConfigError(f"there is a second FROM; the first is in line {self._lines[what]}")
            self._notes.append(Note(self._lines[what], f"{what} has no effect: line {number} says it again"))
        self._lines[what], self._values[what] = number, value

    def finish(self) -> Modelfile:
        """All of it."""
        if "FROM" not in self._values:
            raise ConfigError(f"{self._path}: there is no FROM, which names the model")
        self._note_what_is_idle()
        values = self._values
        parameters = {name: values[f"PARAMETER {name}"] for name in _RANGES if f"PARAMETER {name}" in values}
        return Modelfile(
            path=self._path,
            base=values["FROM"],
            adapter=values.get("ADAPTER"),
            parameters=Parameters(**parameters),
            stop=tuple(self._stop),
            system=values.get("SYSTEM"),
            template=values.get("TEMPLATE"),
            chat_template=self._chat_template(),
            messages=tuple(self._messages),
            licenses=tuple(self._licenses),
            flash=self._flash(),
            notes=tuple(sorted(self._notes, key=lambda note: note.line)),
        )

    def _note_what_is_idle(self) -> None:
        lines = self._lines
        if "FLASH_CONTEXT_LENGTH" in lines and (line := lines.get("PARAMETER num_ctx")):
            self._notes.append(Note(line, "PARAMETER num_ctx sets no memory aside: FLASH_CONTEXT_LENGTH does"))
        if "PARAMETER repeat_penalty" not in lines and (line := lines.get("PARAMETER repeat_last_n")):
            self._notes.append(
                Note(line, "PARAMETER repeat_last_n has no effect: PARAMETER repeat_penalty is not given")
            )

    def _chat_template(self) -> str | None:
        template = self._values.get("TEMPLATE")
        if template is None:
            return None
        jinja = to_jinja(template)
        if isinstance(jinja, str):
            if jinja != template and ".System" not in template and (line := self._lines.get("SYSTEM")):
                self._notes.append(Note(line, "SYSTEM has no effect: TEMPLATE has no {{ .System }}"))
            return jinja
        line = self._lines["TEMPLATE"] + template.count("\n", 0, jinja.offset)
        self._notes.append(
            Note(line, f"TEMPLATE has no effect: {jinja.reason}; the tokenizer's own chat template is used instead")
        )
        return None

    def _flash(self) -> dict[str, str]:
        flash = {setting: self._values[name] for name, setting in FLASH_INSTRUCTIONS.items() if name in self._values}
        if num_ctx := self._values.get("PARAMETER num_ctx"):
            flash.setdefault("context_length", str(num_ctx))
        return flash


def _unquote(text: str, following: Iterator[str]) -> str:
    """The value that begins with this text; lines that its quotes span are taken from those that follow."""
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


def _role(word: str) -> str:
    if word not in ROLES:
        raise ConfigError(f"MESSAGE is of {word!r}: it must be one of {', '.join(ROLES)}{did_you_mean(word, ROLES)}")
    return word


def _stop(value: str) -> str:
    if not value:
        raise ConfigError("PARAMETER stop is empty: every text would end before it begins")
    return value


def _parameter(name: str, text: str) -> int | float | None:
    """The value of a parameter, within its range."""
    if name not in _RANGES:
        raise ConfigError(
            f"there is no parameter {name!r}{did_you_mean(name, [*_RANGES, 'stop', *_UNUSED_PARAMETERS])}"
        )
    kind, least, most, words = _RANGES[name]
    try:
        number = kind(text)
    except ValueError:
        hint = ". Hint: a comment needs a line of its own" if "#" in text else ""
        wanted = "a number" if kind is float else "a whole number"
        raise ConfigError(f"PARAMETER {name} is {text!r}: it must be {wanted}{hint}") from None
    if not least <= number <= most or number == math.inf or (name == "num_predict" and number == 0):
        raise ConfigError(f"PARAMETER {name} is {text}: it must be {words}")
    return None if name == "seed" and number == -1 else number


def _base(value: str, folder: Path) -> str:
    """The model: a directory that exists, or else a Hugging Face repository."""
    is_path = value in (".", "..", "~") or value.startswith(("/", "./", "../", "~/"))
    if value.lower().endswith(".gguf"):
        raise ConfigError(
            f"FROM is {value!r}: GGUF files are not read. Hint: name a model of mlx-community on Hugging Face"
        )
    if is_path or _path(value, folder).exists():
        return str(_directory(value, folder))
    repository = re.sub(r"^(https?://)?(hf\.co|huggingface\.co)/", "", value)
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", repository, re.ASCII):
        raise ConfigError(
            f"FROM is {value!r}: it is neither a directory nor a Hugging Face repository such as "
            "mlx-community/Llama-3.2-3B-Instruct-4bit"
        )
    return repository


def _directory(value: str, folder: Path) -> Path:
    """A directory that exists, as an absolute path."""
    path = _path(value, folder)
    if not path.is_dir():
        raise ConfigError(f"{value!r} is {'not a directory' if path.exists() else 'not there'}: looked at {path}")
    return path.absolute()


def _path(value: str, folder: Path) -> Path:
    """A path that is relative to a folder, or to the home of a user."""
    try:
        path = folder / Path(value).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a null character
        raise ConfigError(f"{value!r} is not a path: {error}") from None
    return path

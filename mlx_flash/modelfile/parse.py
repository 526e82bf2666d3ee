"""Modelfiles, as of Ollama: a model, its prompts, its sampling, and here its streaming, in one text file.

    FROM mlx-community/Llama-3.2-3B-Instruct-4bit
    PARAMETER temperature 0.7
    SYSTEM Answer in one sentence.
    FLASH_RAM_GB 4

Each line has one instruction, in upper or lower case. A line that begins with ``#`` is a comment. A value is the rest
of the line, or text in ``"`` or ``\"""`` quotes, which may span lines and have no escapes. One without effect
becomes a :class:`Note`. A wrong one raises a ConfigError with file and line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from mlx_flash.config import ALIASES, IDLE, FlashConfig, did_you_mean, own_settings, parse_setting
from mlx_flash.errors import ConfigError
from mlx_flash.files import make_private, settings_file, write_atomically, write_errors
from mlx_flash.layout.names import repository_of

_NAME = re.compile(r"\w[\w.:-]{0,99}", re.ASCII)


def models_folder() -> Path:
    """Return the folder of Modelfiles with names, beside the settings file. It need not exist."""
    return settings_file().parent / "models"


def named_models() -> dict[str, Path]:
    """Return the Modelfiles of the folder by name. Files with other names are left out."""
    folder = models_folder()
    if not folder.is_dir():
        return {}
    return {path.name: path for path in sorted(folder.iterdir()) if _NAME.fullmatch(path.name) and path.is_file()}


def find_modelfile(name: str) -> Modelfile:
    """Return the Modelfile at a path or with a name, or one that only names a folder or repository."""
    if Path(name).is_file() and not name.endswith(".gguf"):
        return read_modelfile(name)
    if not Path(name).is_dir() and (path := named_models().get(name)):
        return read_modelfile(path)
    return Modelfile(path=Path(name), base=repository_of(name))


def check_model_name(name: str) -> None:
    """Refuse a name that cannot be one of a Modelfile."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no name for a model or a conversation: it must have 1 to 100 letters, digits, and . : _ - "
            "(not at the start)"
        )


def create_model(name: str, source: Path | str) -> Path:
    """Copy a Modelfile to one with a name. Return its path."""
    check_model_name(name)
    text, path = read_text(Path(source)), models_folder() / name
    found = parse_modelfile(text, source)
    try:
        copy = parse_modelfile(text, path)
    except ConfigError:
        copy = replace(found, base="")
    if (copy.base, copy.adapter) != (found.base, found.adapter):
        raise ConfigError(f"{source}: its paths depend on its folder. Hint: begin those of FROM and ADAPTER with /")
    with write_errors(f"cannot write the Modelfile {path}", "or set XDG_CONFIG_HOME to another folder"):
        make_private(path.parent)
        write_atomically(path, text)
    return path


DEFAULT_MAX_TOKENS = 512
"""Tokens of an answer where nothing else is said."""

ROLES = ("system", "user", "assistant")

_MOST = 2**31 - 1
"""The greatest number that MLX takes for a length."""

_SAMPLING = "mlx-flash does not sample that way"
_HARDWARE = "MLX and the plan decide that"
UNUSED_PARAMETERS = {
    **dict.fromkeys(("mirostat", "mirostat_eta", "mirostat_tau", "tfs_z", "typical_p", "penalize_newline"), _SAMPLING),
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
    """Return a text that becomes tokens."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{what} is no text: it has bytes that are not UTF-8 after {error.start} characters. "
            "Hint: iconv -f ISO-8859-1 -t UTF-8 converts files of Western European languages."
        ) from None
    return text


def parse_stop(value: str) -> str:
    """Return a text that ends the generation."""
    if not value:
        raise ConfigError("PARAMETER stop is empty: every text would end before it begins")
    return value


def parse_parameter(name: str, text: str) -> int | float:
    """Return the value of a PARAMETER, checked against its bounds."""
    if (found := PARAMETERS.get(name)) is None:
        known = [*PARAMETERS, "stop", *UNUSED_PARAMETERS]
        raise ConfigError(f"there is no parameter {name!r}{did_you_mean(name, known)}")
    kind, least, most, words = found
    try:
        number = kind(text)
    except ValueError:
        hint = ". Hint: a comment needs a line of its own" if "#" in text else ""
        wanted = "a number" if kind is float else "a whole number"
        raise ConfigError(f"PARAMETER {name} is {text!r}: it must be {wanted}{hint}") from None
    if not least <= number <= most or number == math.inf or (name == "num_predict" and number == 0):
        raise ConfigError(f"PARAMETER {name} is {text}: it must be {words}")
    return number


def parse_base(value: str, folder: Path) -> str:
    """Return the model of FROM: a directory that exists, or else a Hugging Face repository."""
    if value.lower().endswith(".gguf"):
        raise ConfigError(
            f"FROM is {value!r}: GGUF files are not read. Hint: name a model of mlx-community on Hugging Face"
        )
    if _is_path(value) or _path(value, folder).is_dir():
        return str(parse_directory(value, folder))
    repository = repository_of(value)
    if _is_path(repository):  # of a name of the user's own
        return str(parse_directory(repository, folder))
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", repository, re.ASCII):
        raise ConfigError(
            f"FROM is {value!r}: it is neither a directory nor a Hugging Face repository such as "
            "mlx-community/Llama-3.2-3B-Instruct-4bit"
        )
    return repository


def _is_path(value: str) -> bool:
    return value in (".", "..", "~") or value.startswith(("/", "./", "../", "~/"))


def parse_directory(value: str, folder: Path) -> Path:
    """Return an existing directory as an absolute path."""
    path = _path(value, folder)
    if not path.is_dir():
        raise ConfigError(f"{value!r} is {'not a directory' if path.exists() else 'not there'}: looked at {path}")
    return path.absolute()


def _path(value: str, folder: Path) -> Path:
    try:
        path = folder / Path(value).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a null character
        raise ConfigError(f"{value!r} is not a path: {error}") from None
    return path


class Note(NamedTuple):
    """An instruction without effect, or with another effect than in Ollama: its line, from 1, and an explanation."""

    line: int
    text: str


PARAMETERS: Mapping[str, tuple[Callable[[str], int | float], float, float, str]] = {
    "num_ctx": (int, 1, math.inf, "at least 1"),
    "num_predict": (int, -2, math.inf, "at least 1, or -1 for no limit, or -2 to fill the context"),
    "temperature": (float, 0, math.inf, "0 or more"),
    "top_p": (float, math.ulp(0), 1, "above 0 and at most 1. Hint: temperature 0 takes the likeliest token"),
    "top_k": (int, 0, _MOST, "0, which keeps all, or more, below 2**31"),
    "min_p": (float, 0, 1, "between 0 and 1"),
    "seed": (int, -1, 2**64 - 1, "0 or more, below 2**64, or -1 for another one each time"),
    "repeat_penalty": (float, math.ulp(0), math.inf, "above 0; 1 is no penalty"),
    "repeat_last_n": (int, -1, _MOST, "0 or more, below 2**31, or -1 for the whole context"),
    "presence_penalty": (float, -100, 100, "between -100 and 100"),
    "frequency_penalty": (float, -100, 100, "between -100 and 100"),
}
"""The parameters, with Ollama's names: type, bounds, and these in words. One that is unset means mlx-lm's default."""


def recent_tokens(repeat_last_n: float | None) -> int:
    """Return the number of recent tokens that a penalty counts. None is Ollama's default, 64; -1 is all tokens."""
    return 64 if repeat_last_n is None else _MOST if repeat_last_n == -1 else int(repeat_last_n)


@dataclass(frozen=True, kw_only=True, slots=True)
class Modelfile:
    """The contents of a Modelfile."""

    path: Path  # the file
    base: str  # the model: an absolute path of a directory, or a Hugging Face repository
    adapter: Path | None = None  # directory of a LoRA adapter
    parameters: Mapping[str, int | float] = field(default_factory=dict)  # those that are set
    stop: tuple[str, ...] = ()  # texts that end the generation
    system: str | None = None  # the system prompt
    chat_template: str | None = None  # a template of Jinja; None takes the tokenizer's own
    messages: tuple[dict[str, str], ...] = ()  # first ones of every conversation: role and content
    flash: Mapping[str, str] = field(default_factory=dict)  # fields of FlashConfig and their checked texts
    notes: tuple[Note, ...] = ()  # instructions without effect, by line

    @property
    def first_messages(self) -> tuple[dict[str, str], ...]:
        """The messages that every conversation begins with."""
        system = () if self.system is None else ({"role": "system", "content": self.system},)
        return (*system, *self.messages)


_OTHER_NAMES = {"enabled": "FLASH", "ram_budget_gb": "FLASH_RAM_GB", "kv_cache": "FLASH_KV"}
FLASH_INSTRUCTIONS = {
    _OTHER_NAMES.get(setting.name, f"FLASH_{setting.name.upper()}"): setting.name for setting in fields(FlashConfig)
}
"""The instructions for streaming, each with its field of FlashConfig."""

_INSTRUCTION_OF = {setting: name for name, setting in FLASH_INSTRUCTIONS.items()}
_JINJA_MARK = re.compile(r"\{%|\{\{[^{}]*(?<![.\w])messages\b")

_ALIASES = {f"FLASH_{name.upper()}": name for name in ALIASES}

_WITHOUT_EFFECT = {
    **{f"FLASH_{name.upper()}": reason for name, reason in IDLE.items()},
    "REQUIRES": "mlx-flash has no versions of Ollama",
    "RENDERER": "the prompt is made by TEMPLATE or the tokenizer's chat template",
    "PARSER": "mlx-flash prints the text as it is generated",
    "CAPABILITY": "the model's own configuration has its capabilities",
}
_INSTRUCTIONS = (
    *("FROM", "PARAMETER", "SYSTEM", "TEMPLATE", "MESSAGE", "ADAPTER", "LICENSE"),
    *_WITHOUT_EFFECT,
    *FLASH_INSTRUCTIONS,
)


def read_modelfile(path: Path | str) -> Modelfile:
    """Read a Modelfile."""
    path = Path(path)
    return parse_modelfile(read_text(path), path)


def read_text(path: Path) -> str:
    """Read the text of a Modelfile."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: the Modelfile cannot be read: {error.strerror}") from error
    try:
        return data.decode("utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: the Modelfile is not text: {error}") from error


def parse_modelfile(text: str, path: Path | str) -> Modelfile:
    """Parse the text of a Modelfile. Paths in it are relative to the folder of ``path``, its file."""
    path, notes = Path(path), list[Note]()
    found: dict[str, list[tuple[int, Any]]] = {}  # the lines and values of each instruction
    lines = enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), 1)
    for number, line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            what, value, reason = _instruction(line, (following for _, following in lines), path.parent)
            if what == "FROM" and what in found:
                raise ConfigError(f"there is a second FROM; the first is in line {found[what][0][0]}")
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        if reason:
            notes.append(Note(number, f"{what} has no effect: {reason}"))
            continue
        if what in found and what not in _SEVERAL:
            notes.append(Note(found[what][-1][0], f"{what} has no effect: line {number} says it again"))
        found.setdefault(what, []).append((number, value))
    return _made_of(found, notes, path)


def _own_instruction(alias: str, rest: list[str]) -> tuple[str, list[str]]:
    """Return our instruction for another name of a setting, and its value if it has one."""

    def spell(name: str) -> str:
        return _INSTRUCTION_OF.get(name, f"FLASH_{name.upper()}")

    ((setting, value),) = own_settings({spell(alias): rest[0] if rest else None}, spell=spell).items()
    return _INSTRUCTION_OF[setting], [str(value)] if rest else []


_SEVERAL = ("MESSAGE", "LICENSE", "PARAMETER stop")
"""Instructions that may be repeated. Of each other instruction the last one counts."""


def _instruction(line: str, following: Iterator[str], folder: Path) -> tuple[str, Any, str]:
    """Return the instruction of a line, its value, and why it has no effect.

    Lines that its quotes span are taken from ``following``. A parameter has its name in the instruction.
    """
    first, *rest = line.split(None, 1)
    name, key = first.upper(), ""
    if name in _ALIASES:
        name, rest = _own_instruction(_ALIASES[name], rest)
    if name not in _INSTRUCTIONS:
        raise ConfigError(f"there is no instruction {first!r}{did_you_mean(name, _INSTRUCTIONS)}")
    if name in ("PARAMETER", "MESSAGE"):
        key, *rest = rest[0].split(None, 1) if rest else [""]
        key = key.lower()
    what = f"{name} {key}".strip()
    if not rest:
        raise ConfigError(f"{what} has no value")
    value = unquote(rest[0], following)
    if reason := _WITHOUT_EFFECT.get(name) or (UNUSED_PARAMETERS.get(key) if name == "PARAMETER" else None):
        return what, value, reason
    if name == "PARAMETER":
        return what, parse_stop(value) if key == "stop" else parse_parameter(key, value), ""
    if name == "MESSAGE":
        if key not in ROLES:
            raise ConfigError(f"MESSAGE is of {key!r}: it must be one of {', '.join(ROLES)}{did_you_mean(key, ROLES)}")
        return name, {"role": key, "content": value}, ""
    if name in ("FROM", "ADAPTER"):
        if not value:
            raise ConfigError(f"{name} is empty")
        return name, (parse_base if name == "FROM" else parse_directory)(value, folder), ""
    if name in FLASH_INSTRUCTIONS:
        parse_setting(FLASH_INSTRUCTIONS[name], value)
    return name, value, ""


def _made_of(found: Mapping[str, Sequence[tuple[int, Any]]], notes: list[Note], path: Path) -> Modelfile:
    """Return the Modelfile with some instructions. Of those that cannot be repeated the last one counts."""
    lines = {what: each[-1][0] for what, each in found.items()}
    values: dict[str, Any] = {what: each[-1][1] for what, each in found.items()}
    values |= {what: [value for _, value in found[what]] for what in _SEVERAL if what in found}
    if "FROM" not in values:
        raise ConfigError(f"{path}: there is no FROM, which names the model")
    if "FLASH_CONTEXT_LENGTH" in lines and (line := lines.get("PARAMETER num_ctx")):
        notes.append(Note(line, "PARAMETER num_ctx sets no memory aside: FLASH_CONTEXT_LENGTH does"))
    has_penalty = any(f"PARAMETER {kind}_penalty" in lines for kind in ("repeat", "presence", "frequency"))
    if not has_penalty and (line := lines.get("PARAMETER repeat_last_n")):
        notes.append(Note(line, "PARAMETER repeat_last_n has no effect: no penalty is given"))
    template = values.get("TEMPLATE")
    if template is not None and not _JINJA_MARK.search(template):
        template = None
        words = "TEMPLATE has no effect: templates of Go are not read, and the tokenizer's own chat template is used"
        notes.append(Note(lines["TEMPLATE"], words))
    parameters = {name: values[what] for name in PARAMETERS if (what := f"PARAMETER {name}") in values}
    flash = {setting: values[name] for name, setting in FLASH_INSTRUCTIONS.items() if name in values}
    if "num_ctx" in parameters:
        flash.setdefault("context_length", str(parameters["num_ctx"]))
    return Modelfile(
        path=path,
        base=values["FROM"],
        adapter=values.get("ADAPTER"),
        parameters=parameters,
        stop=tuple(values.get("PARAMETER stop", ())),
        system=values.get("SYSTEM"),
        chat_template=template,
        messages=tuple(values.get("MESSAGE", ())),
        flash=flash,
        notes=tuple(sorted(notes, key=lambda note: note.line)),
    )

"""The settings of the engine: what they are, and where they come from. Validated when they are made."""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

from mlx_flash.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GB = 1_000_000_000
"""Sizes that people see are decimal."""

Profile = Literal["safe", "balanced", "performance"]
Budget = float | Literal["min", "safe", "balanced", "performance"] | None
IOMode = Literal["auto", "direct", "buffered"]
KVMode = Literal["stock", "preallocated", "lazy", "disk"]
PrefixMode = Literal["off", "exact", "longest"]

_BUDGET_WORDS = ("min", *get_args(Profile))
_IO_MODES = get_args(IOMode)
_KV_MODES = get_args(KVMode)
_PREFIX_MODES = get_args(PrefixMode)
_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}

VARIABLE_PREFIX = "MLX_FLASH_"
OTHER_VARIABLES = frozenset({"MLX_FLASH_TRACEBACK"})
"""Environment variables with the prefix that are no settings of the engine."""


@dataclass(frozen=True, kw_only=True)
class FlashConfig:
    """How a model is streamed.

    Attributes:
        enabled: False makes the patch of mlx-lm leave everything to mlx-lm.
        ram_budget_gb: what the whole process may use at its peak, in decimal GB, or a word. ``"min"`` is the smallest
            workable budget; of a mixture, the smallest with experts that are read one by one. ``"safe"``,
            ``"balanced"`` and ``"performance"`` take 50, 70 and 90 % of the memory that is free when the model is
            loaded, at most 40, 70 and 80 % of the machine's, and never less than ``"min"``. None is ``"balanced"``.
        context_length: tokens of KV cache the plan sets memory aside for, over all sequences. None plans for 4096, or
            for less where those would take more than a quarter of the budget. A call that would need more memory than
            the budget has left is refused.
        prefill_step_size: the most new tokens in one forward call the plan sets memory aside for. None plans for
            mlx-lm's default, or for less where that would take more than a fifth of the budget.
        kv_cache: how the KV cache is kept. ``"stock"`` leaves it to mlx-lm. ``"preallocated"`` takes the memory of
            ``context_length`` tokens at once, ``"lazy"`` takes it as tokens come; neither copies old tokens.
            ``"disk"`` keeps in memory what ``kv_ram_gb`` has room for, the rest in files: the disk limits the context.
            None keeps it in memory as mlx-lm does, and has it on disk where the plan, or a call, has no room for it.
        kv_ram_gb: memory for keys and values, beyond which they are on disk, in decimal GB. None lets the plan choose.
        kv_max_tokens: when a cache would hold more tokens, the older half is forgotten, which changes the output. None
            forgets nothing.
        kv_keep: so many tokens at the beginning are not forgotten with ``kv_max_tokens``.
        kv_step: tokens by which a cache grows, and tokens of a page on disk.
        kv_directory: where the files of a KV cache are, while its model is there. None is mlx-flash's cache folder.
        kv_prefixes: mode of the prefix cache, which keeps prompts on disk so that later runs need not compute them
            again. ``"exact"`` restores only calls of the same length, and the output is bit for bit the same;
            ``"longest"`` restores the longest cached prefix, as mlx-lm's server does with the caches that it keeps.
        kv_prefix_tenant: name of a private part of the prefix cache; tenants find nothing of each other.
        kv_prefix_gb: limit of the prefix cache of all models on disk, in decimal GB; the least recently used pages are
            evicted to keep it. None leaves a tenth of the disk free.
        ssd_write_gb_per_day: limit of what all processes together write to the prefix cache in a day, in decimal GB. A
            KV cache on disk counts too, but goes on beyond it. 0 writes neither. None is 20.
        num_slots: buffers that the streamed units take turns in. None lets the plan choose.
        expert_pool_gb: memory for experts of mixture-of-experts models that are kept between tokens, in decimal GB.
            None: what the rest of the plan leaves of the budget. 0 keeps none; layers are read whole then, with all of
            their experts, as those of other models are.
        expert_lookahead: whether experts are read early that the router of the next layer is likely to choose. A wrong
            guess costs a read; the output is the same either way.
        io: ``"direct"`` reads past the operating system's page cache, ``"buffered"`` through it; ``"auto"`` is direct
            where the file system can.
        read_size_mb: size of one read in MB (10**6 bytes). None takes what a probe of the disk found best.
        queue_depth: reads in flight at once. None takes what a probe of the disk found best.
        derived_cache_gb: what packed copies of parameters that mlx-lm computes while loading may take on disk, those of
            all models together, in decimal GB; the ones used longest ago are removed to keep it. None: as much as
            leaves a tenth of the disk free. 0 writes none, and such parameters stay in memory.
        telemetry: whether the engine's state is published for ``flash-monitor``.
        poison_released_slots: fill every released slot with NaN bytes, so that a read of stale weights shows at once.
            For tests; costs a pass over the memory.
    """

    enabled: bool = True
    ram_budget_gb: Budget = None
    context_length: int | None = None
    prefill_step_size: int | None = None
    kv_cache: KVMode | None = None
    kv_ram_gb: float | None = None
    kv_max_tokens: int | None = None
    kv_keep: int = 0
    kv_step: int = 256
    kv_directory: Path | str | None = None
    kv_prefixes: PrefixMode = "off"
    kv_prefix_tenant: str | None = None
    kv_prefix_gb: float | None = None
    ssd_write_gb_per_day: float | None = None
    num_slots: int | None = None
    expert_pool_gb: float | None = None
    expert_lookahead: bool = True
    io: IOMode = "auto"
    read_size_mb: float | None = None
    queue_depth: int | None = None
    derived_cache_gb: float | None = None
    telemetry: bool = True
    poison_released_slots: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.ram_budget_gb, str) and self.ram_budget_gb not in _BUDGET_WORDS:
            raise ConfigError(
                f"ram_budget_gb is {self.ram_budget_gb!r}: it must be a number of GB, {_or_budget_words()}"
                + did_you_mean(self.ram_budget_gb, _BUDGET_WORDS)
            )
        parse_budget(self.ram_budget_gb)
        _check_count("context_length", self.context_length, 1)
        _check_count("prefill_step_size", self.prefill_step_size, 1)
        _check_count("num_slots", self.num_slots, 1)
        _check_count("queue_depth", self.queue_depth, 1, 64)
        _check_number("read_size_mb", self.read_size_mb)
        for name in ("expert_pool_gb", "derived_cache_gb", "kv_prefix_gb", "ssd_write_gb_per_day"):
            _check_number(name, getattr(self, name), may_be_zero=True)
        _check_word("io", self.io, _IO_MODES)
        self._check_kv()
        for name in ("enabled", "expert_lookahead", "telemetry", "poison_released_slots"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name} is {value!r}: it must be True or False")

    def _check_kv(self) -> None:
        if self.kv_cache is not None:
            _check_word("kv_cache", self.kv_cache, _KV_MODES)
        _check_number("kv_ram_gb", self.kv_ram_gb)
        _check_count("kv_max_tokens", self.kv_max_tokens, 1)
        for name, least in (("kv_keep", 0), ("kv_step", 1)):
            _check_count(name, getattr(self, name), least, is_open=False)
        if not isinstance(self.kv_directory, Path | str | None):
            raise ConfigError(f"kv_directory is {self.kv_directory!r}: it must be a path")
        _check_word("kv_prefixes", self.kv_prefixes, _PREFIX_MODES)
        if not isinstance(self.kv_prefix_tenant, str | None):
            raise ConfigError(f"kv_prefix_tenant is {self.kv_prefix_tenant!r}: it must be text")

    @property
    def writes_nothing(self) -> bool:
        """Whether neither keys and values nor prompts may be written to a disk."""
        return self.ssd_write_gb_per_day == 0

    @property
    def budget_bytes(self) -> int | Literal["min"] | Profile:
        """The budget in bytes, or the word that stands for one."""
        budget = self.ram_budget_gb
        if budget is None:
            return "balanced"
        return budget if isinstance(budget, str) else round(budget * GB)

    @classmethod
    def resolve(
        cls,
        settings: Mapping[str, Any] | None = None,
        /,
        *,
        modelfile: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        file: Path | None = None,
        **keywords: Any,
    ) -> FlashConfig:
        """Gathers the settings from wherever they are given. For each of them the first of these wins: ``keywords``,
        ``settings``, the environment, the file, the Modelfile, the default.

        Text is parsed to the type of its field: ``true``, ``yes``, ``on``, ``1`` and their opposites in any case are
        booleans; ``none`` and ``auto`` in any case are None for a field that can be None (for ``io``, which cannot,
        ``auto`` is a mode). Everything that is given is checked, also what does not win.

        Args:
            settings: names and values. None as a value counts: it leaves the field open whatever ranks lower.
            modelfile: names and text, such as ``Modelfile.flash``.
            environment: where variables such as ``MLX_FLASH_RAM_BUDGET_GB`` are looked up; None is the process's own
                environment. An empty variable counts as not given.
            file: a TOML file whose top-level keys are names of settings. None reads :func:`default_file`, which need
                not exist.
            keywords: names and values. None as a value counts as not given.

        Raises:
            ConfigError: an unknown name or a wrong value, with its source; the file cannot be read.
        """
        path = default_file() if file is None else file
        from_file = _read_toml(path, must_exist=file is not None)
        variables = _own_variables(os.environ if environment is None else environment)
        known = {field.name for field in fields(cls)}
        given = {name: value for name, value in keywords.items() if value is not None or name not in known}
        merged = _settings(modelfile or {}, lambda name: f"Modelfile, {name}")
        merged |= _settings(from_file, lambda name: f"{path}, key {name}")
        merged |= _settings(variables, lambda name: f"environment variable {name}", variables_of_fields())
        merged |= _settings(settings or {}, lambda name: f"settings, key {name}")
        merged |= _settings(given, lambda name: f"keyword {name}")
        return cls(**merged)


def parse_budget(value: object) -> Budget:
    """Turns what a person wrote for the budget into a budget.

    Args:
        value: a number of decimal GB, a string holding one, one of the words of ``ram_budget_gb``, or None.

    Raises:
        ConfigError: neither a word nor a positive, finite number.
    """
    if value is None or (isinstance(value, str) and value in _BUDGET_WORDS):
        return value  # type: ignore[return-value]
    try:
        if isinstance(value, bool | bytes | bytearray):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"ram_budget_gb is {value!r}: it must be a number of GB (10**9 bytes), such as 2 or 1.5, "
            f"{_or_budget_words()}{did_you_mean(value, _BUDGET_WORDS)}"
        ) from None
    if not math.isfinite(number * GB) or number <= 0:
        raise ConfigError(f"ram_budget_gb is {value!r}: it must be a finite number above 0, in GB (10**9 bytes)")
    return number


def parse_setting(name: str, value: object) -> Any:
    """A value for a field of :class:`FlashConfig`, checked; text is parsed as :meth:`FlashConfig.resolve` says.

    Raises:
        ConfigError: the value is not one for this field.
    """
    parsed: Any = _from_text(name, value.strip()) if isinstance(value, str) else value
    FlashConfig(**{name: parsed})
    return parsed


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """The end of an error that names the nearest of the known words; empty when none is near."""
    words = {word.lower(): word for word in known}
    near = difflib.get_close_matches(given.lower(), words, n=1) if isinstance(given, str) else []
    return f". Did you mean {words[near[0]]!r}?" if near else ""


def variables_of_fields() -> dict[str, str]:
    """The environment variables that are settings, each with the field it sets."""
    return {VARIABLE_PREFIX + field.name.upper(): field.name for field in fields(FlashConfig)}


def default_file() -> Path:
    """Where a user's own settings are."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "mlx-flash" / "config.toml"


def _settings(
    values: Mapping[str, Any], source: Callable[[str], str], fields_of: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The settings of one source, parsed and checked.

    Args:
        values: what is given there.
        source: what an error calls a key of it.
        fields_of: the keys there are, each with its field; None takes the names of the fields.
    """
    fields_of = fields_of or {field.name: field.name for field in fields(FlashConfig)}
    found = {}
    for key, value in values.items():
        if key not in fields_of:
            hint = did_you_mean(key, fields_of) or f". There are {', '.join(fields_of)}"
            raise ConfigError(f"{source(key)}: there is no such setting{hint}")
        try:
            found[fields_of[key]] = parse_setting(fields_of[key], value)
        except ConfigError as error:
            raise ConfigError(f"{source(key)}: {error}") from None
    return found


def _from_text(name: str, text: str) -> object:
    """Text as a value of the field's type."""
    kinds = get_args(kind := get_type_hints(FlashConfig)[name]) or (kind,)
    if NoneType in kinds and text.lower() in {"none", "auto"}:
        return None
    if name == "ram_budget_gb":
        return parse_budget(text)
    try:
        if bool in kinds:
            return _BOOLEANS[text.lower()]
        return int(text) if int in kinds else float(text) if float in kinds else text
    except (KeyError, ValueError):
        words = {bool: "true or false", int: "a whole number", float: "a number"}
        raise ConfigError(f"{name} is {text!r}: it must be {words[kinds[0]]}") from None


def _own_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: text
        for name, text in environment.items()
        if name.startswith(VARIABLE_PREFIX) and name not in OTHER_VARIABLES and text
    }


def _read_toml(path: Path, *, must_exist: bool) -> dict[str, Any]:
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if must_exist:
            raise ConfigError(f"{path}: there is no such settings file") from None
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: the settings file cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, nested too deep
        raise ConfigError(f"{path}: the settings file is not TOML: {error}") from error
    return values


def _or_budget_words() -> str:
    return f"or one of {', '.join(map(repr, _BUDGET_WORDS))}"


def _check_word(name: str, value: object, words: Sequence[str]) -> None:
    if value not in words:
        hint = did_you_mean(value, words)
        raise ConfigError(f"{name} is {value!r}: it must be one of {', '.join(map(repr, words))}{hint}")


def _check_count(name: str, value: object, least: int, most: int | None = None, *, is_open: bool = True) -> None:
    if value is None and is_open:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}: it must be a whole number")
    if value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"between {least} and {most}"
        raise ConfigError(f"{name} is {value}: it must be {bounds}")


def _check_number(name: str, value: object, *, may_be_zero: bool = False) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} is {value!r}: it must be a number")
    if not 0 <= value <= sys.float_info.max / GB or (value == 0 and not may_be_zero):
        least = "not below 0" if may_be_zero else "above 0"
        raise ConfigError(f"{name} is {value!r}: it must be a finite number {least}")

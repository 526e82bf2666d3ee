"""The settings of the engine and their sources. Settings are validated when they are made."""

from __future__ import annotations

import difflib
import functools
import math
import os
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mlx_flash.errors import ConfigError
from mlx_flash.files import settings_file
from mlx_flash.logs import log

T = TypeVar("T")

BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
"""Words for True and False in texts."""

ALIASES = {
    "max_kv_size": "kv_max_tokens",
    "prefill_chunk_size": "prefill_step_size",
    "disk_kv_enabled": "kv_cache",
    "disk_kv_dir": "kv_directory",
    "disk_kv_max_tokens": "kv_max_tokens",
    "threads": "queue_depth",
}
"""Other names of settings, each with ours. ``disk_kv_enabled`` has other values too."""

_UNSET: dict[str, Any] = {"prefill_chunk_size": 0, "disk_kv_dir": ""}
"""Values that other programs have for None."""

_DECIDED_OTHERWISE = {
    "the model's config.json has the number of experts of a token; another one changes the output": (
        "top_k",
        "moe_top_k_override",
    ),
    "the plan decides on the memory of experts, and expert_pool=False reads whole layers": (
        "expert_cache_size",
        "expert_pool_gb",
    ),
    "num_slots sets how far the reader is ahead": ("prefetch_layers", "pipeline_depth"),
    "reads always overlap computing": ("pipelined_execution",),
    "free memory and io decide what the page cache keeps": ("eviction", "eviction_strategy"),
    "the checkpoint decides the bits of weights": ("quant_warn_below",),
    "MLX chooses the kernels": ("metal_kernels",),
    "the budget always holds": ("strict_guardrails",),
    "flash-monitor shows the time of each layer, --verbose prints the log": ("debug", "enable_profiling"),
    "telemetry publishes the state for flash-monitor": ("monitor_queue",),
    "kv_bits of generate and stream_generate, or --kv-bits, quantizes keys and values": (
        "kv_cache_quantized",
        "kv_cache_bits",
        "kv_cache_local_window_size",
    ),
    "the plan cuts large weights into row tiles where the budget needs it": ("tiled_execution", "tile_size"),
}
IDLE = {name: reason for reason, names in _DECIDED_OTHERWISE.items() for name in names}
"""Settings of other programs and earlier versions that have no effect here, each with what decides instead."""

OTHER_NAMES = (*ALIASES, *IDLE)

FLAGS = {"--ram": "--ram-budget-gb", "--kv-quant": "--kv-bits", "--modelfile": "--file", "--debug": "--verbose"}
"""Other names of flags, each with ours."""


def own_settings(
    given: Mapping[str, Any], source: Callable[[str], str] | None = None, spell: Callable[[str], str] = str
) -> dict[str, Any]:
    """Return the settings of one source under our names. A warning names those without effect that ask for something.

    Args:
        given: the keys and values of the source.
        source: returns the name of a key for messages. None leaves unknown keys and wrong values to the constructor.
        spell: returns the key of a setting.
    """
    ours = {spell(name): name for name in _type_hints(FlashConfig)}
    names = ours | {spell(name): name for name in OTHER_NAMES}
    found: dict[str, Any] = {}
    idle: dict[str, list[str]] = {}
    for key, value in given.items():
        where = "" if source is None else f"{source(key)}: "
        name = names.get(key, key)
        if where and key not in names:
            hint = did_you_mean(key, names) or f". There are {', '.join(ours)}"
            raise ConfigError(f"{where}there is no such setting{hint}")
        if name in IDLE:
            if value is not None and value is not False:
                idle.setdefault(IDLE[name], []).append(where.removesuffix(": ") or key)
            continue
        try:
            own = None if name in _UNSET and value in (_UNSET[name], str(_UNSET[name])) else value
            if name == "disk_kv_enabled" and value is not None:
                known = BOOLEANS.get(value.strip().lower()) if isinstance(value, str) else value
                if not isinstance(known, bool):
                    hint = f"Hint: {spell('kv_cache')} disk"
                    raise ConfigError(f"{spell(name)} is {value!r}: it must be true or false. {hint}")
                own = "disk" if known else None
            name = ALIASES.get(name, name)
            own = parse_setting(name, own) if where else own
            if found.setdefault(name, own) is None:
                found[name] = own
            if own not in (None, found[name]):
                raise ConfigError(f"{key} is {name}, which is {found[name]!r} and {own!r}. Hint: give it once.")
        except ConfigError as error:
            raise ConfigError(f"{where}{error}") from None
    if idle:
        warn_once("without effect: " + "; ".join(f"{', '.join(keys)} ({why})" for why, keys in idle.items()))
    return found


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning, the first time that it is given."""
    log.warning("%s", text)


def takes_aliases(settings: type[T]) -> type[T]:
    """Make a class of settings take other names as keywords."""
    stock = settings.__init__

    @functools.wraps(stock)
    def __init__(self: T, **given: Any) -> None:  # noqa: N807
        stock(self, **own_settings(given))

    settings.__init__ = __init__  # type: ignore[assignment]
    return settings


GB = 1_000_000_000
"""Sizes that people see are decimal."""

Profile = Literal["safe", "balanced", "performance"]
Budget = float | Literal["min", "auto", "safe", "balanced", "performance"] | None
KVMode = Literal["stock", "disk"]

BUDGET_WORDS = ("min", "auto", *get_args(Profile))
"""The words of ``ram_budget_gb``."""

_OR_A_WORD = f"or one of {', '.join(map(repr, BUDGET_WORDS))}"
_KIND_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "text", Path: "a path"}
_OR_ZERO = {"least": 0}
"""Metadata of a field that may be 0. Else a count is at least 1, another number above 0. ``most`` limits a count."""

VARIABLE_PREFIX = "MLX_FLASH_"
OTHER_VARIABLES = frozenset({"MLX_FLASH_API_KEY", "MLX_FLASH_TRACEBACK"})
"""Environment variables with the prefix that are not settings."""


@takes_aliases
@dataclass(frozen=True, kw_only=True)
class FlashConfig:
    """Settings of one streamed model.

    The command line makes a flag of each field and takes its help from the first sentence here.

    Attributes:
        enabled: stream models. False makes the patch of mlx-lm leave everything to mlx-lm.
        ram_budget_gb: peak memory of the whole process in GB (10**9 bytes), or min, auto, safe, balanced, performance.
            ``"min"`` is the smallest workable budget; for a mixture of experts, the smallest that reads experts one by
            one. ``"safe"``, ``"balanced"`` and ``"performance"`` take 50, 70 and 90 % of the memory that is free at
            load time, at most 40, 70 and 80 % of the machine's memory, and never less than ``"min"``. None is
            ``"balanced"``. ``"auto"`` follows the memory that others leave: it falls when they need memory, and rises
            when some has been free for a while.
        context_length: tokens of KV cache to reserve memory for, over all sequences. None is 4096, or fewer where those
            would take more than a quarter of the budget. On disk it may be more. A call that needs more memory than the
            budget has left is refused.
        prefill_step_size: prompt tokens in one forward call. None is mlx-lm's 2048, or fewer where those would take
            more than a fifth of the budget.
        kv_cache: storage of the KV cache. ``"stock"`` leaves it to mlx-lm, in memory. ``"disk"`` keeps ``kv_ram_gb`` in
            memory and the rest in files, so that the disk limits the context. None keeps it in memory as mlx-lm does,
            and offloads it to disk where the plan or a call has no room for it.
        kv_ram_gb: memory for keys and values, in GB; the rest is on disk. None lets the plan choose.
        kv_max_tokens: last tokens that a cache keeps, which changes the output: mlx-lm's ``RotatingKVCache``, in
            memory, whatever ``kv_cache`` is. None keeps every token.
        kv_keep: tokens at the beginning that ``kv_max_tokens`` never drops.
        kv_step: tokens by which a cache grows, and tokens of a page on disk.
        kv_directory: folder for the files of a KV cache on disk. None is mlx-flash's cache folder.
        kv_prefixes: mode of the prefix cache, which keeps prompts on disk for later runs. ``"exact"`` restores only
            calls of the same length, and the output is bit for bit the same. None is ``"exact"`` for the models of a
            server whose budget has room for it, and ``"off"`` otherwise.
        kv_prefix_tenant: name of a private part of the prefix cache. Tenants find nothing of each other.
        kv_prefix_gb: limit of the prefix cache of all models on disk, in GB. The least recently used pages are evicted.
            None is 20, or a tenth of the free disk if that is less. A tenth of the disk stays free in any case.
        ssd_write_gb_per_day: limit of what a process writes to the prefix cache in a day, in GB. A KV cache on disk
            counts too, but goes on beyond the limit. 0 writes neither. None is 20.
        batching: way of computing several requests or prompts at once. ``"auto"`` computes each as if it were alone,
            bit for bit, where weights are streamed. Where all are in memory it computes mlx-lm's padded batches, in
            which the last bits depend on the others. ``"stock"`` computes mlx-lm's always.
        lend_reserves: keep more weights in memory while the context is short and no large prompt is computed. They are
            dropped as keys, values and intermediate results need their memory.
        speculation: guess tokens from earlier text, and check several in one pass where computing them costs no time.
            The output is the same either way.
        mtp: use of the head for multi-token prediction that some checkpoints have, to guess tokens. ``"auto"`` keeps it
            in memory where a faster model is expected. The output is the same either way.
        num_slots: buffers that streamed units take turns in. None lets the plan choose.
        expert_pool: keep experts between tokens, in what the rest of the plan leaves of the budget, and read others
            one by one. False reads layers whole, with all of their experts.
        expert_lookahead: prefetch of the experts that the next router will probably choose. A wrong guess costs a read;
            the output is the same either way.
        io: way of reading. ``"direct"`` bypasses the operating system's page cache, ``"buffered"`` uses it, ``"auto"``
            is direct where the file system supports that, except for the part of the files that free memory outside the
            budget can cache.
        read_size_mb: MB (10**6 bytes) of one read. None takes a disk probe's result; 2 MiB for compressed weights.
        queue_depth: reads in flight at once. None takes the result of a disk probe.
        derived_cache_gb: disk space for packed copies of parameters that mlx-lm computes while loading, in GB. It holds
            for all models together; the least recently used copies are evicted. None leaves a tenth of the disk free.
            0 writes none and keeps such parameters in memory.
        telemetry: publish the engine's state for ``flash-monitor``.
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
    kv_keep: int = field(default=0, metadata=_OR_ZERO)
    kv_step: int = 256
    kv_directory: Path | str | None = None
    kv_prefixes: Literal["off", "exact"] | None = None
    kv_prefix_tenant: str | None = None
    kv_prefix_gb: float | None = field(default=None, metadata=_OR_ZERO)
    ssd_write_gb_per_day: float | None = field(default=None, metadata=_OR_ZERO)
    batching: Literal["auto", "stock"] = "auto"
    lend_reserves: bool = True
    speculation: bool = True
    mtp: Literal["auto", "off"] = "auto"
    num_slots: int | None = None
    expert_pool: bool = True
    expert_lookahead: bool = True
    io: Literal["auto", "direct", "buffered"] = "auto"
    read_size_mb: float | None = None
    queue_depth: int | None = field(default=None, metadata={"most": 64})
    derived_cache_gb: float | None = field(default=None, metadata=_OR_ZERO)
    telemetry: bool = True
    poison_released_slots: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "ram_budget_gb", parse_budget(self.ram_budget_gb))
        for each in fields(self):
            _check(each.name, getattr(self, each.name), each.metadata)
        if self.kv_max_tokens is not None:
            object.__setattr__(self, "kv_cache", "stock")
            if self.kv_keep >= self.kv_max_tokens:
                raise ConfigError(
                    f"kv_keep is {self.kv_keep}: it must be less than kv_max_tokens, {self.kv_max_tokens}"
                )

    @property
    def writes_nothing(self) -> bool:
        """True when neither a KV cache nor a prefix cache may write to a disk."""
        return self.ssd_write_gb_per_day == 0

    @property
    def caches_prefixes(self) -> bool:
        """True when prompts are kept on disk."""
        return self.kv_prefixes == "exact"

    @property
    def budget_bytes(self) -> int | Literal["min", "auto"] | Profile:
        """The budget in bytes, or its word."""
        budget = "balanced" if self.ram_budget_gb is None else self.ram_budget_gb
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
        """Return the settings of all sources. The first source that gives a setting wins: ``keywords``, ``settings``,
        the environment, the Modelfile, the TOML file, the default.

        Text is parsed to the type of its field: ``true``, ``yes``, ``on``, ``1`` and their opposites in any case are
        booleans; ``none`` and ``auto`` in any case are None for a field that can be None (``auto`` is a mode of ``io``
        and a budget). Every value is checked, even where another source wins.

        Args:
            settings: names and values. None as a value counts: it unsets what sources of lower rank give.
            modelfile: names and text, such as ``Modelfile.flash``.
            environment: variables such as ``MLX_FLASH_RAM_BUDGET_GB``; None is the process's own environment. An empty
                variable counts as unset.
            file: a TOML file whose top-level keys are names of settings. None reads the user's settings file, if there
                is one.
            keywords: names and values. None as a value counts as unset.

        Raises:
            ConfigError: a name is unknown, a value is wrong (the message names its source), or the file is unreadable.
        """
        path = settings_file() if file is None else file
        from_file = _read_toml(path, must_exist=file is not None)
        from_file.pop(NAMES, None)
        variables = {
            name: text
            for name, text in (os.environ if environment is None else environment).items()
            if name.startswith(VARIABLE_PREFIX) and name not in OTHER_VARIABLES and text
        }
        known = {*(field.name for field in fields(cls)), *OTHER_NAMES}
        given = {name: value for name, value in keywords.items() if value is not None or name not in known}
        merged = own_settings(from_file, lambda name: f"{path}, key {name}")
        merged |= own_settings(modelfile or {}, lambda name: f"Modelfile, {name}")
        merged |= own_settings(
            variables, lambda name: f"environment variable {name}", lambda name: VARIABLE_PREFIX + name.upper()
        )
        merged |= own_settings(settings or {}, lambda name: f"settings, key {name}")
        merged |= own_settings(given, lambda name: f"keyword {name}")
        return cls(**merged)


NAMES = "models"
"""The table of the settings file that is not about settings: the user's own names of models."""


def own_names() -> dict[str, str]:
    """Return the user's own names of models, each with its repository or folder."""
    path = settings_file()
    names = _read_toml(path, must_exist=False).get(NAMES, {})
    if not isinstance(names, dict) or not all(isinstance(model, str) and model for model in names.values()):
        raise ConfigError(
            f'{path}, table {NAMES}: it must have names of models, each with a text. Hint: mine = "NAMESPACE/NAME"'
        )
    return names


def parse_budget(value: object) -> Budget:
    """Return the budget that a user wrote.

    Args:
        value: a number of decimal GB, text with such a number, a word of ``ram_budget_gb``, or None.

    Raises:
        ConfigError: the value is neither a word nor a positive, finite number.
    """
    if value is None or (isinstance(value, str) and value in BUDGET_WORDS):
        return value  # type: ignore[return-value]
    try:
        if isinstance(value, bool | bytes | bytearray):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"ram_budget_gb is {value!r}: it must be a number of GB (10**9 bytes), such as 2 or 1.5, "
            f"{_OR_A_WORD}{did_you_mean(value, BUDGET_WORDS)}"
        ) from None
    if not math.isfinite(number * GB) or number <= 0:
        raise ConfigError(f"ram_budget_gb is {value!r}: it must be a finite number above 0, in GB (10**9 bytes)")
    return number


def parse_setting(name: str, value: object) -> Any:
    """Return a checked value for a field of :class:`FlashConfig`. Text is parsed as in :meth:`FlashConfig.resolve`."""
    parsed: Any = _from_text(name, value.strip()) if isinstance(value, str) else value
    FlashConfig(**{name: parsed})
    return parsed


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return the end of an error message: a suggestion of the nearest known word, or nothing when none is near."""
    words = {word.lower(): word for word in known}
    near = difflib.get_close_matches(given.lower(), words, n=1) if isinstance(given, str) else []
    return f". Did you mean {words[near[0]]!r}?" if near else ""


_type_hints = functools.cache(get_type_hints)


def setting_kinds(name: str) -> tuple[Any, ...]:
    """Return the types of a field; text is parsed to the first of them."""
    kind = _type_hints(FlashConfig)[name]
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _from_text(name: str, text: str) -> object:
    """Return the text as a value of the field's type."""
    kinds = setting_kinds(name)
    if name == "ram_budget_gb" and text.lower() != "none":
        return parse_budget("auto" if text.lower() == "auto" else text)
    if NoneType in kinds and text.lower() in {"none", "auto"}:
        return None
    try:
        if bool in kinds:
            return BOOLEANS[text.lower()]
        return int(text) if int in kinds else float(text) if float in kinds else text
    except (KeyError, ValueError):
        words = "true or false" if bool in kinds else _KIND_WORDS[kinds[0]]
        raise ConfigError(f"{name} is {text!r}: it must be {words}") from None


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


def _check(name: str, value: object, bounds: Mapping[str, int]) -> None:
    """Refuse a value that the field's type does not allow. The budget has its own check."""
    kinds = setting_kinds(name)
    kind = kinds[0]
    if name == "ram_budget_gb" or (value is None and NoneType in kinds):
        return
    if get_origin(kind) is Literal:
        words = get_args(kind)
        is_right, wanted = value in words, f"one of {', '.join(map(repr, words))}{did_you_mean(value, words)}"
    elif kind not in (int, float):
        is_right, wanted = isinstance(value, kinds), _KIND_WORDS[kind]
    elif isinstance(value, bool) or not isinstance(value, (int, kind)):
        is_right, wanted = False, _KIND_WORDS[kind]
    elif kind is float:
        is_right = 0 <= value <= sys.float_info.max / GB and (value > 0 or "least" in bounds)
        wanted = f"a finite number {'not below 0' if 'least' in bounds else 'above 0'}"
    else:
        least, most = bounds.get("least", 1), bounds.get("most", math.inf)
        is_right = least <= value <= most
        wanted = f"at least {least}" if most == math.inf else f"between {least} and {most}"
    if not is_right:
        raise ConfigError(f"{name} is {value!r}: it must be {wanted}")

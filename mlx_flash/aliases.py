"""Names that other programs have for our settings, and settings of theirs that have no counterpart."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mlx_flash.errors import ConfigError

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

_EXPERTS = "the model's config.json has the number of experts of a token; another one changes the output"
_AHEAD = "num_slots sets how far the reader is ahead"
_PAGES = "free memory and io decide what the page cache keeps"
_TIMES = "flash-monitor shows the time of each layer, --verbose prints the log"
_BITS = "kv_bits of generate and stream_generate, or --kv-bits, quantizes keys and values"
_TILES = "the plan cuts large weights into row tiles where the budget needs it"

IDLE = {
    "top_k": _EXPERTS,
    "moe_top_k_override": _EXPERTS,
    "expert_cache_size": "expert_pool_gb sets the memory for experts",
    "prefetch_layers": _AHEAD,
    "pipeline_depth": _AHEAD,
    "pipelined_execution": "reads always overlap computing",
    "eviction": _PAGES,
    "eviction_strategy": _PAGES,
    "quant_warn_below": "the checkpoint decides the bits of weights",
    "metal_kernels": "MLX chooses the kernels",
    "strict_guardrails": "the budget always holds",
    "debug": _TIMES,
    "enable_profiling": _TIMES,
    "monitor_queue": "telemetry publishes the state for flash-monitor",
    "kv_cache_quantized": _BITS,
    "kv_cache_bits": _BITS,
    "kv_cache_local_window_size": _BITS,
    "tiled_execution": _TILES,
    "tile_size": _TILES,
}
"""Settings of other programs that have no effect here, each with what decides instead."""

OTHER_NAMES = (*ALIASES, *IDLE)

FLAGS = {"--ram": "--ram-budget-gb", "--kv-quant": "--kv-bits", "--modelfile": "--file", "--debug": "--verbose"}
"""Other names of flags, each with ours."""

_DISK_KV = {True: "disk", False: None}


def own_setting(name: str, value: Any, spell: Callable[[str], str] = str) -> tuple[str, Any]:
    """Return our name and value of a setting; a name that is no alias, and its value, as they are.

    Args:
        name: of the setting, which is not idle.
        value: of the setting, or a text.
        spell: returns a name as the user writes it, for the message.

    Raises:
        ConfigError: the value of an alias is wrong.
    """
    if name in _UNSET and value in (_UNSET[name], str(_UNSET[name])):
        value = None
    if name == "disk_kv_enabled" and value is not None:
        known = BOOLEANS.get(value.strip().lower()) if isinstance(value, str) else value
        if not isinstance(known, bool):
            raise ConfigError(f"{spell(name)} is {value!r}: it must be true or false. Hint: {spell('kv_cache')} disk")
        value = _DISK_KV[known]
    return ALIASES.get(name, name), value


def without_idle(
    given: Mapping[str, Any], setting_of: Callable[[str], str | None] = str, spell: Callable[[str], str] = str
) -> dict[str, Any]:
    """Return the settings that have an effect. A warning names the others that ask for something, once.

    Args:
        given: the keys and values of a source.
        setting_of: returns the setting of a key.
        spell: returns the name of a key for the warning.
    """
    asked: dict[str, list[str]] = {}
    for key, value in given.items():
        if (name := setting_of(key)) in IDLE and value is not None and value is not False:
            asked.setdefault(IDLE[name], []).append(spell(key))
    if asked:
        warn_once("without effect: " + "; ".join(f"{', '.join(keys)} ({why})" for why, keys in asked.items()))
    return {key: value for key, value in given.items() if setting_of(key) not in IDLE}


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning, the first time that it is given."""
    logging.getLogger("mlx_flash").warning("%s", text)


def put(found: dict[str, Any], name: str, value: Any, given: str) -> None:
    """Add a setting to others. None counts as unset.

    Raises:
        ConfigError: it is there with another value, under another name.
    """
    if found.get(name) is not None and value is None:
        return
    if found.get(name, value) not in (None, value):
        raise ConfigError(f"{given} is {name}, which is {found[name]!r} and {value!r}. Hint: give it once.")
    found[name] = value


def takes_aliases(settings: type[T]) -> type[T]:
    """Make a class of settings take other names as keywords."""
    stock = settings.__init__

    @functools.wraps(stock)
    def __init__(self: T, **given: Any) -> None:  # noqa: N807
        found: dict[str, Any] = {}
        for name, value in without_idle(given).items():
            put(found, *own_setting(name, value), name)
        stock(self, **found)

    settings.__init__ = __init__  # type: ignore[assignment]
    return settings

"""Names that other programs have for our settings, and settings of theirs that have no counterpart."""

from __future__ import annotations

import functools
from collections.abc import Callable
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

REFUSED = {
    "top_k": ("another number of experts changes the output", ""),
    "prefetch_layers": ("the number of slots decides how far the reader is ahead", "num_slots"),
    "eviction": ("free memory and the way of reading decide what the page cache keeps", "io"),
    "quant_warn_below": ("the checkpoint decides on the bits of weights", ""),
    "ranks_mode": ("each of several ranks computes some layers; tensor mode is gone", ""),
}
"""Settings that are not available: the reason, and our setting for the same purpose if there is one."""

OTHER_NAMES = (*ALIASES, *REFUSED)

_DISK_KV = {True: "disk", False: None}


def own_setting(name: str, value: Any, spell: Callable[[str], str] = str) -> tuple[str, Any]:
    """Return our name and value of a setting; a name that is no alias, and its value, as they are.

    Args:
        name: of the setting.
        value: of the setting, or a text.
        spell: returns a name as the user writes it, for the message.

    Raises:
        ConfigError: the setting is not available, or the value of an alias is wrong.
    """
    if name in REFUSED:
        reason, ours = REFUSED[name]
        hint = f"set {spell(ours)}" if ours else "leave it out"
        raise ConfigError(f"{spell(name)} is not available: {reason}. Hint: {hint}.")
    if name == "disk_kv_enabled" and value is not None:
        known = BOOLEANS.get(value.strip().lower()) if isinstance(value, str) else value
        if not isinstance(known, bool):
            raise ConfigError(f"{spell(name)} is {value!r}: it must be true or false. Hint: {spell('kv_cache')} disk")
        value = _DISK_KV[known]
    return ALIASES.get(name, name), value


def put(found: dict[str, Any], name: str, value: Any, given: str) -> None:
    """Add a setting to others.

    Raises:
        ConfigError: it is there with another value, under another name.
    """
    if name in found and found[name] != value:
        raise ConfigError(f"{given} is {name}, which is {found[name]!r} and {value!r}. Hint: give it once.")
    found[name] = value


def takes_aliases(settings: type[T]) -> type[T]:
    """Make a class of settings take :data:`ALIASES` as keywords, and explain what is refused."""
    stock = settings.__init__

    @functools.wraps(stock)
    def __init__(self: T, **given: Any) -> None:  # noqa: N807
        found: dict[str, Any] = {}
        for name, value in given.items():
            put(found, *own_setting(name, value), name)
        stock(self, **found)

    settings.__init__ = __init__  # type: ignore[assignment]
    return settings

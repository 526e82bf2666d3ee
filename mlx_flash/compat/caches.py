"""Parts of mlx-lm's caches: the entries of lists of caches, and attributes that are private to them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_flash.compat.require import require, require_that

CACHE_STEP = 256
"""Tokens by which a ``KVCache`` grows; plans count with it."""

require_that(KVCache.step == CACHE_STEP, f"KVCache.step is not {CACHE_STEP}")
require(KVCache, "update_and_fetch", "keys", "values")
for _method in ("state", "make_mask", "to_quantized", "merge", "size", "empty", "trim"):
    require(KVCache, _method)  # the contract that DiskKVCache keeps
require(CacheList, "__init__", "caches")
for _method in ("filter", "extract", "merge"):
    require(BatchKVCache, _method)  # sequences go into and out of a batch with these
for _entry, _names in (
    (BatchKVCache([0]), {"_idx", "left_padding", "offset"}),
    (BatchRotatingKVCache(1, [0]), {"_lengths", "_offset", "left_padding"}),
    (RotatingKVCache(1), {"_idx", "keep", "keys", "max_size", "offset", "values"}),
    (ArraysCache(1), {"cache", "left_padding", "lengths"}),
):
    require_that(_names <= vars(_entry).keys(), f"{type(_entry).__name__} lacks one of {', '.join(sorted(_names))}")


class CacheKinds:
    """Classes of caches, of mlx-lm and of libraries that have their own of the same names."""

    plain: tuple[type[Any], ...] = (KVCache,)  # keys and values of all tokens, with nothing else about them
    lists: tuple[type[Any], ...] = (CacheList,)
    recurrent: tuple[type[Any], ...] = (ArraysCache,)  # states that every token replaces
    windows: tuple[type[Any], ...] = (RotatingKVCache,)  # the last tokens only
    # keys and values in buffers with room behind them
    buffers: tuple[type[Any], ...] = (KVCache, BatchKVCache, RotatingKVCache, BatchRotatingKVCache)

    trimmable: tuple[type[Any], ...] = (KVCache, QuantizedKVCache)  # any number of the last tokens can be removed

    @classmethod
    def add(cls, module: Any) -> None:
        cls.plain += (require(module, "KVCache"),)
        cls.lists += (require(module, "CacheList"),)
        cls.recurrent += (require(module, "ArraysCache"),)
        cls.windows += (require(module, "RotatingKVCache"),)


def is_recurrent(entry: Any) -> bool:
    """Return whether an entry of a prompt cache holds states that every token replaces."""
    return issubclass(type(entry), CacheKinds.recurrent)


def is_window(entry: Any) -> bool:
    """Return whether an entry of a prompt cache keeps the last tokens only."""
    return isinstance(entry, CacheKinds.windows)


def entries_of(cache: Iterable[Any]) -> list[Any]:
    """Return the entries of a prompt cache, and those of its lists of caches in their place."""
    found = list(cache)
    for kind in {*map(type, found)}:  # any() would take a call of Python for each: prompts ask this several times
        if issubclass(kind, CacheKinds.lists):
            break
    else:
        return found
    parts = (entries_of(entry.caches) if issubclass(type(entry), CacheKinds.lists) else [entry] for entry in found)
    return [entry for part in parts for entry in part]


def trimmable(cache: Iterable[Any]) -> list[int] | None:
    """Return the offsets of all entries, to which they can be trimmed later; None if one cannot be trimmed."""
    offsets: list[int] = []
    for entry in cache:
        if not issubclass(type(entry), CacheKinds.trimmable):  # entries that calls share refuse to be asked for a class
            return None
        offsets.append(entry.offset)
    return offsets


def length_of(entry: Any) -> int:
    """Return how many tokens a cache was given, padding included; batches count in private attributes."""
    if isinstance(entry, BatchRotatingKVCache):
        return int(entry._offset)
    return int(entry._idx if isinstance(entry, BatchKVCache) else entry.offset)


def token_fits(entry: Any) -> bool:
    """Return whether one more token of each sequence changes no memory of a cache of mlx-lm's."""
    kind = type(entry)
    if kind is BatchKVCache:  # one call for each layer and token of a server
        return entry.keys is not None and bool(entry._idx < entry.keys.shape[2])
    if issubclass(kind, CacheKinds.recurrent):
        return all(array is not None for array in vars(entry)["cache"])
    if issubclass(kind, CacheKinds.lists):
        return all(map(token_fits, entry.caches))
    if kind not in CacheKinds.buffers or (keys := entry.keys) is None:
        return False
    size, most = (keys if isinstance(keys, mx.array) else keys[0]).shape[2], getattr(entry, "max_size", None)
    return size == most or (length_of(entry) < size and (most is None or size < most))


def shortened_window(entry: Any) -> Any:
    """Return mlx-lm's window without the tokens that a call moved out, and the next one drops; else the entry."""
    if type(entry) is not RotatingKVCache or entry.keep or entry.keys is None or entry._idx < entry.keys.shape[2]:
        return entry
    window = RotatingKVCache(entry.max_size)
    window.keys, window.values = (array[..., -entry.max_size :, :] for array in (entry.keys, entry.values))
    window.offset, window._idx = entry.offset, window.keys.shape[2]
    return window


def is_right_padded(entry: BatchKVCache | BatchRotatingKVCache) -> bool:
    """Return whether a batch waits for ``finalize()`` to move padding from the right to the left."""
    return getattr(entry, "_right_padding", None) is not None


def refuses_single_tokens(entry: Any) -> bool:
    """Return whether an entry is a window of several prompts that are padded at their ends."""
    return isinstance(entry, BatchRotatingKVCache) and entry._lengths is not None

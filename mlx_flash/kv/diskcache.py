"""KV caches with mlx-lm's interface, whose tokens are in memory or on disk."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache, load_prompt_cache

from mlx_flash.compat.caches import CacheKinds
from mlx_flash.errors import CheckpointError, StreamedWeightsError
from mlx_flash.kv.base import PooledCache, contents, forgetful, pair
from mlx_flash.kv.history import merged, pass_on
from mlx_flash.kv.kvpool import KVPool
from mlx_flash.kv.layerrows import LayerRows, is_admitted
from mlx_flash.kv.memory import NO_BUFFERS, MemoryRows, append_within
from mlx_flash.kv.options import KVOptions
from mlx_flash.storage.safetensors import read_shard


class DiskKVCache(PooledCache, KVCache):  # type: ignore[misc]
    """One layer's ``KVCache`` of mlx-lm whose tokens may be on disk.

    A streamed model makes its own. One that is constructed puts all full pages on disk, and is used in any loop that
    takes mlx-lm's caches::

        from mlx_flash import DiskKVCache
        from mlx_lm import generate, load

        model, tokenizer = load("mlx-community/Qwen3-4B-4bit")
        cache = [DiskKVCache() for _ in model.layers]
        generate(model, tokenizer, "A long prompt", prompt_cache=cache)

    Memory holds the last tokens of each layer, and two slots that all layers constructed with the same arguments share.
    Attention reads a layer's tokens from a slot while the other one is filled for the next layer. Forward calls of
    models whose layers share slots must run one after another. The files are removed with the last of these caches.

    The class has mlx-lm's name, because ``save_prompt_cache`` writes the name and ``load_prompt_cache`` looks it up:
    mlx-lm loads a saved cache without mlx-flash.

    Args:
        layer_idx: without effect: each cache names its own files.
        directory: the folder for files, which is created; None for the cache folder.
        max_tokens: beyond it the older half is dropped, which changes the output; None keeps every token.
        cache_dir: another name of the folder.
        rows: storage that a pool has made. With it the other arguments are not used.

    Raises:
        ConfigError: ``max_tokens`` is less than two pages of 256 tokens.
    """

    def __init__(
        self,
        layer_idx: int | None = None,
        directory: str | Path | None = None,
        max_tokens: int | None = None,
        *,
        cache_dir: str | Path | None = None,
        rows: LayerRows | None = None,
    ) -> None:
        directory = cache_dir if directory is None else directory
        self.rows = rows or _rows_on_disk(max_tokens, None if directory is None else Path(directory).expanduser())

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add tokens, ``(batch, heads, new tokens, width)``. Return all that are kept. Raises: as its rows do."""
        rows = self.rows
        with rows.pool.lock:
            store, found = rows.store, None
            if rows.may_stay and rows.group in rows.pool.computed and isinstance(store, MemoryRows):
                if store.buffers is NO_BUFFERS and is_admitted(rows, keys.shape[2]):
                    store.begin([keys, values])
                found = append_within(store, keys, values)
            if found is None:
                all_keys, all_values = rows.append([keys, values])
                found = all_keys, all_values
            return found

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> QuantizedKVCache:
        """Return a cache of quantized keys and values in the same pool. This one must not be used afterwards."""
        self._refuse_forgotten("quantized")
        rows = self.pool.new_rows(self.rows.group, self.rows.index)
        cache = DiskQuantizedKVCache(rows, group_size, bits)
        if not self.empty():
            rows.succeed(self.rows, _quantized(self.rows.fetch(), group_size, bits))
        pass_on(self, cache)
        return cache

    def _refuse_forgotten(self, what: str) -> None:
        if self.num_forgotten:
            raise StreamedWeightsError(
                f"a KV cache that has forgotten {self.num_forgotten} tokens cannot be {what}. "
                "Hint: leave kv_max_tokens unset."
            )

    def as_stock(self) -> KVCache:
        """Return mlx-lm's own cache with the same contents, all in memory."""
        self._refuse_forgotten("merged")
        cache = KVCache()
        if not self.empty():
            cache.keys, cache.values = contents(self.rows)
            cache.offset = self.offset
        return cache

    @classmethod
    def merge(cls, caches: Sequence[KVCache]) -> BatchKVCache:
        """Return mlx-lm's cache of a batch, in memory. Raises: ConfigError: ``max_tokens`` is set."""
        for cache in caches:
            if isinstance(cache, DiskKVCache) and cache.pool.options.max_tokens is not None:
                raise forgetful(cache.pool.options.max_tokens, "part of a batch, whose sequences are kept together")
        if len(caches) > 1 and all(cache.empty() for cache in caches):  # of each layer of each sequence that begins
            return BatchKVCache([0] * len(caches))
        return merged([c.as_stock() if isinstance(c, DiskKVCache) else c for c in caches], caches)


class DiskQuantizedKVCache(PooledCache, QuantizedKVCache):  # type: ignore[misc]
    """mlx-lm's ``QuantizedKVCache`` whose tokens may be on disk."""

    _form = ("group_size", "bits")

    def __init__(self, rows: LayerRows, group_size: int = 64, bits: int = 8) -> None:
        self.rows = rows
        self.group_size = group_size
        self.bits = bits

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Quantize and add tokens, ``(batch, heads, new tokens, width)``. Return all that are kept, as triples."""
        return pair(self.rows.append(_quantized([keys, values], self.group_size, self.bits)))


# mlx-lm's functions for saving write down the name of the class, and those for loading look it up among mlx-lm's.
DiskKVCache.__name__ = KVCache.__name__
DiskQuantizedKVCache.__name__ = QuantizedKVCache.__name__


def _quantized(arrays: Sequence[mx.array], group_size: int, bits: int) -> list[mx.array]:
    return [part for array in arrays for part in mx.quantize(array, group_size=group_size, bits=bits)]


_pools: weakref.WeakValueDictionary[tuple[int | None, Path | None], KVPool] = weakref.WeakValueDictionary()
"""The pool of all caches that were constructed with the same arguments."""


def _rows_on_disk(max_tokens: int | None, directory: Path | None) -> LayerRows:
    pool = _pools.get((max_tokens, directory))
    if pool is None:
        pool = KVPool(KVOptions(max_tokens=max_tokens, directory=directory, always_on_disk=True))
        _pools[max_tokens, directory] = pool
    return pool.new_rows(pool.new_group(), 0)


def make_caches(model_caches: Sequence[Any], options: KVOptions, pool: KVPool | None = None) -> list[Any]:
    """Return a new list of a model's caches with the plain ones replaced, and what is in them.

    These are entries whose class is exactly ``KVCache`` or ``QuantizedKVCache``. Others, lists of caches among them,
    are the same objects as before. The pool may be shared with other caches of the same model; None makes a new one.
    """
    pool = pool or KVPool(options)
    group = pool.new_group()
    caches = list[Any](model_caches)
    for index, entry in enumerate(model_caches):
        if type(entry) in CacheKinds.plain:
            caches[index] = DiskKVCache(rows=pool.new_rows(group, index))
        elif type(entry) is QuantizedKVCache:
            caches[index] = DiskQuantizedKVCache(pool.new_rows(group, index), entry.group_size, entry.bits)
        else:
            continue
        if entry.keys is not None:
            caches[index].state = entry.state
    return caches


_MOST_DIGITS = 5
"""Most digits of a layer's index: caches have fewer layers."""


def load_saved(path: Path) -> tuple[list[Any], dict[str, Any]]:
    """Load a prompt cache and its metadata with mlx-lm's ``load_prompt_cache``.

    MLX believes the shapes in a file, and makes lists as long as the largest index in a name. Raises: CheckpointError:
    the file is not what ``save_prompt_cache`` writes.
    """
    shard = read_shard(path)
    names = [*(record.name for record in shard.tensors), *shard.metadata]
    numbers = [part for name in names for part in name.split(".") if part.isdecimal()]
    if any(len(number) > _MOST_DIGITS for number in numbers):
        raise CheckpointError(f"{path} is not a saved prompt cache: a name in it has a number that is too large")
    try:
        cache, metadata = load_prompt_cache(str(path), return_metadata=True)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a saved prompt cache ({type(error).__name__}: {error}). Hint: make it with "
            "`mlx_lm.cache_prompt`."
        ) from error
    return cache, metadata

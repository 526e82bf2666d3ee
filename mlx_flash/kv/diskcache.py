"""KV caches with mlx-lm's interface, whose tokens are in memory or on disk."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache

from mlx_flash.compat.caches import CacheKinds
from mlx_flash.errors import ConfigError
from mlx_flash.kv.history import merged, pass_on
from mlx_flash.kv.kvledger import KVOptions
from mlx_flash.kv.kvpool import CacheGroup, KVPool, OnDisk, PooledCache, buffers_of, pair, resized


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
        max_tokens: only None, for every token: mlx-lm's ``RotatingKVCache`` keeps the last ones, in memory.
        cache_dir: another name of the folder.

    Raises:
        ConfigError: ``max_tokens`` is given.
    """

    def __init__(
        self,
        layer_idx: int | None = None,
        directory: str | Path | None = None,
        max_tokens: int | None = None,
        *,
        cache_dir: str | Path | None = None,
    ) -> None:
        if max_tokens is not None:
            raise ConfigError(
                f"max_tokens is {max_tokens}: a DiskKVCache keeps every token. "
                "Hint: mlx_lm.models.cache.RotatingKVCache(max_size) keeps the last ones."
            )
        directory = cache_dir if directory is None else directory
        self.__class__ = DiskKVCache  # of one that is made anew, too
        super().__init__()
        _pool_of(None if directory is None else Path(directory).expanduser()).add(self, CacheGroup(), 0)
        self.offload()

    state = KVCache.state.setter(PooledCache.set_state)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> QuantizedKVCache:
        """Return a cache of quantized keys and values in the same pool. This one must not be used afterwards.

        The next call makes room for it, when this one is dropped.
        """
        cache = self.as_stock().to_quantized(group_size, bits)
        mx.eval(cache.keys, cache.values)
        pass_on(self, cache)
        return _pooled(cache, self.pool, self.group, self.index)

    def as_stock(self) -> KVCache:
        """Return mlx-lm's own cache with the same contents, all in memory."""
        cache = KVCache()
        cache.state = self.state
        return cache

    @classmethod
    def merge(cls, caches: Sequence[KVCache]) -> BatchKVCache:
        """Return mlx-lm's cache of a batch, in memory."""
        if len(caches) > 1 and all(cache.empty() for cache in caches):  # of each layer of each sequence that begins
            return BatchKVCache([0] * len(caches))
        return merged([c.as_stock() if isinstance(c, _OnDisk) else c for c in caches], caches)


class DiskQuantizedKVCache(PooledCache, QuantizedKVCache):  # type: ignore[misc]
    """mlx-lm's ``QuantizedKVCache`` whose tokens may be on disk."""

    form = ("group_size", "bits")
    state = QuantizedKVCache.state.setter(PooledCache.set_state)

    def append_quantized(self, new: Sequence[mx.array]) -> None:
        """Add quantized tokens, ``(batch, heads, new tokens, width)`` for each buffer."""
        arrays = buffers_of(self) or [array[..., :0, :] for array in new]
        start, end = self.offset, self.offset + new[0].shape[2]
        if end > arrays[0].shape[2]:
            arrays = resized(arrays, start, self.pool.options.capacity_after(start, 0, end - start))
        for array, rows in zip(arrays, new, strict=True):
            array[..., start:end, :] = rows
        self.keys, self.values = pair(arrays)
        self.offset = end


class _OnDisk(OnDisk, DiskKVCache):
    pass


class _QuantizedOnDisk(OnDisk, DiskQuantizedKVCache):
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Quantize and add tokens, ``(batch, heads, new tokens, width)``. Return all, as triples."""
        new = [
            part for rows in (keys, values) for part in mx.quantize(rows, group_size=self.group_size, bits=self.bits)
        ]
        return pair(self.append(new))


for _stock, _kind, _on_disk in (
    (KVCache, DiskKVCache, _OnDisk),
    (QuantizedKVCache, DiskQuantizedKVCache, _QuantizedOnDisk),
):
    # mlx-lm's functions for saving write down the name of the class, and those for loading look it up among mlx-lm's.
    _on_disk.__name__ = _kind.__name__ = _stock.__name__
    _kind.kind_in_memory, _kind.kind_on_disk = _kind, _on_disk


CacheKinds.buffers += (DiskKVCache, DiskQuantizedKVCache)

_pools: weakref.WeakValueDictionary[Path | None, KVPool] = weakref.WeakValueDictionary()
"""The pool of all caches that were constructed with the same folder."""


def _pool_of(directory: Path | None) -> KVPool:
    pool = _pools.get(directory)
    if pool is None:
        pool = _pools[directory] = KVPool(KVOptions(directory=directory, always_on_disk=True))
    return pool


def _pooled(entry: Any, pool: KVPool, group: CacheGroup, index: int) -> Any:
    """Have a pool count a cache of mlx-lm's, the one at ``index`` of a list, from now on."""
    entry.__class__ = DiskKVCache if type(entry) is KVCache else DiskQuantizedKVCache
    pool.add(entry, group, index)
    if pool.options.always_on_disk:
        entry.offload()
    return entry


def make_caches(model_caches: Sequence[Any], options: KVOptions, pool: KVPool | None = None) -> list[Any]:
    """Return a new list of a model's caches with the plain ones replaced, and what is in them.

    These are entries whose class is exactly ``KVCache`` or ``QuantizedKVCache``. Others, lists of caches among them,
    are the same objects as before. The pool may be shared with other caches of the same model; None makes a new one.
    """
    pool = pool or KVPool(options)
    group = CacheGroup()
    caches = list[Any](model_caches)
    for index, entry in enumerate(model_caches):
        if type(entry) in CacheKinds.plain:
            plain = KVCache()
        elif type(entry) is QuantizedKVCache:
            plain = QuantizedKVCache(entry.group_size, entry.bits)
        else:
            continue
        caches[index] = _pooled(plain, pool, group, index)
        if entry.keys is not None:
            caches[index].state = entry.state
    return caches

"""KV caches with mlx-lm's interface, whose tokens are in memory or on disk."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import mlx.core as mx
from mlx_lm.models.cache import (
    BatchKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
)

from mlx_flash.compat.caches import CacheKinds
from mlx_flash.compat.callers import evaluates_only
from mlx_flash.errors import CheckpointError, ConfigError
from mlx_flash.kv.history import merged, pass_on
from mlx_flash.kv.kvpool import CacheGroup, KVPool, LayerRows
from mlx_flash.kv.memory import MemoryRows, append_pair
from mlx_flash.kv.options import KVOptions
from mlx_flash.layout.reachable import arrays_in
from mlx_flash.storage.safetensors import read_shard

C = TypeVar("C", bound="PooledCache")


def arrays_of(cache: Iterable[Any]) -> list[mx.array]:
    """Return every array of a prompt cache that is in memory. Those of common entries need no search."""
    found: list[mx.array] = []
    for entry in cache:
        if isinstance(entry, PooledCache):
            store = entry.rows.store
            found += store.arrays if isinstance(store, MemoryRows) else ()
        elif type(entry) in (KVCache, RotatingKVCache):
            found += [] if entry.keys is None else [entry.keys, entry.values]
        else:
            found += arrays_in(entry)
    return found


class PooledCache:
    """A cache of one layer, plain or quantized, whose rows belong to a pool.

    Its sizes are computed from the rows, so none can contradict them.
    """

    rows: LayerRows
    _form: ClassVar[tuple[str, ...]] = ()
    """Attributes that follow the offset in ``state``."""

    @property
    def offset(self) -> int:
        """Position of the next token."""
        return self.rows.store.length

    @property
    def pool(self) -> KVPool:
        """The pool that the cache shares with others."""
        return self.rows.pool

    @property
    def is_on_disk(self) -> bool:
        """True when the pages are on disk."""
        return self.rows.disk is not None

    @property
    def nbytes(self) -> int:
        """Bytes in memory, shared ones included. Those on disk do not count."""
        store = self.rows.store
        return store.nbytes if isinstance(store, MemoryRows) else store.tail_bytes

    def size(self) -> int:
        """Return the number of tokens."""
        return self.offset

    def empty(self) -> bool:
        """Return whether the cache never held a token."""
        return self.rows.store.layout is None

    def trim(self, n: int) -> int:
        """Remove up to ``n`` of the newest tokens. Return how many were removed."""
        n = max(0, min(self.offset, n))
        if n:
            self.rows.truncate(self.offset - n)
        return n

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return all tokens."""
        return pair(self.rows.fetch())

    @property
    def keys(self) -> Any:
        """Keys with the room behind them, a triple if they are quantized. Those on disk are read."""
        return pair(buffers(self.rows))[0]

    @property
    def values(self) -> Any:
        """Values with the room behind them, as the keys."""
        return pair(buffers(self.rows))[1]

    @property
    def state(self) -> tuple[Any, ...]:
        """Keys, values, offset, and what else mlx-lm's class has there.

        Keys and values are None when mlx-lm asks only in order to evaluate them, and they are on disk.
        """
        arrays = [] if self.is_on_disk and evaluates_only() else contents(self.rows)
        return *pair(arrays), self.offset, *[getattr(self, name) for name in self._form]

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        keys, values, offset, *form = state
        for name, value in zip(self._form, form, strict=True):
            setattr(self, name, value)
        if keys is not None:
            self.rows.set(_flat(keys, values), offset)

    def __deepcopy__(self: C, memo: dict[Any, Any]) -> C:
        key, is_alone = (KVPool, id(self.pool)), not memo  # else the list that it is in was noted first
        if key not in memo:  # caches that are copied together belong to one list
            memo[key] = CacheGroup(), {}
        group, copies = memo[key]
        if self.rows not in copies:
            copies |= self.pool.fork(self.rows, group, is_alone=is_alone)
        other = type(self).__new__(type(self))
        other.rows = copies[self.rows]
        for name in self._form:
            setattr(other, name, getattr(self, name))
        pass_on(self, other)
        return other


def buffers(rows: LayerRows) -> list[mx.array]:
    """Return the buffers in memory, with the room behind the tokens; read the arrays that are on disk."""
    return rows.memory.arrays or contents(rows)


def contents(rows: LayerRows) -> list[mx.array]:
    """Return arrays that the caller may keep: those in a slot are copied."""
    if rows.store.layout is None:
        return []
    found = rows.fetch()
    if rows.disk is not None:
        found = [mx.contiguous(array) for array in found]
        mx.eval(found)
    return found


def pair(arrays: Sequence[mx.array]) -> tuple[Any, Any]:
    """Return keys and values: an array each, a triple each if they are quantized, None each if there are none."""
    if not arrays:
        return None, None
    half = len(arrays) // 2
    return (arrays[0], arrays[1]) if half == 1 else (tuple(arrays[:half]), tuple(arrays[half:]))


def _flat(keys: Any, values: Any) -> list[mx.array]:
    """Return the arrays of :func:`pair`."""
    return [keys, values] if isinstance(keys, mx.array) else [*keys, *values]


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
        rows: storage that a pool has made. With it the other arguments are not used.

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
        rows: LayerRows | None = None,
    ) -> None:
        if max_tokens is not None:
            raise ConfigError(
                f"max_tokens is {max_tokens}: a DiskKVCache keeps every token. "
                "Hint: mlx_lm.models.cache.RotatingKVCache(max_size) keeps the last ones."
            )
        directory = cache_dir if directory is None else directory
        self.rows = rows or _rows_on_disk(None if directory is None else Path(directory).expanduser())

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add tokens, ``(batch, heads, new tokens, width)``. Return all. Raises: as its rows do."""
        rows = self.rows
        with rows.pool.lock:
            store = rows.store
            if isinstance(store, MemoryRows) and not rows.goes_to_disk:
                return append_pair(store, keys, values)
            all_keys, all_values = rows.append([keys, values])
            return all_keys, all_values

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> QuantizedKVCache:
        """Return a cache of quantized keys and values in the same pool. This one must not be used afterwards."""
        rows = self.pool.new_rows(self.rows.group, self.rows.index)
        cache = DiskQuantizedKVCache(rows, group_size, bits)
        if not self.empty():
            arrays = _quantized(self.rows.fetch(), group_size, bits)
            # the next call makes room, when this cache is dropped
            rows.replace(MemoryRows(rows.options, arrays, self.rows.length))
        pass_on(self, cache)
        return cache

    def as_stock(self) -> KVCache:
        """Return mlx-lm's own cache with the same contents, all in memory."""
        cache = KVCache()
        if not self.empty():
            cache.keys, cache.values = contents(self.rows)
            cache.offset = self.offset
        return cache

    @classmethod
    def merge(cls, caches: Sequence[KVCache]) -> BatchKVCache:
        """Return mlx-lm's cache of a batch, in memory."""
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
        """Quantize and add tokens, ``(batch, heads, new tokens, width)``. Return all, as triples."""
        return pair(self.rows.append(_quantized([keys, values], self.group_size, self.bits)))


# mlx-lm's functions for saving write down the name of the class, and those for loading look it up among mlx-lm's.
DiskKVCache.__name__ = KVCache.__name__
DiskQuantizedKVCache.__name__ = QuantizedKVCache.__name__


def _quantized(arrays: Sequence[mx.array], group_size: int, bits: int) -> list[mx.array]:
    return [part for array in arrays for part in mx.quantize(array, group_size=group_size, bits=bits)]


_pools: weakref.WeakValueDictionary[Path | None, KVPool] = weakref.WeakValueDictionary()
"""The pool of all caches that were constructed with the same folder."""


def _rows_on_disk(directory: Path | None) -> LayerRows:
    pool = _pools.get(directory)
    if pool is None:
        pool = _pools[directory] = KVPool(KVOptions(directory=directory, always_on_disk=True))
    return pool.new_rows(CacheGroup(), 0)


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

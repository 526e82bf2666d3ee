"""Caches with mlx-lm's contract, in memory or on disk."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache, create_attention_mask

from mlx_flash.compat.callers import evaluates_only, is_for_a_draft
from mlx_flash.errors import ConfigError, StreamedWeightsError
from mlx_flash.kv.history import pass_on
from mlx_flash.kv.lone import merged
from mlx_flash.kv.options import KVOptions
from mlx_flash.kv.pool import KVPool, LayerRows
from mlx_flash.kv.shared import sizes


class _Cache:
    """What both kinds of caches have in common.

    Attributes:
        rows: the tokens' rows.
        offset: the position of the next token.
        num_forgotten: tokens that were forgotten to stay within ``max_tokens``.
    """

    rows: LayerRows
    offset: int
    num_forgotten: int

    def _start(self, rows: LayerRows, offset: int = 0, num_forgotten: int = 0) -> None:
        self.rows = rows
        self.offset = offset
        self.num_forgotten = num_forgotten

    @property
    def pool(self) -> KVPool:
        """What the cache shares with others."""
        return self.rows.pool

    @property
    def step(self) -> int:
        """Tokens by which it grows."""
        return self.pool.options.step

    @property
    def is_on_disk(self) -> bool:
        """Whether its pages are on disk."""
        return self.rows.disk is not None

    @property
    def _is_settled(self) -> bool:
        """Whether its rows were evaluated, and to look at them is to copy them."""
        return self.is_on_disk or self.rows.is_parked

    @property
    def nbytes(self) -> int:
        """Bytes that it holds in memory, together with others or not; those on disk are :attr:`disk_nbytes`."""
        disk, memory = self.rows.disk, self.rows.memory
        return memory.held + sum(sizes([memory.parts]).values()) if disk is None else disk.tail_bytes

    @property
    def disk_nbytes(self) -> int:
        """Bytes of its pages on disk, shared or not."""
        disk = self.rows.disk
        return 0 if disk is None else disk.paged_tokens * disk.layout.token_bytes

    def size(self) -> int:
        """Tokens that are kept."""
        return self.offset - self.num_forgotten

    def empty(self) -> bool:
        """Whether there never were tokens in it."""
        return self.rows.layout is None

    def is_trimmable(self) -> bool:
        """Whether any number of tokens can be taken back: not when some were forgotten.

        Raises:
            ConfigError: mlx-lm asks in order to begin speculative decoding, and ``max_tokens`` is set.
        """
        if self.pool.options.max_tokens is not None and is_for_a_draft():
            raise _forgetful(self.pool.options.max_tokens, "used with a draft model, whose tokens are taken back")
        return self.num_forgotten == 0

    def trim(self, n: int) -> int:
        """Takes the newest tokens back, as many as are kept. Returns how many."""
        n = min(self.size(), n)
        if n:
            self.rows.truncate(self.size() - n)
            self.offset -= n
        return n

    def make_mask(self, N: int, *args: Any, **kwargs: Any) -> Any:  # noqa: N803  (mlx-lm's name)
        """The mask for ``N`` new tokens."""
        forgotten = self.pool.options.forgotten_tokens(self.size(), N)
        return create_attention_mask(N, *args, offset=self.size() - forgotten, **kwargs)

    def read_rows(self, start: int, stop: int) -> list[mx.array]:
        """Rows of some tokens as they are kept, ``(batch, heads, tokens, width)`` for each array.

        Raises:
            ReadError: pages could not be read.
        """
        return self.rows.read(start, stop)

    def append_rows(self, rows: Sequence[mx.array]) -> None:
        """Adds tokens by their rows, as :meth:`read_rows` returned them.

        Raises:
            BudgetError: they do not fit the budget even with every layer on disk.
            WriteError: the disk is full, or fails.
        """
        self._append(rows)

    def _append(self, new: Sequence[mx.array]) -> list[mx.array]:
        num_new = new[0].shape[2]
        options = self.pool.options
        forgotten = options.forgotten_tokens(self.size(), num_new)
        if forgotten:
            self.rows.drop(options.kept_tokens, options.kept_tokens + forgotten)
            self.num_forgotten += forgotten
        found = self.rows.append(new)
        self.offset += num_new
        return found

    def _contents(self) -> list[mx.array]:
        """The rows for somebody who may keep them: those on disk or parked in memory of their own."""
        if self.rows.layout is None:
            return []
        found = self.rows.fetch()
        if self.is_on_disk:
            found = [mx.contiguous(array) for array in found]
            mx.eval(found)
        return found

    def _fork(self, memo: dict[Any, Any]) -> LayerRows:
        """A copy of the rows; those of caches that are copied together belong together."""
        key = (KVPool, id(self.pool))
        if key not in memo:
            memo[key] = self.pool.new_group()
        return self.rows.fork(memo[key])


def _forgetful(max_tokens: int, what: str) -> ConfigError:
    return ConfigError(
        f"max_tokens of the KV cache is {max_tokens}: a cache that forgets cannot be {what}. "
        "Hint: leave kv_max_tokens open."
    )


class DiskKVCache(_Cache, KVCache):  # type: ignore[misc]
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
        max_tokens: beyond it the older half is dropped, which changes the output; None keeps every token.
        directory: the folder for files, which is created; None for the cache folder.
        rows: storage that a pool has made. With it the other arguments are not used.

    Raises:
        ConfigError: ``max_tokens`` is less than two pages of 256 tokens.
    """

    def __init__(
        self, max_tokens: int | None = None, directory: str | Path | None = None, *, rows: LayerRows | None = None
    ) -> None:
        self._start(rows or _rows_on_disk(max_tokens, None if directory is None else Path(directory).expanduser()))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Adds tokens, ``(batch, heads, new tokens, width)``. Returns all that are kept.

        Raises:
            BudgetError: they do not fit the budget even with every layer on disk.
            WriteError: the disk is full, or fails.
            ReadError: pages could not be read.
        """
        found = self._append([keys, values])
        return found[0], found[1]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """All tokens that are kept."""
        keys, values = self.rows.fetch()
        return keys, values

    @property
    def keys(self) -> mx.array | None:
        """Keys with the room behind them; those on disk are read."""
        return self._array(0)

    @keys.setter
    def keys(self, array: mx.array) -> None:
        self._replace(0, array)

    @property
    def values(self) -> mx.array | None:
        """Values with the room behind them; those on disk are read."""
        return self._array(1)

    @values.setter
    def values(self, array: mx.array) -> None:
        self._replace(1, array)

    def _array(self, index: int) -> mx.array | None:
        arrays = self.rows.memory.arrays or self._contents()
        return arrays[index] if arrays else None

    def _replace(self, index: int, array: mx.array) -> None:
        if self.is_on_disk:
            raise StreamedWeightsError(
                "keys or values of a KV cache that is on disk cannot be replaced. Hint: raise budget_bytes."
            )
        self.rows.replace(index, array)

    @property
    def state(self) -> tuple[Any, ...]:
        """Keys, values and offset, as ``KVCache`` has them.

        Keys and values are None where mlx-lm asks in order to evaluate them only, and they are on disk or parked: what
        is there was evaluated. With tokens forgotten their number comes fourth, so that mlx-lm, which could not go on
        from such a cache, refuses it.
        """
        if self._is_settled and evaluates_only():
            return None, None, self.offset
        keys, values = self._contents() or (None, None)
        return keys, values, self.offset, *((self.num_forgotten,) if self.num_forgotten else ())

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        keys, values, self.offset, *rest = state
        self.num_forgotten = rest[0] if rest else 0
        if keys is not None:
            self.rows.set([keys, values], self.size())

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> DiskKVCache:
        """A cache with these contents, in memory, in a pool of its own."""
        cache = cls(rows=_own_rows())
        cache.state = state
        return cache

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> QuantizedKVCache:
        """A cache of quantized keys and values in the same pool; this one is of no use any more."""
        self._refuse_forgotten("quantized")
        rows = self.pool.new_rows(self.rows.group, self.rows.index)
        cache = DiskQuantizedKVCache(rows, group_size, bits)
        if not self.empty():
            arrays = _quantized(self.rows.fetch(), group_size, bits)
            mx.eval(arrays)
            self.pool.retire(self.rows)
            rows.set(arrays, self.size())
            cache.offset = self.offset
        pass_on(self, cache)
        return cache

    def _refuse_forgotten(self, what: str) -> None:
        if self.num_forgotten:
            raise StreamedWeightsError(
                f"a KV cache that has forgotten {self.num_forgotten} tokens cannot be {what}. "
                "Hint: leave max_tokens open."
            )

    def as_stock(self) -> KVCache:
        """mlx-lm's own cache with the same contents, all in memory."""
        self._refuse_forgotten("merged")
        cache = KVCache()
        if not self.empty():
            cache.keys, cache.values = self._contents()
            cache.offset = self.offset
        return cache

    @classmethod
    def merge(cls, caches: Sequence[KVCache]) -> BatchKVCache:
        """One cache for several sequences, mlx-lm's own, in memory. Raises: ConfigError: ``max_tokens`` is set."""
        for cache in caches:
            if isinstance(cache, DiskKVCache) and cache.pool.options.max_tokens is not None:
                raise _forgetful(cache.pool.options.max_tokens, "part of a batch, whose sequences are kept together")
        return merged([c.as_stock() if isinstance(c, DiskKVCache) else c for c in caches], caches)

    def __deepcopy__(self, memo: dict[Any, Any]) -> DiskKVCache:
        other = DiskKVCache(rows=self._fork(memo))
        other.offset, other.num_forgotten = self.offset, self.num_forgotten
        pass_on(self, other)
        return other


class DiskQuantizedKVCache(_Cache, QuantizedKVCache):  # type: ignore[misc]
    """mlx-lm's ``QuantizedKVCache`` whose tokens may be on disk.

    Args:
        rows: where tokens are kept.
        group_size: numbers that share a scale.
        bits: of a number.
    """

    def __init__(self, rows: LayerRows, group_size: int = 64, bits: int = 8) -> None:
        self._start(rows)
        self.group_size = group_size
        self.bits = bits

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Adds tokens, ``(batch, heads, new tokens, width)``, quantized. Returns all that are kept, as triples.

        Raises:
            BudgetError: they do not fit the budget even with every layer on disk.
            WriteError: the disk is full, or fails.
            ReadError: pages could not be read.
        """
        return _triples(self._append(_quantized([keys, values], self.group_size, self.bits)))

    def keys_and_values(self) -> tuple[Any, Any]:
        """All tokens that are kept."""
        return _triples(self.rows.fetch())

    @property
    def keys(self) -> Any:
        """Keys with the room behind them; those on disk are read."""
        arrays = self.rows.memory.arrays or self._contents()
        return _triples(arrays)[0] if arrays else None

    @property
    def values(self) -> Any:
        """Values with the room behind them; those on disk are read."""
        arrays = self.rows.memory.arrays or self._contents()
        return _triples(arrays)[1] if arrays else None

    @property
    def state(self) -> tuple[Any, ...]:
        """Keys, values, offset, group size and bits; see :attr:`DiskKVCache.state`."""
        if self._is_settled and evaluates_only():
            return None, None, self.offset, self.group_size, self.bits
        arrays = self._contents()
        keys, values = _triples(arrays) if arrays else (None, None)
        rest = (self.num_forgotten,) if self.num_forgotten else ()
        return keys, values, self.offset, self.group_size, self.bits, *rest

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        keys, values, self.offset, self.group_size, self.bits, *rest = state
        self.num_forgotten = rest[0] if rest else 0
        if keys is not None:
            self.rows.set([*keys, *values], self.size())

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> DiskQuantizedKVCache:
        """A cache with these contents, in memory, in a pool of its own."""
        cache = cls(_own_rows())
        cache.state = state
        return cache

    def __deepcopy__(self, memo: dict[Any, Any]) -> DiskQuantizedKVCache:
        other = DiskQuantizedKVCache(self._fork(memo), self.group_size, self.bits)
        other.offset, other.num_forgotten = self.offset, self.num_forgotten
        pass_on(self, other)
        return other


# mlx-lm's functions for saving write down the name of the class, and those for loading look it up among mlx-lm's.
DiskKVCache.__name__ = KVCache.__name__
DiskQuantizedKVCache.__name__ = QuantizedKVCache.__name__


def _quantized(arrays: Sequence[mx.array], group_size: int, bits: int) -> list[mx.array]:
    return [part for array in arrays for part in mx.quantize(array, group_size=group_size, bits=bits)]


def _triples(arrays: Sequence[mx.array]) -> tuple[Any, Any]:
    return tuple(arrays[:3]), tuple(arrays[3:])


def _own_rows() -> LayerRows:
    pool = KVPool(KVOptions())
    return pool.new_rows(pool.new_group(), 0)


_pools: weakref.WeakValueDictionary[tuple[int | None, Path | None], KVPool] = weakref.WeakValueDictionary()
"""What caches share that were constructed with the same arguments."""


def _rows_on_disk(max_tokens: int | None, directory: Path | None) -> LayerRows:
    pool = _pools.get((max_tokens, directory))
    if pool is None:
        pool = KVPool(KVOptions(max_tokens=max_tokens, directory=directory, always_on_disk=True))
        pool.close_at_end()
        _pools[max_tokens, directory] = pool
    return pool.new_rows(pool.new_group(), 0)


def make_caches(model_caches: Sequence[Any], options: KVOptions, pool: KVPool | None = None) -> list[Any]:
    """A model's list of caches with the plain ones replaced.

    Args:
        model_caches: as mlx-lm's ``make_prompt_cache`` or ``load_prompt_cache`` returns them. Only entries whose
            class is exactly ``KVCache`` or ``QuantizedKVCache`` are replaced, with what is in them.
        options: the settings; not looked at when a pool is given.
        pool: what the caches share with others of the same model; a new one is made when it is None.

    Returns:
        A new list. Entries of other classes, lists of caches among them, are the same objects as before.
    """
    pool = pool or KVPool(options)
    group = pool.new_group()
    return [_replaced(entry, pool, group, index) for index, entry in enumerate(model_caches)]


def _replaced(entry: Any, pool: KVPool, group: int, index: int) -> Any:
    if type(entry) is KVCache:
        cache: Any = DiskKVCache(rows=pool.new_rows(group, index))
    elif type(entry) is QuantizedKVCache:
        cache = DiskQuantizedKVCache(pool.new_rows(group, index), entry.group_size, entry.bits)
    else:
        return entry
    if not entry.empty():
        cast(Any, cache).state = entry.state
    return cache

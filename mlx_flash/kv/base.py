"""The common part of the caches that follow mlx-lm's interface."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache, create_attention_mask

from mlx_flash.compat.callers import evaluates_only, is_for_a_draft
from mlx_flash.errors import ConfigError, StreamedWeightsError
from mlx_flash.kv.history import pass_on
from mlx_flash.kv.kvpool import KVPool
from mlx_flash.kv.layerrows import LayerRows
from mlx_flash.kv.memory import MemoryRows
from mlx_flash.kv.options import KVOptions
from mlx_flash.kv.pages import sizes
from mlx_flash.layout.reachable import arrays_in

C = TypeVar("C", bound="PooledCache")


def arrays_of(cache: Iterable[Any]) -> list[mx.array]:
    """Return every array of a prompt cache that is in memory. Those of common entries need no search."""
    found: list[mx.array] = []
    for entry in cache:
        if isinstance(entry, PooledCache):
            store = entry.rows.store
            found += store.buffers.arrays if isinstance(store, MemoryRows) else ()
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
        store = self.rows.store
        if isinstance(store, MemoryRows) and not store.buffers.pages:  # each layer asks twice for each token
            return store.num_rows + store.num_forgotten
        return store.length + store.num_forgotten

    @property
    def num_forgotten(self) -> int:
        """Number of tokens that were dropped to stay within ``max_tokens``."""
        return self.rows.store.num_forgotten

    @property
    def pool(self) -> KVPool:
        """The pool that the cache shares with others."""
        return self.rows.pool  # type: ignore[return-value]  # which makes all rows

    @property
    def is_on_disk(self) -> bool:
        """True when the pages are on disk."""
        return self.rows.disk is not None

    @property
    def nbytes(self) -> int:
        """Bytes in memory, shared ones included. Those on disk do not count."""
        disk, memory = self.rows.disk, self.rows.memory
        return memory.buffers.nbytes + sum(sizes([memory.pages]).values()) if disk is None else disk.tail_bytes

    def size(self) -> int:
        """Return the number of tokens that are kept."""
        return self.offset - self.num_forgotten

    def empty(self) -> bool:
        """Return whether the cache never held a token."""
        return self.rows.store.layout is None

    def is_trimmable(self) -> bool:
        """Return whether any number of tokens can be trimmed. False once tokens were dropped.

        Raises: ConfigError: mlx-lm asks because it begins speculative decoding, and ``max_tokens`` is set.
        """
        if self.pool.options.max_tokens is not None and is_for_a_draft():
            raise forgetful(self.pool.options.max_tokens, "used with a draft model, whose tokens are taken back")
        return self.num_forgotten == 0

    def trim(self, n: int) -> int:
        """Remove up to ``n`` of the newest tokens. Return how many were removed."""
        n = max(0, min(self.size(), n))
        if n:
            self.rows.truncate(self.size() - n)
        return n

    def make_mask(self, N: int, *args: Any, **kwargs: Any) -> Any:  # noqa: N803  (mlx-lm's name)
        """Return the attention mask for ``N`` new tokens."""
        options, length = self.rows.options, self.rows.store.length
        forgotten = 0 if options.max_tokens is None else options.forgotten_tokens(length, N)
        return create_attention_mask(N, *args, offset=length - forgotten, **kwargs)

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return all tokens that are kept."""
        return pair(self.rows.fetch())

    @property
    def keys(self) -> Any:
        """Keys with the room behind them, a triple if they are quantized. Those on disk are read."""
        return pair(buffers(self.rows))[0]

    @keys.setter
    def keys(self, keys: Any) -> None:
        self._replace(keys, self.values)

    @property
    def values(self) -> Any:
        """Values with the room behind them, as the keys."""
        return pair(buffers(self.rows))[1]

    @values.setter
    def values(self, values: Any) -> None:
        self._replace(self.keys, values)

    def _replace(self, keys: Any, values: Any) -> None:
        if self.is_on_disk:
            raise StreamedWeightsError(
                "keys or values of a KV cache that is on disk cannot be replaced one at a time. Hint: set state."
            )
        self.rows.set(_flat(keys, values), self.size(), self.num_forgotten)

    @property
    def state(self) -> tuple[Any, ...]:
        """Keys, values, offset, and what else mlx-lm's class has there.

        Keys and values are None when mlx-lm asks only in order to evaluate them, and they are on disk or parked, and so
        evaluated already. After tokens were dropped their number comes last: mlx-lm, which could not continue from such
        a cache, then refuses the state.
        """
        is_evaluated = self.is_on_disk or bool(self.rows.memory.pages)
        arrays = [] if is_evaluated and evaluates_only() else contents(self.rows)
        form = [getattr(self, name) for name in self._form]
        return *pair(arrays), self.offset, *form, *([self.num_forgotten] if self.num_forgotten else [])

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        keys, values, offset, *rest = state
        for name in self._form:
            setattr(self, name, rest.pop(0))
        num_forgotten = rest[0] if rest else 0
        if keys is not None:
            self.rows.set(_flat(keys, values), offset - num_forgotten, num_forgotten)

    @classmethod
    def from_state(cls: type[C], state: Sequence[Any]) -> C:
        """Return a cache with these contents, in memory, in a pool of its own."""
        cache = cls.__new__(cls)
        pool = KVPool(KVOptions())
        cache.rows = pool.new_rows(pool.new_group(), 0)
        cache.state = state
        return cache

    def __deepcopy__(self: C, memo: dict[Any, Any]) -> C:
        key, is_alone = (KVPool, id(self.pool)), not memo  # else the list that it is in was noted first
        if key not in memo:  # caches that are copied together belong to one list
            memo[key] = self.pool.new_group(), {}
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


def forgetful(max_tokens: int, what: str) -> ConfigError:
    """Return the error for a use that dropped tokens do not allow."""
    return ConfigError(
        f"kv_max_tokens is {max_tokens}: a cache that forgets cannot be {what}. Hint: leave kv_max_tokens unset."
    )


def pair(arrays: Sequence[mx.array]) -> tuple[Any, Any]:
    """Return keys and values: an array each, a triple each if they are quantized, None each if there are none."""
    if not arrays:
        return None, None
    half = len(arrays) // 2
    return (arrays[0], arrays[1]) if half == 1 else (tuple(arrays[:half]), tuple(arrays[half:]))


def _flat(keys: Any, values: Any) -> list[mx.array]:
    """Return the arrays of :func:`pair`."""
    return [keys, values] if isinstance(keys, mx.array) else [*keys, *values]

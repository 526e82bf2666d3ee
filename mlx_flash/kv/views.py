"""Views of a prompt cache for calls in lockstep: each call sees the cache as the calls before it will leave it.

The calls visit each layer in their order, but all of them pass the top of the model, where masks and positions are
made, before the first has reached the last layer. So an entry of a later call answers from a clone at first, which the
cache's own code has advanced with zeros that are never evaluated. When the call before is done with the entry, the view
becomes the entry itself: both have one class and one ``__dict__``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from mlx_flash.kv.base import PooledCache
from mlx_flash.kv.sizes import example_update
from mlx_flash.layout.arrays import arrays_in


class SharedEntryError(Exception):
    """A call used an entry of the cache after a later call had changed it: this model's calls need an order."""


class _Passed:
    """The class of a view that its call is done with."""

    def _refuse(self, *args: Any) -> Any:
        raise SharedEntryError("an entry")

    __getattribute__ = __getitem__ = __setitem__ = __len__ = __iter__ = __bool__ = _refuse


class CacheViews:
    """The views of one prompt cache, for calls that run in lockstep.

    Args:
        cache: the entries.
        lengths: new tokens of each call, in order.

    Attributes:
        views: for each call, what it takes for the prompt cache.
    """

    def __init__(self, cache: Sequence[Any], lengths: Sequence[int]) -> None:
        self._real = cache
        self.views: list[list[Any]] = [[] for _ in lengths]
        for entry in cache:
            before = 0
            for views, length in zip(self.views, lengths, strict=True):
                views.append(_advanced(entry, before))
                before += length
        self._owner = [0] * len(cache)
        self._seen = [_leaves(entry) for entry in cache]
        for number in range(len(cache)):
            self._attach(number)

    def after(self, call: int) -> None:
        """Pass on the entries that a call has updated since it got them."""
        for number, entry in enumerate(self._real):
            if self._owner[number] == call and not _same(self._seen[number], now := _leaves(entry)):
                self._seen[number] = now
                self._owner[number] += 1
                self._attach(number)
                if call + 1 < len(self.views):
                    view = self.views[call][number]
                    object.__setattr__(view, "__dict__", {})
                    object.__setattr__(view, "__class__", _Passed)

    def _attach(self, number: int) -> None:
        call, entry = self._owner[number], self._real[number]
        if call < len(self.views):
            view = self.views[call][number]
            view.__class__ = type(entry)
            view.__dict__ = entry.__dict__


def can_be_viewed(cache: Sequence[Any]) -> bool:
    """Return whether every entry is a cache that views exist for."""
    return all(hasattr(entry, "__dict__") and not isinstance(entry, list | tuple) for entry in cache)


def snapshot(cache: Sequence[Any]) -> Callable[[], None] | None:
    """Return what puts empty entries back as they are; None if one of them holds anything."""
    if any(arrays_in(entry) for entry in cache) or any(not entry.empty() for entry in cache if hasattr(entry, "empty")):
        return None
    before = [copy.deepcopy(_state(entry)) for entry in cache]

    def put_back() -> None:
        for entry, state in zip(cache, before, strict=True):
            if isinstance(entry, PooledCache):
                entry.trim(entry.size())
            else:
                entry.__dict__ = state

    return put_back


def trimmer(cache: Sequence[Any]) -> Callable[[], None] | None:
    """Return what trims every entry to the tokens that it has now; None if one cannot be trimmed."""
    if not all(isinstance(entry, PooledCache | KVCache | QuantizedKVCache) for entry in cache):
        return None
    offsets = [entry.offset for entry in cache]

    def trim() -> None:
        for entry, offset in zip(cache, offsets, strict=True):
            entry.trim(entry.offset - offset)

    return trim


def _state(entry: Any) -> dict[str, Any]:
    return {} if isinstance(entry, PooledCache) else vars(entry)


def _advanced(entry: Any, num_tokens: int) -> Any:
    """Return an object of some cache class that answers as the entry will after more tokens. Evaluates nothing."""
    if isinstance(entry, PooledCache | KVCache | QuantizedKVCache):  # the offset says everything
        clone: Any = KVCache()
        clone.offset = entry.offset + num_tokens
        return clone
    memo: dict[int, Any] = {id(array): mx.zeros(array.shape, array.dtype) for array in arrays_in(entry)}
    clone = copy.deepcopy(entry, memo)
    if num_tokens:
        _advance(clone, num_tokens)
    return clone


def _advance(clone: Any, num_tokens: int) -> None:
    if hasattr(clone, "update_and_fetch"):
        clone.update_and_fetch(*example_update(clone, num_tokens))
    elif hasattr(clone, "caches"):
        for child in clone.caches:
            _advance(child, num_tokens)
    elif hasattr(clone, "advance"):
        clone.advance(num_tokens)


def _leaves(entry: Any) -> list[Any]:
    """Return what an entry holds: arrays, and numbers."""
    found: list[Any] = []
    _collect(vars(entry), found)
    return found


def _collect(value: Any, found: list[Any]) -> None:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            _collect(item, found)
    elif isinstance(value, mx.array | int | float | str) or value is None:
        found.append(value)
    elif hasattr(value, "update_and_fetch") or hasattr(value, "caches"):
        _collect(vars(value), found)


def _same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(
        a is b or (not isinstance(a, mx.array) and not isinstance(b, mx.array) and a == b)
        for a, b in zip(left, right, strict=True)
    )

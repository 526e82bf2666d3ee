"""Views of a prompt cache for calls in lockstep: each call sees the cache as the calls before it will leave it.

The calls visit each layer in their order, but all of them pass the top of the model, where masks and positions are
made, before the first has reached the last layer. So an entry of a later call answers from a clone at first, which the
cache's own code has advanced with zeros that take no memory. When the call before is done with the entry, the view
becomes the entry itself: both have one class and one ``__dict__``.

Recurrent states of an entry are passed on one by one, since a layer of several units replaces them one after another.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from functools import cache as cached
from typing import Any, Protocol, cast

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_flash.compat.caches import entries_of
from mlx_flash.kv.growth import example_update
from mlx_flash.kv.kvpool import PooledCache
from mlx_flash.kv.owed import own_kind
from mlx_flash.layout.reachable import Opaque, arrays_in

_KINDS = (KVCache, QuantizedKVCache, RotatingKVCache, ChunkedKVCache, ArraysCache)
"""Classes of mlx-lm whose positions and masks depend on their lengths alone."""


class SharedEntryError(RuntimeError):
    """A call used tokens or states of the cache at the wrong time: before the call ahead of it had left them there, or
    after a later one had changed them. This model's calls need an order."""


def _refuse(*_: Any) -> Any:
    raise SharedEntryError


class _Passed(Opaque):
    """The class of a view that its call is done with."""

    __getattribute__ = __getitem__ = __setitem__ = __len__ = __iter__ = __bool__ = _refuse


@cached
def _early(kind: Any) -> Any:
    """Return the class of a view that its call has not got yet: it knows its length, and holds nothing."""
    refusing = property(_refuse)
    body = {"keys": refusing, "values": refusing, "state": refusing, "__getitem__": _refuse, "__setitem__": _refuse}
    return type(kind.__name__, (kind,), body)


class Observer(Protocol):
    """Observer of the entries of a prompt cache between calls."""

    def add(self, call: int, entry: Any, found: Any, /) -> None:
        """Take note of an entry, as ``found`` by a call, which changes it. States in it may be newer already."""


class _States:
    """The recurrent states of an entry, each of which passes from call to call when it is replaced."""

    def __init__(self, entry: ArraysCache, views: Sequence[Any], observer: Observer | None) -> None:
        self._entry, self._observer, self._num_calls = entry, observer, len(views)
        self._owners = [0] * len(entry.cache)
        self._found: list[dict[int, Any] | None] = [{} for _ in views]  # by call, until the observer has it
        if observer is not None:
            observer.add(0, entry, entry)
        for call, view in enumerate(views):
            view.__class__ = _state_view(cast(Hashable, type(entry)))
            view.__dict__ |= {"cache": entry.cache, _PLACE: (self, call)}  # what evaluates a call's effects finds them

    def get(self, call: int, index: int) -> Any:
        """Return a state as a call left it, or as the one before it did."""
        self._check(call, index)
        return self._entry[index]

    def set(self, call: int, index: int, state: Any) -> None:
        """Replace a state, which the next call gets."""
        self._check(call, index)
        if self._observer is not None and call + 1 < self._num_calls:
            self._tell(self._observer, call + 1, index, state)
        self._entry[index] = state
        self._owners[index] = call + 1

    def _tell(self, observer: Observer, call: int, index: int, state: Any) -> None:
        """Give the observer the entry as a call finds it, once it has all states."""
        if (found := self._found[call]) is None:
            raise SharedEntryError  # a state is replaced twice
        found[index] = copy.copy(state)  # the call may write to the other one
        if len(found) == len(self._owners):
            entry = copy.copy(self._entry)
            entry.cache = [found[number] for number in range(len(found))]
            self._found[call] = None
            observer.add(call, self._entry, entry)

    def _check(self, call: int, index: int) -> None:
        if self._owners[index] not in (call, call + 1):
            raise SharedEntryError


_PLACE = "_place"
"""Attribute of a view with the states of its entry, and the number of its call."""


@cached
def _state_view(kind: Any) -> Any:
    """Return the class of a view of states."""

    def get(view: Any, index: int) -> Any:
        states, call = vars(view)[_PLACE]
        return states.get(call, index)

    def put(view: Any, index: int, state: Any) -> None:
        states, call = vars(view)[_PLACE]
        states.set(call, index, state)

    refusing = property(_refuse)
    body = {"cache": refusing, "state": refusing, "__getitem__": get, "__setitem__": put}
    return type(kind.__name__, (kind,), body)


class CacheViews:
    """The views of one prompt cache, for calls of some lengths that run in lockstep.

    ``observer`` gets each entry as each call finds it: to take the calls back later, or to keep states.
    """

    def __init__(self, cache: Sequence[Any], lengths: Sequence[int], observer: Observer | None = None) -> None:
        self._entries = entries_of(cache)
        starts = [sum(lengths[:call]) for call in range(len(lengths))]
        self._views = [[_advanced(entry, start) for entry in self._entries] for start in starts]
        # for each call, what it takes for the prompt cache
        self.views = [_same_structure(cache, iter(parts)) for parts in self._views]
        self._lengths, self._owner = lengths, [0] * len(self._entries)
        self._seen: list[Any] = [None] * len(self._entries)  # what the owner of each found
        self._observer = observer
        for number, entry in enumerate(self._entries):
            if _passes_states(entry):
                _States(entry, [views[number] for views in self._views], observer)
                self._owner[number] = len(starts)  # nothing else is passed on
            else:
                self._attach(number)

    def after(self, call: int) -> None:
        """Pass on the entries that a call has updated since it got them."""
        for number, entry in enumerate(self._entries):
            if self._owner[number] == call and not _same(self._seen[number], _contents(entry)):
                self._owner[number] += 1
                self._attach(number)
                if call + 1 < len(self._views):
                    view = self._views[call][number]
                    object.__setattr__(view, "__dict__", {})
                    object.__setattr__(view, "__class__", _Passed)

    def _attach(self, number: int) -> None:
        """Make the view of the call that owns an entry the entry itself."""
        call, entry = self._owner[number], self._entries[number]
        if call < len(self._views):
            if self._observer is not None:
                self._observer.add(call, entry, entry)
            if isinstance(entry, PooledCache):
                entry.drop_room(self._lengths[call])
            view = self._views[call][number]
            view.__class__ = type(entry)
            view.__dict__ = entry.__dict__
        self._seen[number] = _contents(entry)


def _passes_states(entry: Any) -> bool:
    """Return whether an entry has recurrent states, and nothing else that calls change."""
    return type(entry) is ArraysCache and entry.lengths is None and entry.left_padding is None


def can_be_viewed(cache: Sequence[Any]) -> bool:
    """Return whether views of all entries exist: they are mlx-lm's caches of one sequence, or of a pool."""
    kinds = {own_kind(type(entry)) for entry in entries_of(cache)}
    return all(issubclass(kind, PooledCache) or kind in _KINDS for kind in kinds)


def _same_structure(cache: Sequence[Any], parts: Iterator[Any]) -> list[Any]:
    return [
        CacheList(*_same_structure(entry.caches, parts)) if isinstance(entry, CacheList) else next(parts)
        for entry in cache
    ]


def _advanced(entry: Any, num_tokens: int) -> Any:
    """Return an object that answers for its length as the entry will after more tokens. Evaluates nothing."""
    if isinstance(entry, KVCache | QuantizedKVCache):  # the offset says everything
        clone: Any = KVCache()
        clone.offset = entry.offset + num_tokens
    else:
        zeros = [getattr(entry, name, None) for name in ("keys", "values")]
        memo: dict[int, Any] = {id(array): array for array in arrays_in(vars(entry))}
        memo |= {id(array): mx.zeros(array.shape, array.dtype) for array in arrays_in(zeros)}
        clone = copy.deepcopy(entry, memo)
        if num_tokens and hasattr(clone, "update_and_fetch"):
            clone.update_and_fetch(*example_update(clone, num_tokens))
        elif num_tokens and hasattr(clone, "advance"):
            clone.advance(num_tokens)
        for name in ("keys", "values"):
            if isinstance(array := getattr(clone, name, None), mx.array):  # no memory where a layer evaluates it
                setattr(clone, name, mx.broadcast_to(mx.zeros((), array.dtype), array.shape))
    clone.__class__ = _early(cast(Hashable, type(clone)))
    return clone


def _contents(entry: Any) -> list[Any]:
    """Return what an entry holds, to compare it by."""
    values = [*vars(entry).values(), getattr(entry, "offset", None)]  # that of rows on disk is not an attribute
    return [item for value in values for item in (value if isinstance(value, list | tuple) else [value])]


def _same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(
        a is b or (isinstance(a, int | float) and isinstance(b, int | float) and a == b)
        for a, b in zip(left, right, strict=True)
    )

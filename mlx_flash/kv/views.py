"""Views of a prompt cache for calls in lockstep: each call sees the cache as the calls before it will leave it.

Checkpoints put a cache back after tokens that were computed in vain.

The calls visit each layer in their order, but all of them pass the top of the model, where masks and positions are
made, before the first has reached the last layer. So an entry of a later call answers from a clone at first, which the
cache's own code has advanced with zeros that take no memory. When the call before is done with the entry, the view
becomes the entry itself: both have one class and one ``__dict__``.

Recurrent states of an entry are passed on one by one, since a layer of several units replaces them one after another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache as cached
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_flash.compat.caches import CacheKinds, entries_of
from mlx_flash.kv.growth import example_update
from mlx_flash.kv.kvpool import PooledCache, buffers_of, pair, resized
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


Observer = Callable[[int, Any, Any], None]
"""It gets the number of a call, an entry, and that entry as the call found it. States may be newer in the first."""


class _States:
    """The recurrent states of an entry, each of which passes from call to call when it is replaced."""

    def __init__(self, entry: ArraysCache, views: Sequence[Any], observer: Observer | None) -> None:
        self._entry, self._observer, self._num_calls = entry, observer, len(views)
        self._owners = [0] * len(entry.cache)
        self._found: list[dict[int, Any] | None] = [{} for _ in views]  # by call, until the observer has it
        if observer is not None:
            observer(0, entry, entry)
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
            observer(call, self._entry, entry)

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
                self._observer(call, entry, entry)
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


# --- what puts a cache back after tokens that were computed in vain ---------------------------------------------------

PutBack = Callable[[], None]


class Checkpoints:
    """Checkpoints of a prompt cache before each of several calls, which add a token each."""

    def __init__(self) -> None:
        self._before: list[list[PutBack]] = []

    def add(self, call: int, entry: Any, found: Any) -> None:
        """Make a checkpoint of an entry as a call found it, which changes it."""
        while len(self._before) <= call:
            self._before.append([])
        self._before[call].append(checkpoint(entry, found))

    def take_back(self, num_kept: int) -> None:
        """Put the entries back as the first calls left them."""
        for put_backs in reversed(self._before[num_kept:]):
            for put_back in put_backs:
                put_back()
        del self._before[num_kept:]


def checkpoint(entry: Any, found: Any = None) -> PutBack:
    """Return what puts an entry back as it is now, after at most one more token; or as it was ``found``, its states.

    After several tokens, the checkpoints before each of them put the entry back, the last one first. None copies more
    than a token: arrays of states are kept, since models replace them, and rows behind the end mean nothing. Buffers
    that have grown since are cut: on GPUs the kernel of attention, and so its last bits, may depend on whether keys
    fill their buffer.
    """
    if isinstance(entry, CacheKinds.trimmable):
        offset, capacity = entry.offset, _capacity(entry)

        def trim() -> None:
            trim_to(entry, offset)
            _shrink_to(entry, capacity)

        return trim
    attributes = {name: _kept(value) for name, value in vars(entry if found is None else found).items()}
    rewrite = _overwritten(entry) if isinstance(entry, RotatingKVCache) else None

    def put_back() -> None:
        entry.__dict__ = attributes
        if rewrite is not None:
            rewrite()

    return put_back


def kept_bytes(entry: Any) -> int:
    """Return the bytes that a checkpoint keeps in memory once the entry has gone on."""
    if isinstance(entry, RotatingKVCache) and entry.keys is not None:
        length, nbytes = entry.keys.shape[2], int(entry.nbytes)
        return nbytes // length if length <= entry.max_size else nbytes
    return sum(array.nbytes for array in arrays_in(entry.cache)) if isinstance(entry, ArraysCache) else 0


def trim_to(entry: Any, offset: int) -> None:
    """Take the tokens from an offset on from an entry, if it has any."""
    if entry.offset > offset:
        entry.trim(entry.offset - offset)


def is_empty(cache: Sequence[Any]) -> bool:
    """Return whether no entry of a prompt cache holds anything."""
    return all(entry.empty() and not arrays_in(vars(entry)) for entry in entries_of(cache))


def _capacity(entry: Any) -> int:
    """Return the number of tokens that the buffers of an entry have room for; 0 if it has none in memory."""
    arrays = buffers_of(entry)
    return int(arrays[0].shape[2]) if arrays else 0


def _shrink_to(entry: Any, capacity: int) -> None:
    """Cut the buffers of an entry that have grown."""
    if capacity < _capacity(entry):
        entry.keys, entry.values = pair(resized(buffers_of(entry), capacity, capacity) if capacity else [])


def _kept(value: Any) -> Any:
    """Return a value that later changes in place do not reach. Arrays in lists are states, and not written to."""
    return [copy.copy(item) for item in value] if isinstance(value, list) else value


def _overwritten(entry: RotatingKVCache) -> PutBack | None:
    """Return what writes back the row of a rotating cache that the next token overwrites; None if it does not."""
    keys, values, _, keep, max_size, index = entry.state
    index = keep if index == max_size else index
    if keys is None or keys.shape[2] > max_size or index >= keys.shape[2]:  # the next token makes new arrays
        return None
    rows = [mx.take(array, mx.array([index]), axis=2) for array in (keys, values)]  # a copy
    mx.eval(rows)

    def rewrite() -> None:
        for array, row in zip((keys, values), rows, strict=True):
            array[..., index : index + 1, :] = row

    return rewrite

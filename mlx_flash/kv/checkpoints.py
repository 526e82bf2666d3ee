"""Checkpoints and trimming, which put caches back after tokens that were computed in vain."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, RotatingKVCache

from mlx_flash.compat.caches import CacheKinds, entries_of
from mlx_flash.kv.kvpool import buffers_of, pair, resized
from mlx_flash.layout.reachable import arrays_in

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


def trim_all_to(cache: Sequence[Any], offsets: Sequence[int]) -> None:
    """Trim every entry to an offset."""
    for entry, offset in zip(cache, offsets, strict=True):
        trim_to(entry, offset)


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

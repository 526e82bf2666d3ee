"""Memory of mlx-lm's cache objects, found through their arrays: what they hold, and what an update adds."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_flash.compat.caches import is_window, token_fits
from mlx_flash.kv.kvpool import DiskKVCache
from mlx_flash.kv.owed import OWED
from mlx_flash.layout.reachable import arrays_in, nbytes_in

_EXAMPLE_WIDTH = 512
"""Numbers in a head's row that any group size of quantization divides."""

_PLAIN = {int, bool, type(None)}
"""Classes of attributes that are part of a key as they are."""


class Growth(NamedTuple):
    """Memory that an update of caches takes, in bytes more than they hold now.

    An entry whose arrays grow holds the old ones, the room for new tokens, and the new ones.
    """

    added: int  # afterwards; negative when a window is cut
    peak: int  # the most during the update, when entries are updated one after another


def tokens_fit(cache: Sequence[Any]) -> bool:
    """Return whether a token of each sequence changes no memory of a prompt cache."""
    if not cache or OWED in vars(cache[0]) or OWED in vars(cache[-1]):
        return False
    for entry in cache:  # no function is called for most
        if type(entry) is not DiskKVCache:
            if not token_fits(entry):
                return False
        elif (keys := entry.keys) is None or entry.offset >= keys.shape[2]:
            return False
    return True


def update_growth(cache: Sequence[Any], num_tokens: int, row_bytes: int = 0, step: int | None = None) -> Growth:
    """Return the memory that an update of some caches of mlx-lm's takes. Evaluate nothing, change no entry.

    The entries' own code runs, on lazy zeros with the shapes of their arrays, so the answer holds for any class with
    ``keys``, ``values``, and ``update_and_fetch``. An entry without that method has recurrent states: the new ones take
    as much as the old ones. One without ``keys`` keeps tokens in another form, and counts as if it kept all of them.

    ``row_bytes`` are the bytes of one token of all sequences in an entry. They count for entries that are empty or keep
    tokens in another form.

    The tokens come in parts of ``step``, each of which moves older ones out of a window; None for all at once.
    """
    known: dict[Any, Growth] = {}
    return _one_after_another(_growth(entry, num_tokens, step or num_tokens, row_bytes, known) for entry in cache)


def _one_after_another(growths: Iterable[Growth]) -> Growth:
    added = peak = 0
    for growth in growths:
        peak = max(peak, added + growth.peak)
        added += growth.added
    return Growth(added, peak)


def _growth(entry: Any, num_tokens: int, step: int, row_bytes: int, known: dict[Any, Growth]) -> Growth:
    if not hasattr(entry, "update_and_fetch"):
        return Growth(0, nbytes_in(entry))
    if not hasattr(entry, "keys"):  # what it keeps of tokens is its own business: at most what they all take
        added = num_tokens * row_bytes
        return Growth(added, nbytes_in(entry) + added)
    key = _key(entry, row_bytes)
    if key not in known:
        known[key] = _traced_in_parts(entry, num_tokens, step, row_bytes)
    return known[key]


def _key(entry: Any, row_bytes: int) -> Any:
    """Return a key that is equal for entries that grow alike; asked for every layer and token."""
    values = [
        (value.shape, value.dtype)
        if value.__class__ is mx.array
        else value
        if value.__class__ in _PLAIN
        else _shape_of(value)
        for value in vars(entry).values()
    ]
    return type(entry), *values, row_bytes if entry.keys is None else 0


def _shape_of(value: Any) -> Any:
    if isinstance(value, mx.array):
        return value.shape, value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_shape_of, value))
    return value if isinstance(value, int) else None


def _traced_in_parts(entry: Any, num_tokens: int, step: int, row_bytes: int) -> Growth:
    """Return what an update takes. Of a window in parts, the last one finds no more than the window."""
    if num_tokens <= step or not is_window(entry):
        return _traced(entry, num_tokens, row_bytes)
    kept = min(entry.offset, entry.max_size - 1)
    num_left = min(num_tokens, entry.max_size - 1 - kept + step)
    growth = _traced(entry, num_left, row_bytes)
    is_large = kept + num_left > step  # the last part is added to a window that came with those before it
    return Growth(growth.added, growth.peak + (growth.added if entry.keys is None and is_large else 0))


def _traced(entry: Any, num_tokens: int, row_bytes: int) -> Growth:
    memo: dict[int, Any] = {id(array): mx.zeros(array.shape, array.dtype) for array in arrays_in(entry)}
    clone = copy.deepcopy(entry, memo)
    before = {id(array): array for array in arrays_in(clone)}
    is_empty = entry.keys is None
    clone.update_and_fetch(*example_update(entry, num_tokens))
    after = {id(array): array for array in arrays_in(clone)}
    if is_empty:
        added = _arrays_of(clone.keys)[0].shape[2] * row_bytes
        return Growth(added, added)
    added = sum(array.nbytes for array in after.values()) - sum(array.nbytes for array in before.values())
    old = sum(before[i].nbytes for i in before.keys() - after.keys())
    new = sum(after[i].nbytes for i in after.keys() - before.keys())
    is_window = _arrays_of(clone.keys)[0].shape[2] < _arrays_of(entry.keys)[0].shape[2] + num_tokens
    return Growth(added, new + (old if is_window else new - old))  # a window is put in order before it is cut


def example_update(entry: Any, num_tokens: int) -> list[mx.array]:
    """Return keys and values that the entry can be updated with."""
    if entry.keys is None:
        return [mx.zeros((1, 1, num_tokens, _EXAMPLE_WIDTH), mx.float16)] * 2
    found = []
    for kept in (entry.keys, entry.values):
        arrays = _arrays_of(kept)
        batch, heads, _, width = arrays[-1].shape
        is_quantized = len(arrays) > 1  # numbers, scales, and biases
        found.append(
            mx.zeros((batch, heads, num_tokens, width * (entry.group_size if is_quantized else 1)), arrays[-1].dtype)
        )
    return found


def _arrays_of(kept: Any) -> Sequence[mx.array]:
    return [kept] if isinstance(kept, mx.array) else list(kept)

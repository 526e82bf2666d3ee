"""The sizes of a model's cache, taken from the arrays that a dry run leaves in it. Nothing is evaluated."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_flash.compat.caches import CACHE_STEP, CacheKinds, entries_of, is_window
from mlx_flash.layout.reachable import arrays_in, nbytes_in

_RESHAPING = {"Squeeze", "ExpandDims", "Reshape", "Flatten", "Unflatten", "Transpose"}
"""Primitives whose result shares the memory of their input and has the same size."""

_CUTTING = {"Slice", "Split"}
"""Primitives whose result shares the memory of a longer input."""

_DONATED_BYTES = 16 << 10
"""MLX may put a result into the memory of an input that is so much larger. Whether it does depends on timing."""


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Sizes of the cache of one sequence, in bytes."""

    # of recurrent states, however long the context is, with what their memory may have beyond them
    constant_bytes: int = 0
    token_bytes: int = 0  # growth by each token. Sliding windows count as if they grew for good.
    largest_row: int = 0  # the most that a token adds to the cache of a layer
    rows: tuple[int, ...] = ()  # of each plain ``KVCache``, growth by each token; part of ``token_bytes``
    # of each sliding window, growth by each token, and its length; part of ``token_bytes``
    windows: tuple[tuple[int, int], ...] = ()
    # memory that states keep for each token of the last call: a state that is a slice of an array with all tokens of
    # the call holds that array
    call_bytes: int = 0
    # the most in one layer, for each token of a call, of arrays with the states after every token
    largest_scan: int = 0
    largest_state: int = 0  # bytes of the largest state

    def nbytes(self, num_tokens: int) -> int:
        """Return the size of all caches with so many tokens."""
        return self.constant_bytes + self.token_bytes * num_tokens

    @property
    def growing(self) -> int:
        """Growth by each token of caches without a window that are in no :attr:`rows`."""
        return self.token_bytes - sum(self.rows) - sum(row for row, _ in self.windows)

    def states_bytes(self, num_new: int, num_tokens: int) -> int:
        """Return the size of windows and states with so many tokens, the newest of which came in one call."""
        windows = [row * min(num_tokens, length + num_new) for row, length in self.windows]
        return self.constant_bytes + sum(windows) + self.call_bytes * num_new

    def others_bytes(self, num_tokens: int) -> int:
        """Return the size of the caches that are in no :attr:`rows`, while one token after another comes."""
        windows = [row * min(num_tokens, length + CACHE_STEP) for row, length in self.windows]
        room = num_tokens + CACHE_STEP
        copied = max([*windows, self.largest_row * room if self.growing else 0])
        return self.constant_bytes + self.growing * room + sum(windows) + copied + self.call_bytes


def add_sizes(sizes: Sequence[CacheSizes]) -> CacheSizes:
    """Return the sizes of several entries of a cache together."""
    return CacheSizes(
        constant_bytes=sum(each.constant_bytes for each in sizes),
        token_bytes=sum(each.token_bytes for each in sizes),
        largest_row=max((each.largest_row for each in sizes), default=0),
        rows=tuple(row for each in sizes for row in each.rows),
        windows=tuple(window for each in sizes for window in each.windows),
        call_bytes=sum(each.call_bytes for each in sizes),
        largest_scan=max((each.largest_scan for each in sizes), default=0),
        largest_state=max((each.largest_state for each in sizes), default=0),
    )


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """An entry of a prompt cache."""

    sizes: CacheSizes  # its own
    users: frozenset[int]  # the ``id`` of every module that is given it, or a part of it, in a call


FirstSizes = dict[int, tuple[int, int]]
"""Bytes and bytes of one token of each entry of a cache with one token, by ``id``."""


def first_sizes(cache: Sequence[Any]) -> FirstSizes:
    """Return the sizes of a cache after a call with one token."""
    return {id(entry): (nbytes_in(entry), _row_bytes(entry)) for entry in entries_of(cache)}


def sizes_of(entry: Any, first: FirstSizes) -> CacheSizes:
    """Return the sizes of an entry of the same cache, after a call with two more tokens."""
    found = [_sizes_of(leaf, first) for leaf in entries_of([entry])]
    constant, row, kept, scanned = (sum(sizes[i] for sizes in found) for i in range(4))
    return CacheSizes(
        constant_bytes=constant + _DONATED_BYTES * _num_states(entry),
        token_bytes=row,
        largest_row=row,
        rows=(row,) if type(entry) in CacheKinds.plain else (),
        windows=((row, entry.max_size),) if is_window(entry) else (),
        call_bytes=kept,
        largest_scan=scanned,
        largest_state=constant,
    )


def _sizes_of(entry: Any, first: FirstSizes) -> tuple[int, int, int, int]:
    """Return the constant size, the growth by a token, and for each token of a call what is kept and scanned."""
    before, row = first[id(entry)]
    if isinstance(getattr(entry, "step", None), int):  # grows in steps
        return 0, row, 0, 0
    growth = max(0, nbytes_in(entry) - before) // 2
    kept, scanned = _kept_of_a_call(arrays_in(entry))
    return max(0, before - growth), growth, kept, scanned


def _num_states(entry: Any) -> int:
    """Return the number of arrays of an entry that does not grow in steps."""
    leaves = [leaf for leaf in entries_of([entry]) if not isinstance(getattr(leaf, "step", None), int)]
    return len({id(array) for leaf in leaves for array in arrays_in(leaf)})


def num_growing(entries: Sequence[Any]) -> int:
    """Return the number of caches that grow in steps, as keys and values do."""
    return sum(isinstance(getattr(leaf, "step", None), int) for leaf in entries_of(entries))


def _row_bytes(entry: Any) -> int:
    """Return the bytes of one token in arrays of shape (batch, heads, tokens, width)."""
    arrays = {id(array): array for array in arrays_in(entry) if array.ndim > 1 and array.size}
    return sum(array.nbytes // array.shape[-2] for array in arrays.values())


def _kept_of_a_call(states: Sequence[mx.array]) -> tuple[int, int]:
    """Return bytes for each token of the call that computed some states: of longer arrays whose memory the states
    share, and the part of it where a whole state is one token's.
    """
    names = {f"state{i}": state for i, state in enumerate(states)}
    file = io.StringIO()
    mx.export_to_dot(file, **names)
    graph = file.getvalue()
    operations = dict(re.findall(r'\{ (\d+) \[label ="(\w+)"', graph))
    inputs = {operation: name for name, operation in re.findall(r'^"(\w+)" -> (\d+)', graph, re.MULTILINE)}
    makers = {name: operation for operation, name in re.findall(r'^(\d+) -> "(\w+)"', graph, re.MULTILINE)}
    kept = scanned = 0
    for name, state in names.items():
        maker = makers.get(name, "")
        is_one_token = operations.get(maker) in _RESHAPING
        while operations.get(maker) in _RESHAPING:
            maker = makers.get(inputs[maker], "")
        if operations.get(maker) in _CUTTING:
            kept += state.nbytes if is_one_token else state.nbytes // state.shape[1]  # (batch, tokens, ...)
            scanned += state.nbytes if is_one_token else 0
    return kept, scanned

"""The entries of a prompt cache as the prefix cache sees them: rows that are appended, and states that are replaced."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
)

from mlx_flash.compat.arrays import memory_of
from mlx_flash.compat.caches import entries_of, is_right_padded, length_of, shortened_window
from mlx_flash.kv.diskcache import DiskQuantizedKVCache
from mlx_flash.kv.history import ATTRIBUTE, History, LoneKVCache, is_anchored
from mlx_flash.kv.kvpool import OnDisk, PooledCache, buffers_of
from mlx_flash.kv.owed import own_kind
from mlx_flash.prefixes.store import Blob

_OTHERS = "others"
_ROWS = (KVCache, BatchKVCache, LoneKVCache)
_STATES = (RotatingKVCache, ChunkedKVCache, ArraysCache, BatchRotatingKVCache)


def leaves_of(cache: Sequence[Any]) -> list[Leaf] | None:
    """Return the leaves of a prompt cache of one sequence; None if an entry is unknown, or forgets tokens."""
    leaves: list[Leaf] = []
    for entry in entries_of(cache):
        is_row = isinstance(entry, PooledCache) or type(entry) in _ROWS
        leaf = RowLeaf(entry) if is_row else StateLeaf(entry) if type(entry) in _STATES else None
        if leaf is None or not leaf.is_plain:
            return None
        leaves.append(leaf)
    return leaves or None


def has_state(entry: Any) -> bool:
    """Return whether an entry has a window or a state, whose content between two calls is gone after the second."""
    return own_kind(type(entry)) in _STATES


def forget(cache: Sequence[Any]) -> None:
    """Forget the content of a prompt cache."""
    for entry in entries_of(cache):
        getattr(entry, "__dict__", {}).pop(ATTRIBUTE, None)


class Leaf:
    """An entry of a prompt cache: mlx-lm's, or one of ours."""

    def __init__(self, entry: Any) -> None:
        self.entry = entry

    @property
    def is_plain(self) -> bool:
        """True when it holds one sequence from its beginning on, without padding."""
        entry = self.entry
        if isinstance(entry, ArraysCache):
            return entry.lengths is None and entry.batch_size == 1 and _is_zero(entry.left_padding)
        if isinstance(entry, BatchKVCache | BatchRotatingKVCache):
            return not is_right_padded(entry) and _is_zero(entry.left_padding)
        return True

    @property
    def length(self) -> int | None:
        """Number of tokens; None for entries that do not count them."""
        entry = self.entry
        return None if isinstance(entry, ArraysCache) else length_of(entry)

    @property
    def is_empty(self) -> bool:
        """True when its content does not matter."""
        return bool(self.entry.empty())

    @property
    def form(self) -> list[object]:
        """Class and settings that decide the bytes that it holds."""
        names = ("bits", "group_size", "max_size", "keep", "chunk_size")
        return [type(self.entry).__name__, *(getattr(self.entry, name, None) for name in names)]

    @property
    def history(self) -> History | None:
        """The content noted by :meth:`note`; None once sequences were added or removed."""
        return vars(self.entry)[ATTRIBUTE][0] if is_anchored(self.entry, self._anchor()) else None

    def note(self, history: History) -> None:
        """Note the content, until :func:`forget`."""
        vars(self.entry)[ATTRIBUTE] = (history, self._anchor())

    def _anchor(self) -> object:
        """Return an object that the entry replaces when sequences are added or removed."""
        entry = self.entry
        if isinstance(entry, ArraysCache):
            return entry.cache
        return entry.left_padding if isinstance(entry, BatchKVCache | BatchRotatingKVCache) else None


class RowLeaf(Leaf):
    """Keys and values, a row each for every token."""

    @property
    def is_empty(self) -> bool:
        return self.length == 0

    @property
    def form(self) -> list[object]:
        return super().form[:3]

    def read(self, start: int, stop: int) -> dict[str, Blob]:
        """Return the rows of some tokens, ``(1, heads, tokens, width)`` for each array."""
        entry = self.entry
        on_disk = entry.read(start, stop) if isinstance(entry, OnDisk) else None
        arrays = on_disk or [array[..., start:stop, :] for array in buffers_of(entry)]
        return {str(i): to_blob(array) for i, array in enumerate(arrays)}

    def append(self, arrays: Sequence[mx.array]) -> None:
        """Add rows as :meth:`read` returned them, and evaluate them."""
        entry = self.entry
        if isinstance(entry, OnDisk):
            entry.append(arrays, fetches=False)
        elif isinstance(entry, DiskQuantizedKVCache):
            entry.append_quantized(arrays)
        else:
            entry.update_and_fetch(*arrays)
        mx.eval(buffers_of(entry), entry.offset)

    def trim(self, length: int) -> None:
        """Remove the newest tokens."""
        self.entry.trim((self.length or 0) - length)


class StateLeaf(Leaf):
    """A window of tokens, or a recurrent state: its content at the end of a call decides everything after it."""

    def read_state(self) -> dict[str, Blob]:
        """Return the arrays of its state by their paths, and everything else in JSON.

        A window comes without the tokens before it, which the next call would drop.
        """
        flat: Any = tree_flatten(shortened_window(self.entry).state)
        blobs = {path: to_blob(leaf) for path, leaf in flat if isinstance(leaf, mx.array)}
        others = json.dumps([[path, leaf] for path, leaf in flat if path not in blobs]).encode()
        return {_OTHERS: Blob(others, "uint8", (len(others),)), **blobs}

    def set_state(self, found: Mapping[str, Blob]) -> None:
        """Replace the state by one that :meth:`read_state` returned."""
        others = json.loads(bytes(found[_OTHERS].data))
        arrays = [(path, to_array(blob)) for path, blob in found.items() if path != _OTHERS]
        self.entry.state = tree_unflatten([*arrays, *others])


def _is_zero(padding: mx.array | None) -> bool:
    return padding is None or padding.tolist() == [0]


def to_blob(array: mx.array) -> Blob:
    """Return an array's bytes; evaluates it."""
    flat = mx.contiguous(array).reshape(-1)
    mx.eval(flat)
    return Blob(memory_of(flat), str(array.dtype).removeprefix("mlx.core."), tuple(array.shape))


def to_array(blob: Blob) -> mx.array:
    """Return a copy of an array's bytes as that."""
    kind: mx.Dtype = getattr(mx, blob.dtype)
    flat = mx.array(np.frombuffer(blob.data, np.uint8)) if blob.data else mx.zeros(0, mx.uint8)
    return flat.view(kind).reshape(blob.shape)


def form_of(leaves: Sequence[Leaf]) -> int:
    """Return a number for what decides a cache's bytes. A batch of one has another number."""
    text = json.dumps([leaf.form for leaf in leaves]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)

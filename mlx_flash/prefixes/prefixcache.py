"""The prefix cache of a model: calls that are answered from disk instead of being computed.

The last bits of a row depend on how many tokens were computed in one call. So a page's name covers its tokens and the
bounds of the calls that computed them, and a call is restored whole or not at all: the output is bit for bit the same.
Calls whose logits are wanted, generated tokens among them, are not kept.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, islice, pairwise
from pathlib import Path
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
from mlx_flash.config import GB, VARIABLE_PREFIX, FlashConfig
from mlx_flash.files import FREE_SHARE, cache_directory, free_bytes
from mlx_flash.kv.disk import WriteGovernor
from mlx_flash.kv.kvledger import PAGE_TOKENS
from mlx_flash.kv.kvpool import (
    HISTORY,
    DiskQuantizedKVCache,
    LoneKVCache,
    OnDisk,
    PooledCache,
    buffers_of,
    is_anchored,
)
from mlx_flash.kv.owed import own_kind
from mlx_flash.layout.reachable import Opaque
from mlx_flash.prefixes.store import Blob, Prefix, PrefixStore

_OTHERS = "others"
_ROWS = (KVCache, BatchKVCache, LoneKVCache)
_STATES = (RotatingKVCache, ChunkedKVCache, ArraysCache, BatchRotatingKVCache)


class History(Opaque):
    """The content of a cache, all full pages of which are stored. It is immutable, so copies of a cache share it.

    Attributes:
        labels: ``(tokens, 4)``: the token, begin and end of the call that computed it, the form of the cache then.
        ends: with how many tokens each page ends.
    """

    def __init__(self, labels: np.ndarray[Any, np.dtype[np.int64]] | None = None, ends: tuple[int, ...] = ()) -> None:
        self.labels = np.empty((0, 4), np.int64) if labels is None else labels
        self.ends = ends
        self.length = len(self.labels)

    def __deepcopy__(self, memo: dict[int, Any]) -> History:
        return self

    def cut(self, length: int) -> History:
        """Return the first tokens of this history, and the pages in them."""
        return History(self.labels[:length], tuple(end for end in self.ends if end <= length))


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
        getattr(entry, "__dict__", {}).pop(HISTORY, None)


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
        return vars(self.entry)[HISTORY][0] if is_anchored(self.entry, self._anchor()) else None

    def note(self, history: History) -> None:
        """Note the content, until :func:`forget`."""
        vars(self.entry)[HISTORY] = (history, self._anchor())

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


# --- calls ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class PrefixCounters:
    """Restored tokens, their bytes in the caches, calls that computed nothing, and prompt tokens that were computed."""

    num_restored: int = 0
    restored_bytes: int = 0
    num_calls_restored: int = 0
    num_computed: int = 0


DEFAULT_GB = 20.0
"""The most bytes of all prompts on disk, in GB: 160 000 tokens of a model with 128 KiB for each (8B, 16 bits)."""

STATE = "state"
"""Letters before the number of a leaf with a window or states in the names of a page's arrays."""


@dataclass(slots=True)
class KnownCall:
    """A forward call on a cache whose content is known, or some that share a pass. Its logits are dropped."""

    leaves: list[Leaf]  # the entries of the cache
    history: History  # their content when the call began
    after: History  # and when it has ended
    tokens: mx.array  # the new ones
    bounds: list[int]  # ends of the calls in which the tokens are computed: one, or some that share a pass
    num_after: int = 0  # tokens that the same pass adds behind it
    found: Prefix = field(default_factory=Prefix)  # what is cached
    kept: dict[int, dict[int, StateLeaf]] = field(default_factory=dict)  # between its calls: by end, and id of entry

    def add(self, index: int, entry: Any, found: Any) -> None:
        """Keep a state as it was found by the call of a number, of those that share a pass, if it is wanted."""
        bound = self.bounds[index - 1] if 0 < index <= len(self.bounds) else 0
        if has_state(entry) and bound in self.after.ends:
            kept = copy.copy(found)
            kept.__dict__ = {name: _unshared(value) for name, value in vars(found).items()}
            self.kept.setdefault(bound, {})[id(entry)] = StateLeaf(kept)

    def take_states(self, bound: int) -> dict[int, dict[str, Blob]]:
        """Return windows and states at the end of one of the calls; none inside a call. They are not kept longer.

        Those between calls that share a pass were kept.
        """
        kept = self.kept.pop(bound, {})
        if bound == self.after.length and not self.num_after:
            kept = {id(leaf.entry): leaf for leaf in self.states} | kept
        if any(id(leaf.entry) not in kept for leaf in self.states):
            return {}
        return {i: kept[id(leaf.entry)].read_state() for i, leaf in enumerate(self.states)}

    @property
    def num_restored(self) -> int:
        return max(0, self.found.num_tokens - self.history.length)

    @property
    def rows(self) -> list[RowLeaf]:
        return [leaf for leaf in self.leaves if isinstance(leaf, RowLeaf)]

    @property
    def states(self) -> list[StateLeaf]:
        return [leaf for leaf in self.leaves if isinstance(leaf, StateLeaf)]


def _unshared(value: Any) -> Any:
    """Return what an entry holds as it is now: an array that is written to later is another one then."""
    if isinstance(value, list):
        return [*map(_unshared, value)]
    return copy.copy(value) if isinstance(value, mx.array) else value


class PrefixCache:
    """The prefix cache of one model. Calls come one at a time, from the thread that uses MLX.

    Args:
        store: its pages.
    """

    def __init__(self, store: PrefixStore) -> None:
        self.store = store
        self.counters = PrefixCounters()

    def look(
        self, parts: Sequence[mx.array], cache: Sequence[Any], segments_left: Sequence[int] = ()
    ) -> KnownCall | None:
        """Return the longest cached prefix of a prompt that would be computed in some calls; None if nothing is cached.

        Arguments are those of :meth:`begin`. The logits of all calls are dropped.
        """
        call = self._known(parts, cache, segments_left)
        if call is not None:
            call.found = self.store.find(call.after.labels, call.after.ends).cut(set(call.bounds))
        return call if call is not None and call.num_restored else None

    def restore(self, call: KnownCall) -> int:
        """Restore what :meth:`look` found. Return how many tokens: none where a page is gone or damaged."""
        forget([leaf.entry for leaf in call.leaves])
        self.store.touch(call.found)
        number = call.num_restored if self._fill(call, call.found) else 0
        end = call.history.length + number
        self.counters.num_restored += number
        self.counters.num_calls_restored += sum(bound <= end for bound in call.bounds)
        history = call.after.cut(end)
        for leaf in call.leaves:
            leaf.note(history)
        return number

    def begin(
        self, parts: Sequence[mx.array], cache: Sequence[Any], num_prompts: int, segments_left: Sequence[int] = ()
    ) -> KnownCall | None:
        """Begin a call on mlx-lm's prompt cache, or some that share a pass.

        Args:
            parts: the new tokens of each call, ``(sequences, length)``.
            cache: the prompt cache. If there are several calls, its entries have a row for each token.
            num_prompts: the calls whose logits are dropped, which come first.
            segments_left: for each call, the tokens that come after it in its segment.

        Returns:
            The calls as one, for :meth:`end` when they were computed; None if the content of the cache is not known,
            or nothing is kept.
        """
        call = self._known(parts[:num_prompts], cache, segments_left) if num_prompts else None
        forget(cache)
        if call is not None:
            call.num_after = sum(part.shape[1] for part in parts[num_prompts:])
        return call

    def end(self, call: KnownCall) -> None:
        """Store the pages that a call completed, and note what the cache holds now."""
        self.counters.num_computed += call.tokens.shape[1]
        if any(leaf.length not in (call.after.length + call.num_after, None) for leaf in call.leaves):
            return
        if self._store(call) and not call.num_after:
            for leaf in call.leaves:
                leaf.note(call.after)

    def telemetry(self) -> dict[str, int]:
        """Return what was restored and stored so far."""
        return {**asdict(self.counters), **self.store.telemetry()}

    def close(self) -> None:
        """Write the pages that wait to be stored."""
        self.store.close()

    def _known(
        self, parts: Sequence[mx.array], cache: Sequence[Any], segments_left: Sequence[int] = ()
    ) -> KnownCall | None:
        """Return a call on a cache, or some that share a pass as one; None if the content of the cache is not known."""
        leaves = leaves_of(cache)
        tokens = parts[0] if len(parts) == 1 else mx.concatenate([*parts], axis=1)
        history = _history(leaves) if leaves and len(tokens) == 1 and tokens.shape[1] else None
        if leaves is None or history is None:
            return None
        bounds = [*accumulate([part.shape[1] for part in parts], initial=history.length)][1:]
        ends = {full for full in range(PAGE_TOKENS, bounds[-1] + 1, PAGE_TOKENS) if full > history.length}
        lefts = [*segments_left, *[0] * len(parts)][: len(parts)]
        # the last page of a call ends with it, unless its segment has no full page
        ends.update(end for end, left in zip(bounds, lefts, strict=True) if end + left >= PAGE_TOKENS)
        labels = np.empty((bounds[-1], 4), np.int64)
        labels[: history.length] = history.labels
        labels[history.length :, 0], labels[history.length :, 3] = np.array(tokens)[0], form_of(leaves)
        for begin, end in pairwise([history.length, *bounds]):
            labels[begin:end, 1:3] = begin, end
        after = History(labels, (*history.ends, *sorted(ends)))
        return KnownCall(leaves, history, after, tokens, bounds)

    def _fill(self, call: KnownCall, prefix: Prefix) -> bool:
        """Add the pages of a prefix to a cache. Return whether all could be read; if not, it is as before.

        A page in which the call begins replaces its tokens in the cache, as if the cache had been cut before it.
        """
        for page, start, end in zip(prefix.pages, (0, *prefix.ends), prefix.ends, strict=False):
            states = call.states if end == prefix.num_tokens else []
            if end <= call.history.length or not (call.rows or states):
                continue
            found = self._read(page, *map(str, range(len(call.rows))), *(f"{STATE}{i}" for i in range(len(states))))
            if found is None:
                for leaf in call.rows:
                    leaf.trim(call.history.length)
                return False
            for i, leaf in enumerate(call.rows):
                leaf.trim(start)
                leaf.append([to_array(blob) for blob in found[f"{i}"].values()])
            for i, holder in enumerate(states):
                holder.set_state(found[f"{STATE}{i}"])
        return True

    def _read(self, page: str, *leaves: str) -> dict[str, dict[str, Blob]] | None:
        """Return what a page has of some leaves, by leaf and name; None if it is damaged, or has not all of them."""
        found: dict[str, dict[str, Blob]] = {leaf: {} for leaf in leaves}
        for name, blob in (self.store.read(page) or {}).items():
            leaf, _, key = name.partition(".")
            if leaf in found:
                found[leaf][key] = blob
                self.counters.restored_bytes += len(blob.data)
        return found if all(found.values()) else None

    def _store(self, call: KnownCall) -> bool:
        """Store the pages that were computed. Return whether all of them are stored, so that others may follow."""
        pages = enumerate(_new_pages(call), len(call.history.ends))
        return all(self._put(call, number, start, end) for number, (start, end) in pages)

    def _put(self, call: KnownCall, number: int, start: int, end: int) -> bool:
        """Store a page: copies of its rows, and of the states at its end."""
        found = {f"{i}": leaf.read(start, end) for i, leaf in enumerate(call.rows)}
        found |= {f"{STATE}{i}": state for i, state in call.take_states(end).items()}
        blobs = {f"{leaf}.{name}": blob for leaf, arrays in found.items() for name, blob in arrays.items()}
        return self.store.put(call.after.labels, number, blobs, call.after.ends)


def _history(leaves: Sequence[Leaf]) -> History | None:
    """Return the content of a cache; None if it is not known."""
    if all(leaf.is_empty for leaf in leaves):
        return History()
    history = leaves[0].history
    if history is None or any(leaf.history is not history for leaf in leaves):
        return None
    lengths = {leaf.length for leaf in leaves} - {None}
    length = lengths.pop() if lengths else history.length
    if lengths or length is None or length > history.length:
        return None
    if length == history.length:
        return history
    return history.cut(length) if all(isinstance(leaf, RowLeaf) for leaf in leaves) else None


def _new_pages(call: KnownCall) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the pages that a call completes."""
    ends = call.after.ends
    return islice(zip((0, *ends), ends, strict=False), len(call.history.ends), None)


def open_prefixes(
    config: FlashConfig, model: str, title: str, queue_bytes: int, governor: WriteGovernor
) -> PrefixCache | None:
    """Return the prefix cache of a model with a fingerprint and a title; None where the settings want none.

    ``queue_bytes`` is the memory for pages that wait to be written.
    """
    if not config.caches_prefixes:
        return None
    directory = prefix_directory()
    limit = round(config.kv_prefix_gb * GB) if config.kv_prefix_gb is not None else default_limit(directory)
    store = PrefixStore(
        directory,
        model=model,
        settings=json.dumps([_device(), config.kv_prefixes], sort_keys=True),
        tenant=config.kv_prefix_tenant or "",
        title=title,
        limit_bytes=limit,
        queue_bytes=queue_bytes,
        governor=governor,
    )
    return PrefixCache(store)


def default_limit(directory: Path) -> int:
    """Return the bytes that the prefix cache may take of a disk: 20 GB, or a tenth of what is free if that is less."""
    return min(round(DEFAULT_GB * GB), int(free_bytes(directory) * FREE_SHARE))


def _device() -> dict[str, str]:
    """Return what decides the bits that a model computes here: the device and MLX's environment variables.

    The rest of MLX's description is left out: on CUDA it includes the free memory, which is never the same again.
    """
    known = mx.device_info()
    device = {key: str(known[key]) for key in ("architecture", "device_name") if key in known}
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("MLX_") and not name.startswith(VARIABLE_PREFIX)
    }
    return device | variables


def prefix_directory() -> Path:
    """Return the directory of the prefix cache of all models; it need not exist."""
    return cache_directory() / "prefixes"

"""Prompts that need not be computed again: caches filled from the store, and the store filled from caches.

Two modes, which differ in what names a page. A row's last bits depend on how many tokens were computed in one call, so
in the mode ``exact`` a page is named by its tokens and by the bounds of the calls they were computed in, and a call is
answered wholly or not at all: what follows is what would have followed. In the mode ``longest`` tokens alone name a
page and the longest cached prefix is used, as mlx-lm's server does with the caches that it keeps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from mlx_flash.config import GB, VARIABLE_PREFIX, FlashConfig
from mlx_flash.files import cache_directory
from mlx_flash.kv.history import History, make_labels
from mlx_flash.kv.options import PAGES_ON_THEIR_WAY, QUEUED_PAGES
from mlx_flash.kv.wear import DEFAULT_GB_PER_DAY, WriteGovernor
from mlx_flash.prefixes.files import Blob, full_pages
from mlx_flash.prefixes.leaves import Leaf, RowLeaf, StateLeaf, forget, form_of, leaves_of, new_array, to_array
from mlx_flash.prefixes.store import Prefix, PrefixStore

Mode = Literal["exact", "longest"]

STATE = "state"
"""The kind of snapshot that holds what is no row of a token."""


@dataclass(slots=True)
class PrefixCounters:
    """What was taken from a store instead of being computed, and what was not found.

    Attributes:
        num_restored: tokens.
        restored_bytes: what the caches hold of them.
        num_calls_restored: calls for which nothing was computed.
        num_computed: tokens of prompts that were looked for, and not found.
    """

    num_restored: int = 0
    restored_bytes: int = 0
    num_calls_restored: int = 0
    num_computed: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """A forward call on a cache whose contents are known.

    Attributes:
        leaves: of the cache.
        history: what was in it when the call began.
        tokens: the new ones, ``(1, length)``.
        form: of the cache.
        is_prompt: whether nobody looks at the logits.
        num_restored: how many of the new tokens are in the cache now.
    """

    leaves: list[Leaf]
    history: History
    tokens: mx.array
    form: int
    is_prompt: bool
    num_restored: int = 0

    @property
    def is_answered(self) -> bool:
        """Whether nothing is left to be computed."""
        return self.num_restored == self.tokens.shape[1]


class PrefixCache:
    """The prompts of one model that are remembered. One forward call at a time; its thread is the one that uses MLX.

    Args:
        store: where they are.
        mode: what has to be the same for a page to be used again.

    Attributes:
        store: where they are.
        counters: what was taken from it.
    """

    def __init__(self, store: PrefixStore, mode: Mode) -> None:
        self.store = store
        self.counters = PrefixCounters()
        self._is_exact = mode == "exact"

    def begin(self, tokens: mx.array, cache: Sequence[Any], *, is_prompt: bool) -> Call | None:
        """Fills a cache with what is stored of a call's tokens.

        Args:
            tokens: the new ones, ``(sequences, length)``.
            cache: mlx-lm's prompt cache.
            is_prompt: whether nobody looks at the logits; else nothing is taken from the store.

        Returns:
            What is to be given to :meth:`end` when the rest of the call was computed; None when it is not known what
            the cache holds.
        """
        leaves = leaves_of(cache)
        history = self._history(leaves) if leaves and len(tokens) == 1 and tokens.shape[1] else None
        forget(cache)
        if leaves is None or history is None or (self._is_exact and not is_prompt):
            return None
        form = form_of(leaves, of_batches=self._is_exact)
        call = Call(leaves, history, tokens, form, is_prompt)
        if not is_prompt:
            return call
        num_restored = self._restore(call)
        self.counters.num_computed += tokens.shape[1] - num_restored
        self.counters.num_calls_restored += num_restored == tokens.shape[1]
        return Call(leaves, history, tokens, form, is_prompt, num_restored)

    def end(self, call: Call) -> None:
        """Stores what was computed, page by page, and notes what the cache holds now."""
        end = call.history.length + call.tokens.shape[1]
        if any(leaf.length not in (end, None) for leaf in call.leaves):
            return
        known = self._ends(call)
        if not call.is_prompt and not known:
            tokens = call.tokens
            history = call.history.with_unread(lambda: np.array(tokens)[0], tokens.shape[1], call.form)
        else:
            history = call.history.with_labels(self._labels(call), known)
        restored = call.history.length + call.num_restored
        if self._store(call, history, restored):
            for leaf in call.leaves:
                leaf.note(history)

    def telemetry(self) -> dict[str, int]:
        """What was restored and stored so far."""
        return {**asdict(self.counters), **self.store.written()}

    def close(self) -> None:
        """Writes what waits to be stored."""
        self.store.close()

    def _history(self, leaves: Sequence[Leaf]) -> History | None:
        """What a cache holds; None when that is not known."""
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
        is_known = length in (0, *history.ends) if self._is_exact else all(isinstance(leaf, RowLeaf) for leaf in leaves)
        return history.cut(length) if is_known else None

    def _labels(self, call: Call) -> np.ndarray[Any, np.dtype[np.int64]]:
        begin = call.history.length
        bounds = (begin, begin + call.tokens.shape[1]) if self._is_exact else (0, 0)
        return make_labels(np.array(call.tokens)[0], *bounds, call.form)

    def _ends(self, call: Call) -> list[int]:
        """Where the pages end that a call fills; in the mode ``exact`` the last one ends with the call."""
        begin, end = call.history.length, call.history.length + call.tokens.shape[1]
        ends = [i for i in full_pages(end, self.store.page_tokens) if i > begin]
        return [*ends, end] if self._is_exact and end not in ends else ends

    # --- from the store ---

    def _restore(self, call: Call) -> int:
        """Fills the cache. Returns with how many tokens: all or none of them in the mode ``exact``."""
        begin, end = call.history.length, call.history.length + call.tokens.shape[1]
        states = [leaf for leaf in call.leaves if isinstance(leaf, StateLeaf)]
        rows = [leaf for leaf in call.leaves if isinstance(leaf, RowLeaf)]
        whole = begin if self._is_exact else max(call.history.ends, default=0)
        looked_for = call.history.with_labels(self._labels(call), self._ends(call))
        reached = end + 1
        while True:
            prefix = self.store.find(looked_for.labels, ends=looked_for.ends, snapshot=STATE if states else "")
            prefix = self.store.pin(prefix)
            try:
                if not begin < prefix.num_tokens < reached or (self._is_exact and prefix.num_tokens < end):
                    return 0
                # what does not fill a page is taken from the store too: the cache is as if it had been cut there
                rest = [leaf.read(whole, begin) for leaf in rows] if whole < begin else []
                for leaf in rows:
                    leaf.trim(whole)
                if (not states or prefix.snapshot) and self._fill(prefix, whole, rows, states):
                    self.counters.num_restored += prefix.num_tokens - begin
                    return prefix.num_tokens - begin
            finally:
                self.store.release(prefix)
            for leaf in rows:
                leaf.trim(whole)
            for leaf, blobs in zip(rows, rest, strict=False):
                leaf.append([to_array(blob) for blob in blobs])
            reached = prefix.num_tokens  # a page was damaged: what is before it may be used

    def _fill(self, prefix: Prefix, begin: int, rows: Sequence[RowLeaf], states: Sequence[StateLeaf]) -> bool:
        """Adds the pages after a token. Returns whether all could be read; if not, some rows may have been added."""
        snapshot = self._read_states(prefix.snapshot, states) if states else []
        pages = [page for page, end in zip(prefix.pages, prefix.ends, strict=True) if end > begin]
        if snapshot is None:
            return False
        for page in pages if rows else ():
            found = self._read_rows(page, rows)
            if found is None:
                return False
            for leaf, arrays in zip(rows, found, strict=True):
                leaf.append(arrays)
        for holder, state in zip(states, snapshot, strict=True):
            holder.set_state(state)
        return True

    def _read_rows(self, page: str, rows: Sequence[RowLeaf]) -> list[list[mx.array]] | None:
        """For each leaf its arrays of a page; None when it is damaged or gone."""
        info = self.store.describe(page)
        if info is None:
            return None
        arrays: list[list[mx.array]] = [[] for _ in rows]
        views = {}
        for name, blob in info.blobs.items():
            array, views[name] = new_array(blob.dtype, blob.shape)
            arrays[int(name.partition(".")[0])].append(array)
        is_read = self.store.read_into(page, views)
        self.counters.restored_bytes += sum(view.nbytes for view in views.values()) if is_read else 0
        return arrays if is_read else None

    def _read_states(self, snapshot: str, states: Sequence[StateLeaf]) -> list[dict[str, Blob]] | None:
        info, found = self.store.describe(snapshot), self.store.read(snapshot)
        if info is None or found is None:
            return None
        parts: list[dict[str, Blob]] = [{} for _ in states]
        for name, blob in info.blobs.items():
            number, _, key = name.partition(".")
            parts[int(number)][key] = Blob(found[name], blob.dtype, blob.shape)
        self.counters.restored_bytes += sum(len(data) for data in found.values())
        return parts

    # --- to the store ---

    def _store(self, call: Call, history: History, restored: int) -> bool:
        """Stores the pages that were computed. Returns whether all of them are stored, so that others may follow."""
        known = call.history.ends
        for number in range(len(known), len(history.ends)):
            end = history.ends[number]
            if end <= restored:
                continue
            start = history.ends[number - 1] if number else 0
            blobs: dict[str, Blob] = {}
            for i, leaf in enumerate(leaf for leaf in call.leaves if isinstance(leaf, RowLeaf)):
                blobs |= {f"{i}.{j}": blob for j, blob in enumerate(leaf.read(start, end))}
            if not self._put(history, number, blobs):
                return False
        ends_with_page = bool(history.ends) and history.ends[-1] == history.length
        states = [leaf for leaf in call.leaves if isinstance(leaf, StateLeaf)]
        if states and call.is_prompt and ends_with_page and restored < history.length:
            blobs = {f"{i}.{name}": b for i, leaf in enumerate(states) for name, b in leaf.read_state().items()}
            return self._put(history, len(history.ends) - 1, blobs, snapshot=STATE) or not self._is_exact
        return True

    def _put(self, history: History, number: int, blobs: dict[str, Blob], snapshot: str = "") -> bool:
        # where tokens alone name a page, the one that is there may have been computed in other calls
        only_new = not self._is_exact
        ends = history.ends
        return self.store.put(
            history.labels, number, blobs, snapshot=snapshot, ends=ends, waits=True, only_new=only_new
        )


def open_prefixes(
    config: FlashConfig, model: str, title: str, prefix_bytes: int, governor: WriteGovernor
) -> PrefixCache | None:
    """The remembered prompts of a model; None where the settings want none.

    Args:
        config: the settings.
        model: fingerprint of everything that decides what it computes.
        title: its name, for people.
        prefix_bytes: set aside for pages on their way.
        governor: of what is written.
    """
    mode = config.kv_prefixes
    if mode == "off":
        return None
    store = PrefixStore(
        prefix_directory(),
        model=model,
        settings=json.dumps([_device(), mode], sort_keys=True),
        tenant=config.kv_prefix_tenant or "",
        title=title,
        limit_bytes=None if config.kv_prefix_gb is None else round(config.kv_prefix_gb * GB),
        queue_bytes=prefix_bytes * QUEUED_PAGES // PAGES_ON_THEIR_WAY,
        governor=governor,
    )
    return PrefixCache(store, mode)


def _device() -> dict[str, str]:
    """What decides the bits that a model gives here: the device, and how MLX was told to use it.

    Not all that MLX says of a device: on CUDA its free memory is among that, which is never the same again.
    """
    known = mx.device_info()
    device = {key: str(known[key]) for key in ("architecture", "device_name") if key in known}
    settings = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("MLX_") and not name.startswith(VARIABLE_PREFIX)
    }
    return device | settings


def prefix_directory() -> Path:
    """Where all prompts are remembered; it need not exist."""
    return cache_directory() / "prefixes"


def open_governor(config: FlashConfig) -> WriteGovernor:
    """What counts the bytes that are written, and says when it is enough."""
    cap = config.ssd_write_gb_per_day
    gb_per_day = DEFAULT_GB_PER_DAY if cap is None else cap
    return WriteGovernor(cache_directory(), gb_per_day=gb_per_day, zero_write=config.writes_nothing)

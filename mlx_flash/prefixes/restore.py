"""Pages and snapshots of the prefix cache on their way into a prompt cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from mlx_flash.kv.kvfiles import Stored
from mlx_flash.kv.pages import Page
from mlx_flash.prefixes.call import KnownCall
from mlx_flash.prefixes.leaves import new_array, rows_in
from mlx_flash.prefixes.pagefile import Place
from mlx_flash.prefixes.store import Prefix, PrefixStore


@dataclass(slots=True)
class PrefixCounters:
    """Restored tokens, their bytes in the caches, calls that computed nothing, and prompt tokens that were computed."""

    num_restored: int = 0
    restored_bytes: int = 0
    num_calls_restored: int = 0
    num_computed: int = 0


def fill(call: KnownCall, prefix: Prefix, store: PrefixStore, counters: PrefixCounters) -> bool:
    """Add the pages of a prefix to a cache. Return whether all could be read; if not, some of them may have been added.

    A page in which the call begins replaces its tokens in the cache, as if the cache had been cut before it.
    """
    states = _read(prefix.snapshot, len(call.states), store, counters) if call.states else []
    if states is None:
        return False
    for page, start, end in zip(prefix.pages, (0, *prefix.ends), prefix.ends, strict=False):
        if call.rows and end > call.history.length:
            found = _read(page, len(call.rows), store, counters)
            if found is None:
                return False
            for leaf, (arrays, rows) in zip(call.rows, found, strict=True):
                leaf.trim(start)
                leaf.append([*arrays.values()], Page(rows, end - start))
    for holder, (state, _) in zip(call.states, states, strict=True):
        holder.set_state(state)
    return True


def _read(
    page: str, num_leaves: int, store: PrefixStore, counters: PrefixCounters
) -> list[tuple[dict[str, mx.array], Stored]] | None:
    """Return for each leaf the arrays of a page or snapshot, by name, and their place; None if it is damaged."""
    arrays: list[dict[str, mx.array]] = [{} for _ in range(num_leaves)]
    views: dict[str, memoryview] = {}
    places: list[Stored] = []

    def allocate(place: Place) -> dict[str, memoryview]:
        places.extend(partial(rows_in, lambda: place, leaf) for leaf in range(num_leaves))
        for name, blob in place.blobs.items():
            leaf, _, key = name.partition(".")
            arrays[int(leaf)][key], views[name] = new_array(blob.dtype, blob.shape)
        return views

    if not store.read(page, allocate):
        return None
    counters.restored_bytes += sum(view.nbytes for view in views.values())
    return [*zip(arrays, places, strict=True)]

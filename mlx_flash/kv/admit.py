"""The room that a call needs in a pool of KV caches: what it adds, how it stays within a limit, what goes before it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from mlx_flash.kv.kvledger import Coming, KVLedger, Way
from mlx_flash.kv.kvpool import KVPool
from mlx_flash.kv.layerrows import LayerRows
from mlx_flash.kv.memory import MemoryRows


class Adding(NamedTuple):
    """Tokens that a call, or several in lockstep, add to layers of caches."""

    layers: Sequence[LayerRows]
    num_new: Sequence[int]  # tokens of each sequence that each layer gets
    step: int  # how many of them go through the model at a time
    row_bytes: Sequence[int]  # of a token of all sequences in each layer; not used where there are tokens already


def admit(pool: KVPool, adding: Adding, limit: int) -> int:
    """Prepare a call, or several in lockstep: offload layers before it takes memory, and set what it may take.

    ``limit`` is the most memory of all caches together, reads and writes in flight included. Return the bytes that are
    missing: 0 when the call can begin. Raises: WriteError: there is no room on the disk.
    """
    if adding.layers:
        pool.begin({rows.group for rows in adding.layers})
    ledger = ledger_of(pool, adding)
    way = way_within(pool, ledger, limit)
    if way.missing or pool.options.budget_bytes is None:
        return way.missing
    pool.budget_bytes, pool.under_way_bytes = limit, way.under_way_bytes
    in_parts = any(each.num_new > adding.step for each in ledger.coming.values())
    for rows, each in ledger.coming.items():
        rows.expect(each.held if in_parts else 0)
    if way.num_slots:
        pool.ring.resize(way.num_slots)
        pool.files.limit_queue(way.num_slots)
    if adding.layers:
        pool.free(lambda: pool.ledger(ledger.coming, adding.step).peak, adding.layers[0].group)
    stays = {} if way.num_slots else {rows: each.held for rows, each in ledger.coming.items()}
    pool.admitted = weakref.WeakKeyDictionary(stays)
    return 0


def admit_quietly(pool: KVPool, layers: Sequence[LayerRows], largest: int, limit: int) -> bool:
    """Prepare a call that takes no more memory, for which :func:`admit` would do nothing else.

    Most tokens are such a call: the buffers of every layer have room for them, as :func:`quiet_width` has found.
    ``largest`` is what it returned. Return False, and change nothing, where the limit is too low.
    """
    offload = 0 if pool.options.budget_bytes is None else pool.options.offload_bytes([largest])
    if pool.memory_bytes + offload > limit:
        return False
    pool.begin({rows.group for rows in layers})
    if pool.options.budget_bytes is not None:
        pool.budget_bytes, pool.under_way_bytes = limit, offload
    return True


def quiet_width(pool: KVPool, layers: Sequence[LayerRows], num_new: Sequence[int]) -> int | None:
    """Return the most bytes of a token in a layer if the buffers of all layers have room for the new tokens.

    Return None where they have not, where a layer is on disk, and where tokens may be dropped.
    """
    if pool.layers.is_on_disk or pool.options.max_tokens is not None:
        return None
    largest = 0
    for rows, more in zip(layers, num_new, strict=True):
        store = rows.store
        if not isinstance(store, MemoryRows) or store.takes_more(more):
            return None
        if (width := store.buffers.nbytes // store.buffers.capacity) > largest:
            largest = width
    return largest


def ledger_of(pool: KVPool, adding: Adding) -> KVLedger:
    """Return the ledger of the tokens that come to some layers."""
    step, held = adding.step, pool.options.held_tokens
    coming = {
        rows: Coming(sum(rows.store.in_numbers.widths) or nbytes, new, held(rows.length + new, step))
        for rows, new, nbytes in zip(adding.layers, adding.num_new, adding.row_bytes, strict=True)
    }
    return pool.ledger(coming, step)


def way_within(pool: KVPool, ledger: KVLedger, limit: int) -> Way:
    """Return how a call stays within a limit. Raises: WriteError: there is no room on the disk."""
    way = ledger.way(limit)
    pool.files.check_room(way.disk_bytes)
    return way

"""The room that a call needs in a pool of KV caches: what it adds, how it stays within a limit, what goes before it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from mlx_flash.kv.kvledger import Coming, KVLedger, Way
from mlx_flash.kv.kvpool import KVPool
from mlx_flash.kv.layerrows import LayerRows
from mlx_flash.kv.memory import MemoryRows


def admit(
    pool: KVPool, layers: Sequence[LayerRows], num_new: Sequence[int], step: int, row_bytes: Sequence[int], limit: int
) -> int:
    """Prepare a call, or several in lockstep: offload layers before it takes memory, and set what it may take.

    The call adds ``num_new`` tokens to each layer, of which ``step`` go through the model at a time. ``row_bytes`` are
    those of a token in each layer; not used where there are tokens already. ``limit`` is the most memory of all caches
    together, reads and writes in flight included. Return the bytes that are missing: 0 when the call can begin. Raises:
    WriteError: there is no room on the disk.
    """
    if layers:
        pool.begin({rows.group for rows in layers})
    call = ledger_of(pool, layers, num_new, step, row_bytes)
    way = way_within(pool, call, limit)
    if way.missing or pool.options.budget_bytes is None:
        return way.missing
    pool.budget_bytes, pool.under_way_bytes = limit, way.under_way_bytes
    in_parts = any(each.num_new > step for each in call.coming.values())
    for rows, each in call.coming.items():
        rows.expect(each.held if in_parts else 0)
    if way.num_slots:
        pool.ring.resize(way.num_slots)
        pool.files.limit_queue(way.num_slots)
    if layers:
        pool.free(lambda: pool.ledger(call.coming, step).peak, layers[0].group)
    stays = {} if way.num_slots else {rows: each.held for rows, each in call.coming.items()}
    pool.granted = weakref.WeakKeyDictionary(stays)
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


def ledger_of(
    pool: KVPool, layers: Sequence[LayerRows], num_new: Sequence[int], step: int, row_bytes: Sequence[int]
) -> KVLedger:
    """Return the ledger of a call; the arguments are those of :func:`admit`."""
    held = pool.options.held_tokens
    coming = {
        rows: Coming(sum(rows.store.in_numbers.widths) or nbytes, new, held(rows.length + new, step))
        for rows, new, nbytes in zip(layers, num_new, row_bytes, strict=True)
    }
    return pool.ledger(coming, step)


def way_within(pool: KVPool, call: KVLedger, limit: int) -> Way:
    """Return how a call stays within a limit. Raises: WriteError: there is no room on the disk."""
    way = call.way(limit)
    pool.files.check_room(way.disk_bytes)
    return way

"""The room that a call needs in a pool of KV caches: what it adds, how it stays within a limit, what goes before it."""

from __future__ import annotations

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

    @property
    def in_parts(self) -> bool:
        """True if the tokens come in parts."""
        return max(self.num_new, default=0) > self.step


class Bound(NamedTuple):
    """Bytes that surely suffice for the tokens of a call, with all layers in memory."""

    growth: int  # of new buffers, beside the old ones of every layer; 0 where the old ones have room
    largest: int  # of a token in a layer
    held: Sequence[int]  # tokens of each layer afterwards


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
    in_parts = adding.in_parts
    for rows, each in ledger.coming.items():
        rows.expect(each.held if in_parts else 0)
    if way.num_slots:
        pool.ring.resize(way.num_slots)
        pool.files.limit_queue(way.num_slots)
    if adding.layers:
        with pool.lock:
            pool.free(lambda: pool.ledger(ledger.coming, adding.step).peak, adding.layers[0].group)
    pool.admission += 1
    if not way.num_slots:
        for rows, each in ledger.coming.items():
            rows.admitted = pool.admission, each.held
    return 0


def admit_surely(pool: KVPool, adding: Adding, bound: Bound, limit: int) -> bool:
    """Prepare a call as :func:`admit` does, if all caches together surely stay within a limit. Most calls do.

    Return False, and change nothing, where the bound does not fit, or the pool was closed: :func:`admit` refuses that.
    """
    if pool.is_closed or not is_surely_within(pool, bound, limit):
        return False
    pool.begin({rows.group for rows in adding.layers})
    if pool.options.budget_bytes is not None:
        pool.budget_bytes, pool.under_way_bytes = limit, pool.options.offload_bytes([bound.largest])
        if bound.growth:
            pool.admission += 1
            in_parts = adding.in_parts
            for rows, length in zip(adding.layers, bound.held, strict=True):  # all of them in memory
                rows.admitted, rows.expected = (pool.admission, length), length if in_parts else 0
    return True


def is_surely_within(pool: KVPool, bound: Bound, limit: int) -> bool:
    """Return whether all caches together, and what offloading one layer takes, surely stay within a limit."""
    offload = 0 if pool.options.budget_bytes is None else pool.options.offload_bytes([bound.largest])
    return pool.memory_bytes + bound.growth + offload <= limit


def bound_of(pool: KVPool, adding: Adding) -> Bound | None:
    """Return what surely suffices for new tokens, without a sum over the layers of other caches.

    Return None where a layer is on disk or parked, and where tokens may be dropped.
    """
    options = pool.options
    if pool.layers.is_on_disk or options.max_tokens is not None:
        return None
    growth, largest, held = 0, 0, list[int]()
    rooms: dict[int, int] = {}  # of layers that grow, by their length: nearly all are as long
    for rows, num_new, nbytes in zip(adding.layers, adding.num_new, adding.row_bytes, strict=True):
        store = rows.store
        if not isinstance(store, MemoryRows) or store.buffers.pages:
            return None
        length = store.num_rows + num_new
        if capacity := store.buffers.capacity:
            nbytes = store.buffers.nbytes // capacity
        if not capacity or length > capacity:
            if length not in rooms:  # one step more if the buffers grow several times
                rooms[length] = options.most_capacity(length) + options.step
            growth += nbytes * rooms[length]
        if nbytes > largest:
            largest = nbytes
        held.append(length)
    return Bound(growth, largest, held)


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

"""Grants: prompt caches whose next tokens surely fit the budget, so that nothing is added up over layers for them.

With everything in memory a token takes what the one before it took, until the buffers of its cache are full. The same
is true of a token for each row of a batch of mlx-lm's, while its rows stay the same. What a prompt in a new cache takes
depends on its length alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache

from mlx_flash.compat.caches import CACHE_STEP, length_of
from mlx_flash.engine.call import ForwardCall
from mlx_flash.engine.headroom import most_growth
from mlx_flash.engine.lane import Lane
from mlx_flash.engine.row import Row
from mlx_flash.engine.undo import break_cache, trim_all
from mlx_flash.kv.admit import Adding, Bound, admit_surely
from mlx_flash.kv.base import PENDING, PooledCache
from mlx_flash.kv.checkpoints import trimmable
from mlx_flash.kv.diskcache import DiskKVCache
from mlx_flash.kv.history import LoneKVCache
from mlx_flash.kv.layerrows import LayerRows
from mlx_flash.kv.memory import NO_BUFFERS, Changes, MemoryRows
from mlx_flash.kv.options import KVOptions
from mlx_flash.memory.lazy import active_memory
from mlx_flash.memory.pagecache import round_up
from mlx_flash.residency.ledger import NewTokens, recorded_bytes
from mlx_flash.residency.plan import ResidencyPlan

_PROMPT_STEP = 64
"""A prompt is counted as if its length were the next multiple of this, so that few lengths are worked out."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The next tokens of a prompt cache, each in a call of its own.

    Attributes:
        plan: the plan that it was made for.
        cache: number of the list of entries.
        kind: class of the entries' first one. Another one means that the cache is pending, or broken.
        padding: what the rows of a batch are padded with. Another array means that rows have come or gone.
        stop: length of the cache from which on it does not hold.
        change: the last change of a layer's memory when it was made.
        nbytes: the most that the process has with a token, beside the arrays before it.
    """

    plan: ResidencyPlan
    cache: int
    kind: type
    padding: mx.array | None
    stop: int
    change: int
    nbytes: int


class PromptNeed(NamedTuple):
    """The most memory of a prompt in a new cache, in bytes."""

    plan: ResidencyPlan
    options: KVOptions  # of the cache
    nbytes: int  # of the process, beside the arrays before it, and its keys and values
    growth: int  # of keys and values
    largest: int  # of a token in a layer


class Grants:
    """The grants of a model's prompt caches, by the first entry of each.

    Args:
        num_layers: layers that MLX may record ahead of a GPU; 0 where that does not matter.
    """

    def __init__(self, num_layers: int) -> None:
        self._grants: WeakKeyDictionary[Any, Grant] = WeakKeyDictionary()
        self._needs: dict[int, PromptNeed] = {}  # by length
        self._num_layers = num_layers

    def of(self, cache: Sequence[Any]) -> Grant | None:
        """Return the grant of a prompt cache in which nothing is pending or broken, if there is one."""
        grant = self._grants.get(cache[0]) if cache else None
        if grant is None or grant.cache != id(cache) or type(cache[0]) is not grant.kind:
            return None
        if issubclass(grant.kind, BatchKVCache) and vars(cache[0])["left_padding"] is not grant.padding:
            return None
        return None if PENDING in vars(cache[0]) or PENDING in vars(cache[-1]) else grant

    def undo_if_granted(self, plan: ResidencyPlan, row: Row) -> Callable[[], None] | None:
        """Return what takes the next part of a row back if its call surely fits the budget; None for all other calls.

        A batch is not put back, but refuses every later use: mlx-lm changes two attributes of it for each token.
        """
        call = row.left[0]
        if call.cache is None or not call.is_plain or call.checkpoints is not None or call.runs is not None:
            return None
        if not call.is_decode:
            return self._undo_of_prompt(plan, row)
        grant = self.of(call.cache)
        if grant is None or grant.plan is not plan or Changes.last != grant.change:
            return None
        length = length_of(call.cache[0])
        if length >= grant.stop or active_memory() + grant.nbytes > plan.budget_bytes:
            return None
        is_batch = issubclass(grant.kind, BatchKVCache)
        return partial(break_cache, call.cache) if is_batch else partial(trim_all, call.cache, length)

    def _undo_of_prompt(self, plan: ResidencyPlan, row: Row) -> Callable[[], None] | None:
        """Return what takes back a prompt in a new cache of one sequence, all but its last token; None for others."""
        call, num_tokens = row.left[0], row.num_left
        if call.wants_logits or call.batch_size > 1 or len(row.left) > 2 or row.pending is not None:
            return None
        assert call.cache is not None
        if (layers := _new_layers(call.cache)) is None:
            return None
        pool, limit, lengths = call.cache[0].pool, plan.kv.limit, [num_tokens] * len(layers)
        if pool.layers.is_on_disk or (need := self._need(plan, pool.options, len(layers), num_tokens)) is None:
            return None
        room = plan.budget_bytes - active_memory() - need.nbytes + pool.memory_bytes
        adding, bound = Adding(layers, lengths, call.length, plan.kv.rows), Bound(need.growth, need.largest, lengths)
        has_room = admit_surely(pool, adding, bound, room if limit is None else min(room, limit))
        return partial(trim_all, call.cache, 0) if has_room else None

    def _need(self, plan: ResidencyPlan, options: KVOptions, num_entries: int, num_tokens: int) -> PromptNeed | None:
        """Return the most memory of a prompt of so many tokens; None where the plan does not tell."""
        length, rows = round_up(num_tokens, _PROMPT_STEP), plan.kv.rows
        found = self._needs.get(length)
        if found is not None and found.plan is plan and found.options is options and len(rows) == num_entries:
            return found
        if plan.streaming.num_units or plan.pool is not None or plan.kv.options is None or len(rows) != num_entries:
            return None
        new = NewTokens(length, length, length, all_logits=False, in_parts=True)
        nbytes = plan.ledger.process + recorded_bytes(plan.ledger, new, self._num_layers)
        growth = sum(rows) * (options.most_capacity(length) + options.step)  # its last token may make buffers grow
        self._needs[length] = found = PromptNeed(plan, options, nbytes, growth, max(rows))
        return found

    def note(self, plan: ResidencyPlan, call: ForwardCall) -> None:
        """Note that a token has room, and with it those after it, as far as buffers reach.

        Two tokens are counted: the pass of one may begin before that of the other is computed.
        """
        if not call.is_decode or not call.cache or not call.is_plain:
            return
        kinds = {*map(type, call.cache)}
        is_batch = kinds in ({BatchKVCache}, {LoneKVCache})
        if not is_batch and call.num_tokens > 1:
            return
        lengths = [*map(length_of, call.cache)] if is_batch else trimmable(call.cache)
        if lengths is None or len({*lengths}) > 1:
            return
        length = lengths[0]
        stores = [entry.rows.store for entry in call.cache if isinstance(entry, PooledCache)]
        capacities = [store.buffers.capacity for store in stores if isinstance(store, MemoryRows)]
        stop = min([length + CACHE_STEP, *capacities])
        if len(capacities) < len(stores) or stop <= length:  # a layer is on disk, parked, or full
            return
        new, growth = NewTokens(1, 1, stop), 0
        if kinds != {DiskKVCache}:
            lane = Lane(call)
            new = lane.tokens._replace(context=stop)
            growth = most_growth(plan, lane, new)
        nbytes = plan.ledger.process + 2 * plan.ledger.computed([new]) + growth
        kind, padding = type(call.cache[0]), call.cache[0].left_padding if is_batch else None
        self._grants[call.cache[0]] = Grant(plan, id(call.cache), kind, padding, stop, Changes.last, nbytes)


def _new_layers(cache: Sequence[Any]) -> list[LayerRows] | None:
    """Return the layers of a new prompt cache, if all are of the pool and may stay in memory; None for others."""
    if {*map(type, cache)} != {DiskKVCache}:
        return None
    layers: list[LayerRows] = [entry.rows for entry in cache]
    group = layers[0].group
    for rows in layers:
        store = rows.store
        if rows.group is not group or not rows.may_stay or not isinstance(store, MemoryRows):
            return None
        if store.buffers is not NO_BUFFERS:
            return None
    return layers

"""Grants: prompt caches whose next tokens surely fit the budget, so that nothing is added up over layers for them.

With everything in memory a token takes what the one before it took, until the buffers of its cache are full. The same
is true of a token for each row of a batch of mlx-lm's, while its rows stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache

from mlx_flash.compat.caches import CACHE_STEP, length_of
from mlx_flash.engine.call import ForwardCall
from mlx_flash.engine.headroom import most_growth
from mlx_flash.engine.lane import Lane
from mlx_flash.engine.undo import break_cache, trim_all
from mlx_flash.kv.base import PENDING
from mlx_flash.kv.checkpoints import trimmable
from mlx_flash.kv.history import LoneKVCache
from mlx_flash.kv.memory import Changes, MemoryRows
from mlx_flash.memory.lazy import active_memory
from mlx_flash.residency.plan import ResidencyPlan


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


class Grants:
    """The grants of a model's prompt caches, by the first entry of each."""

    def __init__(self) -> None:
        self._grants: WeakKeyDictionary[Any, Grant] = WeakKeyDictionary()

    def of(self, cache: Sequence[Any]) -> Grant | None:
        """Return the grant of a prompt cache in which nothing is pending or broken, if there is one."""
        grant = self._grants.get(cache[0]) if cache else None
        if grant is None or grant.cache != id(cache) or type(cache[0]) is not grant.kind:
            return None
        if issubclass(grant.kind, BatchKVCache) and vars(cache[0])["left_padding"] is not grant.padding:
            return None
        return None if PENDING in vars(cache[0]) or PENDING in vars(cache[-1]) else grant

    def undo_if_granted(self, plan: ResidencyPlan, call: ForwardCall) -> Callable[[], None] | None:
        """Return what takes a token back whose call surely fits the budget; None for all other calls.

        A batch is not put back, but refuses every later use: mlx-lm changes two attributes of it for each token.
        """
        if not call.is_decode or call.cache is None or not call.is_plain or call.checkpoints is not None:
            return None
        grant = self.of(call.cache)
        if grant is None or grant.plan is not plan or Changes.last != grant.change:
            return None
        length = length_of(call.cache[0])
        if length >= grant.stop or active_memory() + grant.nbytes > plan.budget_bytes:
            return None
        is_batch = issubclass(grant.kind, BatchKVCache)
        return partial(break_cache, call.cache) if is_batch else partial(trim_all, call.cache, length)

    def note(self, plan: ResidencyPlan, call: ForwardCall) -> None:
        """Note that a token has room, and with it those after it, as far as buffers reach.

        Two tokens are counted: the pass of one may begin before that of the other is computed.
        """
        if not call.is_decode or not call.cache or not call.is_plain:
            return
        is_batch = {*map(type, call.cache)} in ({BatchKVCache}, {LoneKVCache})
        if not is_batch and call.num_tokens > 1:
            return
        lengths = [*map(length_of, call.cache)] if is_batch else trimmable(call.cache)
        if lengths is None or len({*lengths}) > 1:
            return
        lane, length = Lane(call), lengths[0]
        stores = [entry.rows.store for entry in lane.own]
        capacities = [store.buffers.capacity for store in stores if isinstance(store, MemoryRows)]
        stop = min([length + CACHE_STEP, *capacities])
        if len(capacities) < len(stores) or stop <= length:  # a layer is on disk, parked, or full
            return
        new = lane.tokens._replace(context=stop)
        ledger = plan.ledger
        nbytes = ledger.process + 2 * ledger.computed([new]) + most_growth(plan, lane, new)
        kind, padding = type(call.cache[0]), call.cache[0].left_padding if is_batch else None
        self._grants[call.cache[0]] = Grant(plan, id(call.cache), kind, padding, stop, Changes.last, nbytes)

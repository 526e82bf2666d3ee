"""The part of one prompt cache in a pass, as the budget sees it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mlx_lm.models.cache import QuantizedKVCache

from mlx_flash.compat.caches import entries_of
from mlx_flash.engine.call import ForwardCall
from mlx_flash.kv.base import PooledCache
from mlx_flash.kv.kvpool import KVPool
from mlx_flash.ranks.chain import is_elsewhere
from mlx_flash.residency.ledger import NewTokens


@dataclass(frozen=True)
class Lane:
    """New tokens that are added to one prompt cache in a pass. It looks at the entries of the cache once.

    Attributes:
        call: the call; of one in parts, all that is left of it.
        step: new tokens of each sequence that go through the model at a time; None for all.
        num_kept: tokens whose logits are kept while others compute, as in ``NewTokens``.
    """

    call: ForwardCall
    step: int | None = None
    num_kept: int = 0

    @cached_property
    def own(self) -> list[PooledCache]:
        """The caches that belong to a pool."""
        return [entry for entry in self.call.cache or () if isinstance(entry, PooledCache)]

    @cached_property
    def pools(self) -> set[KVPool]:
        """The pools of these caches: one, unless a program made them one by one."""
        return {entry.pool for entry in self.own}

    @cached_property
    def others(self) -> list[Any]:
        """mlx-lm's own caches on this machine, without the lists that hold some."""
        cache = self.call.cache or ()
        if len(self.own) == len(cache):
            return []
        return [e for e in entries_of(cache) if not isinstance(e, PooledCache) and not is_elsewhere(e)]

    @cached_property
    def tokens(self) -> NewTokens:
        """The lane in numbers."""
        call, num_each = self.call, self.call.length
        kinds = set(map(type, [*self.others, *self.own]))
        is_fused = not any(issubclass(kind, QuantizedKVCache) for kind in kinds)
        lengths = [_num_attended(entry) for entry in self.others]
        lengths += [entry.rows.store.length if is_fused else entry.offset for entry in self.own]
        return NewTokens(
            num_new=call.num_tokens,
            num_at_once=self.step * call.batch_size if self.step else call.num_tokens,
            context=max(call.num_tokens, max(lengths, default=-num_each) + num_each),
            batch_size=call.batch_size,
            all_logits=call.wants_logits,
            in_parts=bool(self.step),
            is_fused=is_fused,
            num_kept=self.num_kept,
        )


def _num_attended(entry: Any) -> int:
    has_size = hasattr(entry, "size") and not isinstance(entry, QuantizedKVCache)  # whose size is always 0
    return int(entry.size() if has_size else getattr(entry, "offset", 0))  # a model's own caches may have neither

"""The part of one prompt cache in a pass, as the budget sees it."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import QuantizedKVCache

from mlx_flash.compat.caches import entries_of
from mlx_flash.engine.call import ForwardCall
from mlx_flash.kv.diskcache import PooledCache
from mlx_flash.kv.kvpool import KVPool
from mlx_flash.layout.reachable import nbytes_in
from mlx_flash.ranks import is_elsewhere
from mlx_flash.residency.ledger import NewTokens


class Lane:
    """New tokens that are added to one prompt cache in a pass. It looks at the entries of the cache once.

    Args:
        call: the call; of one in parts, all that is left of it.
        step: new tokens of each sequence that go through the model at a time; None for all.
        num_kept: tokens whose logits are kept while others compute, as in ``NewTokens``.

    Attributes:
        call, step, num_kept: as given.
        own: the caches that belong to a pool.
        lengths: the tokens in each of these.
        others: mlx-lm's own caches on this machine, without the lists that hold some.
        tokens: the lane in numbers.
    """

    def __init__(self, call: ForwardCall, step: int | None = None, num_kept: int = 0) -> None:
        cache = call.cache or ()
        self.call, self.step, self.num_kept = call, step, num_kept
        self.own = [entry for entry in cache if isinstance(entry, PooledCache)]
        self.others: list[Any] = []
        if len(self.own) < len(cache):
            others = [entry for entry in entries_of(cache) if not isinstance(entry, PooledCache)]
            self.others = [entry for entry in others if not is_elsewhere(entry)]
        kinds = {*map(type, self.own), *map(type, self.others)}
        is_fused = not any(issubclass(kind, QuantizedKVCache) for kind in kinds)
        self.lengths = [entry.rows.store.length for entry in self.own]
        lengths = [*(self.lengths if is_fused else [entry.offset for entry in self.own])]
        lengths += map(_num_attended, self.others)
        batch_size, num_each = call.batch_size, call.length
        self.tokens = NewTokens(
            num_tokens=call.num_tokens,
            num_at_once=step * batch_size if step else call.num_tokens,
            context=max(call.num_tokens, max(lengths, default=-num_each) + num_each),
            batch_size=batch_size,
            all_logits=call.wants_logits,
            in_parts=bool(step),
            is_fused=is_fused,
            num_kept=num_kept,
            quantized_row=0 if is_fused else max(map(_quantized_row, [*self.own, *self.others])),
        )

    @property
    def pools(self) -> set[KVPool]:
        """The pools of its own caches: one, unless a program made them one by one."""
        return {entry.rows.pool for entry in self.own}


def _quantized_row(entry: Any) -> int:
    """Return the bytes of a token of all sequences in an entry; 0 if it is not quantized, or empty."""
    if not isinstance(entry, QuantizedKVCache):
        return 0
    if isinstance(entry, PooledCache):
        layout = entry.rows.store.layout
        return 0 if layout is None else layout.token_bytes
    return 0 if entry.keys is None else nbytes_in(entry) // int(entry.keys[0].shape[2])


def _num_attended(entry: Any) -> int:
    has_size = hasattr(entry, "size") and not isinstance(entry, QuantizedKVCache)  # whose size is always 0
    return int(entry.size() if has_size else getattr(entry, "offset", 0))  # a model's own caches may have neither

"""A batch of one sequence: mlx-lm's, which knows what is in it as long as the sequence is alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import BatchKVCache, KVCache

from mlx_flash.kv.history import is_anchored, pass_on


class LoneKVCache(BatchKVCache):  # type: ignore[misc]
    """mlx-lm's ``BatchKVCache`` that began with one sequence. It computes as that does.

    The history that is noted on it stays when mlx-lm takes the sequence from one batch to another, and goes to what is
    extracted. Once others are added it is of no use any more, and does not come back when they leave.
    """

    def filter(self, batch_indices: Any) -> None:
        """Keeps just the given sequences."""
        is_known = is_anchored(self, self.left_padding)  # then there is one, and nothing else that could be kept
        super().filter(batch_indices)
        if is_known:
            pass_on(self, self, self.left_padding)

    def extract(self, idx: int) -> KVCache:
        """A plain cache of one sequence."""
        cache = super().extract(idx)
        if is_anchored(self, self.left_padding):
            pass_on(self, cache)
        return cache


LoneKVCache.__name__ = BatchKVCache.__name__


def merged(plain: Sequence[KVCache], caches: Sequence[object]) -> BatchKVCache:
    """One cache for some sequences.

    Args:
        plain: mlx-lm's, one a sequence.
        caches: those that they were made of, which know their history.
    """
    if len(plain) > 1:
        return BatchKVCache.merge(plain)
    batch = LoneKVCache.merge(plain) if plain[0].size() else LoneKVCache([0])
    pass_on(caches[0], batch, batch.left_padding)
    return batch

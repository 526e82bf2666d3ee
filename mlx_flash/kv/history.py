"""The tokens in a cache, and everything else that decided the bits of their keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mlx_lm.models.cache import BatchKVCache, KVCache

from mlx_flash.compat.caches import CacheKinds
from mlx_flash.layout.reachable import Opaque

Labels = np.ndarray[Any, np.dtype[np.int64]]
"""``(tokens, 4)``: the token, begin and end of the call that computed it, the form of the cache at that call."""

NO_LABELS: Labels = np.empty((0, 4), np.int64)

ATTRIBUTE = "prefix_history"
"""Attribute of an entry of a cache with its history."""


def make_labels(tokens: Sequence[int], begin: int, end: int, form: int) -> Labels:
    """Return the labels of tokens that were computed in one call."""
    labels = np.empty((len(tokens), 4), np.int64)
    labels[:, 0], labels[:, 1:] = tokens, (begin, end, form)
    return labels


class History(Opaque):
    """The content of a cache, all full pages of which are stored. It is immutable, so copies of a cache share it."""

    def __init__(self, labels: Labels = NO_LABELS, ends: tuple[int, ...] = ()) -> None:
        self.labels = labels  # of all tokens
        self.ends = ends  # with how many tokens each page ends
        self.length = len(labels)

    def __deepcopy__(self, memo: dict[int, Any]) -> History:
        return self

    def with_labels(self, labels: Labels, ends: Sequence[int]) -> History:
        """Return this history with more tokens and pages."""
        return History(np.concatenate([self.labels, labels]), (*self.ends, *ends))

    def cut(self, length: int) -> History:
        """Return the first tokens of this history, and the pages in them."""
        return History(self.labels[:length], tuple(end for end in self.ends if end <= length))


def pass_on(entry: object, successor: object, anchor: object = None) -> None:
    """Note the history of an entry on another one that holds the same tokens.

    The anchor is an object that the other one replaces when sequences are added or removed; None if that cannot be.
    """
    if ATTRIBUTE in vars(entry):
        vars(successor)[ATTRIBUTE] = (vars(entry)[ATTRIBUTE][0], anchor)


def is_anchored(entry: object, anchor: object) -> bool:
    """Return whether the history that is noted on an entry still holds."""
    return ATTRIBUTE in vars(entry) and vars(entry)[ATTRIBUTE][1] is anchor


class LoneKVCache(BatchKVCache):  # type: ignore[misc]
    """mlx-lm's ``BatchKVCache`` of one sequence, which keeps its history. It computes the same.

    The history stays when mlx-lm moves the sequence from one batch to another, and goes to the extracted cache. It ends
    when other sequences are added.
    """

    def filter(self, batch_indices: Any) -> None:
        """Keep just the given sequences."""
        is_known = is_anchored(self, self.left_padding)  # then there is one sequence, and it is kept
        super().filter(batch_indices)
        if is_known:
            pass_on(self, self, self.left_padding)

    def extract(self, idx: int) -> KVCache:
        """Return a plain cache of one sequence."""
        cache = super().extract(idx)
        if is_anchored(self, self.left_padding):
            pass_on(self, cache)
        return cache


LoneKVCache.__name__ = BatchKVCache.__name__
CacheKinds.buffers += (LoneKVCache,)


def merged(plain: Sequence[KVCache], caches: Sequence[object]) -> BatchKVCache:
    """Return one cache for some sequences. ``caches`` know the history of the plain ones, which were made of them."""
    if len(plain) > 1:
        return BatchKVCache.merge(plain)
    batch = LoneKVCache.merge(plain) if plain[0].size() else LoneKVCache([0])
    pass_on(caches[0], batch, batch.left_padding)
    return batch

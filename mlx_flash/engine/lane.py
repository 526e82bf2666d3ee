"""The part of one prompt cache in a pass, as the budget sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import QuantizedKVCache

from mlx_flash.compat.caches import entries_of
from mlx_flash.engine.call import ForwardCall
from mlx_flash.kv.base import PooledCache
from mlx_flash.ranks.chain import is_elsewhere
from mlx_flash.residency.sizes import ActivationSizes


@dataclass(frozen=True, slots=True)
class Lane:
    """New tokens that are added to one prompt cache in a pass.

    Attributes:
        call: the call; of one in parts, all that is left of it.
        step: new tokens of each sequence that go through the model at a time; None for all.
    """

    call: ForwardCall
    step: int | None = None

    @property
    def num_at_once(self) -> int:
        """New tokens that go through the model at a time, over all sequences."""
        return self.step * self.call.batch_size if self.step else self.call.num_tokens

    @property
    def context(self) -> int:
        """Tokens that the newest one attends to, itself included."""
        per_sequence = self.call.num_tokens // self.call.batch_size
        return max([self.call.num_tokens, *(_num_tokens(entry) + per_sequence for entry in self._entries)])

    @property
    def _entries(self) -> list[Any]:
        return [*other_entries(self.call.cache), *own_entries(self.call.cache)]

    def active_bytes(self, sizes: ActivationSizes) -> int:
        """Return the memory of intermediate results while the lane computes."""
        logits = self.call.num_tokens * sizes.logits_per_token if self.step and self.call.wants_logits else 0
        fused = not any(isinstance(entry, QuantizedKVCache) for entry in self._entries)
        wants_logits = self.call.wants_logits
        return logits + sizes.nbytes(self.num_at_once, self.context, all_logits=wants_logits, fused=fused)

    def waiting_bytes(self, sizes: ActivationSizes) -> int:
        """Return the memory of intermediate results while others compute, and of the logits until they are used."""
        num_rows = self.call.num_tokens if self.call.wants_logits else 1
        return sizes.waiting_bytes(self.num_at_once) + 2 * num_rows * sizes.logits_per_token


def own_entries(cache: Sequence[Any] | None) -> list[PooledCache]:
    """Return the caches that belong to a pool."""
    return [entry for entry in cache or () if isinstance(entry, PooledCache)]


def other_entries(cache: Sequence[Any] | None) -> list[Any]:
    """Return mlx-lm's own caches on this machine, without the lists that hold some."""
    found = entries_of(cache or ())
    return [entry for entry in found if not isinstance(entry, PooledCache) and not is_elsewhere(entry)]


def _num_tokens(entry: Any) -> int:
    has_size = hasattr(entry, "size") and not isinstance(entry, QuantizedKVCache)  # whose size is always 0
    return int(entry.size() if has_size else getattr(entry, "offset", 0))  # a model's own caches may have neither

"""Prompt caches that a model keeps between requests."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache

from mlx_flash.kv.diskcache import DiskKVCache
from mlx_flash.kv.layerrows import park
from mlx_flash.layout.reachable import arrays_in
from mlx_flash.model import FlashLLM
from mlx_flash.server.ranks import Ranks

_KEY = "model"
"""mlx-lm's prompt cache holds those of several models by a key; here each model has its own."""


class PromptCaches(LRUPromptCache):  # type: ignore[misc]
    """mlx-lm's prompt cache.

    Args:
        model: the model.
        max_size: the most caches.
        max_bytes: the most bytes of all; None for no limit.
        ranks: those that answer together; None for this process alone.

    Attributes:
        limit_bytes: the memory that requests leave for all of them now; None for no limit.
    """

    def __init__(self, model: Any, max_size: int, max_bytes: int | None, ranks: Ranks | None) -> None:
        super().__init__(max_size, 1 << 63 if max_bytes is None else max_bytes)
        self.limit_bytes: int | None = None
        self._model = model
        self._ranks = ranks

    def keep(self, prompt_cache: list[Any], tokens: list[int], kind: str = "assistant") -> None:
        """Keep a cache that is not computed with any more, if there is room for it.

        Args:
            prompt_cache: the cache.
            tokens: those in the cache.
            kind: of the segment that it ends with: a system prompt is dropped last.
        """
        if not tokens:
            return
        nbytes = sum(entry.nbytes for entry in prompt_cache)
        if self.limit_bytes is not None:
            if nbytes > self.limit_bytes:
                return
            self.trim_to(n_bytes=self.limit_bytes - nbytes)
        if isinstance(self._model, FlashLLM) and self._model.engine is not None:  # copies are not evaluated yet
            lending = self._model.engine.lending
            lending.recall(min(nbytes, lending.nbytes))
        for entry in prompt_cache:
            if isinstance(entry, DiskKVCache) and not entry.is_on_disk:
                with entry.pool.lock:
                    park(entry.rows)  # without the room for more tokens
            mx.eval(arrays_in(entry))
        self.insert_cache(_KEY, tokens[:], prompt_cache, cache_type=kind)

    def longest(self, tokens: list[int]) -> tuple[list[Any] | None, int]:
        """Return a copy of the kept cache with the longest prefix of a prompt, and the number of tokens in it.

        At least the prompt's last token is left to compute: its logits are needed.
        """
        if self.limit_bytes is not None and self.nbytes > self.limit_bytes // 2:
            self.trim_to(n_bytes=self.limit_bytes // 2)  # the copy is there beside the row of the batch for a moment
        cache, rest = self.fetch_nearest_cache(_KEY, tokens)
        if cache is not None and not rest:
            if can_trim_prompt_cache(cache):
                trim_prompt_cache(cache, 1)
                rest = tokens[-1:]
            else:
                cache, rest = self.fetch_nearest_cache(_KEY, tokens[:-1])
                rest = [*rest, tokens[-1]]
        num_cached = 0 if cache is None else len(tokens) - len(rest)
        if self._ranks is not None and not self._ranks.have_same(num_cached):  # another rank has let go of it
            return None, 0
        return (cache, num_cached) if num_cached else (None, 0)

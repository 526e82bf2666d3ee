"""Prompt caches in a pass that has not ended: an exception puts them back, or they refuse every later use.

A pass changes a cache layer by layer. One whose layers replace what they hold cannot be put back.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from mlx_flash.compat.caches import entries_of
from mlx_flash.engine.call import ForwardCall
from mlx_flash.errors import CacheError, FlashError
from mlx_flash.kv.checkpoints import PutBack, checkpoint, is_empty, trim_all_to, trimmable
from mlx_flash.kv.owed import Debt, Owed
from mlx_flash.kv.views import can_be_viewed


class Undo:
    """The way back of a prompt cache to what it is before some calls of a pass. It may be taken several times.

    Attributes:
        is_possible: False if there is none. The cache refuses every use then.
    """

    def __init__(self, calls: Sequence[ForwardCall]) -> None:
        cache, checkpoints, self.is_possible = calls[0].cache or (), calls[0].checkpoints, True
        self._steps: list[PutBack]
        if len(calls) > 1 and checkpoints is not None:
            self._steps = [partial(checkpoints.take_back, 0)]
        elif (offsets := trimmable(cache)) is not None:
            self._steps = [partial(_trim, cache, offsets)]
        elif can_be_viewed(cache) and is_empty(cache):
            self._steps = [checkpoint(entry) for entry in entries_of(cache)]
        else:
            self._steps, self.is_possible = [partial(break_cache, cache)], False

    def __call__(self) -> None:
        """Put the cache back."""
        for step in self._steps:
            step()


def _trim(cache: Sequence[Any], offsets: Sequence[int]) -> None:
    with suppress(FlashError, OSError):  # tokens on disk, which may be full or gone, cannot be read
        trim_all_to(cache, offsets)
    if [entry.offset for entry in cache] != offsets:
        break_cache(cache)


def break_cache(cache: Sequence[Any]) -> None:
    """Make a prompt cache refuse every use: some of its layers have tokens that others do not have."""
    kinds = sorted({type(entry).__name__ for entry in entries_of(cache)})

    def refuse() -> None:
        raise CacheError(
            "a call with this prompt cache was interrupted or failed before all layers had its tokens, and what was "
            f"dropped from its {', '.join(kinds)} cannot be put back. Hint: start again with a fresh prompt cache."
        )

    Owed(cache).owe(Debt(0, refuse))

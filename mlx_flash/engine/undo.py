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


def undo_of(calls: Sequence[ForwardCall]) -> PutBack | None:
    """Return what puts the cache of some calls of a pass back, as often as it is called; None if nothing can."""
    cache = calls[0].cache
    if cache is None:
        return lambda: None
    if len(calls) > 1 and calls[0].checkpoints is not None:
        return partial(calls[0].checkpoints.take_back, 0)
    if (offsets := trimmable(cache)) is not None:
        return partial(_trim, cache, offsets)
    if not can_be_viewed(cache) or not is_empty(cache):
        return None
    put_backs = [checkpoint(entry) for entry in entries_of(cache)]

    def put_back() -> None:
        for each in put_backs:
            each()

    return put_back


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

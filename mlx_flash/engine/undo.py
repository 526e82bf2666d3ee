"""Prompt caches in a pass that has not ended: an exception at any point puts them back, or breaks them.

A pass changes a cache layer by layer. A cache that cannot be put back, since its layers replace what they hold, refuses
every later use.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import cache as cached
from functools import partial
from typing import Any, cast

from mlx_flash.compat.caches import entries_of
from mlx_flash.engine.call import ForwardCall
from mlx_flash.errors import CacheError, FlashError
from mlx_flash.kv.checkpoints import snapshot, trim_all_to, trimmable
from mlx_flash.kv.views import can_be_viewed

_USES = ("update_and_fetch", "make_mask", "trim", "to_quantized", "merge", "extract", "extend", "filter", "prepare")
_SPECIAL_USES = ("__getitem__", "__setitem__")
"""Methods of mlx-lm's caches that need their contents."""


def undo_of(calls: Sequence[ForwardCall]) -> Callable[[], None]:
    """Return what puts the cache of some calls of a pass back as it is, as often as it is called. Else it breaks it."""
    cache = calls[0].cache
    if cache is None:
        return lambda: None
    if len(calls) > 1 and calls[0].checkpoints is not None:
        return partial(calls[0].checkpoints.take_back, 0)
    if (offsets := trimmable(cache)) is not None:
        return partial(_trim, cache, offsets)
    put_back = snapshot(cache) if can_be_viewed(cache) else None
    return put_back or partial(break_cache, cache)


def breaks(put_back: Callable[[], None]) -> bool:
    """Return whether what :func:`undo_of` returned breaks a cache."""
    return isinstance(put_back, partial) and put_back.func is break_cache


def _trim(cache: Sequence[Any], offsets: Sequence[int]) -> None:
    if broken(cache) is not None:
        return
    with suppress(FlashError, OSError):  # tokens on disk, which may be full or gone, cannot be read
        trim_all_to(cache, offsets)
    if [entry.offset for entry in cache] != offsets:
        break_cache(cache)  # or a second interrupt ended the prefix cache's own putting back, where rows were missing


def break_cache(cache: Sequence[Any]) -> None:
    """Make a prompt cache refuse every use: some of its layers have tokens that others do not have."""
    for entry in entries_of(cache):
        if not is_broken(entry):
            entry.__class__ = _broken(cast(Hashable, type(entry)))


def is_broken(entry: Any) -> bool:
    """Return whether an entry of a prompt cache refuses every use."""
    return hasattr(type(entry), _MARK)


def broken(cache: Sequence[Any] | None) -> CacheError | None:
    """Return the error of a call with a prompt cache that was broken; None if it was not."""
    entries = entries_of(cache or ())
    if not any(hasattr(kind, _MARK) for kind in set(map(type, entries))):
        return None
    return next(_error(entry) for entry in entries if is_broken(entry))


_MARK = "_is_broken"


@cached
def _broken(kind: Any) -> Any:
    """Return a class like mlx-lm's whose objects refuse to be used, copied with their contents, or saved."""

    def refuse(entry: Any, *_: Any, **__: Any) -> Any:
        raise _error(entry)

    names = [name for name in (*_USES, *_SPECIAL_USES) if hasattr(kind, name)]
    body: dict[str, Any] = dict.fromkeys(names, refuse)
    return type(kind.__name__, (kind,), {**body, "state": property(refuse, refuse), _MARK: True})


def _error(entry: Any) -> CacheError:
    return CacheError(
        f"a call with this prompt cache was interrupted or failed before all layers had its tokens, and what a "
        f"{type(entry).__name__} has dropped cannot be put back. Hint: start again with a fresh prompt cache."
    )

"""Calls of a model as its prefix cache keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from mlx_flash.engine.call import ForwardCall
from mlx_flash.engine.row import Row
from mlx_flash.prefixes.call import KnownCall
from mlx_flash.prefixes.leaves import forget
from mlx_flash.prefixes.prefixcache import PrefixCache
from mlx_flash.streaming.lockstep import CALL_ERRORS


def begin(prefixes: PrefixCache, calls: Sequence[ForwardCall]) -> KnownCall | None:
    """Plan what is kept of a call, or of some that share a prompt cache and a pass. Return them as the cache does."""
    if (cache := calls[0].cache) is None:
        return None
    tokens = [call.tokens for call in calls if call.tokens is not None and call.is_plain]
    if len(tokens) < len(calls):
        forget(cache)
        return None
    num_prompts = len([*takewhile(lambda call: not call.wants_output, calls)])
    return prefixes.begin(tokens, cache, num_prompts, [call.segment_left for call in calls])


def begin_parts(prefixes: PrefixCache, lanes: Mapping[Row, Sequence[ForwardCall]]) -> dict[Row, KnownCall]:
    """Plan what is kept of calls that share a pass. Return the rows of several calls whose content is known."""
    found = {row: begin(prefixes, calls) for row, calls in lanes.items() if len(calls) > 1}
    return {row: call for row, call in found.items() if call is not None}


def end_parts(prefixes: PrefixCache, cached: KnownCall, outputs: list[Any]) -> list[Any] | Exception:
    """Keep calls that shared a prompt cache. Return their outputs, or the error."""
    try:
        prefixes.end(cached)
    except CALL_ERRORS as error:
        return error
    return outputs


def look(prefixes: PrefixCache, row: Row) -> KnownCall | None:
    """Return what is cached of the next parts of a row, up to the first whose output is wanted; None if nothing is."""
    parts = [*takewhile(lambda part: not part.wants_output and part.is_plain, row.left)]
    tokens = [part.tokens for part in parts if part.tokens is not None]
    if not tokens or row.whole.cache is None:
        return None
    return prefixes.look(tokens, row.whole.cache, [part.segment_left for part in parts])

"""Calls of a model as its prefix cache answers and keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import mlx.core as mx

from mlx_flash.engine.call import ForwardCall
from mlx_flash.engine.row import Row
from mlx_flash.prefixes.call import KnownCall
from mlx_flash.prefixes.leaves import forget
from mlx_flash.prefixes.prefixcache import PrefixCache
from mlx_flash.streaming.lockstep import CALL_ERRORS


def begin(prefixes: PrefixCache, call: ForwardCall) -> KnownCall | None:
    """Restore the cached part of a call. Return it as :meth:`PrefixCache.begin` does."""
    if call.cache is None:
        return None
    if call.tokens is None or not call.is_plain:
        forget(call.cache)
        return None
    return prefixes.begin(call.tokens, call.cache, is_prompt=not call.wants_output, segment_left=call.segment_left)


def begin_parts(prefixes: PrefixCache, lanes: Mapping[Row, Sequence[ForwardCall]]) -> dict[Row, KnownCall]:
    """Plan what is kept of calls that share a prompt cache, and a pass. Return the rows whose content is known."""
    found: dict[Row, KnownCall] = {}
    for row, calls in lanes.items():
        if len(calls) > 1 and (cache := calls[0].cache) is not None:
            tokens = [call.tokens for call in calls if call.tokens is not None]
            left = [call.segment_left for call in calls]
            num_prompts = len([*takewhile(lambda call: not call.wants_output, calls)])
            if (call := prefixes.begin_parts(tokens, cache, num_prompts, left)) is not None:
                found[row] = call
    return found


def end_parts(prefixes: PrefixCache, cached: KnownCall, outputs: list[Any]) -> list[Any] | Exception:
    """Keep calls that shared a prompt cache. Return their outputs, or the error."""
    try:
        prefixes.end(cached)
    except CALL_ERRORS as error:
        return error
    return outputs


def prompt_of(row: Row) -> mx.array | None:
    """Return the tokens of the next parts of a row, up to the first whose output is wanted; None if there are none."""
    parts = takewhile(lambda part: not part.wants_output and part.is_plain, row.left)
    tokens = [part.tokens for part in parts if part.tokens is not None]
    return mx.concatenate(tokens, axis=1) if tokens else None


def restore(prefixes: PrefixCache, row: Row, prompt: mx.array, cache: Sequence[Any]) -> None:
    """Take a prompt from disk; fewer tokens of it, or none, where a page is damaged."""
    cached = prefixes.begin(prompt, cache, is_prompt=True)
    if cached is not None:
        prefixes.end(cached.first(cached.num_restored))
        row.skip(cached.num_restored)

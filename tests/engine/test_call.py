"""The arguments of a forward call, read once."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_flash.engine.call import ForwardCall, parse_call

TOKENS = mx.array([[1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14]])
CACHE = [KVCache()]


def parse(*arguments: Any, **keywords: Any) -> ForwardCall:
    return parse_call(arguments, keywords)


PLAIN = [
    *(parse(TOKENS, CACHE), parse(TOKENS, cache=CACHE), parse(TOKENS, CACHE, cache=None)),
    *(parse(TOKENS, cache=CACHE, input_embeddings=None), parse(TOKENS, tuple(CACHE))),
]
OTHERS = [
    (parse(), 1, False),
    (parse(inputs=TOKENS), 1, False),
    (parse(TOKENS), 14, False),
    (parse(TOKENS, None), 14, False),
    (parse(TOKENS[0], cache=CACHE), 7, True),
    (parse(TOKENS, mx.ones((7, 7))), 14, False),
    (parse(TOKENS, None, CACHE), 14, False),
    (parse(TOKENS, CACHE, None), 14, True),
    (parse(TOKENS, CACHE, mask=mx.ones((7, 7))), 14, True),
    (parse(TOKENS, cache=CACHE, input_embeddings=mx.ones((2, 7, 4))), 14, True),
]
"""Calls, their tokens, and whether they have the cache."""


def test_tokens_and_a_cache_are_a_plain_call_and_others_are_not_cut() -> None:
    for call in PLAIN:
        assert call.is_plain and call.tokens is TOKENS and [*(call.cache or ())] == CACHE
        assert (call.num_tokens, call.batch_size) == (14, 2)
    for call, num_tokens, has_cache in OTHERS:
        assert not call.is_plain and call.step_within(1) is None
        assert (call.num_tokens, call.cache is CACHE) == (num_tokens, has_cache)


def test_a_plain_call_is_cut_where_a_limit_of_tokens_asks() -> None:
    """The limit counts the tokens of all sequences."""
    for call in (parse(TOKENS, CACHE), parse(TOKENS, cache=CACHE, mask=None)):
        assert [call.step_within(limit) for limit in (1, 4, 13, 14, 100)] == [1, 2, 4, None, None]

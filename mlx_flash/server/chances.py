"""Probabilities of tokens, as clients ask for them."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx

from mlx_flash.server.events import TokenChance, TokenDetail


def detail_of(token: int, logprobs: mx.array, num_likeliest: int, tokenizer: Any) -> TokenDetail:
    """Return a token and the likeliest ones with the logarithms of their probabilities.

    Args:
        token: the token that was chosen.
        logprobs: of all tokens, ``(vocabulary,)``.
        num_likeliest: how many of the likeliest tokens.
        tokenizer: mlx-lm's wrapper.
    """
    num_likeliest = min(num_likeliest, logprobs.size)
    likeliest: list[int] = []
    if num_likeliest:
        found = mx.argpartition(-logprobs, kth=num_likeliest - 1)[:num_likeliest]
        likeliest = cast(list[int], found[mx.argsort(-logprobs[found])].tolist())
    tokens = mx.array([[token, *likeliest]])
    (detail,) = details_of(tokens, logprobs[tokens], tokenizer)
    return detail


def details_of(tokens: mx.array, logprobs: mx.array, tokenizer: Any) -> list[TokenDetail]:
    """Return tokens, each with the likeliest ones in its place.

    Args:
        tokens: a row for each place: the token, and the likeliest ones.
        logprobs: the logarithms of their probabilities.
        tokenizer: mlx-lm's wrapper.
    """
    rows = zip(cast(Any, tokens.tolist()), cast(Any, logprobs.tolist()), strict=True)
    found = []
    for numbers, values in rows:
        pairs = zip(numbers, values, strict=True)
        chosen, *likeliest = [TokenChance(each, tokenizer.decode([each]), _finite(value)) for each, value in pairs]
        found.append(TokenDetail(chosen, tuple(likeliest)))
    return found


def _finite(value: float) -> float:
    """Return a number that JSON has: tokens that a grammar forbids have a probability of 0."""
    return max(value, -9999.0)

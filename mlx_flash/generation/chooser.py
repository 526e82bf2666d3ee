"""The choice of a token from logits."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_flash.compat.compiler import evaluate
from mlx_flash.compat.randomkeys import draw_as_between, random_key, set_random_key

Choice = tuple[mx.array, mx.array]
"""A token that was chosen, ``(1,)``, and the logarithms of all probabilities, ``(1, vocabulary)``."""


class Chooser:
    """Chooses tokens from logits as mlx-lm does.

    Args:
        sampler: chooses from log probabilities; None takes the likeliest token.
        processors: change logits; None for none.
        tokens: those that processors see before the first ones that are given to a call.

    Attributes:
        sampler, processors: as given.
    """

    def __init__(self, sampler: Any, processors: Any, tokens: mx.array | list[int]) -> None:
        self.sampler = sampler or (lambda logprobs: mx.argmax(logprobs, axis=-1))
        self.processors = processors or ()
        self._tokens = mx.array(tokens) if self.processors else None
        self._last: mx.array | None = None
        self._keys: tuple[mx.array, mx.array] | None = None  # before and after the last token
        self._next_key: mx.array | None = None  # before the next one, if its numbers are drawn already

    def __call__(self, output: mx.array) -> Choice:
        """Return the next token, and the probabilities that it was chosen from: the last row of the logits counts."""
        logits = output[:, -1, :]
        if self._tokens is not None:
            self._tokens = self._tokens if self._last is None else mx.concat([self._tokens, self._last])
            for process in self.processors:
                logits = process(self._tokens, logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        self._last = token = self._draw(logprobs)
        keys = () if self._keys is None else self._keys[1:]  # later, it would wait for the pass after this one
        evaluate(token, logprobs, *keys)
        return token, logprobs

    def _draw(self, logprobs: mx.array) -> mx.array:
        """Choose a token from log probabilities, with the random numbers that were drawn ahead, if there are any."""
        ahead = None
        if self._next_key is not None:
            ahead = random_key()
            set_random_key(self._next_key)
            self._next_key = None
        try:
            before = random_key()
            token: mx.array = self.sampler(logprobs)
            after = random_key()
        finally:
            if ahead is not None:
                set_random_key(ahead)
        self._keys = None if after is before else (before, after)
        return token

    def draw_ahead(self) -> None:
        """Draw the random numbers of the next token, which gets them when it is chosen.

        When mlx-lm hands a token out, it has chosen the next one. What the caller draws from then on follows that.
        """
        key = random_key()
        if self._keys is not None and self._next_key is None and draw_as_between(*self._keys):
            self._next_key = key

"""The choice of a token from logits."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_flash.compat.compiler import evaluate


class Chooser:
    """Chooses tokens from logits as mlx-lm does.

    Args:
        sampler: chooses from log probabilities; None takes the likeliest token.
        processors: change logits; None for none.
        tokens: those that processors see before the first ones that are given to a call.
    """

    def __init__(self, sampler: Any, processors: Any, tokens: mx.array | list[int]) -> None:
        self._sampler = sampler or (lambda logprobs: mx.argmax(logprobs, axis=-1))
        self._processors = processors or ()
        self._tokens = mx.array(tokens) if self._processors else None

    def __call__(self, last: mx.array | None, output: mx.array, *, waits: bool) -> tuple[mx.array, mx.array]:
        """Return the next token, ``(1,)``, and the log probabilities, ``(1, vocabulary)``.

        Args:
            last: the token before it; None for the prompt's, which processors know.
            output: the logits, of which the last row counts.
            waits: evaluate them. If not, that begins.
        """
        logits = output[:, -1, :]
        if self._tokens is not None:
            self._tokens = self._tokens if last is None else mx.concat([self._tokens, last])
            for process in self._processors:
                logits = process(self._tokens, logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        token = self._sampler(logprobs)
        evaluate(token, logprobs, waits=waits)
        return token, logprobs

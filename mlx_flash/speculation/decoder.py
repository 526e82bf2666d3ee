"""Decoding one token after another, with several in one pass where guesses turn out right."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from mlx_flash.speculation.guesses import MAX_GUESSES, Guesses, Source
from mlx_flash.speculation.pace import Times

_log = logging.getLogger("mlx_flash")


class Rows(Protocol):
    """Tokens that were computed in one pass, each in a forward call of its own."""

    @property
    def outputs(self) -> Sequence[mx.array]:
        """The logits of the first tokens, as many as memory had room for: ``(1, 1, vocabulary)`` each."""

    def keep(self, number: int) -> None:
        """Keep the first tokens in the prompt cache, and take the others back."""


class RowModel(Protocol):
    """A model that computes several tokens in one pass."""

    @property
    def times(self) -> Times:
        """Measured times of its passes."""

    def refusal(self, cache: Sequence[Any]) -> str | None:
        """Return the reason why tokens have to be computed one at a time; None if they need not."""

    def rows(self, tokens: Sequence[int], cache: list[Any]) -> Rows:
        """Compute tokens that follow each other, at least the first."""


class Decoder:
    """The logits of tokens that follow each other: those of plain decoding, bit for bit.

    Args:
        model: the model.
        cache: the prompt cache, which holds the prompt.
        source: guesses tokens.
        most: the most tokens to guess at a time.
    """

    def __init__(self, model: RowModel, cache: list[Any], source: Source, most: int = MAX_GUESSES) -> None:
        self._model = model
        self._cache = cache
        self._guesses = Guesses(source, most)
        self._tokens: list[int] = []
        self._rows: Rows | None = None
        self._num_used = 0
        self._reason: str | None = None

    def logits(self, token: int, limit: int) -> mx.array:
        """Add a token to the cache. Return the logits that follow it, ``(1, 1, vocabulary)``.

        Args:
            token: the token.
            limit: the most tokens to guess after it.
        """
        self._guesses.add(token)
        if not self.is_guessed(token):
            self.take_back()
            self._tokens = [token, *self._guess(limit)]
            self._rows = self._model.rows(self._tokens, self._cache)
            del self._tokens[len(self._rows.outputs) :]
        assert self._rows is not None
        self._num_used += 1
        return self._rows.outputs[self._num_used - 1]

    def is_guessed(self, token: int) -> bool:
        """Return whether a token, as the next one, was guessed and is computed already."""
        return self._rows is not None and self._tokens[self._num_used :][:1] == [token]

    def take_back(self) -> None:
        """Take tokens from the cache that were only guessed."""
        rows, self._rows = self._rows, None
        num_used, self._num_used = self._num_used, 0
        if rows is not None and len(self._tokens) > 1:
            self._guesses.note(len(self._tokens) - 1, num_used - 1)
            rows.keep(num_used)

    def _guess(self, limit: int) -> Sequence[int]:
        if not self._guesses.look(limit) or self._is_refused():
            return []
        return self._guesses.take(self._model.times, limit)

    def _is_refused(self) -> bool:
        reason = self._model.refusal(self._cache)
        if reason is not None and reason != self._reason:
            _log.info("no tokens are guessed: %s", reason)
        self._reason = reason
        return reason is not None

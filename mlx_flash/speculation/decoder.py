"""Decoding one token after another, with several in one pass where guesses turn out right."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from mlx_flash.speculation.pace import Acceptance, Times, num_worth_guessing

_log = logging.getLogger("mlx_flash")

MAX_GUESSES = 15
"""The most tokens that are guessed at a time."""


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


class Source(Protocol):
    """A source of guesses.

    Attributes:
        guess_seconds: time that it takes to guess a token.
    """

    guess_seconds: float

    def add(self, token: int) -> None:
        """Add the next token of the text."""

    def look(self) -> int:
        """Return the quality of a guess now. Guesses of one quality are about as often right; 0 stands for none."""

    def guess(self, number: int) -> Sequence[int]:
        """Return the next tokens, if :meth:`look` has found any."""

    def end(self) -> None:
        """Leave a prompt cache of the caller's with the text and nothing else."""


class Decoder:
    """The logits of tokens that follow each other: those of plain decoding, bit for bit.

    Args:
        model: the model.
        cache: the prompt cache, which holds the prompt.
        source: guesses tokens.
        most: the most tokens to guess at a time.
    """

    def __init__(self, model: RowModel, cache: list[Any], source: Source, most: int = MAX_GUESSES) -> None:
        self._most = most
        self._model = model
        self._cache = cache
        self._source = source
        self._acceptance = Acceptance()
        self._quality = 0
        self._unchecked: int | None = None
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
        self._source.add(token)
        if self._unchecked is not None:
            self._acceptance.note(self._quality, 1, int(token == self._unchecked))
            self._unchecked = None
        if not self.is_guessed(token):
            self.take_back()
            self._tokens = [token, *self._guess(min(limit, self._most))]
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
            self._acceptance.note(self._quality, len(self._tokens) - 1, num_used - 1)
            rows.keep(num_used)

    def _guess(self, limit: int) -> Sequence[int]:
        """Return tokens that are worth computing. Of others note the first one, if that costs nothing."""
        self._quality = self._source.look() if limit > 0 else 0
        if not self._quality or self._is_refused():
            return []
        times, seconds = self._model.times, self._source.guess_seconds
        acceptance = self._acceptance.of(self._quality)
        number = num_worth_guessing(acceptance, times.pass_seconds, times.row_seconds, limit, seconds)
        if number:
            return self._source.guess(number)
        if seconds:
            self._acceptance.note(self._quality, 0, 0)
        else:
            self._unchecked = self._source.guess(1)[0]
        return []

    def _is_refused(self) -> bool:
        reason = self._model.refusal(self._cache)
        if reason is not None and reason != self._reason:
            _log.info("no tokens are guessed: %s", reason)
        self._reason = reason
        return reason is not None

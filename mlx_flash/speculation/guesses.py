"""Guesses of the next tokens, as many as are worth computing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mlx_flash.speculation.pace import Acceptance, Times, num_worth_guessing

MAX_GUESSES = 15
"""The most tokens that are guessed at a time."""


class Source(Protocol):
    """A source of guesses.

    Attributes:
        guess_seconds: time that it takes to guess a token.
        cache: the prompt cache of its own; empty if it has none.
    """

    guess_seconds: float
    cache: list[Any]

    def add(self, token: int) -> None:
        """Add the next token of the text."""

    def look(self) -> int:
        """Return the quality of a guess now. Guesses of one quality are about as often right; 0 stands for none."""

    def guess(self, number: int) -> Sequence[int]:
        """Return the next tokens, if :meth:`look` has found any."""

    def end(self) -> None:
        """Leave a prompt cache of the caller's with the text and nothing else."""

    def leave(self) -> int:
        """Take guesses back. Return the number of tokens that :meth:`end` adds."""


class Guesses:
    """The guesses of one text, and how many of them were right.

    Args:
        source: guesses tokens.
        most: the most tokens to guess at a time.
    """

    def __init__(self, source: Source, most: int = MAX_GUESSES) -> None:
        self._source = source
        self._most = most
        self._acceptance = Acceptance()
        self._quality = 0
        self._unchecked: int | None = None

    def add(self, token: int) -> None:
        """Add the next token of the text."""
        self._source.add(token)
        if self._unchecked is not None:
            self._acceptance.note(self._quality, 1, int(token == self._unchecked))
            self._unchecked = None

    def look(self, limit: int) -> bool:
        """Return whether there is a guess.

        Args:
            limit: the most tokens to guess.
        """
        self._quality = self._source.look() if min(limit, self._most) > 0 else 0
        return self._quality > 0

    def take(self, times: Times, limit: int, num_others: int = 0) -> Sequence[int]:
        """Return tokens that are worth computing, after :meth:`look`. Of others note the first one, if that is free.

        Args:
            times: of the model's passes.
            limit: the most tokens to guess.
            num_others: rows that other texts compute in the same pass.
        """
        seconds, acceptance = self._source.guess_seconds, self._acceptance.of(self._quality)
        limit = min(limit, self._most)
        number = num_worth_guessing(
            acceptance, times.pass_seconds, times.row_seconds, limit, seconds, num_others=num_others
        )
        if number:
            return self._source.guess(number)
        if seconds:
            self._acceptance.note(self._quality, 0, 0)
        else:
            self._unchecked = self._source.guess(1)[0]
        return []

    def note(self, num_tried: int, num_right: int) -> None:
        """Note how many of the tokens that were taken last were right."""
        self._acceptance.note(self._quality, num_tried, num_right)

"""Guesses of the next tokens, as many as are worth computing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mlx_flash.speculation.worth import Acceptance, Times, Worth, worth_guessing

MAX_GUESSES = 31
"""The most tokens that are guessed at a time."""

_KEEPS = 0.8
"""Weight of earlier guesses in the measured time, against the newest one."""


class Source(Protocol):
    """A source of guesses.

    Attributes:
        guess_seconds: time that it takes to guess a token.
        expected: the share of right guesses of each quality, before any is known.
        reads: whether it reads the model's hidden states.
    """

    guess_seconds: float
    expected: Mapping[int, float]
    reads: bool = False

    def add(self, token: int) -> None:
        """Add the next token of the text."""

    def look(self) -> int:
        """Return the quality of a guess now. Guesses of one quality are about as often right; 0 stands for none."""

    def guess(self, number: int) -> Sequence[int]:
        """Return the next tokens, if :meth:`look` has found any."""

    def end(self) -> None:
        """Leave a prompt cache of the caller's with the text and nothing else, if the source has one."""
        return

    def leave(self) -> None:
        """Have a prompt cache of the caller's say the text, and compute what it lacks when somebody looks."""
        return

    def note_seconds(self, seconds: float) -> None:
        """Note the time that a guess of a token took."""
        self.guess_seconds += (1 - _KEEPS if self.guess_seconds else 1) * (seconds - self.guess_seconds)


class Guesses:
    """The guesses of one text, and how many of them were right.

    Args:
        sources: guess tokens. Before each pass the one is asked that promises the most tokens a second.
        most: the most tokens to guess at a time.

    Attributes:
        reader: the source that reads hidden states, if there is one.
    """

    def __init__(self, *sources: Source, most: int = MAX_GUESSES) -> None:
        self._most = most
        self._sources = [_Judged(source) for source in sources]
        self._asked = self._sources[0]
        self.reader: Any = next((source for source in sources if source.reads), None)

    def add(self, token: int) -> None:
        """Add the next token of the text."""
        for each in self._sources:
            each.source.add(token)
            if each.unchecked is not None:
                each.check(token)

    def look(self, limit: int) -> bool:
        """Return whether there is a guess.

        Args:
            limit: the most tokens to guess.
        """
        has_room = min(limit, self._most) > 0
        for each in self._sources:
            each.quality = each.source.look() if has_room else 0
        return any(each.quality for each in self._sources)

    def take(self, times: Times, limit: int, num_others: int = 0) -> Sequence[int]:
        """Return tokens that are worth computing, after :meth:`look`. Of others note the first one, if that is free.

        Args:
            times: of the model's passes.
            limit: the most tokens to guess.
            num_others: calls of other sequences in the same pass.
        """
        limit = min(limit, self._most)
        able = [each for each in self._sources if each.quality]
        worths = [each.worth(times, limit, num_others) for each in able]
        best = max(range(len(able)), key=lambda i: worths[i].speed)
        self._asked = able[best]
        for i, each in enumerate(able):
            if i != best or not worths[i].number:
                each.pass_over()
        return self._asked.source.guess(worths[best].number) if worths[best].number else []

    def note(self, num_tried: int, num_right: int) -> None:
        """Note how many of the tokens that were taken last were right."""
        self._asked.acceptance.note(self._asked.quality, num_tried, num_right)


class _Judged:
    """A source, and how often it was right."""

    def __init__(self, source: Source) -> None:
        self.source, self.acceptance, self.quality = source, Acceptance(source.expected), 0
        self.unchecked: int | None = None

    def check(self, token: int) -> None:
        """Note whether the guess that was passed over is the token."""
        self.acceptance.note(self.quality, 1, int(token == self.unchecked))
        self.unchecked = None

    def worth(self, times: Times, limit: int, num_others: int) -> Worth:
        """Return how many of its guesses to compute."""
        seconds, acceptance = self.source.guess_seconds, self.acceptance.of(self.quality)
        return worth_guessing(acceptance, times.pass_seconds, times.row_seconds, limit, seconds, num_others=num_others)

    def pass_over(self) -> None:
        """Note the first guess, to compare it with the text; where that takes time, trust older guesses less."""
        if self.source.guess_seconds:
            self.acceptance.note(self.quality, 0, 0)
        else:
            self.unchecked = self.source.guess(1)[0]

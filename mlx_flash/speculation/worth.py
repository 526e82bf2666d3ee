"""The number of tokens worth guessing: as many as make the text faster, given how often guesses were right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

LEAST_GAIN = 1.05
"""A smaller gain in speed is within the error of the measurements."""

_KEEPS = 0.8
"""Weight of earlier passes in the measured times, against the newest one."""

_FORGETS = 0.98
"""Weight that earlier guesses keep at each new one, so that the estimate follows the text."""

_WAITS = 0.05
"""A pass that waits longer for weights, as a part of its time, tells how long reading takes."""


class Worth(NamedTuple):
    """The number of tokens to guess, and the tokens a second that are expected then."""

    number: int
    speed: float


def worth_guessing(
    acceptance: float,
    pass_seconds: float,
    row_seconds: float,
    limit: int,
    guess_seconds: float = 0.0,
    *,
    num_others: int = 0,
) -> Worth:
    """Return how many tokens to guess, so that the most tokens a second are expected.

    A pass checks each guessed token in a row of its own. It yields the tokens that were right, and one more.

    Args:
        acceptance: the probability that a guessed token is right, given that those before it are.
        pass_seconds: time to read the weights once, during which rows are computed.
        row_seconds: time to compute a row.
        limit: the most tokens.
        guess_seconds: time to guess a token.
        num_others: rows that other texts compute in the same pass; each yields a token.
    """
    expected, right = 1.0 + num_others, 1.0
    plain = expected / max(pass_seconds, expected * row_seconds, 1e-9)
    best, most = 0, LEAST_GAIN * plain
    all_further = acceptance / (1 - acceptance) if acceptance < 1 else inf
    for number in range(1, limit + 1):
        right *= acceptance
        expected += right
        seconds = max(pass_seconds, (number + 1 + num_others) * row_seconds, 1e-9)
        if expected + right * all_further < most * seconds:  # nor do more guesses, which take no less time
            break
        speed = expected / seconds
        if guess_seconds:
            speed = 1 / (1 / speed + number * guess_seconds / expected)
        if speed > most:
            best, most = number, speed
    return Worth(best, most if best else plain)


@dataclass(slots=True)
class Times:
    """Measured times of a model's passes.

    Attributes:
        pass_seconds: time to read the weights once.
        row_seconds: time to compute a row of one token.
    """

    pass_seconds: float
    row_seconds: float

    def note(self, num_rows: int, seconds: float, waited_seconds: float, reading_seconds: float) -> None:
        """Note a pass with rows of one token.

        Its time is not that of reading: with many rows it takes as long as they do, and more of them would look free.

        Args:
            num_rows: of the pass.
            seconds: its time.
            waited_seconds: the part of it that it waited for weights.
            reading_seconds: the part of it in which reads were in flight.
        """
        row = (seconds - waited_seconds) / num_rows
        self.row_seconds += (1 - _KEEPS) * (row - self.row_seconds)
        if waited_seconds > _WAITS * seconds:
            self.pass_seconds += (1 - _KEEPS) * (min(seconds, reading_seconds) - self.pass_seconds)
        else:  # it was computing that took so long
            self.pass_seconds = min(self.pass_seconds, seconds)


@dataclass(slots=True)
class Acceptance:
    """The share of right guesses, by their quality.

    Attributes:
        expected: the shares before any guess is known; one half where there is none.
    """

    expected: Mapping[int, float] = field(default_factory=dict)
    _right: dict[int, float] = field(default_factory=dict)
    _tried: dict[int, float] = field(default_factory=dict)

    def note(self, quality: int, num_tried: int, num_right: int) -> None:
        """Note a guess. A token after a wrong one says nothing, and does not count as tried."""
        num_counted = min(num_tried, num_right + 1)
        self._right[quality] = self._right.get(quality, 0.0) * _FORGETS + num_right
        self._tried[quality] = self._tried.get(quality, 0.0) * _FORGETS + num_counted

    def of(self, quality: int) -> float:
        """Return the expected share of right tokens."""
        before = 2 * self.expected.get(quality, 0.5)
        return (before + self._right.get(quality, 0.0)) / (2 + self._tried.get(quality, 0.0))

"""Guesses: where they come from, and how many are worth computing."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_flash.speculation import (
    LEAST_GAIN,
    MAX_MATCH,
    Acceptance,
    Guesses,
    Lookup,
    Source,
    Times,
    worth_guessing,
)

shares = st.floats(0, 1)
seconds = st.floats(1e-6, 1e3)
limits = st.integers(0, 20)


def speed(number: int, acceptance: float, reading: float, row: float, guessing: float) -> float:
    """Return the expected tokens a second with so many guesses."""
    tokens = sum(acceptance**i for i in range(number + 1))
    return tokens / (max(reading, (number + 1) * row) + number * guessing)


@given(shares, seconds, seconds, limits, st.floats(0, 1e3))
def test_no_other_number_of_guesses_is_faster(
    acceptance: float, reading: float, row: float, limit: int, guessing: float
) -> None:
    number, expected = worth_guessing(acceptance, reading, row, limit, guessing)
    assert 0 <= number <= limit
    speeds = [speed(i, acceptance, reading, row, guessing) for i in range(limit + 1)]
    assert expected == pytest.approx(speeds[number])
    if number:
        assert speeds[number] >= max(speeds) * (1 - 1e-9)
        assert speeds[number] >= LEAST_GAIN * speeds[0] * (1 - 1e-9)
    else:
        assert max(speeds) <= LEAST_GAIN * speeds[0] * (1 + 1e-9)


@pytest.mark.parametrize(("num_others", "number"), [(0, 9), (4, 5), (8, 1), (9, 0), (20, 0)])
def test_rows_of_others_take_the_place_of_guesses(num_others: int, number: int) -> None:
    assert worth_guessing(1.0, 1.0, 0.1, 15, num_others=num_others).number == number


@given(st.floats(0.06, 1), seconds, st.integers(1, 20))
def test_everything_is_guessed_where_rows_are_free(acceptance: float, reading: float, limit: int) -> None:
    number = worth_guessing(acceptance, reading, reading / 100, limit).number
    assert number == limit or acceptance ** (number + 1) < 1e-15  # one more adds nothing that a float can hold


@given(shares, shares, seconds, seconds, limits)
def test_better_guesses_are_not_fewer(one: float, other: float, reading: float, row: float, limit: int) -> None:
    low, high = sorted([one, other])
    numbers = [worth_guessing(acceptance, reading, row, limit).number for acceptance in (low, high)]
    assert numbers[0] <= numbers[1]


def test_times_follow_a_disk_that_gets_slower_and_faster() -> None:
    times = Times(1.0, 0.1)
    for _ in range(30):
        times.note(4, 2.0, 1.2, 2.0)
    assert times.pass_seconds == pytest.approx(2.0, rel=0.01) and times.row_seconds == pytest.approx(0.2, rel=0.01)
    for _ in range(30):
        times.note(4, 0.4, 0.0, 0.4)  # nothing waits: reading takes no longer than that
    assert times.pass_seconds == pytest.approx(0.4) and times.row_seconds == pytest.approx(0.1, rel=0.01)


def test_rows_that_take_long_do_not_make_more_rows_look_free() -> None:
    times = Times(0.12, 0.1)
    for _ in range(30):
        number = worth_guessing(0.6, times.pass_seconds, times.row_seconds, 8).number
        seconds = 0.1 * (1 + number) + 0.06  # the first weights are waited for
        times.note(1 + number, seconds, 0.06, 0.12)
    assert times.pass_seconds == pytest.approx(0.12)
    assert number == 0  # a row takes as long as reading does


def test_acceptance_follows_the_text_for_each_quality() -> None:
    acceptance = Acceptance()
    assert acceptance.of(1) == acceptance.of(4) == 0.5
    for _ in range(100):
        acceptance.note(4, 5, 5)
        acceptance.note(1, 5, 0)
    assert acceptance.of(4) > 0.95 and acceptance.of(1) < 0.05
    for _ in range(400):
        acceptance.note(1, 0, 0)  # nothing was guessed
    assert acceptance.of(1) == pytest.approx(0.5, abs=0.05)


def test_the_expected_share_counts_until_guesses_are_known() -> None:
    acceptance = Acceptance({1: 0.1})
    assert (acceptance.of(1), acceptance.of(2)) == (0.1, 0.5)
    acceptance.note(1, 100, 100)
    assert acceptance.of(1) > 0.95


tokens = st.lists(st.integers(-3, 2**20) | st.integers(0, 3), max_size=60)


@given(tokens, st.integers(1, 9))
def test_a_guess_is_what_followed_the_longest_match(text: list[int], number: int) -> None:
    lookup = Lookup(text)
    length = lookup.look()
    lengths = [n for n in range(1, MAX_MATCH + 1) if n < len(text) and _latest(text, n) is not None]
    assert length == max(lengths, default=0)
    if length:
        at = _latest(text, length)
        assert at is not None
        longer = list(text)
        while len(longer) < len(text) + number:
            longer.append(longer[at + len(longer) - len(text)])
        assert lookup.guess(number) == longer[len(text) :]


def _latest(text: list[int], length: int) -> int | None:
    """Return where the text goes on after the latest earlier occurrence of its last tokens."""
    for at in range(len(text) - 1, length - 1, -1):
        if text[at - length : at] == text[-length:]:
            return at
    return None


@given(tokens)
def test_tokens_may_come_one_after_another(text: list[int]) -> None:
    lookup = Lookup(text[:5])
    for token in text[5:]:
        lookup.add(token)
    whole = Lookup(text)
    assert lookup.look() == whole.look() and (not whole.look() or lookup.guess(5) == whole.guess(5))


class Fixed(Source):
    """A source whose guesses are right, or never are."""

    def __init__(self, text: list[int], *, is_right: bool, guess_seconds: float = 0.0) -> None:
        self.guess_seconds = guess_seconds
        self.expected = dict[int, float]()
        self.num_asked = 0
        self._text, self._at, self._wrong = text, 0, int(not is_right)

    def add(self, token: int) -> None:
        self._at += 1

    def look(self) -> int:
        return 1

    def guess(self, number: int) -> list[int]:
        self.num_asked += 1
        return [token + self._wrong for token in self._text[self._at : self._at + number]]


def passes_of(text: list[int], guesses: Guesses, times: Times) -> int:
    """Go through a text, and return the number of passes."""
    at = passes = 0
    while at < len(text):
        limit = len(text) - at - 1
        guessed = guesses.take(times, limit) if guesses.look(limit) else []
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(guessed, text[at:], strict=False)))
        for token in text[at : at + right + 1]:
            guesses.add(token)
        if guessed:
            guesses.note(len(guessed), right)
        at, passes = at + right + 1, passes + 1
    return passes


@pytest.mark.parametrize("seconds", [0.0, 0.001])
@pytest.mark.parametrize("order", [1, -1])
def test_the_better_of_two_sources_is_asked(seconds: float, order: int) -> None:
    text, times = list(range(300)), Times(1.0, 0.01)
    right, wrong = Fixed(text, is_right=True, guess_seconds=seconds), Fixed(text, is_right=False)
    assert passes_of(text, Guesses(*[right, wrong][::order]), times) < 1.2 * 300 / 16


def test_a_slow_source_is_left_alone_where_a_free_one_is_as_good() -> None:
    text, times = list(range(300)), Times(1.0, 0.01)
    free, slow = Fixed(text, is_right=True), Fixed(text, is_right=True, guess_seconds=0.1)
    passes_of(text, Guesses(slow, free), times)
    assert slow.num_asked == 0

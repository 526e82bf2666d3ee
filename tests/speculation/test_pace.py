"""Guesses: where they come from, and how many are worth computing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_flash.speculation.lookup import MAX_MATCH, Lookup
from mlx_flash.speculation.pace import LEAST_GAIN, Acceptance, Times, num_worth_guessing

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
    number = num_worth_guessing(acceptance, reading, row, limit, guessing)
    assert 0 <= number <= limit
    speeds = [speed(i, acceptance, reading, row, guessing) for i in range(limit + 1)]
    if number:
        assert speeds[number] >= max(speeds) * (1 - 1e-9)
        assert speeds[number] >= LEAST_GAIN * speeds[0] * (1 - 1e-9)
    else:
        assert max(speeds) <= LEAST_GAIN * speeds[0] * (1 + 1e-9)


@given(shares, seconds, seconds, limits)
def test_nothing_is_guessed_for_a_model_in_memory(acceptance: float, reading: float, more: float, limit: int) -> None:
    assert num_worth_guessing(acceptance, reading, reading + more, limit) == 0


@pytest.mark.parametrize(("num_others", "number"), [(0, 9), (4, 5), (8, 1), (9, 0), (20, 0)])
def test_rows_of_others_take_the_place_of_guesses(num_others: int, number: int) -> None:
    assert num_worth_guessing(1.0, 1.0, 0.1, 15, num_others=num_others) == number


@given(st.floats(0.06, 1), seconds, st.integers(1, 20))
def test_everything_is_guessed_where_rows_are_free(acceptance: float, reading: float, limit: int) -> None:
    number = num_worth_guessing(acceptance, reading, reading / 100, limit)
    assert number == limit or acceptance ** (number + 1) < 1e-15  # one more adds nothing that a float can hold


@given(shares, shares, seconds, seconds, limits)
def test_better_guesses_are_not_fewer(one: float, other: float, reading: float, row: float, limit: int) -> None:
    low, high = sorted([one, other])
    numbers = [num_worth_guessing(acceptance, reading, row, limit) for acceptance in (low, high)]
    assert numbers[0] <= numbers[1]


def test_times_follow_a_disk_that_gets_slower_and_faster() -> None:
    times = Times(1.0, 0.1)
    for _ in range(30):
        times.note(4, 2.0, 1.2)
    assert times.pass_seconds == pytest.approx(2.0, rel=0.01) and times.row_seconds == pytest.approx(0.2, rel=0.01)
    for _ in range(30):
        times.note(4, 0.4, 0.0)  # nothing waits: reading takes no longer than that
    assert times.pass_seconds == pytest.approx(0.4) and times.row_seconds == pytest.approx(0.1, rel=0.01)


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

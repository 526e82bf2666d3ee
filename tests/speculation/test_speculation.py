"""Guessed tokens change how many passes a text takes, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

import mlx_flash
from mlx_flash import BudgetError, DiskKVCache, FlashLLM, ReadError, load_model
from mlx_flash.compat.generation import stock_generate_step, stock_speculative_generate_step
from mlx_flash.engine.call import Row
from mlx_flash.generation import speculative_generate_step
from mlx_flash.prefixes import prefixcache
from mlx_flash.prefixes.prefixcache import prefix_directory
from mlx_flash.prefixes.store import clear_prefixes
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
from models import LLAMA, computed, guessed, same_bits, stock
from oracle import Oracle, on_a_machine, with_room
from oracle import free_rows as free_rows  # a fixture
from saved_models import model_fixture
from shared_passes import MODELS, Directories, Tokens, alone, check_equal
from shared_passes import directories as directories  # a fixture
from streamed import LARGE_GB, config, failing_once, streamed_whole

PROMPT = [5, 17, 290, 3, 42, 64, 99, 5, 17, 290, 3, 42]
NUM_TOKENS = 20


def by_mlx_lm(directory: Path, max_tokens: int = NUM_TOKENS, **options: Any) -> Tokens:
    return alone(directory, PROMPT, max_tokens, **options)


def streamed(model: FlashLLM, max_tokens: int = NUM_TOKENS, **options: Any) -> Tokens:
    mx.random.seed(3)
    return list(mlx_flash.generate_step(mx.array(PROMPT), model, max_tokens=max_tokens, **options))


def by_oracle(monkeypatch: pytest.MonkeyPatch, expected: Tokens) -> None:
    """Make the generation loop ask an oracle."""
    monkeypatch.setattr("mlx_flash.generation.sequence.Lookup", lambda prompt: Oracle([token for token, _ in expected]))


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_logprobs_are_those_of_plain_decoding(
    directories: Directories, free_rows: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    expected = by_mlx_lm(directories(name))
    by_oracle(monkeypatch, expected)
    with streamed_whole(directories(name)) as model:
        check_equal(streamed(with_room(model)), expected)
        counters = model.counters
        assert counters.num_guessed > counters.num_right >= NUM_TOKENS // 2
        assert counters.num_passes == NUM_TOKENS - counters.num_right
        assert counters.num_tokens_out == NUM_TOKENS - 1  # the prompt's call gives the first
        assert counters.num_tokens_in == len(PROMPT) + NUM_TOKENS - 1
        assert counters.num_failed == 0


def test_a_repeating_text_takes_less_than_half_the_passes(directories: Directories, free_rows: None) -> None:
    expected = by_mlx_lm(directories("mamba2"))  # which says the same two tokens over and over
    with streamed_whole(directories("mamba2")) as model:
        check_equal(streamed(with_room(model)), expected)
        assert model.counters.num_passes < NUM_TOKENS / 2


def test_a_model_in_memory_guesses_nothing(directories: Directories, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine(monkeypatch, 0.1, 0.16)
    with streamed_whole(directories("mamba2")) as model:
        streamed(with_room(model))
        assert model.counters.num_guessed == 0


def arrays_of(cache: list[Any]) -> list[mx.array]:
    """Return what a cache holds, without the room behind the tokens."""
    found: list[Any] = []
    for entry in cache:
        whole = entry.keys_and_values() if hasattr(entry, "keys_and_values") else entry.cache
        found += [array for item in whole for array in (item if isinstance(item, list | tuple) else [item])]
    return found


@pytest.mark.parametrize("num_tokens", [4, 5])
@pytest.mark.parametrize("name", MODELS)
def test_the_callers_cache_ends_as_plain_decoding_leaves_it(
    directories: Directories, free_rows: None, monkeypatch: pytest.MonkeyPatch, name: str, num_tokens: int
) -> None:
    """The text may end at its last token, or wherever the caller stops to listen."""
    plain = stock(directories(name))
    theirs = make_prompt_cache(plain)
    expected = list(stock_generate_step(mx.array(PROMPT), plain, max_tokens=num_tokens, prompt_cache=theirs))
    by_oracle(monkeypatch, by_mlx_lm(directories(name)))
    with streamed_whole(directories(name)) as model:
        for max_tokens in (num_tokens, -1):
            ours = make_prompt_cache(with_room(model))
            steps: Any = mlx_flash.generate_step(mx.array(PROMPT), model, max_tokens=max_tokens, prompt_cache=ours)
            got = []
            for number in range(1, num_tokens + 1):
                got.append(next(steps))
                lengths = {entry.offset for entry in ours if hasattr(entry, "offset")}
                assert lengths <= {
                    len(PROMPT) + number
                }  # as mlx-lm's, whether the token is computed or guesses are ahead
            num_passes = model.counters.num_passes
            steps.close()
            assert model.counters.num_passes == num_passes
            check_equal(got, expected)
            assert same_bits(arrays_of(ours), arrays_of(theirs))
            offsets = [[getattr(entry, "offset", None) for entry in cache] for cache in (ours, theirs)]
            assert offsets[0] == offsets[1]


def test_a_cache_on_disk_and_a_switch_refuse_with_the_reason(
    directories: Directories, free_rows: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = by_mlx_lm(directories("llama"))
    by_oracle(monkeypatch, expected)
    caplog.set_level("INFO", "mlx_flash")
    with streamed_whole(directories("llama")) as model:
        caches = [DiskKVCache(directory=directories("llama") / "kv") for _ in model.layers]
        check_equal(streamed(with_room(model), prompt_cache=caches), expected)
        assert model.counters.num_guessed == 0
    with streamed_whole(directories("llama"), speculation=False) as model:
        check_equal(streamed(with_room(model)), expected)
        assert model.counters.num_guessed == 0
    told = [record.message for record in caplog.records if "no tokens are guessed" in record.message]
    assert [line.partition(": ")[2] for line in told] == ["keys and values are on disk", "speculation is switched off"]


def test_a_quantized_cache(directories: Directories, free_rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that was quantized before goes on in rows; ``kv_bits`` itself is left to mlx-lm's loop."""

    def prepared(model: Any) -> list[Any]:
        cache = make_prompt_cache(model)
        model(mx.array([[7, 8, 9, 10]]), cache=cache)
        return [entry.to_quantized(group_size=32, bits=8) for entry in cache]

    plain = stock(directories("llama"))
    expected = by_mlx_lm_from(plain, prepared(plain))
    by_oracle(monkeypatch, expected)
    with streamed_whole(directories("llama")) as model:
        check_equal(streamed(with_room(model), prompt_cache=prepared(model)), expected)
        assert model.counters.num_right > 0


def by_mlx_lm_from(model: Any, cache: list[Any]) -> Tokens:
    return list(stock_generate_step(mx.array(PROMPT), model, max_tokens=NUM_TOKENS, prompt_cache=cache))


def test_a_failed_read_puts_every_cache_back(directories: Directories, free_rows: None) -> None:
    """Also those that cannot be trimmed: a window and recurrent states."""
    for name in ("gemma3", "mamba2", "qwen3_next"):
        with streamed_whole(directories(name)) as model:
            cache = make_prompt_cache(with_room(model))
            computed(model, mx.array([PROMPT]), cache)
            before = [mx.array(array) for array in arrays_of(cache)]
            with failing_once(model), pytest.raises(ReadError, match="unplugged"):
                guessed(model, [1, 2, 3], cache)
            assert same_bits(arrays_of(cache), before)


def test_rows_that_do_not_fit_are_not_computed(directories: Directories) -> None:
    with streamed_whole(directories("llama")) as model:
        cache = make_prompt_cache(with_room(model))
        computed(model, mx.array([PROMPT]), cache)
        rows = guessed(model, [1, 2, 3], cache)
        assert len(rows.outputs) == 3
        rows.keep(1)
        model.plan = replace(model.plan, activations=replace(model.plan.activations, logits_per_token=10**9))
        model.plan = replace(model.plan, budget_bytes=model.plan.budget_bytes + 6 * 10**9)  # one row needs 5
        rows = guessed(model, [2, 3, 4], cache)
        assert len(rows.outputs) == 1
        assert {entry.offset for entry in cache} == {len(PROMPT) + 2}


draft_directory = model_fixture({**LLAMA, "num_hidden_layers": 4})
"""A draft model that is right now and then: the first layers of the Llama."""


@pytest.mark.parametrize("name", MODELS)
def test_a_draft_model_changes_nothing_but_the_passes(directories: Directories, free_rows: None, name: str) -> None:
    """A model that drafts for itself is always right, whatever cache it has."""
    expected = by_mlx_lm(directories(name))
    with streamed_whole(directories(name)) as model:
        steps = speculative_generate_step(
            mx.array(PROMPT), with_room(model), stock(directories(name)), num_draft_tokens=3, max_tokens=NUM_TOKENS
        )
        found = list(steps)
        check_equal([(token, logprobs) for token, logprobs, _ in found], expected)
        counters = model.counters
        assert counters.num_guessed == counters.num_right == NUM_TOKENS - counters.num_passes
        assert counters.num_passes == 1 + -(-(NUM_TOKENS - 1) // 4)
        assert sum(is_drafted for *_, is_drafted in found) == counters.num_right


def test_guesses_that_are_no_tokens_of_the_model(
    directories: Directories, free_rows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model may have more: their rows of the embedding are memory of others."""
    expected = by_mlx_lm(directories("llama"))
    tokens = [token for token, _ in expected]
    size = expected[0][1].shape[-1]
    monkeypatch.setattr(
        "mlx_flash.generation.sequence.Lookup",
        lambda prompt: Oracle([*tokens[:3], size, *tokens[4:9], 10**6, *tokens[10:]]),
    )
    with streamed_whole(directories("llama")) as model:
        check_equal(streamed(with_room(model)), expected)
        assert model.counters.num_right > 5


def test_an_unset_number_of_draft_tokens_is_what_pays(directories: Directories, free_rows: None) -> None:
    expected = by_mlx_lm(directories("llama"))
    with streamed_whole(directories("llama")) as model:
        steps = speculative_generate_step(
            mx.array(PROMPT), with_room(model), stock(directories("llama")), max_tokens=NUM_TOKENS
        )
        check_equal([(token, logprobs) for token, logprobs, _ in steps], expected)
        assert model.counters.num_passes < 1 + -(-(NUM_TOKENS - 1) // 4), "fewer than with mlx-lm's three at a time"


@pytest.mark.parametrize("sampler", [None, make_sampler(temp=0.7)], ids=["greedy", "sampled"])
def test_a_draft_model_that_is_often_wrong(
    directories: Directories, draft_directory: Path, free_rows: None, sampler: Any
) -> None:
    expected = by_mlx_lm(directories("llama"), sampler=sampler)
    draft = stock(draft_directory)
    with streamed_whole(directories("llama")) as model:
        own = make_prompt_cache(with_room(model))
        caches = own + make_prompt_cache(draft)
        mx.random.seed(3)
        steps = speculative_generate_step(
            mx.array(PROMPT),
            model,
            draft,
            num_draft_tokens=3,
            max_tokens=NUM_TOKENS,
            prompt_cache=caches,
            sampler=sampler,
        )
        check_equal([(token, logprobs) for token, logprobs, _ in steps], expected)
        assert model.counters.num_guessed > model.counters.num_right
        assert {entry.offset for entry in caches} == {len(PROMPT) + NUM_TOKENS}
        drafted = make_prompt_cache(draft)
        draft(mx.array([[*PROMPT, *(token for token, _ in expected)]]), cache=drafted)
        for ours, theirs in zip(arrays_of(caches[len(own) :]), arrays_of(drafted), strict=True):
            assert mx.allclose(ours, theirs, atol=1e-4)


def test_a_model_that_must_not_guess_decodes_plainly(directories: Directories) -> None:
    draft = stock(directories("llama"))
    expected = by_mlx_lm(directories("llama"))
    with load_model(directories("llama"), config(speculation=False))[0] as model:
        steps = speculative_generate_step(mx.array(PROMPT), model, draft, num_draft_tokens=2, max_tokens=NUM_TOKENS)
        found = list(steps)
        check_equal([(token, logprobs) for token, logprobs, _ in found], expected)
        assert not any(is_drafted for *_, is_drafted in found)
        assert model.counters.num_guessed == 0


def test_a_model_in_memory_is_left_to_mlx_lm(directories: Directories) -> None:
    draft, plain = stock(directories("llama")), stock(directories("llama"))
    options: dict[str, Any] = {"num_draft_tokens": 2, "max_tokens": NUM_TOKENS}
    expected = list(stock_speculative_generate_step(mx.array(PROMPT), plain, draft, **options))
    with load_model(directories("llama"), config(ram_budget_gb=LARGE_GB))[0] as model:
        found = list(speculative_generate_step(mx.array(PROMPT), model, draft, **options))
    check_equal([each[:2] for each in found], [each[:2] for each in expected])
    assert [each[2] for each in found] == [each[2] for each in expected] and any(each[2] for each in found)


def test_a_draft_model_whose_guesses_had_no_room_gets_the_text(
    directories: Directories, draft_directory: Path, free_rows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance, refused = FlashLLM.advance, list[Row]()

    def without_room(model: FlashLLM, rows: Sequence[Row]) -> None:
        if not refused and rows[0].whole.checkpoints is not None:
            rows[0].error = BudgetError("no room for guesses", 1)
            refused.append(rows[0])
        else:
            advance(model, rows)

    monkeypatch.setattr(FlashLLM, "advance", without_room)
    draft = stock(draft_directory)
    with streamed_whole(directories("llama")) as model:
        caches = make_prompt_cache(with_room(model)) + make_prompt_cache(draft)
        options: Any = {"num_draft_tokens": 3, "max_tokens": 5, "prompt_cache": caches}
        steps = speculative_generate_step(mx.array(PROMPT), model, draft, **options)
        assert [is_drafted for *_, is_drafted in steps] == [False] * 5 and refused
        assert {entry.offset for entry in caches} == {len(PROMPT) + 5}


@pytest.mark.parametrize("name", MODELS)
def test_with_the_prefix_cache(
    directories: Directories, free_rows: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A text that was guessed leaves the pages that plain decoding leaves."""
    store = prefixcache.PrefixStore
    monkeypatch.setattr(prefixcache, "PrefixStore", lambda *a, **b: store(*a, **{**b, "page_tokens": 4}))
    expected = by_mlx_lm(directories(name))
    by_oracle(monkeypatch, expected)
    text = [*PROMPT, *(token for token, _ in expected), 7, 8, 9]
    restored, num_restored, kept = [], [], []
    for speculation in (True, False):
        clear_prefixes(prefix_directory())
        settings: dict[str, Any] = {"kv_prefixes": "exact", "speculation": speculation}
        with streamed_whole(directories(name), **settings) as model:
            check_equal(streamed(with_room(model)), expected)
            assert (model.counters.num_guessed > model.counters.num_right > 0) is speculation
        kept.append(sorted(path.name for path in prefix_directory().rglob("*.page")))
        with streamed_whole(directories(name), **settings) as model:
            cache = make_prompt_cache(with_room(model))
            assert model.prefixes is not None
            model.advance([model.row(mx.array([text]), cache, 64, wants_logits=False)])
            num_restored.append(model.prefixes.counters.num_restored)
            restored.append(arrays_of(cache))
    assert num_restored[0] == num_restored[1]
    assert set(kept[1]) <= set(kept[0]) and kept[1]
    assert same_bits(*restored)


# --- where guesses come from, and how many are worth computing --------------------------------------------------------


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

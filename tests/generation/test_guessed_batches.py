"""Guesses in batches: sequences that share passes get several tokens a pass, and the bits of runs alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import StopSequences
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from batches import Tokens, alone, by_generator, check_equal
from mlx_flash.errors import BudgetError
from mlx_flash.generation import RowGenerator
from oracle import Oracle, free_rows, with_room
from shared_passes import PROMPTS, STEP, Directories, directories
from streamed import streamed_whole

__all__ = ["directories", "free_rows"]

LENGTHS = [20, 9, 14, 1]


def expected_of(directory: Path, **options: Any) -> list[Tokens]:
    return [alone(directory, prompt, number, **options) for prompt, number in zip(PROMPTS, LENGTHS, strict=True)]


def by_oracles(monkeypatch: pytest.MonkeyPatch, texts: list[Tokens]) -> None:
    """Let each sequence of a batch guess two thirds of its text right."""
    known = {tuple(prompt): [token for token, _ in text] for prompt, text in zip(PROMPTS, texts, strict=True)}
    monkeypatch.setattr("mlx_flash.generation.batches.Lookup", lambda prompt: Oracle(known[tuple(prompt)]))


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba2", "qwen3_moe"])
def test_rows_with_guesses_are_their_solo_runs(
    directories: Directories, free_rows: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    processors = make_logits_processors(repetition_penalty=1.3, repetition_context_size=20)
    expected = expected_of(directories(name), logits_processors=processors)
    by_oracles(monkeypatch, expected)
    with streamed_whole(directories(name)) as model:
        generator = RowGenerator(with_room(model), prefill_step_size=STEP)
        uids = generator.insert(PROMPTS, max_tokens=LENGTHS, logits_processors=[processors] * 4)
        for tokens, other in zip(by_generator(generator, uids), expected, strict=True):
            check_equal(tokens, other)
        counters = model.counters
        assert counters.num_guessed > counters.num_right >= 10
        assert counters.num_passes < max(LENGTHS)
        assert counters.num_tokens_in == sum(map(len, PROMPTS)) + sum(LENGTHS) - len(LENGTHS)


def test_a_row_ends_within_its_guesses(
    directories: Directories, free_rows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache then holds the text, and no guesses."""
    expected = expected_of(directories("llama"))
    by_oracles(monkeypatch, expected)
    wanted = [token for token, _ in expected[0]]
    with streamed_whole(directories("llama")) as model:
        generator = RowGenerator(with_room(model), prefill_step_size=STEP)
        end = wanted.index(wanted[2]) + 1
        (uid,) = generator.insert(PROMPTS[:1], max_tokens=LENGTHS[:1], stop_sequences=[StopSequences([[wanted[2]]])])
        answers: list[Any] = []
        while not answers or answers[-1].finish_reason is None:
            answers += generator.next()[1]
        assert [answer.token for answer in answers] == wanted[:end] and answers[-1].uid == uid
        assert answers[-1].all_tokens == [*PROMPTS[0], *wanted[: end - 1]]
        assert {entry.offset for entry in answers[-1].prompt_cache} == {len(PROMPTS[0]) + end - 1}


def test_sequences_that_draw_random_numbers_do_not_guess(
    directories: Directories, free_rows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their order would depend on which guesses are right."""
    by_oracles(monkeypatch, expected_of(directories("llama")))

    def sampled() -> list[list[int]]:
        mx.random.seed(5)
        with streamed_whole(directories("llama")) as model:
            generator = RowGenerator(with_room(model), prefill_step_size=STEP, sampler=make_sampler(temp=0.9))
            found = by_generator(generator, generator.insert(PROMPTS, max_tokens=LENGTHS))
            assert model.counters.num_guessed == 0
        return [[token for token, _ in tokens] for tokens in found]

    assert sampled() == sampled()


def test_a_guess_without_room_is_computed_without(
    directories: Directories, free_rows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = expected_of(directories("llama"))
    by_oracles(monkeypatch, expected)
    with streamed_whole(directories("llama")) as model:
        generator = RowGenerator(with_room(model), prefill_step_size=STEP)
        advance = model.advance

        def refusing(rows: Any) -> None:
            guessing = [row for row in rows if len(row.parts) > 1 and row.parts[0].checkpoints is not None]
            advance([row for row in rows if row not in guessing])
            for row in guessing:
                row.error = BudgetError("no room", 0)

        monkeypatch.setattr(model, "advance", refusing)
        for tokens, other in zip(
            by_generator(generator, generator.insert(PROMPTS, max_tokens=LENGTHS)), expected, strict=True
        ):
            check_equal(tokens, other)
        assert model.counters.num_right == 0

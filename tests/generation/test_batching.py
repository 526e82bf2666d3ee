"""Each sequence of an exact batch has the bits of a run alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.generate import StopSequences
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlx_flash
from mlx_flash import FlashConfig, FlashLLM, load_model
from mlx_flash.compat.generation import StockBatchGenerator, stock_generate_step
from mlx_flash.engine.prepare import prepare
from mlx_flash.errors import BudgetError
from mlx_flash.generation import RowGenerator, batches
from mlx_flash.generation.batches import shares_passes
from mlx_flash.layout.reachable import arrays_in
from mlx_flash.residency.plan import rows_bytes
from models import GEMMA3, LLAMA, VOCAB_SIZE, same_bits, save, stock
from oracle import Oracle, free_rows, with_room
from shared_passes import MODELS, PROMPTS, STEP, Directories, Tokens, alone, by_generator, check_equal, directories
from streamed import LARGE_GB, config, streamed_whole

__all__ = ["directories", "free_rows"]

TOKENIZER = SimpleNamespace(eos_token_ids=[], decode=lambda tokens: " ".join(map(str, tokens)))


@pytest.mark.parametrize("name", MODELS)
def test_every_row_is_its_solo_run(directories: Directories, name: str) -> None:
    with streamed_whole(directories(name)) as model:
        generator = RowGenerator(model, prefill_step_size=STEP)
        got = by_generator(generator, generator.insert(PROMPTS, max_tokens=[5, 2, 4, 1]))
        for tokens, prompt, number in zip(got, PROMPTS, [5, 2, 4, 1], strict=True):
            check_equal(tokens, alone(directories(name), prompt, number))
        assert model.counters.num_passes == 5
        assert model.engine is not None
        assert model.engine.stream.stats.num_acquired == 5 * len(model.engine.stream.units)


@pytest.mark.parametrize("name", MODELS)
def test_everything_in_memory_is_mlx_lms_batch(directories: Directories, name: str) -> None:
    """Tokens and probabilities are those of its padded rows, not of runs alone."""
    wanted: dict[str, Any] = {"max_tokens": [5, 2, 4, 1], "return_token_ids": True, "return_logprobs": True}
    expected = mlx_lm.batch_generate(stock(directories(name)), TOKENIZER, PROMPTS, **wanted)
    with load_model(directories(name), config(ram_budget_gb=LARGE_GB))[0] as model:
        got = mlx_flash.batch_generate(model, TOKENIZER, PROMPTS, **wanted)
        assert not model.engine.stream.units
        assert not shares_passes(model, [30] * 4)
    assert (got.token_ids, got.logprobs) == (expected.token_ids, expected.logprobs)


GIVEN: dict[str, Callable[[int], Any]] = {
    "quantized": lambda index: QuantizedKVCache(32, 8),
    "windows of two sizes": lambda index: RotatingKVCache(16 + 8 * index),
}


@pytest.mark.parametrize("name", GIVEN)
def test_caches_that_cannot_be_merged_are_those_of_rows(directories: Directories, name: str) -> None:
    """mlx-lm's batches raise an error."""
    directory, prompts = directories("llama"), ([1, 2, 3, 4, 5] * 6, [6, 7])
    with load_model(directory, config(ram_budget_gb=LARGE_GB))[0] as model:
        num_layers = len(make_prompt_cache(model))
        caches = [[GIVEN[name](index) for _ in range(num_layers)] for index in range(len(prompts))]
        for prompt, cache in zip(prompts, caches, strict=True):
            model(mx.array([prompt]), cache=cache)
        got = mlx_flash.batch_generate(model, TOKENIZER, [[7, 8], [9]], caches, max_tokens=5, return_token_ids=True)
        for tokens, prompt, cache in zip(got.token_ids, [[7, 8], [9]], caches, strict=True):
            steps = stock_generate_step(mx.array(prompt), model, max_tokens=5, prompt_cache=cache)
            assert tokens == [token for token, _ in steps]


def test_without_room_for_padding_sequences_are_rows(directories: Directories, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest of those that are computed together decide."""
    made: list[dict[str, Any]] = []

    class Noted(RowGenerator):
        def __init__(self, *args: Any, **options: Any) -> None:
            made.append(options)
            super().__init__(*args, **options)

    monkeypatch.setattr(batches, "RowGenerator", Noted)
    all_end = SimpleNamespace(eos_token_ids=range(VOCAB_SIZE), decode=str)
    with load_model(directories("llama"), config(ram_budget_gb=LARGE_GB))[0] as model:
        most = next(n for n in range(1000, 10**7, 1000) if shares_passes(model, [n] * 3))
        for lengths, are_rows in (([most - 1] * 3, True), ([most - 1, 5, most - 1], True), ([most // 2] * 3, False)):
            made.clear()
            got = mlx_flash.batch_generate(model, all_end, [[1], [2], [3]], max_tokens=lengths)
            assert len(got.texts) == 3 and bool(made) == are_rows
        small = {"completion_batch_size": 1, "prefill_batch_size": 1}
        for options, are_rows in ((small, False), ({"completion_batch_size": 1}, True), ({}, True)):
            made.clear()
            mlx_flash.batch_generate(model, all_end, [[1]] * 8, max_tokens=[most // 2] * 8, **options)
            assert bool(made) == are_rows
        lengths = list(np.array([3, 2, 4]))
        assert len(mlx_flash.batch_generate(model, TOKENIZER, [[1], [2], [3]], max_tokens=lengths).texts) == 3


def test_sequences_that_the_budget_does_not_hold_together_wait(tmp_path: Path) -> None:
    """Twenty caches take several times the memory that the budget leaves for keys and values."""
    directory = save(tmp_path, LLAMA | {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 256})
    prompts = [[7 * i % 300, *range(k % 5), k] for i, k in enumerate(range(20))]
    least = prepare(directory, config(ram_budget_gb="min")).plan.minimum_bytes
    with load_model(directory, config(ram_budget_gb=(least + 90_000_000) / 1e9))[0] as model:
        response = mlx_flash.batch_generate(model, TOKENIZER, prompts, max_tokens=3, return_token_ids=True)
        step = model.plan.prefill_step_size
        assert model.has_room([9]) and not model.has_room([9] * 20)
        rows = rows_bytes(model.plan, [9] * 20, may_offload=True)
        assert rows > 1.5 * model.plan.room_bytes > rows / 10
    for tokens, prompt in zip(response.token_ids, prompts, strict=True):
        assert tokens == [token for token, _ in alone(directory, prompt, 3, prefill_step_size=step)]


def test_a_sequence_waits_where_one_rank_has_no_room(directories: Directories) -> None:
    """Otherwise ranks with unequal budgets would compute other sequences."""
    with streamed_whole(directories("llama")) as model:
        assert model.has_room([1])
        prepared = model._life.prepared
        model._life.prepared = replace(prepared, chain=cast(Any, SimpleNamespace(least=lambda has_room: 0)))
        assert not model.has_room([1])
        model._life.prepared = prepared


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(1, 3 * STEP), min_size=1, max_size=5),
    arrivals=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    leaver=st.integers(0, 9),
)
def test_rows_join_and_leave_between_passes(
    directories: Directories, lengths: list[int], arrivals: list[int], leaver: int
) -> None:
    prompts = [[(i * i + 7 * k) % 300 for i in range(length)] for k, length in enumerate(lengths)]
    with streamed_whole(directories("llama")) as model:
        generator = RowGenerator(model, prefill_step_size=STEP)
        found: dict[int, Tokens] = {}
        uids: dict[int, int] = {}
        for step in itertools.count():
            for k, prompt in enumerate(prompts):
                if arrivals[k] == step:
                    (uids[k],) = generator.insert([prompt], max_tokens=[4])
            prompts_done, answers = generator.next()
            for answer in answers:
                found.setdefault(answer.uid, []).append((answer.token, answer.logprobs))
            if step == 2 and leaver in uids:
                generator.remove([uids[leaver]])
            if step > max(arrivals) and not prompts_done and not answers:
                break
    for k, prompt in enumerate(prompts):
        got = found.get(uids[k], [])
        check_equal(got, alone(directories("llama"), prompt, 4)[: len(got)])
        assert len(got) == 4 or k == leaver


def test_samplers_processors_and_stop_sequences(directories: Directories) -> None:
    def seeded(seed: int) -> Callable[[mx.array], mx.array]:
        keys = (mx.random.key(100 * seed + i) for i in itertools.count())
        return lambda logprobs: mx.random.categorical(logprobs, key=next(keys))

    processors = [None, make_logits_processors(repetition_penalty=1.5, repetition_context_size=20), None, None]
    expected = [
        alone(directories("llama"), prompt, 6, sampler=seeded(i), logits_processors=processors[i])
        for i, prompt in enumerate(PROMPTS)
    ]
    stops = [StopSequences([[expected[i][2][0]]]) if i == 2 else StopSequences() for i in range(4)]
    with streamed_whole(directories("llama")) as model:
        generator = RowGenerator(model, prefill_step_size=STEP)
        uids = generator.insert(
            PROMPTS,
            max_tokens=[6] * 4,
            samplers=[seeded(i) for i in range(4)],
            logits_processors=processors,
            stop_sequences=stops,
        )
        for i, tokens in enumerate(by_generator(generator, uids)):
            check_equal(tokens, expected[i][:3] if i == 2 else expected[i])


@pytest.mark.parametrize("kv", [{"kv_cache": "stock"}, {"kv_cache": "disk", "kv_ram_gb": 0.006, "kv_step": 64}, {}])
def test_caches_go_in_and_come_out(directories: Directories, kv: dict[str, Any]) -> None:
    """A conversation goes on from the caches of a batch as from those of its own run."""
    with load_model(directories("llama"), config(ram_budget_gb=LARGE_GB, **kv))[0] as model:
        options: dict[str, Any] = {"return_prompt_caches": True, "return_token_ids": True, "prefill_step_size": STEP}
        first = mlx_flash.batch_generate(model, TOKENIZER, PROMPTS, max_tokens=3, **options)
        offsets = [entry.offset for entry in first.caches[0]]
        assert set(offsets) == {len(PROMPTS[0]) + 3}
        second = mlx_flash.batch_generate(model, TOKENIZER, [[7, 8]] * 4, first.caches, 3, **options)
        assert [entry.offset for entry in first.caches[0]] == offsets
    for prompt, one, two in zip(PROMPTS, first.token_ids, second.token_ids, strict=True):
        resident: Any = stock(directories("llama"))
        cache = make_prompt_cache(resident)
        for tokens, expected in ((prompt, one), ([7, 8], two)):
            steps = stock_generate_step(
                mx.array(tokens), resident, max_tokens=3, prompt_cache=cache, prefill_step_size=STEP
            )
            assert [token for token, _ in steps] == expected


def test_a_failing_row_is_told_and_the_others_go_on(directories: Directories) -> None:
    errors: list[tuple[int, Exception]] = []
    with streamed_whole(directories("llama")) as model:
        generator = RowGenerator(model, prefill_step_size=STEP, on_error=lambda *error: errors.append(error))
        uids = generator.insert([[3, 10**6, 4], *PROMPTS], max_tokens=[3] * 5)
        got = by_generator(generator, uids)
        assert [uid for uid, _ in errors] == [uids[0]] and isinstance(errors[0][1], IndexError)
        for tokens, prompt in zip(got[1:], PROMPTS, strict=True):
            check_equal(tokens, alone(directories("llama"), prompt, 3))
        with pytest.raises(IndexError, match="the embedding has rows"):
            mlx_flash.batch_generate(model, TOKENIZER, [[3, 10**6, 4], *PROMPTS])


def test_a_short_prompt_waits_one_pass_while_a_long_one_is_computed(
    directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    with streamed_whole(directories("llama")) as model:
        monkeypatch.setattr(model._life.passes, "fits", lambda cache: False)  # the long one needs many passes
        generator = RowGenerator(model, prefill_step_size=STEP)
        generator.insert([[5] * 10 * STEP], max_tokens=[1])
        generator.next()
        (short,) = generator.insert([[1]], max_tokens=[2])
        answers = [answer.uid for _ in range(2) for answer in generator.next()[1]]
        assert answers == [short, short]
        assert model.counters.num_passes == 3


def test_recurrent_states_are_handed_out_at_the_end_of_each_segment(directories: Directories) -> None:
    with streamed_whole(directories("mamba2")) as model:
        generator = RowGenerator(model, prefill_step_size=STEP)
        (uid,) = generator.insert_segments([[[1, 2, 3], [4, 5, 6, 7]]], max_tokens=[2])
        (progress,), answers = generator.next()
        assert progress.end_of_segment and not progress.end_of_prompt and not answers and progress.progress == (3, 7)
        cache, tokens = generator.extract_cache([uid])[uid]
        assert tokens == [1, 2, 3]
        expected = make_prompt_cache(stock(directories("mamba2")))
        model(mx.array([[1, 2, 3]]), cache=expected)
        assert same_bits(arrays_in(cache[0]), arrays_in(expected[0]))
        while not progress.end_of_prompt:
            (progress,), answers = generator.next()
        assert len(answers) == 1


def test_stock_batches_and_other_models_are_left_to_mlx_lm(tmp_path: Path, directories: Directories) -> None:
    directory = save(tmp_path, LLAMA, mx.float32)
    with load_model(directory, config(ram_budget_gb=LARGE_GB, batching="stock"))[0] as model:
        mlx_flash.batch_generate(model, TOKENIZER, PROMPTS, max_tokens=3)
        assert model.counters.num_tokens_in > sum(map(len, PROMPTS)) + 3 * len(PROMPTS)  # padded
        assert isinstance(model, FlashLLM) and model.batching == "stock"
    assert len(mlx_flash.batch_generate(stock(directory), TOKENIZER, PROMPTS, max_tokens=3).texts) == 4


@pytest.mark.parametrize("length", [33, 49, 50])
def test_padded_windows_take_no_single_tokens(tmp_path: Path, length: int) -> None:
    """A step of 16 is 8 tokens of each of two prompts, and one is left over of the longer one, which mlx-lm refuses."""
    folder = save(tmp_path / "gemma3", GEMMA3)
    prompts = [[5 + i for i in range(length + 1)], [7, 8, 9]]

    def generated(model: Any) -> list[list[int]]:
        generator = StockBatchGenerator(model, max_tokens=6)
        uids = generator.insert(prompts)
        found: dict[int, list[int]] = {uid: [] for uid in uids}
        while len(min(found.values(), key=len)) < 6:
            for response in generator.next()[1]:
                found[response.uid].append(response.token)
        generator.close()
        return [*found.values()]

    settings: dict[str, Any] = {"ram_budget_gb": 2.0, "prefill_step_size": 16, "telemetry": False}
    with load_model(folder, FlashConfig(**settings))[0] as model:
        assert generated(model) == generated(stock(folder))


# Guesses: sequences that share passes get several tokens a pass

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
    """Which number a sequence draws would depend on the guesses of others that are right."""
    by_oracles(monkeypatch, expected_of(directories("llama")))
    found = []
    for _ in range(2):
        mx.random.seed(5)
        with streamed_whole(directories("llama")) as model:
            generator = RowGenerator(with_room(model), prefill_step_size=STEP, sampler=make_sampler(temp=0.9))
            texts = by_generator(generator, generator.insert(PROMPTS, max_tokens=LENGTHS))
            assert model.counters.num_guessed == 0
        found.append([[token for token, _ in tokens] for tokens in texts])
    assert found[0] == found[1]


def test_a_guess_without_room_is_computed_without(
    directories: Directories, free_rows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = expected_of(directories("llama"))
    by_oracles(monkeypatch, expected)
    with streamed_whole(directories("llama")) as model:
        generator = RowGenerator(with_room(model), prefill_step_size=STEP)
        advance = model.advance

        def refusing(rows: Any) -> None:
            guessing = [row for row in rows if len(row.left) > 1 and row.whole.checkpoints is not None]
            advance([row for row in rows if row not in guessing])
            for row in guessing:
                row.error = BudgetError("no room", 0)

        monkeypatch.setattr(model, "advance", refusing)
        for tokens, other in zip(
            by_generator(generator, generator.insert(PROMPTS, max_tokens=LENGTHS)), expected, strict=True
        ):
            check_equal(tokens, other)
        assert model.counters.num_right == 0

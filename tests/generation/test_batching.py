"""Each sequence of an exact batch has the bits of a run alone."""

from __future__ import annotations

import itertools
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from greenlet import getcurrent, greenlet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.generate import StopSequences
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlx_flash
from expert_pools import with_pool
from mlx_flash import FlashConfig, FlashLLM, apply_flash_patch, load_model, remove_flash_patch
from mlx_flash.compat.generation import StockBatchGenerator, stock_generate_step, stock_speculative_generate_step
from mlx_flash.engine.call import need
from mlx_flash.engine.prepare import prepare
from mlx_flash.errors import CacheError, ReadError
from mlx_flash.generation import RowGenerator, batches, speculative_generate_step
from mlx_flash.generation.batches import shares_passes
from mlx_flash.layout.reachable import arrays_in
from mlx_flash.residency.plan import together_bytes
from models import GEMMA3, LLAMA, MAMBA2, VOCAB_SIZE, same_bits, save, save_initialised, stock
from noting import noted
from oracle import Oracle, free_rows, with_room
from shared_passes import (
    MODELS,
    PROMPT,
    PROMPTS,
    STEP,
    Directories,
    Tokens,
    alone,
    by_generator,
    check_equal,
    directories,
    solo,
    together,
)
from streamed import LARGE_GB, config, streamed_whole
from zoo import configuration

__all__ = ["directories", "free_rows"]

TOKENIZER = SimpleNamespace(eos_token_ids=[], decode=lambda tokens: " ".join(map(str, tokens)))


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
    made = noted(monkeypatch, batches, "RowGenerator", lambda *_, **options: options)
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
        rows = together_bytes(model.plan, [9] * 20, "exact", may_offload=True)
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


# --- rows: independent sequences, and parts of a prompt, that share passes --------------------------------------------


ENOUGH = 10**9 if mx.default_device() == mx.cpu else 10**10
"""A budget for everything; a process that uses a GPU takes more than 1 GB."""


def check(directory: Path, got: Sequence[Sequence[mx.array]], prompts: Sequence[Sequence[int]] = PROMPTS) -> None:
    for logits, prompt in zip(got, prompts, strict=True):
        assert same_bits(logits, solo(directory, prompt))


def test_experts_that_several_rows_need_are_read_once(directories: Directories) -> None:
    """Four equal rows read no more than one: they compute each layer's experts before the next layer's are read."""
    read = []
    for prompts in ([[7]], [[7]] * 4):
        with with_pool(directories("qwen3_moe"), 0, expert_lookahead=False) as model:
            check(directories("qwen3_moe"), together(model, prompts), prompts)
            assert model.engine is not None and model.engine.experts is not None and not model.engine.stream.units
            read.append(model.engine.experts.pool.stats.read_bytes)
    assert 0 < read[1] < 1.2 * read[0]  # the pool counts uses, and may evict another expert


class LeftError(Exception):
    pass


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_that_is_given_up_takes_nothing_from_the_others(directories: Directories, name: str) -> None:
    """Windows and states of rows that go on could not be put back."""

    def leave(done: int, total: int) -> None:
        raise LeftError

    with streamed_whole(directories(name)) as model:
        cache, left = make_prompt_cache(model), make_prompt_cache(model)
        first, *expected = solo(directories(name), PROMPTS[0])
        model.advance([row := model.row(mx.array([PROMPTS[0]]), cache, STEP)])
        while not row.is_done:
            model.advance([row])
        assert same_bits(row.outputs, [first])
        row, other = model.row(mx.argmax(first, -1), cache, STEP), model.row(mx.array([PROMPTS[2]]), left, STEP)
        other.report = leave
        num_passes = model.counters.num_passes
        with pytest.raises(LeftError):
            model.advance([other, row])
        assert row.error is None and model.counters.num_passes == num_passes + 1
        assert same_bits(row.outputs, expected[:1])
        assert same_bits([model(mx.argmax(expected[0], -1), cache=cache)], expected[1:2])


def test_pinned_weights_leave_room_for_parts_of_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save(tmp_path, LLAMA | {"hidden_size": 192, "intermediate_size": 768, "vocab_size": 300}, mx.float32)
    monkeypatch.setattr("mlx_flash.residency.machine.footprint", lambda: ENOUGH // 10)  # two plans of one process
    settings: dict[str, Any] = {"prefill_step_size": STEP, "context_length": 448}
    budget = prepare(directory, config(**settings)).plan.minimum_bytes / 1e9 + 0.008
    prompt, found, num_passes = [(7 * i * i) % 300 for i in range(257)], [], []
    for lends in (False, True):
        with load_model(directory, config(ram_budget_gb=budget, lend_reserves=lends, **settings))[0] as model:
            model.start()
            mx.reset_peak_memory()
            found.append(next(iter(mlx_flash.generate_step(mx.array(prompt), model, prefill_step_size=STEP))))
            num_passes.append(model.counters.num_passes)
            assert num_passes[-1] <= model.plan.prompt_passes(len(prompt)) + 1
            assert model.engine is not None
            plan, nbytes = model.plan, model.engine.reader.stats.nbytes
            assert nbytes <= plan.pinned_bytes + (num_passes[-1] + 1) * plan.read_bytes  # which is read ahead
            assert mx.get_peak_memory() - plan.active_bytes <= plan.budget_bytes - plan.base_bytes
    assert num_passes[1] <= num_passes[0] // 2
    expected = next(iter(stock_generate_step(mx.array(prompt), stock(directory), prefill_step_size=STEP)))
    assert [int(token) for token, _ in found] == [int(expected[0])] * 2
    assert all(same_bits([logprobs], [expected[1]]) for _, logprobs in found)


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose last bits depend on the parts of a prompt."""
    return save_initialised(tmp_path_factory.mktemp("stateful") / "model", MAMBA2)


@pytest.mark.parametrize(("plan", "step"), [(32, 33), (32, 100), (12, 2048)])
def test_prompt_is_cut_at_one_step_that_mlx_lm_could_have(
    stateful: Path, plan: int, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [[(37 * i + k) % 900 for i in range(length)] for k, length in enumerate((231, 109))]
    expected = [alone(stateful, prompt, 3, prefill_step_size=plan) for prompt in prompts]
    others = alone(stateful, prompts[0], 3, prefill_step_size=step)
    assert not same_bits([logprobs for _, logprobs in others], [logprobs for _, logprobs in expected[0]])
    with load_model(stateful, config(ram_budget_gb=1, prefill_step_size=plan))[0] as model:
        for options in ({}, {"kv_bits": 8, "quantized_kv_start": 1000}):  # our loop, and mlx-lm's
            for prompt, tokens in zip(prompts, expected, strict=True):
                steps = mlx_flash.generate_step(
                    mx.array(prompt), model, prefill_step_size=step, max_tokens=3, **options
                )
                check_equal(list(steps), tokens)
        generator = RowGenerator(model, prefill_step_size=step)
        for tokens, wanted in zip(by_generator(generator, generator.insert(prompts, [3, 3])), expected, strict=True):
            check_equal(tokens, wanted)
    assert f"prefill_step_size is {plan} prompt tokens" in caplog.text
    assert f"mlx-lm's own for --prefill-step-size {plan}" in caplog.text and "budget" not in caplog.text


@pytest.mark.parametrize(("length", "step", "lengths"), [(237, 100, [50] * 4 + [36, 1]), (88, 33, [17] * 5 + [2, 1])])
def test_parts_that_have_no_room_are_cut_at_one_step(
    stateful: Path, length: int, step: int, lengths: list[int]
) -> None:
    prompt = [(37 * i) % 900 for i in range(length)]
    with load_model(stateful, config(ram_budget_gb=1))[0] as model:
        row = model.row(mx.array([prompt]), make_prompt_cache(model), step)
        assert row.cut() == lengths[0] and [part.length for part in row.left] == lengths
        while not row.is_done:
            model.advance([row])
        [(_, expected)] = alone(stateful, prompt, 1, prefill_step_size=lengths[0])
        assert same_bits([row.outputs[-1][0, -1] - mx.logsumexp(row.outputs[-1][0, -1])], [expected])
        row = model.row(mx.array([prompt]), make_prompt_cache(model), step, ends=[40, 60])
        row.cut()
        ends = list(accumulate(part.length for part in row.left))
        assert {40, 60, length - 1, length} <= {*ends}, "segments end where parts end"


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1", "granitemoehybrid", "nemotron_h"])
def test_output_is_that_of_the_step_that_the_warning_names(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Their last bits depend on the step."""
    directory = save_initialised(tmp_path / "model", configuration(name))
    prompt = [(37 * i * i + 11 * i) % 300 for i in range(137)]
    with load_model(directory, config(ram_budget_gb=LARGE_GB))[0] as model:
        model.start()
        lane = model.row(mx.array([prompt]), make_prompt_cache(model), 8).lane()
        needs = need(model.plan, [lane]).total + model.plan.cache.nbytes(256)
        model.plan = replace(model.plan, budget_bytes=needs + 100_000)
        found = list(mlx_flash.generate_step(mx.array(prompt), model, prefill_step_size=64, max_tokens=3))
    falls = [tuple(map(int, fall)) for fall in re.findall(r"from token (\d+) .*--prefill-step-size (\d+)", caplog.text)]
    assert falls[-1][1] <= 16 and len({start for start, _ in falls}) == len(falls)
    plain: Any = stock(directory)
    cache, at, step = make_prompt_cache(plain), 0, 64
    for start, smaller in falls:
        for begin in range(at, start, step):
            plain(mx.array([prompt[begin : begin + step]]), cache=cache)
        at, step = start, smaller
    rest = mx.array(prompt[at:])
    check_equal(found, list(stock_generate_step(rest, plain, prompt_cache=cache, prefill_step_size=step, max_tokens=3)))
    others = alone(directory, prompt, 3, prefill_step_size=64)
    assert not same_bits([logprobs for _, logprobs in others], [logprobs for _, logprobs in found])


def test_batch_that_was_interrupted_refuses_to_go_on(directories: Directories, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that was chosen, and not handed out, was lost, and the next ones followed it."""
    with streamed_whole(directories("llama")) as model:
        batch = RowGenerator(model, max_tokens=8)
        batch.insert([[5, 6, 7], [8, 9]])
        batch.next()
        with monkeypatch.context() as patch:
            patch.setattr(RowGenerator, "_answer", interrupt)
            with pytest.raises(KeyboardInterrupt):
                while True:
                    batch.next()
        with pytest.raises(CacheError, match="interrupted between two tokens"):
            batch.next()
        batch.close()


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


# Calls that share a pass over the weights give the bits of calls one after another.


def test_an_error_that_is_kept_keeps_no_greenlet(directories: Directories) -> None:
    """The greenlet of a thread must not outlive it: Python's garbage collector would crash."""
    kept: list[Exception] = []
    hubs: list[weakref.ref[greenlet]] = []

    def fail() -> None:
        hubs.append(weakref.ref(getcurrent()))
        with streamed_whole(directories("llama")) as model:
            stream = model.engine.stream  # type: ignore[union-attr]
            with patch.object(stream, "acquire", side_effect=ReadError("a disk that was unplugged")):
                try:
                    next(mlx_flash.generate_step(mx.array(PROMPT), model, prefill_step_size=STEP))
                except ReadError as error:
                    kept.append(error)

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    deadline = time.monotonic() + 5
    while hubs[0]() is not None and time.monotonic() < deadline:
        time.sleep(0.001)  # the main thread removes it soon
    assert kept and hubs[0]() is None


def _with_step(model: FlashLLM, step: int) -> Any:
    return replace(model.plan, prefill_step_size=step, budget_bytes=2 * model.plan.budget_bytes)


def test_a_long_call_of_mlx_lm_takes_one_pass(directories: Directories) -> None:
    with streamed_whole(directories("llama")) as model:
        model.plan = _with_step(model, STEP)
        tokens = mx.array([PROMPT])
        expected = stock(directories("llama"))
        theirs, ours = make_prompt_cache(expected), make_prompt_cache(model)
        parts = [expected(tokens[:, i : i + STEP], cache=theirs) for i in range(0, len(PROMPT), STEP)]
        assert same_bits([model(tokens, cache=ours)], [mx.concatenate(parts, axis=1)])
        assert model.counters.num_passes == 1


def test_the_patch_replaces_mlx_lms_loop_and_puts_it_back() -> None:
    def steps() -> tuple[Any, Any]:
        module = import_module("mlx_lm.generate")
        return module.generate_step, module.speculative_generate_step

    with apply_flash_patch(config()):
        assert steps() == (mlx_flash.generate_step, speculative_generate_step)
    stock_steps = (stock_generate_step, stock_speculative_generate_step)
    assert steps() == stock_steps
    remove_flash_patch()
    assert steps() == stock_steps


def test_other_models_and_options_are_left_to_mlx_lm(directories: Directories) -> None:
    expected = alone(directories("llama"), PROMPT, 6, kv_bits=8, kv_group_size=32, prefill_step_size=2048)
    with streamed_whole(directories("llama")) as model:
        options: dict[str, Any] = {"max_tokens": 6, "kv_bits": 8, "kv_group_size": 32}
        check_equal(list(mlx_flash.generate_step(mx.array(PROMPT), model, **options)), expected)
        with pytest.raises(TypeError, match="max_token"):
            mlx_flash.generate_step(mx.array(PROMPT), model, max_token=6)
    got = list(mlx_flash.generate_step(mx.array(PROMPT), stock(directories("llama")), max_tokens=6))
    check_equal(got, alone(directories("llama"), PROMPT, 6, prefill_step_size=2048))

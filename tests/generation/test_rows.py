"""Independent sequences that share passes over the weights give the bits of sequences that run alone."""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import mlx.core as mx
import pytest
from greenlet import getcurrent, greenlet
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import LlamaModel

import mlx_flash
from expert_pools import with_pool
from mlx_flash import FlashLLM, apply_flash_patch, load_model, remove_flash_patch
from mlx_flash.compat.generation import stock_generate_step, stock_speculative_generate_step
from mlx_flash.engine.need import need
from mlx_flash.engine.prepare import prepare
from mlx_flash.errors import BudgetError, CacheError, ReadError
from mlx_flash.generation import speculative_generate_step
from mlx_flash.generation.batches import RowGenerator
from models import LLAMA, MAMBA2, same_bits, save, save_initialised, stock
from shared_passes import MODELS, PROMPT, PROMPTS, STEP, Directories, alone, by_generator, check_equal, solo, together
from shared_passes import directories as directories  # a fixture
from streamed import LARGE_GB, config, streamed_whole
from zoo import configuration

ENOUGH = 10**9 if mx.default_device() == mx.cpu else 10**10
"""A budget for everything; a process that uses a GPU takes more than 1 GB."""


def check(directory: Path, got: Sequence[Sequence[mx.array]], prompts: Sequence[Sequence[int]] = PROMPTS) -> None:
    for logits, prompt in zip(got, prompts, strict=True):
        assert same_bits(logits, solo(directory, prompt))


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("exact_rows", [True, False])
def test_rows_share_the_expert_pool(directories: Directories, name: str, exact_rows: bool) -> None:
    with streamed_whole(directories(name), pool_slots=0, exact_rows=exact_rows) as model:
        check(directories(name), together(model, PROMPTS))


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


def test_rows_that_do_not_fit_wait_for_the_next_pass(directories: Directories) -> None:
    with streamed_whole(directories("llama")) as model:
        prompts = [[(i * k + k) % 300 for i in range(65)] for k in range(1, 9)]
        rows = [model.row(mx.array([p]), make_prompt_cache(model), 128) for p in prompts]
        per_row = replace(model.plan.activations, per_token=10**6)
        model.plan = replace(model.plan, activations=per_row)
        model.advance(rows)
        while not all(row.is_done for row in rows):
            model.advance(rows)
        assert 2 < model.counters.num_passes < 16
        for prompt, row in zip(prompts, rows, strict=True):
            assert row.error is None
            alone = list(mlx_flash.generate_step(mx.array(prompt), model, max_tokens=1, prefill_step_size=128))
            assert alone[0][0] == mx.argmax(row.outputs[-1][0, -1]).item()


def test_prompts_take_the_passes_that_the_plan_promises(directories: Directories) -> None:
    for extra in (0.0, 0.001):
        budget = prepare(directories("llama"), config()).plan.minimum_bytes / 1e9 + extra
        with load_model(directories("llama"), config(ram_budget_gb=budget, prefill_step_size=16))[0] as model:
            model.start()
            promised = model.plan.prompt_passes(200)
            list(mlx_flash.generate_step(mx.array([i % 300 for i in range(200)]), model, max_tokens=1))
            assert model.counters.num_passes <= promised + 1  # the last token is a part of its own


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


def test_a_row_that_can_never_fit_fails_alone(directories: Directories) -> None:
    with streamed_whole(directories("llama")) as model:
        rows = [model.row(mx.array([p]), make_prompt_cache(model), STEP) for p in PROMPTS[1:3]]
        huge = model.row(mx.zeros((1, 200_000), mx.int32), make_prompt_cache(model), STEP)
        model.advance([huge, *rows])
        assert isinstance(huge.error, BudgetError)
        for prompt, row in zip(PROMPTS[1:3], rows, strict=True):
            assert same_bits(row.outputs, solo(directories("llama"), prompt)[:1])


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


@pytest.mark.parametrize("length", [1, 23, len(PROMPT)])
def test_first_token_takes_one_pass_and_every_other_one_more(directories: Directories, length: int) -> None:
    with streamed_whole(directories("llama"), speculation=False) as model:
        model.plan = replace(model.plan, prefill_step_size=STEP, budget_bytes=10**10)
        passes = []
        prompt = mx.array([(7 * i) % 300 for i in range(length)])
        for _ in mlx_flash.generate_step(prompt, model, max_tokens=4):
            passes.append(model.counters.num_passes)
        assert passes == [1, 2, 3, 4]
        assert model.counters.num_passes == 4


def test_a_long_call_of_mlx_lm_takes_one_pass(directories: Directories) -> None:
    with streamed_whole(directories("llama")) as model:
        model.plan = _with_step(model, STEP)
        tokens = mx.array([PROMPT])
        expected = stock(directories("llama"))
        theirs, ours = make_prompt_cache(expected), make_prompt_cache(model)
        parts = [expected(tokens[:, i : i + STEP], cache=theirs) for i in range(0, len(PROMPT), STEP)]
        assert same_bits([model(tokens, cache=ours)], [mx.concatenate(parts, axis=1)])
        assert model.counters.num_passes == 1


def test_a_failed_token_is_not_computed_again(directories: Directories, monkeypatch: pytest.MonkeyPatch) -> None:
    with streamed_whole(directories("llama")) as model:
        steps = mlx_flash.generate_step(mx.array([1, 2]), model, prompt_cache=make_prompt_cache(model))
        next(steps)
        calls: list[int] = []

        def failing(index: int, inputs: Sequence[mx.array]) -> None:
            calls.append(index)
            raise ReadError("a disk that was unplugged")

        monkeypatch.setattr(model.engine.stream, "acquire", failing)  # type: ignore[union-attr]
        with pytest.raises(ReadError, match="unplugged"):
            next(steps)
        assert len(calls) == 1


def test_a_model_that_uses_an_entry_again_is_computed_in_order(
    directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that share keys and values would see those of later parts."""

    def forward(self: Any, inputs: mx.array, cache: Any = None, input_embeddings: Any = None) -> mx.array:
        h = self.embed_tokens(inputs)
        mask = create_attention_mask(h, cache[0])
        for layer, entry in zip(self.layers, cache, strict=True):
            h = layer(h, mask, cache=entry) + cache[0].keys[:, :, : cache[0].offset].mean()
        return cast(mx.array, self.norm(h))

    monkeypatch.setattr(LlamaModel, "__call__", forward)
    options = {"max_tokens": 6, "prefill_step_size": STEP}
    expected = list(stock_generate_step(mx.array(PROMPT), stock(directories("llama")), **options))
    with streamed_whole(directories("llama")) as model:
        for _ in range(2):
            got = list(mlx_flash.generate_step(mx.array(PROMPT), model, max_tokens=6, prefill_step_size=STEP))
            check_equal(got, expected)
        assert model._life.passes._needs_order


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

"""Models in memory: mlx-lm's own loops, and calls of mlx-lm's own where no memory changes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from itertools import islice, product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlx_flash
from mlx_flash import FlashLLM, load_model
from mlx_flash.compat.generation import StockBatchGenerator, stock_generate_step
from mlx_flash.engine.passes import Passes
from mlx_flash.errors import BudgetError, ClosedError
from mlx_flash.generation import RowGenerator
from mlx_flash.memory.arena import active_memory
from models import GEMMA3, LLAMA, MAMBA2, NARROW_LLAMA, same_bits, save, stock
from noting import noted
from saved_models import model_fixture
from shared_passes import check_equal
from streamed import LARGE_GB, config

MODELS = {"llama": LLAMA, "gemma3": GEMMA3, "mamba2": MAMBA2}
PROMPT = [5, 17, 290, 3, 42, 64, 99, 128, 7, 21]
STEP = 4
NUM_TOKENS = 6

Found = list[tuple[int, mx.array]]


@pytest.fixture(scope="module", params=MODELS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(request.param) / "model", MODELS[request.param], mx.float32)


llama = model_fixture(NARROW_LLAMA)


def in_memory(directory: Path, **settings: Any) -> FlashLLM:
    model = load_model(directory, config(ram_budget_gb=LARGE_GB, **settings))[0]
    model.start()
    assert model.is_in_memory
    return model


def generated(step: Callable[..., Any], model: Any, **options: Any) -> Found:
    mx.random.seed(3)
    options = {"max_tokens": NUM_TOKENS, "prefill_step_size": STEP, **options}
    return list(step(mx.array(PROMPT), model, **options))


SAMPLERS = {
    "one number": {"sampler": make_sampler(temp=0.9)},
    "two numbers": {"sampler": make_sampler(temp=0.9, xtc_probability=0.5, xtc_threshold=0.01)},
    "none": {"sampler": make_sampler(temp=0.0)},
    "after processors": {
        "sampler": make_sampler(temp=0.9),
        "logits_processors": make_logits_processors(repetition_penalty=1.5),
    },
}


@pytest.mark.parametrize("budget", [LARGE_GB, "min"])
def test_random_numbers_of_the_caller_are_as_with_mlx_lm(llama: Path, budget: Any) -> None:
    """It has chosen a token more than it hands out, and so has drawn one more number: a second text depends on it."""

    def drawn(step: Any, model: Any, name: str, stop: int) -> tuple[list[list[int]], list[float]]:
        mx.random.seed(3)
        texts, numbers = [], []
        for _ in range(3):
            texts.append([])
            with closing(step(mx.array(PROMPT), model, max_tokens=NUM_TOKENS, **SAMPLERS[name])) as steps:
                for token, _ in islice(steps, stop):
                    texts[-1].append(token)
                    if len(texts) == 3:  # numbers between two tokens are the caller's, too
                        numbers.append(mx.random.uniform().item())
        return texts, numbers

    plain = stock(llama)
    with load_model(llama, config(ram_budget_gb=budget))[0] as model:
        for case in product(SAMPLERS, (NUM_TOKENS, 3)):
            assert drawn(mlx_flash.generate_step, model, *case) == drawn(stock_generate_step, plain, *case), case


def test_a_seed_between_two_tokens_is_for_those_after_the_next(llama: Path) -> None:
    def found(step: Any, model: Any, seed: int) -> list[int]:
        mx.random.seed(3)
        tokens = []
        for token, _ in step(mx.array(PROMPT), model, max_tokens=NUM_TOKENS, sampler=make_sampler(temp=3.0)):
            tokens.append(token)
            if len(tokens) == 2:
                mx.random.seed(seed)
        return tokens

    plain = stock(llama)
    expected = [found(stock_generate_step, plain, seed) for seed in (1, 2)]
    assert expected[0][:3] == expected[1][:3] and expected[0] != expected[1]
    for budget in (LARGE_GB, "min"):
        with load_model(llama, config(ram_budget_gb=budget))[0] as model:
            assert [found(mlx_flash.generate_step, model, seed) for seed in (1, 2)] == expected


def test_processors_see_no_token_after_the_last(llama: Path) -> None:
    """A grammar that has ended refuses to be asked."""
    seen: list[int] = []

    def note(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.size)
        return logits

    with in_memory(llama) as model:
        generator = RowGenerator(model, prefill_step_size=STEP)
        generator.insert([PROMPT], max_tokens=[3], logits_processors=[[note]])
        while generator.next()[1] or not seen:
            pass
        assert seen == [len(PROMPT) + number for number in range(3)]


@pytest.mark.parametrize("budget", [LARGE_GB, "min"])
def test_max_tokens_0_draws_as_many_random_numbers_as_mlx_lm(llama: Path, budget: Any) -> None:
    def drawn(step: Any, model: Any) -> int:
        mx.random.seed(3)
        assert not list(step(mx.array(PROMPT), model, max_tokens=0, sampler=make_sampler(temp=0.9)))
        return int(mx.random.randint(0, 1 << 30).item())

    expected = drawn(stock_generate_step, stock(llama))
    with load_model(llama, config(ram_budget_gb=budget))[0] as model:
        assert drawn(mlx_flash.generate_step, model) == expected


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each call whose memory was looked at."""
    found, admit = noted(monkeypatch, Passes, "choose", lambda _, rows: rows[0].left[0].num_tokens), Passes.admit

    def admitted(passes: Passes, call: Any) -> bool:
        is_admitted = admit(passes, call)
        if is_admitted:  # else its row is looked at
            found.append(call.num_tokens)
        return is_admitted

    monkeypatch.setattr(Passes, "admit", admitted)
    return found


@pytest.mark.parametrize("kv_cache", ["stock", None])
def test_memory_is_looked_at_where_buffers_grow(
    directory: Path, monkeypatch: pytest.MonkeyPatch, looks: list[int], kv_cache: Any
) -> None:
    """Each call of several tokens, and one token of 256; and a budget that was used up meanwhile refuses that one."""
    expected = generated(stock_generate_step, stock(directory), max_tokens=300)
    with in_memory(directory, kv_cache=kv_cache) as model:
        check_equal(generated(mlx_flash.generate_step, model, max_tokens=300), expected)
        assert looks[:2] == [STEP, STEP] and set(looks[2:]) <= {1} and len(looks) <= 5, looks
        if directory.parent.name.startswith("mamba"):  # whose states stay as large as they are
            return
        steps = iter(mlx_flash.generate_step(mx.array(PROMPT), model, max_tokens=-1))
        got = list(islice(steps, 10))
        other = active_memory() + model.plan.budget_bytes
        monkeypatch.setattr("mlx_flash.engine.call.active_memory", lambda: other)
        with pytest.raises(BudgetError):
            got += islice(steps, 300)
        assert 10 < len(got) <= 256


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_tokens_of_mlx_lms_batches_are_calls_of_its_own(directory: Path, looks: list[int], num_prompts: int) -> None:
    """Also of a batch of one, whose content the prefix cache may know."""
    with in_memory(directory) as model:
        generator = StockBatchGenerator(model)
        generator.insert([PROMPT] * num_prompts, max_tokens=[50] * num_prompts)
        for _ in range(40):
            generator.next()
        generator.close()
    assert sum(size == num_prompts for size in looks) <= 3, looks


def test_tokens_of_a_batch_that_changes(llama: Path, looks: list[int]) -> None:
    """Memory is looked at where rows have come, and where their buffers are full."""

    def batch_of(model: Any, *prompts: list[int]) -> list[Any]:
        caches = []
        for prompt in prompts:
            model(mx.array([prompt]), cache=(cache := make_prompt_cache(expected)))
            caches.append(cache)
        return [type(each[0]).merge(each) for each in zip(*caches, strict=True)]

    def same(tokens: list[int]) -> None:
        given = mx.array(tokens)[:, None]
        assert same_bits([model(given, cache=cache)], [expected(given, cache=other)])

    expected: Any = stock(llama)
    with in_memory(llama) as model:
        prompts = ([1, 2, 3], [4], [5, 6])
        cache, other = batch_of(model, *prompts), batch_of(expected, *prompts)
        looks.clear()
        num_tokens, num_passes = model.counters.num_tokens_in, model.counters.num_passes
        for _ in range(20):
            same([7, 8, 9])
        assert len(looks) <= 1
        assert model.counters.num_tokens_in - num_tokens == 60 and model.counters.num_passes - num_passes == 20
        for each, entry in zip(cache, other, strict=True):
            each.filter([0, 2])
            entry.filter([0, 2])
        for _ in range(300):  # past the end of the buffers
            same([3, 4])
        assert 0 < len(looks) <= 3
        for each, entry, new, more in zip(cache, other, batch_of(model, [1]), batch_of(expected, [1]), strict=True):
            each.extend(new)
            entry.extend(more)
        for _ in range(5):
            same([3, 4, 5])


def test_the_prefix_cache_forgets_what_tokens_have_replaced(llama: Path, tmp_path: Path) -> None:
    """As many tokens as were trimmed come in calls of mlx-lm's own, and a prompt that completes their page."""
    plain, first = stock(llama), [i % 250 for i in range(300)]
    replaced, second = [first[-1 - i] for i in range(10)], [i % 200 for i in range(300)]
    with in_memory(llama, kv_prefixes="exact", kv_directory=tmp_path) as model:
        for tokens in ([], replaced, first[290:]):
            cache, theirs = make_prompt_cache(model), make_prompt_cache(plain)
            for each, entries in ((model, cache), (plain, theirs)):
                each(mx.array([first]), cache=entries)
                for entry in entries if tokens else ():
                    entry.trim(10)
                for token in tokens:
                    mx.eval(each(mx.array([[token]]), cache=entries))
                each(mx.array([second]), cache=entries)
            found, expected = (m(mx.array([[7]]), cache=c) for m, c in ((model, cache), (plain, theirs)))
            assert same_bits([found], [expected])
            assert model.prefixes is not None
            model.prefixes.store.flush()


def test_a_token_after_the_end_is_refused(llama: Path) -> None:
    model = in_memory(llama)
    model(mx.array([PROMPT]), cache=(cache := make_prompt_cache(model)))
    model.close()
    with pytest.raises(ClosedError):
        model(mx.array([[7]]), cache=cache)

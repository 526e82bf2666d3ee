"""mlx-lm's ways of generating, on a streamed model: the stock result."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache
from mlx_lm.models.mamba2 import Mamba2Block

import mlx_flash
from mlx_flash import CacheError, ClosedError, FlashConfig
from mlx_flash.engine.passes import Passes
from models import GEMMA3, MAMBA2, NARROW_LLAMA, computed, same_bits, save, stock
from saved_models import model_fixture
from streamed import streamed_whole

PROMPT = mx.array([5, 17, 900, 3, 3, 42, 64, 99, 128, 7, 21] * 4)

directory = model_fixture(NARROW_LLAMA, mx.bfloat16)


def wide(plan: Any) -> Any:
    """A plan with room for the whole prompt at once, as stock mlx-lm takes it."""
    return replace(plan, prefill_step_size=2048, budget_bytes=10**10)


@pytest.mark.parametrize("architecture", [NARROW_LLAMA, GEMMA3, MAMBA2], ids=["plain", "sliding window", "recurrent"])
def test_the_last_token_of_an_answer_shares_a_pass_with_the_next_prompt(
    tmp_path: Path, architecture: dict[str, Any]
) -> None:
    directory = save(tmp_path / "model", architecture, mx.float32)
    question = mx.array([7, 8, 9])

    def two_turns(model: Any, step: Any) -> tuple[list[int], list[mx.array]]:
        cache = make_prompt_cache(model)
        steps = step(PROMPT, model, prompt_cache=cache)
        for _ in range(3):
            next(steps)
        steps.close()
        reports: list[tuple[int, int]] = []
        options = {"prompt_cache": cache, "prompt_progress_callback": lambda *report: reports.append(report)}
        found = list(step(question, model, max_tokens=2, **options))
        assert reports[0] == (0, 3) and reports[-1] == (3, 3)
        assert all(0 <= done <= total == 3 for done, total in reports)
        return [token for token, _ in found], [logprobs for _, logprobs in found]

    tokens, logprobs = two_turns(stock(directory), generate_step)
    with streamed_whole(directory, speculation=False) as model:
        model.plan = wide(model.plan)
        found_tokens, found_logprobs = two_turns(model, mlx_flash.generate_step)
        assert found_tokens == tokens and same_bits(found_logprobs, logprobs)
        assert model.counters.num_passes == 3 + 3


@pytest.mark.parametrize("shares", [True, False])
def test_each_part_of_a_prompt_reports_at_each_unit(
    directory: Path, monkeypatch: pytest.MonkeyPatch, shares: bool
) -> None:
    """A caller that leaves is noticed then, although a pass may take minutes."""
    prompt, step = mx.arange(60), 20
    monkeypatch.setattr(Passes, "fits", lambda passes, cache: shares)
    with streamed_whole(directory, speculation=False) as model:
        model.plan = wide(model.plan)
        reports: list[int] = []
        report = lambda done, total: reports.append(done)  # noqa: E731
        options: Any = {"prefill_step_size": step, "prompt_progress_callback": report}
        list(mlx_flash.generate_step(prompt, model, max_tokens=1, **options))
        assert (model.counters.num_passes == 1) == shares
        assert len(reports) >= 3 * len(model.plan.streaming.layers) > 4
        assert reports == sorted(reports) and reports[-1] == 60


def test_a_cache_that_lacks_its_last_token_says_so(directory: Path) -> None:
    with streamed_whole(directory) as model:
        cache = make_prompt_cache(model)
        next(iter(mlx_flash.generate_step(PROMPT, model, prompt_cache=cache)))
    assert cache[0].offset == len(PROMPT) + 1
    with pytest.raises(CacheError, match=r"lacks its last token .*Hint: use the cache"):
        copy.deepcopy(cache)


def test_a_cache_that_cannot_be_put_back_refuses_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "model", MAMBA2 | {"num_hidden_layers": 2})
    block, calls = Mamba2Block.__call__, iter([None, KeyboardInterrupt()])

    def interrupted(*args: Any) -> Any:
        result = block(*args)
        if (error := next(calls)) is not None:
            raise error
        return result

    with streamed_whole(folder) as model:
        cache = make_prompt_cache(model)
        computed(model, PROMPT[None], cache)
        with monkeypatch.context() as patch:
            patch.setattr(Mamba2Block, "__call__", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model(mx.array([[7]]), cache=cache)
        uses: list[Callable[[], Any]] = [
            lambda: model(mx.array([[7]]), cache=cache),
            lambda: computed(model, PROMPT[None], cache),
            lambda: copy.deepcopy(cache),
            lambda: save_prompt_cache(str(tmp_path / "cache.safetensors"), cache),
        ]
        for use in uses:
            with pytest.raises(CacheError, match=r"failed .* ArraysCache .*Hint: start again with a fresh"):
                use()


@pytest.mark.parametrize("budget_gb", ["min", 1.0])
def test_a_callback_may_close_the_model(directory: Path, budget_gb: str | float) -> None:
    """The pass that it is told of ends before that."""
    config = FlashConfig(ram_budget_gb=budget_gb, context_length=512)
    model = mlx_flash.load_model(directory, config)[0]
    calls: list[tuple[int, int]] = []

    def report(*progress: int) -> None:
        calls.append(progress)
        if progress[0]:
            model.close()

    with pytest.raises(ClosedError, match="load it again"):
        list(mlx_flash.generate_step(PROMPT, model, max_tokens=2, prompt_progress_callback=report))
    assert calls[-1][0] >= len(PROMPT) - 1

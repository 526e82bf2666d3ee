"""mlx-lm's ways of generating, on a streamed model: the stock result."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache, trim_prompt_cache

from mlx_flash.memory.driver import has_own_memory
from models import GEMMA3, LLAMA, same_bits, save, stock
from test_model import streamed_whole

PROMPT = mx.array([5, 17, 900, 3, 3, 42, 64, 99, 128, 7, 21] * 4)
OPTIONS = {
    "plain": {},
    "small steps": {"prefill_step_size": 8},
    "rotating cache": {"max_kv_size": 16},
    "8-bit cache": {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0},
    "4-bit cache from the 50th token on": {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 50},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"), LLAMA, mx.bfloat16)


@pytest.fixture(scope="module")
def expected(directory: Path) -> Callable[[str], tuple[list[int], list[mx.array]]]:
    """Tokens and log-probabilities of stock mlx-lm, computed once for each of the options."""
    return functools.cache(lambda name: generated(stock(directory), **OPTIONS[name]))


def generated(model: Any, prompt: mx.array = PROMPT, **options: Any) -> tuple[list[int], list[mx.array]]:
    options = {"prefill_step_size": 2048, "max_tokens": 16, **options}
    found = list(generate_step(prompt, model, **options))
    return [token for token, _ in found], [logprobs for _, logprobs in found]


@pytest.mark.parametrize("cut", [0, 2, "tiles"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_kind_of_cache(directory: Path, expected: Callable[..., Any], name: str, cut: int | str) -> None:
    if has_own_memory() and "kv_bits" in OPTIONS[name]:
        pytest.skip("MLX has no CUDA kernel for these keys")
    tokens, logprobs = expected(name)
    with streamed_whole(directory, cut=cut) as model:
        model.plan = wide(model.plan)
        found_tokens, found_logprobs = generated(model, **OPTIONS[name])
    assert found_tokens == tokens
    assert same_bits(found_logprobs, logprobs)


def wide(plan: Any) -> Any:
    """A plan with room for the whole prompt at once, as stock mlx-lm takes it."""
    return replace(plan, prefill_step_size=2048, budget_bytes=10**10)


@pytest.mark.parametrize("num_draft_tokens", [1, 3])
def test_speculative_decoding(directory: Path, tmp_path: Path, num_draft_tokens: int) -> None:
    draft_dir = save(tmp_path / "draft", {**LLAMA, "num_hidden_layers": 1}, mx.bfloat16)

    def speculated(model: Any, draft: Any) -> list[int]:
        steps = speculative_generate_step(PROMPT, model, draft, num_draft_tokens=num_draft_tokens, max_tokens=16)
        return [token for token, *_ in steps]

    expected = speculated(stock(directory), stock(draft_dir))
    with streamed_whole(directory) as model, streamed_whole(draft_dir) as draft:
        model.plan, draft.plan = wide(model.plan), wide(draft.plan)
        assert speculated(model, draft) == expected


@pytest.mark.parametrize("architecture", [LLAMA, GEMMA3], ids=["plain", "sliding window"])
def test_a_saved_prompt_cache_goes_on(tmp_path: Path, architecture: dict[str, Any]) -> None:
    directory = save(tmp_path / "model", architecture, mx.bfloat16)

    def in_two_parts(model: Any, file: Path) -> tuple[list[int], list[mx.array]]:
        cache = make_prompt_cache(model)
        model(PROMPT[None, :30], cache=cache)
        save_prompt_cache(str(file), cache)
        return generated(model, PROMPT[30:], prompt_cache=load_prompt_cache(str(file)))

    tokens, logprobs = in_two_parts(stock(directory), tmp_path / "stock.safetensors")
    with streamed_whole(directory) as model:
        model.plan = wide(model.plan)
        found_tokens, found_logprobs = in_two_parts(model, tmp_path / "streamed.safetensors")
    assert found_tokens == tokens and same_bits(found_logprobs, logprobs)


@pytest.mark.quick
def test_a_trimmed_cache_goes_on(directory: Path) -> None:
    def trimmed(model: Any) -> tuple[list[int], list[mx.array]]:
        cache = make_prompt_cache(model)
        generated(model, prompt_cache=cache)
        trim_prompt_cache(cache, 20)
        return generated(model, PROMPT[:5], prompt_cache=cache)

    tokens, logprobs = trimmed(stock(directory))
    with streamed_whole(directory) as model:
        model.plan = wide(model.plan)
        found_tokens, found_logprobs = trimmed(model)
    assert found_tokens == tokens and same_bits(found_logprobs, logprobs)

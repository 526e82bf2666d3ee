"""Sequences that share passes, and what mlx-lm computes for each of them alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_flash import FlashLLM
from mlx_flash.compat.generation import stock_generate_step
from mlx_flash.generation import RowGenerator
from models import GEMMA3, MAMBA2, NARROW_LLAMA, QWEN3_MOE, computed_once, same_bits, stock
from saved_models import models_fixture
from zoo import configuration

STEP = 16

PROMPTS = [[(7 * i * i + 3 * i + k) % 300 for i in range(n)] for k, n in enumerate([2 * STEP + 6, 1, 5, STEP + 1])]
PROMPT = [(7 * i * i + 3 * i) % 300 for i in range(3 * STEP + 6)]

NUM_TOKENS = 4

MODELS: dict[str, dict[str, Any]] = {
    "llama": NARROW_LLAMA,
    "gemma3": GEMMA3,
    "mamba2": MAMBA2,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": configuration("qwen3_next"),
}

Directories = Callable[[str], Path]

directories = models_fixture(MODELS)


@computed_once
def solo(directory: Path, prompt: Sequence[int]) -> list[mx.array]:
    """Return the logits of each token that stock mlx-lm computes."""
    model: Any = stock(directory)
    cache = make_prompt_cache(model)
    for start in range(0, len(prompt) - 1, STEP):
        model(mx.array([prompt[start : min(start + STEP, len(prompt) - 1)]]), cache=cache)
    found = [model(mx.array([prompt[-1:]]), cache=cache)]
    while len(found) < NUM_TOKENS:
        found.append(model(mx.argmax(found[-1], -1), cache=cache))
    mx.eval(found)
    return found


def together(model: FlashLLM, prompts: Sequence[Sequence[int]]) -> list[list[mx.array]]:
    """Compute all prompts and their tokens in shared passes."""
    caches: list[Any] = [make_prompt_cache(model) for _ in prompts]
    found: list[list[mx.array]] = [[] for _ in prompts]
    for number in range(NUM_TOKENS):
        given = [mx.argmax(outputs[-1], -1) for outputs in found] if number else [mx.array([each]) for each in prompts]
        rows = [model.row(tokens, cache, STEP) for tokens, cache in zip(given, caches, strict=True)]
        while not all(row.is_done for row in rows):
            model.advance(rows)
        for outputs, row in zip(found, rows, strict=True):
            assert row.error is None
            outputs.append(row.outputs[-1])
    return found


Tokens = list[tuple[int, mx.array]]


@computed_once
def alone(directory: Path, prompt: Sequence[int], max_tokens: int = 5, **options: Any) -> Tokens:
    """Return the tokens of stock mlx-lm, and their log probabilities. Random numbers begin with the seed 3."""
    model, options = stock(directory), {"prefill_step_size": STEP, **options}
    mx.random.seed(3)
    return list(stock_generate_step(mx.array(prompt), model, max_tokens=max_tokens, **options))


def by_generator(generator: RowGenerator, uids: Sequence[int]) -> list[Tokens]:
    found: dict[int, Tokens] = {uid: [] for uid in uids}
    for _ in range(100):
        prompts, answers = generator.next()
        for answer in answers:
            found[answer.uid].append((answer.token, answer.logprobs))
        if not prompts and not answers:
            return [found[uid] for uid in uids]
    raise AssertionError("it does not end")


def check_equal(got: Tokens, expected: Tokens) -> None:
    assert [token for token, _ in got] == [token for token, _ in expected]
    assert same_bits([logprobs for _, logprobs in got], [logprobs for _, logprobs in expected])

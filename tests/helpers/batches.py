from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_flash.compat.generation import stock_generate_step
from mlx_flash.generation import RowGenerator
from models import computed_once, same_bits, stock
from shared_passes import STEP

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

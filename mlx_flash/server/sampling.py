"""mlx-lm's samplers and logits processors for one request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_flash.compat.arrays import evaluate, random_key, set_random_key
from mlx_flash.errors import RefusedError
from mlx_flash.server.request import Sampling

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

LEAST_TEMPERATURE = 1e-5
"""Below it the likeliest token is taken: mlx-lm multiplies by the inverse, which must be a finite number."""


greedy: Sampler = make_sampler(0.0)
"""Takes the likeliest token. It is one object, so that batches of mlx-lm's call it once for all their requests."""


class SeededSampler:
    """A sampler with random numbers of its own, so that its tokens do not depend on other requests.

    They are those that mlx-lm takes after ``mx.random.seed(seed)``.
    """

    def __init__(self, sampler: Sampler, seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        self._key: mx.array | None = None  # the state after the last token, which is computed with it

    def __call__(self, logprobs: mx.array) -> mx.array:
        if self._key is None:
            mx.random.seed(self._seed)
        else:
            set_random_key(self._key)
        token = self._sampler(logprobs)
        self._key = random_key()
        evaluate(token, self._key, waits=False)
        return token


def sampler_of(sampling: Sampling, tokenizer: Any, vocab_size: int) -> Sampler:
    """Return what chooses tokens."""
    given = sampling.given("top_p", "top_k", "min_p", "xtc_probability", "xtc_threshold")
    if (temperature := sampling.temperature or 0.0) < LEAST_TEMPERATURE:
        return greedy
    if given.get("top_k", 0) >= vocab_size:  # all of them
        del given["top_k"]
    special = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
    seed = sampling.drawn_seed if sampling.named_seed is None else sampling.named_seed
    return SeededSampler(make_sampler(temperature, xtc_special_tokens=special, **given), seed)


def processors_of(sampling: Sampling, vocab_size: int) -> list[LogitsProcessor]:
    """Return what changes logits."""
    for token, _ in sampling.logit_bias:  # mlx-lm would write beyond its logits
        if not 0 <= token < vocab_size:
            raise RefusedError(f"logit_bias names token {token}: the model has {vocab_size}.", 400, "logit_bias")
    names = [
        f"{kind}_{field}" for kind in ("repetition", "presence", "frequency") for field in ("penalty", "context_size")
    ]
    processors = make_logits_processors(dict(sampling.logit_bias), **sampling.given(*names))
    return cast(list[LogitsProcessor], processors)

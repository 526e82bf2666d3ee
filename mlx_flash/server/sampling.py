"""mlx-lm's samplers and logits processors for one request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_flash.compat.compiler import evaluate
from mlx_flash.compat.randomkeys import random_key, set_random_key
from mlx_flash.errors import RefusedError
from mlx_flash.server.request import Sampling

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

LEAST_TEMPERATURE = 1e-5
"""Below it the likeliest token is taken: mlx-lm multiplies by the inverse, which must be a finite number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """The settings of requests that leave them out, with mlx-lm's values but for the length of answers.

    Attributes:
        temperature, top_p, top_k, min_p, repetition_penalty, repetition_context_size, seed: as of `Sampling`.
        max_tokens: the most tokens of an answer.
        stop: texts that end an answer, beside those of the request.
        template_options: variables of the chat template, below those of the request.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 0.0
    repetition_context_size: int = 20
    seed: int | None = None
    max_tokens: int = 4096
    stop: Sequence[str] = ()
    template_options: Mapping[str, Any] | None = None


greedy: Sampler = make_sampler(0.0)
"""Takes the likeliest token. It is one object, so that batches of mlx-lm's call it once for all their requests."""


class SeededSampler:
    """A sampler with random numbers of its own, so that its tokens do not depend on other requests.

    They are those that mlx-lm takes after ``mx.random.seed(seed)``.

    Args:
        sampler: mlx-lm's.
        seed: the first state.
    """

    def __init__(self, sampler: Sampler, seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        self._key: mx.array | None = None  # the state after the last token, which is computed with it

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Return the next token."""
        if self._key is None:
            mx.random.seed(self._seed)
        else:
            set_random_key(self._key)
        token = self._sampler(logprobs)
        self._key = random_key()
        evaluate(token, self._key, waits=False)
        return token


def sampler_of(sampling: Sampling, defaults: Defaults, tokenizer: Any, vocab_size: int) -> Sampler:
    """Return what chooses tokens."""
    temperature = _first(sampling.temperature, defaults.temperature)
    top_k = _first(sampling.top_k, defaults.top_k)
    if temperature < LEAST_TEMPERATURE:
        return greedy
    sampler = make_sampler(
        temperature,
        top_p=_first(sampling.top_p, defaults.top_p),
        top_k=top_k if top_k < vocab_size else 0,  # all of them
        min_p=_first(sampling.min_p, defaults.min_p),
        xtc_probability=sampling.xtc_probability,
        xtc_threshold=sampling.xtc_threshold,
        xtc_special_tokens=[*tokenizer.encode("\n"), *tokenizer.eos_token_ids],
    )
    return SeededSampler(sampler, _first(named_seed(sampling, defaults), sampling.drawn_seed))


def named_seed(sampling: Sampling, defaults: Defaults) -> int | None:
    """Return the seed of an answer, if its request or the model names one: it has the same tokens each time."""
    seed = _first(sampling.seed, defaults.seed)
    return None if seed is None or seed < 0 else (seed + sampling.choice) % 2**64


def processors_of(sampling: Sampling, defaults: Defaults, vocab_size: int) -> list[LogitsProcessor]:
    """Return what changes logits.

    Raises:
        RefusedError: ``logit_bias`` names a token that the model does not have: mlx-lm would write beyond its logits.
    """
    for token, _ in sampling.logit_bias:
        if not 0 <= token < vocab_size:
            raise RefusedError(f"logit_bias names token {token}: the model has {vocab_size}.", 400, "logit_bias")
    processors = make_logits_processors(
        dict(sampling.logit_bias),
        _first(sampling.repetition_penalty, defaults.repetition_penalty),
        _first(sampling.repetition_context_size, defaults.repetition_context_size),
        sampling.presence_penalty,
        sampling.presence_context_size,
        sampling.frequency_penalty,
        sampling.frequency_context_size,
    )
    return cast(list[LogitsProcessor], processors)


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value

"""A generation as data, and the ways to carry it out with any model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

stock_generate: Any = import_module("mlx_lm.generate")
"""The module; ``mlx_lm.generate`` is the function."""

VOCAB_SIZE = 300
WINDOW = 12
"""Tokens of a rotating cache."""

QUANTIZED = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}

Bits = tuple[str, tuple[int, ...], bytes]
Output = tuple[int, Bits]
"""A token, and the logits or log probabilities that it was chosen by."""


def bits(array: mx.array) -> Bits:
    """Return an array's type, shape and bytes."""
    return str(array.dtype), tuple(array.shape), np.array(array.reshape(-1).view(mx.uint8)).tobytes()


def tokens_of(seed: int, number: int) -> tuple[int, ...]:
    """Return a prompt. Every third one repeats itself, so that its continuation can be guessed."""
    dice = random.Random(f"{seed} {number}")
    if seed % 3 == 0:
        part = [dice.randrange(VOCAB_SIZE) for _ in range(3)]
        return tuple((part * number)[:number])
    return tuple(dice.randrange(VOCAB_SIZE) for _ in range(number))


@dataclass(frozen=True)
class Script:
    """A generation: what mlx-lm's output depends on.

    Attributes:
        folder: of the model.
        place: of keys and values: ``rotating`` and ``quantized`` are caches of other classes.
        num_before: tokens in the cache before the prompt.
        prompt: tokens of the prompt.
        step: the most tokens in a call of the prompt.
        num_tokens: tokens to generate.
        way: ``calls`` of the model, or ``steps`` of ``generate_step``.
    """

    folder: str
    place: str
    num_before: int
    prompt: tuple[int, ...]
    step: int
    num_tokens: int
    way: str

    def options(self) -> dict[str, Any]:
        """Return options of ``generate_step``."""
        return {
            "max_tokens": self.num_tokens,
            "prefill_step_size": self.step,
            **(QUANTIZED if self.place == "quantized" else {}),
        }


BEFORE_STEP = 64
"""Tokens in a call that fills a cache before its trials."""


def make_cache(model: Any, place: str) -> list[Any]:
    """Return a new prompt cache of a place that is not the engine's own."""
    if place == "rotating":  # most models build their own caches, whatever ``max_kv_size`` is
        return [RotatingKVCache(max_size=WINDOW, keep=4) for _ in model.layers]
    return list(make_prompt_cache(model))


def fill(model: Any, cache: list[Any], num_tokens: int, step: int) -> None:
    """Compute the tokens that precede every prompt."""
    before = tokens_of(1, num_tokens)
    for start in range(0, num_tokens, step):
        mx.eval(model(mx.array([before[start : start + step]]), cache=cache))


def by_calls(model: Any, cache: list[Any], prompt: Sequence[int], step: int, num_tokens: int) -> Iterator[Any]:
    """Generate tokens by calls of a model, with the parts of ``generate_step``."""
    rest = list(prompt)
    while len(rest) > 1:
        part = rest[: min(step, len(rest) - 1)]
        mx.eval(model(mx.array([part]), cache=cache))
        rest = rest[len(part) :]
    for _ in range(num_tokens):
        logits = model(mx.array([rest]), cache=cache)[0, -1]
        rest = [int(mx.argmax(logits).item())]
        yield rest[0], logits


def carried_out(script: Script, model: Any, cache: list[Any], step_function: Callable[..., Any]) -> Iterator[Any]:
    """Return a generator of tokens and logits."""
    if script.way == "calls":
        return by_calls(model, cache, script.prompt, script.step, script.num_tokens)
    found: Iterator[Any] = step_function(mx.array(script.prompt), model, prompt_cache=cache, **script.options())
    return found


@dataclass(frozen=True)
class Continuation:
    """How a cache goes on after an event.

    Attributes:
        way: ``calls`` or ``steps``.
        prompt: tokens that are added.
        step: the most tokens in a call.
    """

    way: str
    prompt: tuple[int, ...]
    step: int

    NUM_TOKENS = 2

    @property
    def num_added(self) -> int:
        """How many tokens the cache has more in the end. ``generate_step`` computes one beyond those it yields."""
        return len(self.prompt) + self.NUM_TOKENS - (self.way == "calls")

    def outputs(self, script: Script, model: Any, cache: list[Any], step_function: Callable[..., Any]) -> list[Output]:
        """Continue a cache."""
        made = Script(script.folder, script.place, 0, self.prompt, self.step, self.NUM_TOKENS, self.way)
        return [(int(token), bits(logits)) for token, logits in carried_out(made, model, cache, step_function)]


def offsets(cache: Sequence[Any]) -> set[int]:
    """Return the lengths that the layers' caches have. Recurrent states have none."""
    return {int(entry.offset) for entry in cache if hasattr(entry, "offset")}


def is_quantized(cache: Sequence[Any]) -> tuple[bool, ...]:
    """Return which layers' caches are quantized."""
    return tuple(isinstance(entry, QuantizedKVCache) for entry in cache)


def can_be_put_back(cache: Sequence[Any]) -> bool:
    """Return whether a call that ended early can be taken back: windows and states forget."""
    return not any(isinstance(entry, RotatingKVCache | ArraysCache) for entry in cache)

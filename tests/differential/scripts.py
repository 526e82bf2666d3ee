"""A generation as data, and the ways to carry it out with any model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_sampler

stock_generate: Any = import_module("mlx_lm.generate")
"""The module; ``mlx_lm.generate`` is the function."""

VOCAB_SIZE = 300
WINDOW = 12
"""Tokens of a rotating cache."""

QUANTIZED = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}

UNQUANTIZED = {"kv_bits": None, "kv_group_size": 64, "quantized_kv_start": 0}

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
    """A generation: what mlx-lm's output depends on."""

    folder: str
    place: str  # of keys and values: ``rotating`` and ``quantized`` are caches of other classes
    num_before: int  # tokens in the cache before the prompt
    prompt: tuple[int, ...]
    step: int  # the most tokens in a call of the prompt
    num_tokens: int  # to generate
    way: str  # ``calls`` of the model, or ``steps`` of ``generate_step``
    parts: tuple[int, ...] = ()  # tokens in each call of the prompt, up to the last one; those of the step if empty
    seed: int = 0  # of random tokens; 0 for the most probable ones. For ``steps`` only

    def options(self) -> dict[str, Any]:
        """Return options of ``generate_step``."""
        sampling = {"sampler": make_sampler(temp=1.0)} if self.seed else {}
        return {"max_tokens": self.num_tokens, "prefill_step_size": self.step, **self.quantization(), **sampling}

    def quantization(self) -> dict[str, int]:
        """Return those of them that quantize keys and values."""
        return QUANTIZED if self.place == "quantized" else {}

    @property
    def num_added(self) -> int:
        """How many tokens the cache has more in the end. ``generate_step`` computes one beyond those it yields."""
        return len(self.prompt) + self.num_tokens - (self.way == "calls")


def cut(number: int, step: int, falls: Sequence[tuple[int, int]] = ()) -> tuple[int, ...]:
    """Return the parts of so many tokens, when the step gets smaller from some tokens on."""
    parts: list[int] = []
    for token, smaller in [*falls, (number, 0)]:
        while (left := min(token, number) - sum(parts)) > 0:
            parts.append(min(step, left))
        step = smaller
    return tuple(parts)


BEFORE_STEP = 8
"""Tokens in a call that fills a cache before its trials: no plan has fewer, and on a GPU parts change last bits."""


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


def carried_out(script: Script, model: Any, cache: list[Any], step_function: Any, **options: Any) -> Iterator[Any]:
    """Generate tokens, and yield them with the logits that they were chosen by. ``options`` are the function's."""
    rest = list(script.prompt)
    if script.way == "calls" or script.parts:
        for number in script.parts or cut(len(rest) - 1, script.step):
            mx.eval(model(mx.array([rest[:number]]), cache=cache))
            stock_generate.maybe_quantize_kv_cache(cache, **(UNQUANTIZED | script.quantization()))
            rest = rest[number:]
    if script.way == "steps":
        if script.seed:
            mx.random.seed(script.seed)
        yield from step_function(mx.array(rest), model, prompt_cache=cache, **{**script.options(), **options})
        return
    for _ in range(script.num_tokens):
        logits = model(mx.array([rest]), cache=cache)[0, -1]
        rest = [int(mx.argmax(logits).item())]
        yield rest[0], logits


def offsets(cache: Sequence[Any]) -> set[int]:
    """Return the lengths that the layers' caches have. Recurrent states have none."""
    return {int(entry.offset) for entry in cache if hasattr(entry, "offset")}


def is_quantized(cache: Sequence[Any]) -> tuple[bool, ...]:
    """Return which layers' caches are quantized."""
    return tuple(isinstance(entry, QuantizedKVCache) for entry in cache)


def can_be_put_back(cache: Sequence[Any]) -> bool:
    """Return whether a call that ended early can be taken back: windows and states forget."""
    return not any(isinstance(entry, RotatingKVCache | ArraysCache) for entry in cache)

"""The key of MLX's random numbers, which every number that is drawn replaces. Each thread has its own."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx

_random: Any = mx.random  # whose type stubs lack the state

_MOST_NUMBERS = 8
"""The most random numbers that a sampler is expected to draw for a token. mlx-lm's draw one or two."""


def random_key() -> mx.array:
    """Return the key; the same object until a number is drawn."""
    key: mx.array = _random.state[0]
    return key


def set_random_key(key: mx.array) -> None:
    """Have the next numbers follow from a key."""
    high, low = cast(list[int], key.tolist())
    mx.random.seed(high << 32 | low)


def draw_as_between(before: mx.array, after: mx.array) -> bool:
    """Draw as many numbers as led from one key to another. Return whether their number was found.

    This waits for the three keys, and for nothing that the device computes after them.
    """
    with mx.stream(mx.cpu):
        for number in range(1, _MOST_NUMBERS + 1):
            before = _next(before)
            if mx.array_equal(before, after).item():
                key = random_key()
                for _ in range(number):
                    key = _next(key)
                set_random_key(key)
                return True
    return False


def _next(key: mx.array) -> mx.array:
    """Return the key after a number was drawn, as MLX computes it."""
    return mx.random.split(key)[0]

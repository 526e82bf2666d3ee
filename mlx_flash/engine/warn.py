"""Warnings about the calls of a model. Each is given once."""

from __future__ import annotations

import logging

_log = logging.getLogger("mlx_flash")


class Warnings:
    """Warnings of one model.

    Args:
        name: of the model, for people.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._given: set[str] = set()

    def step(self, num_tokens: int) -> None:
        """Warn that prompts are computed in smaller parts than mlx-lm's."""
        self._give(
            "the budget has room for %d prompt tokens at a time: output is mlx-lm's own for --prefill-step-size %d",
            num_tokens,
            num_tokens,
        )

    def max_kv_size(self, requested: int) -> None:
        """Warn that a limit of the KV cache has no effect."""
        self._give(
            "max_kv_size=%d has no effect: mlx-lm lets %s build its own caches, which keep every token of the "
            "context. Hint: set kv_max_tokens to bound them.",
            requested,
            self._name,
        )

    def _give(self, text: str, *values: object) -> None:
        if text not in self._given:
            self._given.add(text)
            _log.warning(text, *values)

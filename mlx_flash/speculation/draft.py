"""Guesses by a smaller model with the same vocabulary."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, cast

import mlx.core as mx

from mlx_flash.compat.caches import entries_of
from mlx_flash.kv.checkpoints import PutBack, checkpoint
from mlx_flash.kv.owed import Debt, Owed
from mlx_flash.layout.reachable import arrays_in
from mlx_flash.speculation.guesses import Source


class Draft(Source):
    """A draft model, which guesses its likeliest tokens. It draws no random numbers, since plain decoding draws none.

    Of the prompt it computes ``step`` tokens at a time.
    """

    expected: Mapping[int, float] = {}

    def __init__(self, model: Any, cache: list[Any], tokens: Sequence[int], step: int) -> None:
        self.guess_seconds = 0.0
        self._model = model
        self._cache = cache
        self._step = step
        self._coming = list(tokens)
        self._guessed: list[tuple[int, list[PutBack]]] = []

    def add(self, token: int) -> None:
        """Add the next token of the text."""
        self._coming.append(token)

    def look(self) -> int:
        """Return the quality of a guess: all are of one."""
        return 1

    def guess(self, number: int) -> Sequence[int]:
        """Return the next tokens."""
        token = self._catch_up()
        found = [token]
        while len(found) < number:
            self._guessed.append((token, [checkpoint(entry) for entry in entries_of(self._cache)]))
            token = self._next([token])
            found.append(token)
        return found

    def end(self) -> None:
        """Leave the cache with the text and nothing else."""
        self._take_back()
        if self._coming:
            self._catch_up()

    def leave(self) -> None:
        """Have the cache say the text, and compute what it lacks when somebody looks."""
        self._take_back()
        owed = Owed(self._cache)

        def settle() -> None:
            owed.lift()
            self._catch_up()

        owed.owe(Debt(len(self._coming), settle) if self._coming else None)

    def _take_back(self) -> None:
        """Take back what was guessed wrong; what was right need not be computed again."""
        pairs = zip(self._guessed, self._coming[:-1], strict=False)  # the last token is computed for its logits
        num_right = sum(1 for _ in takewhile(lambda pair: pair[0][0] == pair[1], pairs))
        for _, put_backs in reversed(self._guessed[num_right:]):
            for put_back in put_backs:
                put_back()
        self._guessed.clear()
        del self._coming[:num_right]

    def _catch_up(self) -> int:
        """Add the text that is missing. Return the next token."""
        self._take_back()
        coming, self._coming = self._coming, []
        for start in range(0, len(coming), self._step):
            token = self._next(coming[start : start + self._step])
        return token

    def _next(self, tokens: Sequence[int]) -> int:
        """Add tokens to the cache. Return the likeliest next one."""
        began = time.perf_counter()
        output = self._model(mx.array([tokens]), cache=self._cache)
        token = mx.argmax(output[0, -1])
        mx.eval(token, arrays_in(self._cache))
        if len(tokens) <= 2:  # those that one guess needs
            self.note_seconds(time.perf_counter() - began)
        return cast(int, token.item())

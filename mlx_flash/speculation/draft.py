"""Guesses by a smaller model with the same vocabulary, or by the model's own head for multi-token prediction."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, cast

import mlx.core as mx

from mlx_flash.compat.caches import entries_of
from mlx_flash.kv.checkpoints import PutBack, checkpoint
from mlx_flash.kv.owed import Debt, Owed
from mlx_flash.layout.parts import OwnHead
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


class OwnGuesses(Source):
    """The guesses of a model's head for one text. The head gets each token with the hidden state of the one before it.

    A head that is asked for several tokens goes on from its own hidden states, instead of the model's. Passes hand in
    the hidden states, of prompts with their tokens. The first token that is added ends the prompt.

    Args:
        head: the head.
        most: tokens that its cache has room for. Beyond them it begins anew, and forgets what came before.
        step: the most tokens that it gets at a time.
        compute: does some work in the engine thread while the head is in memory; else it returns None.
    """

    expected: Mapping[int, float] = {1: 0.6}
    reads = True

    def __init__(self, head: OwnHead, most: int, step: int, compute: Callable[[Callable[[], Any]], Any]) -> None:
        self.guess_seconds = 0.0
        self.most, self._step = most, step
        self._head, self._compute = head, compute
        self._cache: list[Any] = []
        self._length = 0
        self._before: list[mx.array] = []  # hidden states that the head has not got, of the tokens before ...
        self._tokens: list[int] = []  # ... these; the last states may have no token yet
        self._is_prompt = True

    # In passes

    def read(self, tokens: mx.array, states: mx.array) -> None:
        """Take the hidden states of new tokens, ``(1, length, dimensions)``."""
        if self._is_prompt:
            self._tokens += cast("list[list[int]]", tokens.tolist())[0][0 if self._before else 1 :]
        self._before.append(states)
        if len(self._tokens) >= self._step:
            self._catch_up()

    @property
    def missing_bytes(self) -> int:
        """Memory that its cache will take with its first token."""
        return 0 if self._cache else self.most * self._head.row_bytes

    def restart(self) -> None:
        """Forget the text: a pass has failed, or the next tokens are computed, or were, without being read."""
        self._before, self._tokens, self._cache, self._length = [], [], [], 0

    # Between passes

    def add(self, token: int) -> None:
        """Add the next token of the text."""
        self._is_prompt = False
        if self._num_ahead > 0:
            self._tokens.append(token)

    def look(self) -> int:
        """Forget the states of wrong guesses. Return the quality of a guess, one for all; 0 where no state is known."""
        del self._before[len(self._before) - self._num_ahead :]
        return int(bool(self._tokens))

    @property
    def _num_ahead(self) -> int:
        """Hidden states without a token after them."""
        return sum(states.shape[1] for states in self._before) - len(self._tokens)

    def guess(self, number: int) -> Sequence[int]:
        """Return the next tokens."""
        return self._compute(partial(self._guess, number)) or [0]

    def _guess(self, number: int) -> list[int]:
        began, num_read = time.perf_counter(), len(self._tokens)
        states = self._catch_up()
        put_backs = [checkpoint(entry) for entry in entries_of(self._cache)]
        found: list[int] = []
        while True:
            token = mx.argmax(self._head.logits(states)[0, -1])
            mx.eval(token, arrays_in(self._cache))
            found.append(cast(int, token.item()))
            if len(found) == number or self._length + len(found) > self.most:
                break
            states = self._head.states(mx.array([found[-1:]]), states, self._cache)
        for put_back in put_backs:
            put_back()
        if num_read <= number + 1:  # else much of the time was for tokens of before
            self.note_seconds((time.perf_counter() - began) / len(found))
        return found

    def _catch_up(self) -> mx.array:
        """Give the head the tokens that it lacks. Return its last hidden state, not evaluated."""
        before = mx.concatenate(self._before, axis=1)
        number = min(len(self._tokens), before.shape[1])
        for start in range(0, number, self._step):
            stop = min(start + self._step, number)
            if not self._cache or self._length + stop - start > self.most:
                self._cache, self._length = self._head.make_cache(self.most), 0
            states = self._head.states(mx.array([self._tokens[start:stop]]), before[:, start:stop], self._cache)
            mx.eval(arrays_in(self._cache))  # of a prompt no more of the layer is computed
            self._length += stop - start
        self._before = [mx.contiguous(before[:, number:])] if number < before.shape[1] else []
        mx.eval(self._before)
        del self._tokens[:number]
        return states[:, -1:]

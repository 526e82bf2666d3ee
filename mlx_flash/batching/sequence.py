"""A sequence that shares passes over the weights with others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import mlx.core as mx

from mlx_flash.compat.batches import Progress, Response, Waiting
from mlx_flash.engine.guesses import GuessedRows, guessed_row
from mlx_flash.engine.row import Row
from mlx_flash.engine.status import PassCounters
from mlx_flash.generation import Chooser
from mlx_flash.kv.views import trimmer
from mlx_flash.model import FlashLLM
from mlx_flash.speculation.guesses import Guesses
from mlx_flash.speculation.lookup import Lookup


@dataclass(eq=False)
class RowSequence:
    """A sequence that is being computed.

    Attributes:
        uid, cache, max_tokens: as given.
        most_tokens: the most tokens that its cache will have.
        tokens: those in the cache.
        segments: parts of the prompt that are left.
        num_prompt: tokens of the prompt.
        choose: chooses tokens.
        matcher: finds the end of the answer.
        new: the tokens that are computed now.
        row: these tokens on their way.
        token: the last token; None before the first one.
        num_tokens: tokens of the answer so far.
        guesses: those of the next tokens; None where none are made.
        ends_segment: the row that is computed ends with a segment.
    """

    uid: int
    cache: list[Any]
    max_tokens: int
    most_tokens: int
    tokens: list[int]
    segments: list[list[int]]
    num_prompt: int
    choose: Chooser
    matcher: Any
    new: list[int]
    row: Row | None = None
    token: mx.array | None = None
    num_tokens: int = 0
    guesses: Guesses | None = None
    ends_segment: bool = True

    @classmethod
    def of(cls, waiting: Waiting) -> RowSequence:
        """Return a sequence that begins."""
        uid, segments, max_tokens, cache, tokens, sampler, processors, stop = waiting
        prompt = [*tokens, *(token for segment in segments for token in segment)]
        choose, num_prompt = Chooser(sampler, processors, prompt), len(prompt) - len(tokens)
        guesses = Guesses(Lookup(prompt))
        return cls(
            uid,
            cache,
            max_tokens,
            waiting.most_tokens,
            tokens,
            segments,
            num_prompt,
            choose,
            stop.matcher(),
            new=[],
            guesses=guesses,
        )

    def begin(self, model: FlashLLM, step: int, num_others: int = 0, *, most: int | None = None) -> Row:
        """Return the row to compute now, beside as many rows of others.

        Args:
            model: the model.
            step: mlx-lm's ``prefill_step_size``.
            num_others: rows of others.
            most: the most tokens of a prompt, a multiple of the step; None for as many as memory allows.
        """
        if self.row is None:
            self.row = self._next_row(model, step, num_others, most)
        return self.row

    def _next_row(self, model: FlashLLM, step: int, num_others: int, most: int | None) -> Row:
        if self.token is not None:
            token = cast(int, self.token.item())
            self.new = [token, *self._guess(model, token, num_others)]
            return (
                guessed_row(self.new, self.cache) if self.is_guessing else model.row(self.token[None], self.cache, step)
            )
        taken = self._take_segments(most)
        self.new = [token for segment in taken for token in segment]
        ends = list(accumulate(map(len, taken[:-1])))
        return model.row(mx.array([self.new]), self.cache, step, wants_logits=not self.segments, ends=ends)

    def _take_segments(self, most: int | None) -> list[list[int]]:
        """Return the segments of the prompt to compute now. A part of one ends where the whole would be cut, too."""
        # A cache that can be trimmed has the ends of its segments in it; of another one they are states of their own.
        apart = len(self.segments) > 2 and trimmer(self.cache) is None
        taken: list[list[int]] = []
        num_left = math.inf if most is None else most
        while self.segments and len(self.segments[0]) <= num_left and not (apart and taken):
            taken.append(self.segments.pop(0))
            num_left -= len(taken[-1])
        self.ends_segment = bool(taken)
        if not taken and most is not None:
            taken, self.segments[0] = [self.segments[0][:most]], self.segments[0][most:]
        return taken

    def _guess(self, model: FlashLLM, token: int, num_others: int) -> Sequence[int]:
        """Return guesses of the tokens after the next one."""
        if self.guesses is None:
            return []
        self.guesses.add(token)
        limit = self.max_tokens - self.num_tokens - 1
        if not self.guesses.look(limit) or model.refusal(self.cache) is not None:
            return []
        return self.guesses.take(model.times, limit, num_others)

    @property
    def is_guessing(self) -> bool:
        """True if the row that is computed has guesses."""
        return self.token is not None and len(self.new) > 1

    @property
    def num_left(self) -> int:
        """Tokens of the prompt that are not in the cache."""
        num_computing = 0 if self.row is None else self.row.num_left
        return num_computing + sum(map(len, self.segments)) if self.token is None else 0

    def progress(self, *, ends_segment: bool) -> Any:
        """Return how far the prompt is."""
        done = self.num_prompt - self.num_left
        return Progress(self.uid, (done, self.num_prompt), ends_segment, done == self.num_prompt)

    def answers(self, counters: PassCounters) -> list[Any]:
        """Return the next tokens, from the logits of a row that is done: those guessed right, and one more."""
        assert self.row is not None
        if not self.is_guessing:
            self.tokens = [*self.tokens, *self.new]
            return [] if self.segments else [self._answer(self.row.outputs[-1])]
        guesses, rows, found = self.guesses, GuessedRows(self.row, counters), []
        for number, output in enumerate(rows.outputs, 1):
            if guesses is not None and number > 1:
                guesses.add(self.new[number - 1])
            self.tokens = [*self.tokens, self.new[number - 1]]
            found.append(self._answer(output))
            if found[-1].finish_reason is not None or self.new[number : number + 1] != [found[-1].token]:
                break
        rows.keep(len(found))
        if guesses is not None:
            guesses.note(len(rows.outputs) - 1, len(found) - 1)
        return found

    def _answer(self, output: mx.array) -> Any:
        """Return the token that follows some logits."""
        new, random = [] if self.token is None else [self.token], _random_state()
        self.token, logprobs = self.choose(mx.concatenate(new) if new else None, output)
        if _random_state() is not random:  # whose order of numbers would depend on guesses
            self.guesses = None
        self.num_tokens += 1
        token = cast(int, self.token.item())
        reason = "length" if self.num_tokens >= self.max_tokens else None
        reason = "stop" if self.matcher.advance(token) else reason
        kept = (self.cache, self.tokens) if reason else (None, None)
        return Response(self.uid, token, logprobs[0], reason, *kept)


def _random_state() -> Any:
    """Return the key of MLX's random numbers. Drawing one replaces it."""
    return cast(Any, mx.random).state[0]

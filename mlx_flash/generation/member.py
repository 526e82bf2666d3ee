"""A sequence of a batch: its number, its end, and its progress and tokens as mlx-lm tells them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from mlx_flash.compat.batchgenerator import Progress, Response, Waiting
from mlx_flash.compat.randomkeys import random_key
from mlx_flash.generation.chooser import Chooser
from mlx_flash.generation.sequence import GeneratedSequence
from mlx_flash.model import FlashLLM, Reads
from mlx_flash.speculation.guesses import Guesses
from mlx_flash.speculation.lookup import Lookup


class Reading(NamedTuple):
    """The hidden states of a prompt that are wanted.

    Attributes:
        step: the most tokens of a part.
        keeps: as ``reads`` of :meth:`FlashLLM.row`.
        is_all: nothing else is wanted: the sequence ends with its prompt.
    """

    step: int
    keeps: Reads
    is_all: bool = False


class Member(GeneratedSequence):
    """A sequence of a batch.

    Args:
        waiting: the sequence as it was inserted.
        model: the model.
        step: mlx-lm's ``prefill_step_size``.
        report: as ``on_prompt`` of `RowGenerator`.
        reading: of the prompt's hidden states; None for none.

    Attributes:
        uid: its number.
        num_prompt: tokens of the prompt.
        most_tokens: the most tokens that its cache will have.
    """

    def __init__(
        self,
        waiting: Waiting,
        model: FlashLLM,
        step: int,
        report: Callable[[int, int, int], None],
        reading: Reading | None = None,
    ) -> None:
        self.uid, segments, max_tokens, cache, tokens, sampler, processors, stop = waiting
        prompt = [*tokens, *(token for segment in segments for token in segment)]
        if reading is not None:
            step = min(step, reading.step)
            if reading.is_all:
                segments, max_tokens = [prompt], 0  # no token is computed alone
        super().__init__(
            model,
            cache,
            segments,
            Chooser(sampler, processors, prompt),
            step=step,
            max_tokens=int(max_tokens),
            guesses=Guesses(Lookup(prompt)),
            tokens=tokens,
            report=partial(report, self.uid),
            reads=None if reading is None else reading.keeps,
        )
        self.num_prompt, self.most_tokens, self._matcher = self.num_left, waiting.most_tokens, stop.matcher()

    def progress(self) -> Any:
        """Return how far the prompt is."""
        done, is_part_done = self.num_prompt - self.num_left, self.begin().is_done
        return Progress(self.uid, (done, self.num_prompt), is_part_done and self.ends_segment, done == self.num_prompt)

    @property
    def has_chosen(self) -> bool:
        """True if a token was chosen, and not handed out."""
        return self.num_tokens > self.num_taken

    def choose(self) -> None:
        """Choose the next token of a sequence that is ready."""
        key = random_key()
        super().choose()
        if random_key() is not key:  # whose order of numbers would depend on guesses
            self.guesses = None

    def answer(self) -> Any:
        """Return the token that was chosen."""
        number, logprobs, _ = self.take()
        reason = "length" if self.num_tokens >= self.max_tokens else None
        reason = "stop" if self._matcher.advance(number) else reason
        return Response(self.uid, number, logprobs, reason, *((self.cache, self.tokens) if reason else (None, None)))

"""A sequence of a batch: its number, its end, and its progress and tokens as mlx-lm tells them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(eq=False)
class Member:
    """A sequence of a batch.

    Attributes:
        uid: its number.
        sequence: the sequence.
        num_prompt: tokens of the prompt.
        most_tokens: the most tokens that its cache will have.
        matcher: finds the end of the answer.
    """

    uid: int
    sequence: GeneratedSequence
    num_prompt: int
    most_tokens: int
    matcher: Any

    @classmethod
    def of(
        cls,
        waiting: Waiting,
        model: FlashLLM,
        step: int,
        report: Callable[[int, int, int], None],
        reading: Reading | None = None,
    ) -> Member:
        """Return a sequence that begins.

        Args:
            waiting: the sequence as it was inserted.
            model: the model.
            step: mlx-lm's ``prefill_step_size``.
            report: as ``on_prompt`` of `RowGenerator`.
            reading: of the prompt's hidden states; None for none.
        """
        uid, segments, max_tokens, cache, tokens, sampler, processors, stop = waiting
        prompt = [*tokens, *(token for segment in segments for token in segment)]
        if reading is not None:
            step = min(step, reading.step)
            if reading.is_all:
                segments, max_tokens = [prompt], 0  # no token is computed alone
        chooser, guesses = Chooser(sampler, processors, prompt), Guesses(Lookup(prompt))
        sequence = GeneratedSequence(
            model,
            cache,
            segments,
            chooser,
            step=step,
            max_tokens=int(max_tokens),
            guesses=guesses,
            tokens=tokens,
            report=partial(report, uid),
            reads=None if reading is None else reading.keeps,
        )
        return cls(uid, sequence, sequence.num_left, waiting.most_tokens, stop.matcher())

    def progress(self) -> Any:
        """Return how far the prompt is."""
        sequence = self.sequence
        done, row = self.num_prompt - sequence.num_left, sequence.begin()
        return Progress(
            self.uid, (done, self.num_prompt), row.is_done and sequence.ends_segment, done == self.num_prompt
        )

    @property
    def has_chosen(self) -> bool:
        """True if a token was chosen, and not handed out."""
        return self.sequence.num_tokens > self.sequence.num_taken

    def choose(self) -> None:
        """Choose the next token of a sequence that is ready."""
        key = random_key()
        self.sequence.choose()
        if random_key() is not key:  # whose order of numbers would depend on guesses
            self.sequence.guesses = None

    def answer(self) -> Any:
        """Return the token that was chosen."""
        sequence = self.sequence
        number, logprobs, _ = sequence.take()
        reason = "length" if sequence.num_tokens >= sequence.max_tokens else None
        reason = "stop" if self.matcher.advance(number) else reason
        kept = (sequence.cache, sequence.tokens) if reason else (None, None)
        return Response(self.uid, number, logprobs, reason, *kept)

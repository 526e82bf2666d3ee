"""Exact batches: sequences that share passes over the weights, each bit for bit as if it were computed alone.

mlx-lm computes a batch as one array with a row for each sequence, padded to the longest one. Kernels then work on other
shapes than for a sequence alone, and on GPUs the last bits differ. Here each sequence keeps its own cache and its own
calls; they share the weights that a pass reads.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, cast

import mlx.core as mx

from mlx_flash.compat.batches import BatchGenerator, Progress, Response, Waiting, stock_batch_generate
from mlx_flash.compat.generation import with_names
from mlx_flash.engine.passes import Row
from mlx_flash.generation import Chooser
from mlx_flash.kv.views import trimmer
from mlx_flash.model import FlashLLM


@dataclass(eq=False)
class _Sequence:
    """A sequence that is being computed.

    Attributes:
        uid, cache, max_tokens: as given.
        tokens: those in the cache.
        segments: parts of the prompt that are left.
        num_prompt: tokens of the prompt.
        choose: chooses tokens.
        matcher: finds the end of the answer.
        new: the tokens that are computed now.
        row: these tokens on their way.
        token: the last token; None before the first one.
        num_tokens: tokens of the answer so far.
    """

    uid: int
    cache: list[Any]
    max_tokens: int
    tokens: list[int]
    segments: list[list[int]]
    num_prompt: int
    choose: Chooser
    matcher: Any
    new: list[int]
    row: Row | None = None
    token: mx.array | None = None
    num_tokens: int = 0

    @classmethod
    def of(cls, waiting: Waiting) -> _Sequence:
        """Return a sequence that begins."""
        uid, segments, max_tokens, cache, tokens, sampler, processors, stop = waiting
        prompt = [*tokens, *(token for segment in segments for token in segment)]
        choose = Chooser(sampler, processors, prompt)
        return cls(uid, cache, max_tokens, tokens, segments, len(prompt) - len(tokens), choose, stop.matcher(), [])

    def begin(self, model: FlashLLM, step: int) -> Row:
        """Return the row to compute now."""
        if self.row is None:
            self.row = self._next_row(model, step)
        return self.row

    def _next_row(self, model: FlashLLM, step: int) -> Row:
        if self.token is not None:
            self.new = [cast(int, self.token.item())]
            return model.row(self.token[None], self.cache, step)
        # A cache that can be trimmed has the ends of its segments in it; of another one they are states of their own.
        apart = len(self.segments) > 2 and trimmer(self.cache) is None
        taken, self.segments = (self.segments[:1], self.segments[1:]) if apart else (self.segments, [])
        self.new = [token for segment in taken for token in segment]
        ends = list(accumulate(map(len, taken[:-1])))
        return model.row(mx.array([self.new]), self.cache, step, wants_logits=not self.segments, ends=ends)

    @property
    def num_left(self) -> int:
        """Tokens of the prompt that are not in the cache."""
        num_computing = 0 if self.row is None else self.row.num_left
        return num_computing + sum(map(len, self.segments)) if self.token is None else 0

    def progress(self, *, ends_segment: bool) -> Any:
        """Return how far the prompt is."""
        done = self.num_prompt - self.num_left
        return Progress(self.uid, (done, self.num_prompt), ends_segment, done == self.num_prompt)

    def answer(self) -> Any:
        """Return the next token, from the logits of a row that is done."""
        assert self.row is not None
        new = [] if self.token is None else [self.token]
        self.token, logprobs = self.choose(mx.concatenate(new) if new else None, self.row.outputs[-1])
        self.num_tokens += 1
        token = cast(int, self.token.item())
        reason = "length" if self.num_tokens >= self.max_tokens else None
        reason = "stop" if self.matcher.advance(token) else reason
        kept = (self.cache, self.tokens) if reason else (None, None)
        return Response(self.uid, token, logprobs[0], reason, *kept)


class RowGenerator(BatchGenerator):
    """mlx-lm's ``BatchGenerator``, whose sequences share passes over the weights and nothing else.

    Each call of ``next`` computes a token of each answer and as much of each prompt as memory allows, one part at
    least. Sequences join and leave in between. A token is handed out as soon as it is known, so a prompt cache that is
    handed out with the last token does not have that token yet.

    Args:
        model: the streamed model.
        completes_caches: add the last tokens to the caches when all sequences have ended, in one pass for all.
        on_error: called with the number of a sequence that could not be computed, and the reason. None raises it.
        options: as mlx-lm's generator takes them.
    """

    def __init__(
        self,
        model: FlashLLM,
        *,
        completes_caches: bool = False,
        on_error: Callable[[int, Exception], None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        self._flash = model
        self._sequences: list[_Sequence] = []
        self._completes_caches = completes_caches
        self._ended: list[_Sequence] = []
        self._on_error = on_error

    def advance(self) -> tuple[list[Any], list[Any]]:
        """Compute a part of each sequence. Return the progress of prompts, and tokens.

        Raises:
            ReadError: weights could not be read.
            FlashError: a sequence could not be computed, and nobody takes its error. It is removed.
        """
        self._join()
        began, num_left = time.perf_counter(), sum(sequence.num_left for sequence in self._sequences)
        self._flash.advance([sequence.begin(self._flash, self.prefill_step_size) for sequence in self._sequences])
        prompts: list[Any] = []
        answers: list[Any] = []
        for sequence in list(self._sequences):
            self._take(sequence, prompts, answers)
        if not self._sequences and not self.num_waiting:
            self._complete_caches()
        num_prompt = num_left - sum(sequence.num_left for sequence in self._sequences)
        self.count(prompt_tokens=num_prompt, new_tokens=len(answers), seconds=time.perf_counter() - began)
        return prompts, answers

    def _join(self) -> None:
        num_prompts = sum(sequence.token is None for sequence in self._sequences)
        room = min(self.prefill_batch_size - num_prompts, self.completion_batch_size - len(self._sequences))
        for _ in range(min(room, self.num_waiting)):
            self._sequences.append(sequence := _Sequence.of(self.take()))
            sequence.begin(self._flash, self.prefill_step_size)

    def _take(self, sequence: _Sequence, prompts: list[Any], answers: list[Any]) -> None:
        """Take what a sequence has computed."""
        row = sequence.begin(self._flash, self.prefill_step_size)
        if row.error is not None:
            self._sequences.remove(sequence)
            self._fail(sequence.uid, row.error)
            return
        if row.is_done:
            sequence.tokens = [*sequence.tokens, *sequence.new]
        if sequence.token is None:
            prompts.append(sequence.progress(ends_segment=row.is_done))
        if not row.is_done:
            return
        if not sequence.segments:
            answers.append(sequence.answer())
        sequence.row = None
        if answers and answers[-1].uid == sequence.uid and answers[-1].finish_reason is not None:
            self._finish(sequence)

    def _fail(self, uid: int, error: Exception) -> None:
        if self._on_error is None:
            raise error
        self._on_error(uid, error)

    def _finish(self, sequence: _Sequence) -> None:
        self._sequences.remove(sequence)
        if self._completes_caches:
            self._ended.append(sequence)

    def _complete_caches(self) -> None:
        """Add the last tokens to the caches of sequences that have ended."""
        rows = [sequence.begin(self._flash, self.prefill_step_size) for sequence in self._ended]
        self._flash.advance(rows)
        for sequence, row in zip(self._ended, rows, strict=True):
            sequence.tokens += sequence.new
            if row.error is not None:
                raise row.error
        self._ended.clear()

    def extract_cache(self, uids: Iterable[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """Return copies of the caches of sequences, and the tokens in them."""
        wanted = set(uids)
        found = [sequence for sequence in self._sequences if sequence.uid in wanted]
        waiting = super().extract_cache(wanted - {sequence.uid for sequence in found})
        return {**waiting, **{each.uid: (copy.deepcopy(each.cache), each.tokens) for each in found}}

    def remove(self, uids: Iterable[int], return_prompt_caches: bool = False) -> dict[int, tuple[list[Any], list[int]]]:
        """Let go of sequences. Return their caches, if wanted, and the tokens in them."""
        gone = set(uids)
        caches = self.extract_cache(gone) if return_prompt_caches else {}
        self.forget(gone)
        self._sequences = [sequence for sequence in self._sequences if sequence.uid not in gone]
        return caches

    @property
    def prompt_cache_nbytes(self) -> int:
        """Bytes of all caches."""
        waiting = int(super().prompt_cache_nbytes)
        return waiting + sum(int(entry.nbytes) for sequence in self._sequences for entry in sequence.cache)


def batch_generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    prompt_caches: list[list[Any]] | None = None,
    max_tokens: int | list[int] = 128,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    **options: Any,
) -> Any:
    """Generate answers to several prompts, as ``mlx_lm.batch_generate`` does with the same arguments.

    With a streamed model each answer is, bit for bit, that of a run alone, whatever the other prompts are. A model that
    is not streamed, or has ``batching="stock"``, is left to mlx-lm.

    Args:
        model, tokenizer, prompts, max_tokens, verbose, return_token_ids, return_logprobs: as mlx-lm's.
        prompt_caches: caches for the prompts. They are copied, not changed.
        return_prompt_caches: return caches with all tokens in them, which costs a pass for the last ones.
        options: as ``BatchGenerator`` takes them: ``sampler``, ``prefill_step_size``, ``max_kv_size`` ...

    Returns:
        mlx-lm's ``BatchResponse``.

    Raises:
        FlashError: a prompt could not be computed.
    """
    generate = stock_batch_generate
    if isinstance(model, FlashLLM) and model.batching == "exact":
        rows = partial(RowGenerator, completes_caches=return_prompt_caches)
        generate = with_names(stock_batch_generate, BatchGenerator=rows)
        prompt_caches = copy.deepcopy(prompt_caches)
    return generate(
        model,
        tokenizer,
        [list(prompt) for prompt in prompts],
        prompt_caches,
        max_tokens,
        verbose,
        return_prompt_caches,
        return_token_ids,
        return_logprobs,
        **options,
    )

"""Batches: sequences that share passes over the weights, each bit for bit as if it were computed alone.

mlx-lm computes a batch as one array with a row for each sequence, padded to the longest one. Kernels then work on other
shapes than for a sequence alone, and on GPUs the last bits differ. Here each sequence keeps its own cache and its own
calls; they share the weights that a pass reads.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_flash.compat.arrays import random_key
from mlx_flash.compat.generation import (
    BatchGenerator,
    Progress,
    Response,
    StockBatchGenerator,
    Waiting,
    merge_caches,
    stock_batch_generate,
    wanted_of,
    with_names,
)
from mlx_flash.errors import CacheError, FlashError
from mlx_flash.generation.sequence import Chooser, GeneratedSequence, compute
from mlx_flash.model import FlashLLM, Reads
from mlx_flash.residency.plan import together_bytes
from mlx_flash.speculation import Guesses, Lookup


class Reading(NamedTuple):
    """The hidden states of a prompt that are wanted."""

    step: int  # the most tokens of a part
    keeps: Reads  # as ``reads`` of :meth:`FlashLLM.row`
    is_all: bool = False  # nothing else is wanted: the sequence ends with its prompt


class RowGenerator(BatchGenerator):
    """mlx-lm's ``BatchGenerator``, whose sequences share passes over the weights and nothing else.

    Each call of ``next`` computes a token of each answer and as much of each prompt as memory allows, one part at
    least. Sequences join and leave in between. One that the budget may not hold beside those that run waits for them. A
    token is handed out as soon as it is known, so a prompt cache that is handed out with the last token lacks it.

    Args:
        completes_caches: for ``batch_generate``: given prompt caches stay as they are. True adds the last tokens to the
            others when all sequences have ended, in one pass for all. If False, nobody wants these: a sequence that has
            ended makes room for the next one. None uses the given ones, and hands them out with the last tokens.
        on_error: called with the number of a sequence that could not be computed, and the reason. None raises it.
        takes_turns: compute at most a step of each prompt in a pass that others wait for.
        takes_turns_alone: do so in every pass, since another sequence may come at any time.
        on_prompt: called with the number of a sequence, and the tokens of its prompt that are done and to do: during a
            pass in which it is alone, and at the end of one that it shares. What it raises, :meth:`next` raises; others
            of the pass keep what they have computed.
    """

    def __init__(
        self,
        model: FlashLLM,
        *,
        completes_caches: bool | None = None,
        on_error: Callable[[int, Exception], None] | None = None,
        takes_turns: bool = False,
        takes_turns_alone: bool = False,
        on_prompt: Callable[[int, int, int], None] = lambda uid, done, total: None,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        self._flash = model
        self._running: list[GeneratedSequence] = []
        self._completes_caches = completes_caches
        self._ended: list[GeneratedSequence] = []
        self._on_error = on_error
        self._on_prompt = on_prompt
        self._takes_turns, self._takes_turns_alone = takes_turns, takes_turns_alone
        self._may_lack_tokens = False
        self.num_elsewhere = 0  # number of sequences that a subclass computes itself

    def _next(self) -> tuple[list[Any], list[Any]]:
        """Compute a part of each sequence, unless an interrupt ended an earlier call: tokens may be lost."""
        if self._may_lack_tokens:
            raise CacheError(
                "the batch was interrupted between two tokens, and some may be lost. Hint: begin again with a new "
                "BatchGenerator."
            )
        self._may_lack_tokens = True
        try:
            found = self.advance()
        except Exception:
            self._may_lack_tokens = False
            raise
        self._may_lack_tokens = False
        return found

    def advance(self) -> tuple[list[Any], list[Any]]:
        """Compute a part of each sequence. Return the progress of prompts, and tokens.

        Raises: FlashError: weights could not be read; or a sequence could not be computed, and nobody takes its error.
        """
        self._join()
        began, num_left = time.perf_counter(), self._num_left
        compute([sequence for sequence in self._running if not sequence.is_ready], most=self._most_prompt)
        prompts: list[Any] = []
        answers: list[Any] = []
        for sequence in [*self._running]:
            self._choose(sequence, prompts)
        for sequence in [*self._running]:
            self._take(sequence, answers)
        if not self._running and not self.waiting:
            self._complete_caches()
        num_prompt, seconds = num_left - self._num_left, time.perf_counter() - began
        self.count(prompt_tokens=num_prompt, new_tokens=len(answers), seconds=seconds)
        return prompts, answers

    @property
    def _num_left(self) -> int:
        return sum(sequence.num_left for sequence in self._running)

    def _join(self) -> None:
        num_prompts = sum(not sequence.num_tokens for sequence in self._running)
        num_running = len(self._running) + self.num_elsewhere
        room = min(self.prefill_batch_size - num_prompts, self.completion_batch_size - num_running)
        for waiting in self.waiting[: max(0, room)]:
            if not self._has_room(waiting):
                return
            self.forget({waiting.uid})
            if self._completes_caches is not None:
                waiting = waiting._replace(cache=copy.deepcopy(waiting.cache))
            self._running.append(self._begin(waiting))

    def _reading(self, uid: int) -> Reading | None:
        """Return the hidden states of a sequence's prompt that are wanted."""
        return None

    def _begin(self, waiting: Waiting) -> GeneratedSequence:
        reading = self._reading(waiting.uid)
        prompt = [*waiting.tokens, *(token for segment in waiting.segments for token in segment)]
        step, segments, max_tokens = self.prefill_step_size, waiting.segments, int(waiting.max_tokens)
        if reading is not None:
            step = min(step, reading.step)
            if reading.is_all:
                segments, max_tokens = [prompt], 0  # no token is computed alone
        return GeneratedSequence(
            self._flash,
            waiting.cache,
            segments,
            Chooser(waiting.sampler, waiting.processors, prompt),
            step=step,
            max_tokens=max_tokens,
            guesses=Guesses(Lookup(prompt), *self._flash.own_guesses(len(prompt) + max_tokens)),
            tokens=waiting.tokens,
            report=partial(self._on_prompt, waiting.uid),
            reads=None if reading is None else reading.keeps,
            uid=waiting.uid,
            stop=waiting.stop_sequences.matcher(),
        )

    @property
    def _most_prompt(self) -> int | None:
        """The most tokens of a prompt in a pass: a step where others wait for the pass, as in mlx-lm's batches."""
        have_reads = [sequence.reads is not None for sequence in self._running]  # nobody waits for their tokens
        is_waited_for = self._takes_turns_alone or (self._takes_turns and len(have_reads) > 1 and not all(have_reads))
        return self.prefill_step_size if is_waited_for else None

    def _has_room(self, waiting: Waiting) -> bool:
        """Return whether a sequence, and those that run, can all be computed to their ends in the budget."""
        if not self._running:  # alone, its keys and values may go to disk, and its prompt may be cut
            return True
        lengths = [sequence.most_tokens for sequence in (*self._running, *self._ended)]
        return self._flash.has_room([*lengths, waiting.most_tokens])

    def _choose(self, sequence: GeneratedSequence, prompts: list[Any]) -> None:
        """Choose the next token of a sequence, if what it follows from is computed."""
        row = sequence.begin()
        if row.error is not None:
            self._running.remove(sequence)
            self._fail(sequence.uid, row.error)
            return
        if not sequence.num_tokens:
            done, total = sequence.num_prompt - sequence.num_left, sequence.num_prompt
            ends_segment = row.is_done and sequence.ends_segment
            prompts.append(Progress(sequence.uid, (done, total), ends_segment, done == total))
        if sequence.end_part():
            if not sequence.segments:  # it is only read
                self._running.remove(sequence)
        elif sequence.is_ready:
            _choose_next(sequence)

    def _take(self, sequence: GeneratedSequence, answers: list[Any]) -> None:
        """Take the token that a sequence has chosen, and those that it has guessed right."""
        while sequence.num_tokens > sequence.num_taken:
            answers.append(self._answer(sequence))
            if answers[-1].finish_reason is not None:
                if self._completes_caches is False:
                    answers[-1].prompt_cache = None
                self._running.remove(sequence)
                sequence.end()
                if self._completes_caches:
                    self._ended.append(sequence)
            elif sequence.num_calls > 1 and sequence.is_ready:  # the next one was guessed right
                _choose_next(sequence)

    def _answer(self, sequence: GeneratedSequence) -> Any:
        number, logprobs, _ = sequence.take()
        reason = "length" if sequence.num_tokens >= sequence.max_tokens else None
        reason = "stop" if sequence.stop.advance(number) else reason
        kept = (sequence.cache, sequence.tokens) if reason else (None, None)
        return Response(sequence.uid, number, logprobs, reason, *kept)

    def _fail(self, uid: int, error: Exception) -> None:
        if self._on_error is None:
            raise error
        self._on_error(uid, error)

    def _complete_caches(self) -> None:
        """Add the last tokens to the caches of sequences that have ended."""
        compute(self._ended)
        for sequence in self._ended:
            row = sequence.begin()
            if row.error is not None:
                raise row.error
            sequence.tokens.append(sequence.last)
        self._ended.clear()

    def extract_cache(self, uids: Iterable[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """Return copies of the caches of sequences, and the tokens in them."""
        wanted = set(uids)
        found = {sequence.uid: sequence for sequence in self._running if sequence.uid in wanted}
        waiting = super().extract_cache(wanted - found.keys())
        return {**waiting, **{uid: (copy.deepcopy(each.cache), [*each.tokens]) for uid, each in found.items()}}

    def remove(self, uids: Iterable[int], return_prompt_caches: bool = False) -> dict[int, tuple[list[Any], list[int]]]:
        """Let go of sequences. Return their caches, if wanted, and the tokens in them."""
        gone = set(uids)
        caches = self.extract_cache(gone) if return_prompt_caches else {}
        self.forget(gone)
        self._running = [sequence for sequence in self._running if sequence.uid not in gone]
        return caches

    @property
    def prompt_cache_nbytes(self) -> int:
        waiting = int(super().prompt_cache_nbytes)
        return waiting + sum(int(entry.nbytes) for sequence in self._running for entry in sequence.cache)


def _choose_next(sequence: GeneratedSequence) -> None:
    key = random_key()
    sequence.choose()
    if random_key() is not key:  # whose order of numbers would depend on guesses
        sequence.guesses = None


def shares_passes(model: FlashLLM, lengths: Sequence[int], caches: Sequence[list[Any]] = ()) -> bool:
    """Return whether sequences share passes, each computed as if it were alone. If not, they are mlx-lm's batches.

    They share passes, too, where mlx-lm's batches, which are padded, have no room. ``lengths`` are the most tokens of
    each sequence, prompt and answer, and ``caches`` those to go on from. The model is started.
    """
    if not may_batch(model, caches):
        return True
    return model.batching != "stock" and together_bytes(model.plan, lengths, "stock") > model.plan.room_bytes


def may_batch(model: FlashLLM, caches: Sequence[list[Any]] = ()) -> bool:
    """Return whether sequences go to mlx-lm's batches: all weights are in memory, or the settings want it.

    These batches must keep to the settings, and be able to merge the caches to go on from. The model is started.
    """
    if (not model.is_in_memory and model.batching != "stock") or not model.is_batchable:
        return False
    try:
        merge_caches([*caches] or [make_prompt_cache(cast(nn.Module, model))])  # nothing is computed
    except (AttributeError, FlashError, TypeError, ValueError):
        return False
    return True


class SharingGenerator(StockBatchGenerator):  # type: ignore[misc]
    """mlx-lm's ``BatchGenerator``, as ``mlx_lm.batch_generate`` makes it while the patch is applied.

    For a streamed model whose sequences share passes it is a `RowGenerator`. Every other caller gets mlx-lm's own.
    """

    def __new__(cls, model: Any, *args: Any, **options: Any) -> Any:
        wanted = wanted_of(sys._getframe(1)) if isinstance(model, FlashLLM) else None
        if wanted is None or not shares_passes(model, wanted.lengths, wanted.given):
            return super().__new__(cls)
        return RowGenerator(model, *args, completes_caches=wanted.caches, **options)


batch_generate = with_names(stock_batch_generate, BatchGenerator=SharingGenerator)

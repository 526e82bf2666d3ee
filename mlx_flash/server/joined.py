"""Requests that are computed in one array, where all weights are in memory.

On a GPU a call with a row for each of several answers takes little longer than a call for one. The price is that the
last bits of an answer depend on the others, as in mlx-lm's server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_flash.compat.batchgenerator import GenerationBatch, JoinedBatch, Waiting, merge_caches
from mlx_flash.errors import BudgetError, RefusedError
from mlx_flash.generation.batches import may_pad
from mlx_flash.generation.member import Member
from mlx_flash.model import FlashLLM
from mlx_flash.residency.admission import room_bytes, together_bytes
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.server.boundary import ends_alone, refusal_of
from mlx_flash.server.rows import Kept, ServedRows, plain_cache
from mlx_flash.server.sampling import LogitsProcessor, Sampler, greedy


def padded_length(num_tokens: int) -> int:
    """Return the length up to which prompts of so many tokens may be padded, so that others are computed with them.

    Up to 64 tokens cost a GPU little. Longer prompts get at most as many tokens more as they have.
    """
    return max(64, 1 << (num_tokens - 1).bit_length())


class _Ends:
    """The end of an answer that has begun, as mlx-lm's batches take it: it goes on where it is.

    Args:
        matcher: finds the end.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def matcher(self) -> Any:
        """Return what finds the end."""
        return self._matcher


class JoiningRows(ServedRows):
    """Rows, and beside them a batch of mlx-lm's.

    Prompts that wait at the same time, are about equally long, and have room in one call go to the batch. Any other one
    is computed as a row. When it has its first token, it moves to the batch.

    Args:
        model: the model.
        is_apart: returns whether the request with a number stays a row.
        options: as of `ServedRows`.
    """

    def __init__(self, model: FlashLLM, *, is_apart: Callable[[int], bool], **options: Any) -> None:
        super().__init__(model, **options)
        self._is_apart = is_apart
        self._may_join = False
        self._batch = JoinedBatch(
            model,
            sampler=greedy,
            completion_batch_size=self.completion_batch_size,
            prefill_batch_size=self.prefill_batch_size,
            prefill_step_size=self.prefill_step_size,
            stream=self.stream,
        )
        self._padded_length = 0  # of the prompts in the batch

    @property
    def batching(self) -> str:
        """The setting that admission counts the answers under way by."""
        return "stock" if len(self._batch) else "exact"

    def admit(self, plan: ResidencyPlan, lengths: Sequence[int]) -> str:
        """Join answers from now on if the budget has room for a batch of all requests."""
        self._may_join = together_bytes(plan, lengths, "stock") <= room_bytes(plan) and may_pad(self._flash)
        return "stock" if self._may_join else self.batching

    def advance(self) -> tuple[list[Any], list[Any]]:
        """Compute a token of each answer, and a part of each prompt. Return the progress of prompts, and tokens."""
        self._pass_on()
        joined_prompts, joined = self._advance_batch()
        for response in joined:
            if response.finish_reason is not None:  # a later token failed, which nobody wants
                self._errors.pop(response.uid, None)
        if self._errors:
            self._batch.remove(self._errors)
        self._batch.forget_last()
        self.num_elsewhere = len(self._batch)
        prompts, answers = super().advance()
        began = [member for member in self._members if member.sequence.num_tokens and not self._is_apart(member.uid)]
        if began and self._may_join:
            self._join_batch(began)
        return joined_prompts + prompts, joined + answers

    def _advance_batch(self) -> tuple[list[Any], list[Any]]:
        """Compute a part of each request in the batch. As far as memory is short, prompts are rows, and answers end."""
        prompts: list[Any] = []
        answers: list[Any] = []
        while self._batch.answers:
            try:
                answers = self._batch.next_answers()
                break
            except BudgetError as error:
                self._refuse(newest := self._batch.answers[-1], refusal_of(error))
                self._batch.remove([newest])
        if self._batch.num_prompts:
            try:
                prompts = self._batch.next_prompts()
            except BudgetError:
                self._may_join = False
                prompts = self._batch.take_begun()  # their samplers and processors have seen the first token
                self.put_back(self._batch.take_prompts())
        return prompts, answers

    def _pass_on(self) -> None:
        """Let the batch compute the most prompts that wait and are about as long as each other, and as those in it."""
        waiting = [each for each in self.waiting if not self._is_apart(each.uid)] if self._may_join else []
        groups: dict[int, list[Waiting]] = {}
        for each in waiting:
            groups.setdefault(padded_length(sum(map(len, each.segments))), []).append(each)
        if held := self._batch.num_prompts:
            groups = {length: group for length, group in groups.items() if length == self._padded_length}
        room = self.completion_batch_size - len(self._members) - len(self._batch)
        together: list[Waiting] = []
        for length, group in groups.items():
            group = group[: max(0, min(room, self.prefill_step_size // length - held))]
            if len(group) > len(together):
                together, self._padded_length = group, length
        if not together or len(together) + held < 2:
            return
        self.forget({each.uid for each in together})
        for each in together:
            sampler, processors = self._sampler(each.uid, each.sampler), self._processors(each.uid, each.processors)
            self._batch.add(each, cache=plain_cache(each.cache), sampler=sampler, processors=processors)

    def _join_batch(self, members: Sequence[Member]) -> None:
        """Move answers to the batch, if memory is not short."""
        sequences = [member.sequence for member in members]
        try:
            added = GenerationBatch(
                self._flash,
                [member.uid for member in members],
                mx.array([sequence.last for sequence in sequences]),
                merge_caches([plain_cache(sequence.cache) for sequence in sequences]),
                [sequence.tokens for sequence in sequences],
                [self._sampler(member.uid, member.sequence.chooser.sampler) for member in members],
                greedy,
                [self._processors(member.uid, member.sequence.chooser.processors) for member in members],
                [_Ends(member.matcher) for member in members],
                [sequence.max_tokens - sequence.num_tokens for sequence in sequences],
            )
        except BudgetError:
            self._may_join = False
            return
        self._members = [member for member in self._members if member not in members]
        self._batch.add_answers(added)
        self._batch.remove(self._errors)

    # The batch keeps what these two return. It refers to no member, whose cache was copied into the batch and is freed.

    def _sampler(self, uid: int, sampler: Sampler) -> Sampler:
        def choose(logprobs: mx.array) -> mx.array:
            with ends_alone(partial(self._refuse, uid)):
                return sampler(logprobs)
            return greedy(logprobs)  # of a request that has failed, which nobody sees

        return greedy if sampler is greedy else choose

    def _processors(self, uid: int, processors: Sequence[LogitsProcessor]) -> list[LogitsProcessor]:
        def process(tokens: mx.array, logits: mx.array) -> mx.array:
            with ends_alone(partial(self._refuse, uid)):
                for processor in processors:
                    logits = processor(tokens, logits)
            return logits

        return [process] if processors else []

    def _refuse(self, uid: int, error: RefusedError) -> None:
        self._errors[uid] = error

    def finish(self, uid: int) -> Kept | None:
        """End a request before its most tokens. Return its cache; None if it is gone."""
        found: dict[int, Kept] = self._batch.remove([uid], return_prompt_caches=True)
        return found[uid] if found else super().finish(uid)

    def extract_cache(self, uids: Iterable[int]) -> dict[int, Kept]:
        """Return copies of the caches of requests, and the tokens in them."""
        found = self._batch.extract_cache(wanted := set(uids))
        joined = {uid: (cache, [*tokens]) for uid, (cache, tokens) in found.items()}
        return {**super().extract_cache(wanted - joined.keys()), **joined}

    def remove(self, uids: Iterable[int], return_prompt_caches: bool = False) -> dict[int, Kept]:
        """Let go of requests. Return their caches, if wanted, and the tokens in them."""
        caches = super().remove(gone := set(uids), return_prompt_caches)
        self._batch.remove(gone)
        return caches

"""Requests whose answers are computed in one array, where all weights are in memory.

On a GPU a call with a row for each of several answers takes little longer than a call for one. The price is that the
last bits of an answer depend on the others, as in mlx-lm's server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_flash.compat.batchgenerator import GenerationBatch, merge_caches
from mlx_flash.errors import RefusedError
from mlx_flash.generation.batches import may_pad
from mlx_flash.generation.member import Member
from mlx_flash.model import FlashLLM
from mlx_flash.residency.admission import room_bytes, together_bytes
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.server.boundary import ends_alone
from mlx_flash.server.rows import Kept, ServedRows, plain_cache
from mlx_flash.server.sampling import LogitsProcessor, Sampler, greedy


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
    """Rows whose answers go on in a batch of mlx-lm's while there are several.

    Each prompt is computed as a row. When it has its first token, and other answers are under way, it moves to the
    batch. An answer that is alone stays a row.

    Args:
        model: the model.
        is_apart: returns whether the request with a number stays a row.
        options: as of `ServedRows`.
    """

    def __init__(self, model: FlashLLM, *, is_apart: Callable[[int], bool], **options: Any) -> None:
        super().__init__(model, **options)
        self._is_apart = is_apart
        self._may_join = False
        self._batch = GenerationBatch.empty(model, greedy)
        self._moving: list[Member] = []

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
        joined = self._batch.next()
        for response in joined:
            if response.finish_reason is not None:  # a later token failed, which nobody wants
                self._errors.pop(response.uid, None)
        self._drop(self._errors)
        if joined and not len(self._batch):
            self._batch = GenerationBatch.empty(self._flash, greedy)  # whose last probabilities leave
        self.num_elsewhere = len(self._batch)
        prompts, answers = super().advance()
        moving, self._moving = [member for member in self._moving if member in self._members], []
        if moving:
            self._join_batch(moving)
        return prompts, joined + answers

    def _begin_ahead(self, members: Sequence[Member]) -> None:
        self._moving = []
        free = [member for member in members if not self._is_apart(member.uid)]
        if self._may_join and len(free) + len(self._batch) > 1 and self._flash.begins_ahead:
            self._moving = free
        super()._begin_ahead([member for member in members if member not in self._moving])

    def _join_batch(self, members: Sequence[Member]) -> None:
        """Move answers, whose next tokens are not begun, to the batch."""
        self._members = [member for member in self._members if member not in members]
        sequences = [member.sequence for member in members]
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
        self._batch.extend(added)
        self._drop(self._errors)

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

    def _drop(self, uids: Iterable[int]) -> None:
        gone = set(uids)
        keep = [index for index, uid in enumerate(self._batch.uids) if uid not in gone]
        if len(keep) < len(self._batch):
            self._batch.filter(keep)

    def finish(self, uid: int) -> Kept | None:
        """End a request before its most tokens. Return its cache; None if it is gone."""
        found = self._joined([uid]).get(uid)
        if found is None:
            return super().finish(uid)
        self._drop([uid])
        return found

    def extract_cache(self, uids: Iterable[int]) -> dict[int, Kept]:
        """Return copies of the caches of requests, and the tokens in them."""
        joined = self._joined(wanted := set(uids))
        return {**super().extract_cache(wanted - joined.keys()), **joined}

    def _joined(self, uids: Iterable[int]) -> dict[int, Kept]:
        wanted, batch = set(uids), self._batch
        found = [(uid, index) for index, uid in enumerate(batch.uids) if uid in wanted]
        return {uid: (batch.extract_cache(index), [*batch.tokens[index]]) for uid, index in found}

    def remove(self, uids: Iterable[int], return_prompt_caches: bool = False) -> dict[int, Kept]:
        """Let go of requests. Return their caches, if wanted, and the tokens in them."""
        caches = super().remove(gone := set(uids), return_prompt_caches)
        self._drop(gone)
        return caches

    @property
    def prompt_cache_nbytes(self) -> int:
        """Bytes of all caches."""
        return super().prompt_cache_nbytes + sum(int(entry.nbytes) for entry in self._batch.prompt_cache)

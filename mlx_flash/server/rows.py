"""Requests that are computed together: as rows, or in batches of mlx-lm's. One that fails gets its error alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_flash.compat.batchgenerator import Group, Waiting
from mlx_flash.compat.caches import CACHE_STEP
from mlx_flash.errors import BudgetError, RefusedError
from mlx_flash.generation.batches import RowGenerator, may_batch
from mlx_flash.generation.member import Member
from mlx_flash.model import FlashLLM
from mlx_flash.residency.admission import room_bytes, together_bytes
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.server.boundary import ends_alone, refusal_of
from mlx_flash.server.lone import LoneRequest, Loop
from mlx_flash.server.sampling import Sampler, greedy

Kept = tuple[list[Any], list[int]]
"""A prompt cache that is not computed with any more, and its tokens."""


class LeftError(Exception):
    """The client of a request has left while its prompt was computed.

    Attributes:
        uid: number of the request.
    """

    def __init__(self, uid: int) -> None:
        super().__init__(f"the client of request {uid} has left")
        self.uid = uid


def padded_length(num_tokens: int) -> int:
    """Return the length up to which prompts of so many tokens may be padded, so that others are computed with them.

    Up to 64 tokens cost a GPU little. Longer prompts get at most as many tokens more as they have.
    """
    return max(64, 1 << (num_tokens - 1).bit_length())


class ServedRows(RowGenerator):
    """Requests of a model.

    Where weights are streamed they are rows, each computed as if it were alone. Where all are in memory they are in
    mlx-lm's batches from the prompt on: prompts that wait at the same time and are about equally long in one array, and
    all answers in one. On a GPU a call with a row for each of several answers takes little longer than a call for one;
    the price is that the last bits of an answer depend on the others, as in mlx-lm's server. With a loop, they are
    answered one after another.

    Args:
        model: the streamed model.
        is_shared: other ranks compute the same requests.
        is_apart: returns whether the request with a number is computed alone.
        loop: the generation loop that answers requests; None where they are computed together.
        inputs_of: returns further options of the loop for the request with a number.
        options: as of `RowGenerator`.

    Attributes:
        loop: as given.
    """

    def __init__(
        self,
        model: FlashLLM,
        *,
        is_shared: bool = False,
        is_apart: Callable[[int], bool] = lambda uid: False,
        loop: Loop | None = None,
        inputs_of: Callable[[int], dict[str, Any]] = lambda uid: {},
        **options: Any,
    ) -> None:
        super().__init__(model, on_error=self._note, **options)
        self._errors: dict[int, RefusedError] = {}
        self._is_shared, self._is_apart, self.loop, self._inputs_of = is_shared, is_apart, loop, inputs_of
        self._fatal: Exception | None = None
        self._restored: dict[int, int] = {}
        self._hidden: dict[int, list[mx.array]] = {}
        self._groups: list[Group | LoneRequest] = []  # the first ones have the answers, those after them prompts
        self._may_batch = False

    def make_cache(self) -> list[Any]:
        """Return an empty prompt cache."""
        return make_prompt_cache(self._flash) if self.loop is None else self.loop.make_cache()

    @property
    def batching(self) -> str:
        """The setting that admission counts the requests under way by."""
        return "stock" if self._groups and self.loop is None else "exact"

    def admit(self, plan: ResidencyPlan, lengths: Sequence[int]) -> str:
        """Take note of the most tokens of each request. Return the setting that admission counts them by.

        Requests are in mlx-lm's batches from now on if the budget has room for one of all of them.
        """
        has_room = together_bytes(plan, lengths, "stock") <= room_bytes(plan)
        self._may_batch = has_room and may_batch(self._flash)
        return "stock" if self._may_batch else self.batching

    def advance(self) -> tuple[list[Any], list[Any]]:
        """Compute a part of each request. Return the progress of prompts, and tokens.

        Raises:
            FlashError: a request failed on this rank, and not on others.
        """
        self._restored, self._hidden = {}, {}
        self._begin_groups()
        batched = [self._next_of(group) for group in self._groups_at_once()]
        self._join_groups()
        prompts, answers = ([each for part in parts for each in part] for parts in zip(([], []), *batched, strict=True))
        try:
            read, computed = super().advance()
        except LeftError as error:  # rows of others are as they were before their next pass
            self.remove([error.uid])
            read, computed = [], []
        if self._fatal is not None:
            raise self._fatal
        self._members = [member for member in self._members if member.uid not in self._errors]
        return prompts + read, answers + [answer for answer in computed if answer.uid not in self._errors]

    def take_errors(self) -> dict[int, RefusedError]:
        """Return the errors of requests since the last call, by number. The requests are gone."""
        errors, self._errors = self._errors, {}
        return errors

    def num_restored(self, uid: int) -> int:
        """Return how many tokens of a prompt, that the last call has computed to its end, the prefix cache had."""
        return self._restored.get(uid, 0)

    def take_hidden(self, uid: int) -> list[mx.array]:
        """Return what is kept of the hidden states of a prompt that the last call has computed to its end."""
        return self._hidden.pop(uid, [])

    def finish(self, uid: int) -> Kept | None:
        """End a request before its most tokens. Return its cache; None if it is gone."""
        row = next((member for member in self._members if member.uid == uid), None)
        kept = self.remove([uid], return_prompt_caches=row is None).get(uid)
        return kept if row is None else (row.cache, row.tokens)

    def extract_cache(self, uids: Iterable[int]) -> dict[int, Kept]:
        """Return copies of the caches of requests, and the tokens in them."""
        found = super().extract_cache(wanted := set(uids))
        for group in self._groups:
            found |= {uid: (cache, [*tokens]) for uid, (cache, tokens) in group.extract_cache(wanted).items()}
        return found

    def remove(self, uids: Iterable[int], return_prompt_caches: bool = False) -> dict[int, Kept]:
        """Let go of requests. Return their caches, if wanted, and the tokens in them."""
        caches = super().remove(gone := set(uids), return_prompt_caches)
        for group in self._groups:
            group.remove(gone)
        self._groups = [group for group in self._groups if len(group)]
        return caches

    def _note(self, uid: int, error: Exception) -> None:
        self._errors[uid] = refusal_of(error)
        if self._is_shared and not isinstance(error, BudgetError):
            self._fatal = error

    def _begin(self, waiting: Waiting) -> Member:
        return super()._begin(self._guarded(waiting))

    def _choose(self, member: Member, prompts: list[Any]) -> None:
        super()._choose(member, prompts)
        self._restored[member.uid] = member.num_restored
        if member.hidden and not member.num_left:
            self._hidden[member.uid], member.hidden = member.hidden, []

    def _guarded(self, waiting: Waiting) -> Waiting:
        """Return a request whose sampler and processors note what they raise: it ends alone after the call.

        They keep no cache, which batches copy.
        """
        uid, processors = waiting.uid, waiting.processors
        sampler: Sampler = waiting.sampler

        def choose(logprobs: mx.array) -> mx.array:
            with ends_alone(partial(self._refuse, uid)):
                return sampler(logprobs)
            return greedy(logprobs)  # which nobody sees

        def process(tokens: mx.array, logits: mx.array) -> mx.array:
            with ends_alone(partial(self._refuse, uid)):
                for processor in processors:
                    logits = processor(tokens, logits)
            return logits

        chooser = greedy if sampler is greedy else choose  # the former is called once for all that have it
        return waiting._replace(sampler=chooser, processors=[process] if processors else [])

    def _refuse(self, uid: int, error: RefusedError) -> None:
        self._errors[uid] = error

    # --- mlx-lm's batches ---------------------------------------------------------------------------------------------

    def _begin_groups(self) -> None:
        """Give prompts that wait to mlx-lm, those together that are about equally long and have room in a step."""
        may_batch = self._may_batch or self.loop is not None
        waiting = [each for each in self.waiting if may_batch and self._reading_of(each.uid) is None]
        self.forget({each.uid for each in waiting})
        alike: dict[tuple[int, ...], list[Waiting]] = {}
        for each in waiting:
            num_new = sum(map(len, each.segments))
            is_kept = num_new >= CACHE_STEP and self._flash.prefixes is not None  # in pages of one sequence
            is_alone = is_kept or self._is_apart(each.uid) or self.loop is not None
            key = (0, each.uid) if is_alone else (padded_length(num_new), len(each.segments))
            alike.setdefault(key, []).append(each)
        for (length, _), group in alike.items():
            most = max(1, min(self.prefill_step_size // max(1, length), self.prefill_batch_size))
            for start in range(0, len(group), most):
                self._begin_group(group[start : start + most])

    def _begin_group(self, sequences: Sequence[Waiting]) -> None:
        step = self.prefill_step_size
        if self.loop is not None:
            (asked,) = sequences
            inputs, fail = self._inputs_of(asked.uid), partial(self._refuse, asked.uid)
            self._groups.append(LoneRequest(self.loop, asked, step, inputs, fail))
            return
        limits = {"completion_batch_size": self.completion_batch_size, "prefill_batch_size": self.prefill_batch_size}
        guarded = [self._guarded(each) for each in sequences]
        options = {"sampler": greedy, "prefill_step_size": step, "stream": self.stream, **limits}
        self._groups.append(Group(self._flash, guarded, **options))

    def _groups_at_once(self) -> Iterator[Group | LoneRequest]:
        """Yield the groups that are computed now. Prompts beyond the limits wait."""
        num_prompts, num_running = 0, len(self._members)
        for group in [*self._groups]:
            num_prompts += group.num_prompts
            num_running += len(group)
            is_beyond = num_prompts > self.prefill_batch_size or num_running > self.completion_batch_size
            if group.num_prompts and is_beyond:
                return
            yield group

    def _next_of(self, group: Group | LoneRequest) -> tuple[list[Any], list[Any]]:
        """Compute a token of each answer of a group, or a part of its prompts.

        As far as memory is short, the newest answers end, and prompts are begun again one by one.
        """
        before = self._num_restored
        while len(group):
            try:
                prompts, answers = group.next()
            except BudgetError as error:
                assert isinstance(group, Group)
                if group.newest is not None:
                    self._note(group.newest, error)
                    group.remove([group.newest])
                    continue
                self._groups.remove(group)
                for each in group.sequences:
                    self._begin_group([each])
                if not group.sequences:
                    self._note(group.uids[0], error)
                break
            group.num_restored += self._num_restored - before
            self._restored |= {response.uid: group.num_restored for response in prompts}
            for response in answers:
                if response.finish_reason is not None:  # a later token failed, which nobody wants
                    self._errors.pop(response.uid, None)
            return prompts, answers
        return [], []

    @property
    def _num_restored(self) -> int:
        prefixes = self._flash.prefixes
        return 0 if prefixes is None else prefixes.counters.num_restored

    def _join_groups(self) -> None:
        """Move the answers of groups whose prompts are computed to the first one, unless they stay apart."""
        for group in self._groups:
            group.remove(self._errors)
        begun = [group for group in self._groups if isinstance(group, Group) and group.newest is not None]
        for group in begun:
            group.sequences = ()
        together = [group for group in begun if not any(map(self._is_apart, group.uids))]
        for group in together[1:]:
            together[0].take(group)
        self._groups = [group for group in self._groups if len(group) and group not in together[1:]]
        self.num_elsewhere = sum(map(len, self._groups))

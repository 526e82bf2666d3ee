"""Requests that share passes over the weights. One that fails gets its error, and the others go on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_flash.compat.batchgenerator import StockBatchGenerator
from mlx_flash.errors import BudgetError, RefusedError
from mlx_flash.generation.batches import RowGenerator
from mlx_flash.generation.member import Member
from mlx_flash.kv.diskcache import DiskKVCache
from mlx_flash.kv.history import pass_on
from mlx_flash.model import FlashLLM
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.server.boundary import ends_alone, refusal_of

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


class Rows:
    """The part of all that computes requests."""

    _errors: dict[int, RefusedError]

    @property
    def batching(self) -> str:
        """The setting that admission counts requests by."""
        return "exact"

    def admit(self, plan: ResidencyPlan, lengths: Sequence[int]) -> str:
        """Take note of the most tokens of each request. Return the setting that admission counts them by."""
        return self.batching

    def take_errors(self) -> dict[int, RefusedError]:
        """Return the errors of requests since the last call, by number. The requests are gone."""
        errors, self._errors = self._errors, {}
        return errors

    def num_restored(self, uid: int) -> int:
        """Return how many tokens of a prompt, that the last call has computed to its end, the prefix cache had.

        0 where that is not known by request.
        """
        return 0


class ServedRows(Rows, RowGenerator):
    """Exact batches: each request is computed as if it were alone.

    Args:
        model: the streamed model.
        is_shared: other ranks compute the same requests.
        options: as mlx-lm's generator takes them.
    """

    def __init__(self, model: FlashLLM, *, is_shared: bool = False, **options: Any) -> None:
        super().__init__(model, on_error=self._note, **options)
        self._errors: dict[int, RefusedError] = {}
        self._is_shared = is_shared
        self._fatal: Exception | None = None
        self._restored: dict[int, int] = {}
        self._hidden: dict[int, list[mx.array]] = {}

    def advance(self) -> tuple[list[Any], list[Any]]:
        """Compute a part of each request. Return the progress of prompts, and tokens.

        Raises:
            FlashError: a request failed on this rank, and not on others.
        """
        self._restored, self._hidden = {}, {}
        try:
            found = super().advance()
        except LeftError as error:  # rows of others are as they were before their next pass
            self.remove([error.uid])
            return [], []
        if self._fatal is not None:
            raise self._fatal
        return found

    def num_restored(self, uid: int) -> int:
        """Return how many tokens of a prompt the prefix cache had."""
        return self._restored.get(uid, 0)

    def take_hidden(self, uid: int) -> list[mx.array]:
        """Return what is kept of the hidden states of a prompt that the last call has computed to its end."""
        return self._hidden.pop(uid, [])

    def finish(self, uid: int) -> Kept | None:
        """End a request before its most tokens. Return its cache; None if it is gone."""
        found = next((member.sequence for member in self._members if member.uid == uid), None)
        self.remove([uid])
        return None if found is None else (found.cache, found.tokens)

    def _note(self, uid: int, error: Exception) -> None:
        self._errors[uid] = refusal_of(error)
        if self._is_shared and not isinstance(error, BudgetError):
            self._fatal = error

    def _choose(self, member: Member, prompts: list[Any]) -> None:
        with ends_alone(partial(self._end, member)):
            super()._choose(member, prompts)
            self._restored[member.uid] = member.sequence.num_restored
            if member.sequence.hidden and not member.sequence.num_left:
                self._hidden[member.uid], member.sequence.hidden = member.sequence.hidden, []

    def _take(self, member: Member, answers: list[Any]) -> None:
        with ends_alone(partial(self._end, member)):
            super()._take(member, answers)

    def _end(self, member: Member, error: RefusedError) -> None:
        """End a request whose sampler or logits processor failed."""
        self._members = [other for other in self._members if other is not member]
        self._errors[member.uid] = error


class StockRows(Rows, StockBatchGenerator):  # type: ignore[misc]
    """mlx-lm's batches, whose requests fail together."""

    @property
    def batching(self) -> str:
        """The setting that admission counts requests by."""
        return "stock"

    def take_errors(self) -> dict[int, RefusedError]:
        """Return no errors: mlx-lm raises them."""
        return {}

    def finish(self, uid: int) -> Kept | None:
        """End a request before its most tokens. Return its cache; None if it is gone."""
        caches: dict[int, Kept] = self.remove([uid], return_prompt_caches=True)
        return caches.get(uid)


def plain_cache(cache: Iterable[Any]) -> list[Any]:
    """Return a cache that is not computed with any more as mlx-lm's batches extract it, without room for tokens."""
    return [_plain(entry) for entry in cache]


def _plain(entry: Any) -> Any:
    if not isinstance(entry, DiskKVCache) or entry.is_on_disk or entry.num_forgotten:
        return entry
    plain = entry.as_stock()
    pass_on(entry, plain)
    return plain

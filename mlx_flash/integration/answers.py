"""Answers of the server, and the batches that compute them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from queue import Queue
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx

from mlx_flash.batching import RowGenerator
from mlx_flash.compat.batches import Response
from mlx_flash.compat.server import GenerationContext, is_stopped
from mlx_flash.errors import BudgetError, FlashError
from mlx_flash.integration.http import ClientLeftError
from mlx_flash.kv.cache import DiskKVCache
from mlx_flash.kv.history import pass_on
from mlx_flash.model import FlashLLM

_MOST_LOGPROBS = 64
"""More tokens than a client may ask the probabilities of."""


class Answer:
    """The queue of a request, as mlx-lm's thread sees it.

    Args:
        queue: where the thread of the client waits.
        request: the request.
        args: its arguments.
        number: of the request.
        is_shared: other ranks answer it too.
        is_over: returns whether the client of a queue left, or the server was asked to end.

    Attributes:
        number, is_shared: as given.
        is_alone: it is answered in no batch.
        is_done: mlx-lm computes nothing for it any more.
        length: tokens of the prompt and the longest answer; 0 while unknown.
        tokenized: the tokens as mlx-lm wants them; None while unknown.
    """

    def __init__(
        self,
        queue: Queue[Any],
        request: Any,
        args: Any,
        number: int,
        *,
        is_shared: bool,
        is_over: Callable[[Queue[Any]], bool],
    ) -> None:
        self.number = number
        self.queue, self.request, self.args = queue, request, args
        self.is_alone = self.is_done = False
        self.length = 0
        self.tokenized: Any = None
        self.is_shared = is_shared
        self._is_over = is_over
        self._context: Any = None

    @property
    def is_stopped(self) -> bool:
        """True once nobody waits for the answer."""
        return is_stopped(self._context)

    def put(self, item: Any) -> None:
        """Hand on a part of the answer. An answer whose client left is stopped here.

        Raises:
            ClientLeftError: the client left, or the server stops, while a prompt is computed alone.
        """
        if isinstance(item, GenerationContext):
            if self.is_shared and self.is_alone:  # computed to its end: other ranks do not see it stop
                item = copy.copy(item)
            else:
                self._context = item
        if self._context is not None and self._is_over(self.queue):
            self._context.stop()
        self.is_done = item is None or isinstance(item, Exception)
        self.is_done = self.is_done or (self.is_stopped and not self.is_shared)
        self.queue.put(item)
        if self.is_alone and isinstance(item, tuple) and is_stopped(self._context):
            raise ClientLeftError("nobody waits for this answer any more")


class ServedRows(RowGenerator):
    """Requests that share passes over the weights. One that fails gets its error, and the others go on.

    Args:
        model: the streamed model.
        joining: returns the answer of the request that is inserted now.
        options: as mlx-lm's generator takes them.
    """

    def __init__(self, model: FlashLLM, joining: Callable[[], Answer | None], **options: Any) -> None:
        super().__init__(model, on_error=self._refuse, **options)
        self._joining = joining
        self._answers: WeakValueDictionary[int, Answer] = WeakValueDictionary()  # mlx-lm's server holds them
        self._refused: list[int] = []

    def insert_segments(self, *args: Any, **options: Any) -> list[int]:
        """Add the request that joins. Return its number in a list."""
        uids: list[int] = super().insert_segments(*args, **options)
        answer = self._joining()
        if answer is not None:
            self._answers.update(dict.fromkeys(uids, answer))
        return uids

    def advance(self) -> tuple[list[Any], list[Any]]:
        """Compute a part of each request. mlx-lm's server sees one that has failed as one that has ended."""
        prompts, answers = super().advance()
        for answer in answers:
            if answer.prompt_cache is not None:
                answer.prompt_cache = [_extracted(entry) for entry in answer.prompt_cache]
        refused, self._refused = self._refused, []
        return prompts, [*answers, *(Response(uid, 0, mx.zeros(_MOST_LOGPROBS), "stop", [], []) for uid in refused)]

    def _refuse(self, uid: int, error: Exception) -> None:
        """Hand on the error of a request."""
        answer = self._answers.pop(uid, None)
        if answer is None or (answer.is_shared and not isinstance(error, BudgetError)):  # other ranks did not raise it
            raise error
        answer.put(error if isinstance(error, FlashError) else FlashError(f"{type(error).__name__}: {error}"))
        self._refused.append(uid)


def _extracted(entry: Any) -> Any:
    """Return a cache that is not computed with any more as mlx-lm's batches extract it, without room for tokens."""
    if not isinstance(entry, DiskKVCache) or entry.is_on_disk or entry.num_forgotten:
        return entry
    plain = entry.as_stock()
    pass_on(entry, plain)
    return plain

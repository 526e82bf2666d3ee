"""The server's queue: requests that wait for room in the budget, and those that are answered now."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import Queue
from typing import Any

import jinja2

from mlx_flash.errors import FlashError
from mlx_flash.integration.answers import Answer
from mlx_flash.integration.followers import ServerRanks
from mlx_flash.model import FlashLLM
from mlx_flash.residency.admission import Decision, alone_bytes, decide, room_bytes, together_bytes

_REQUEST_ERRORS = (
    *(FlashError, jinja2.TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError),
    *(TypeError, ValueError),
)
"""Errors of one request while its prompt is made: a chat template may fail in many ways."""


class RequestQueue:
    """Requests in the order of their arrival. Those that run fit the budget together.

    Args:
        model_provider: mlx-lm's.
        prompt_cache: mlx-lm's; prompt caches are kept in what requests leave.
        ranks: those that answer together; None for this process alone.
        tokenize: mlx-lm's, of (tokenizer, request, arguments).
        would_batch: returns whether a request with these arguments may be answered together with others.

    Attributes:
        waiting, running: requests that wait, and those that are answered now.
        joining: the one that mlx-lm's thread begins with; None if it is of no streamed model.
    """

    def __init__(
        self,
        model_provider: Any,
        prompt_cache: Any,
        ranks: ServerRanks | None,
        tokenize: Callable[[Any, Any, Any], Any],
        would_batch: Callable[[Any], bool],
    ) -> None:
        self.waiting: deque[Answer] = deque()
        self.running: list[Answer] = []
        self.joining: Answer | None = None
        self._provider = model_provider
        self._prompt_cache = prompt_cache
        self._ranks = ranks
        self._tokenize = tokenize
        self._would_batch = would_batch

    @property
    def is_exact(self) -> bool:
        """True if requests that share passes are answered as if each were alone."""
        return isinstance(self._provider.model, FlashLLM) and self._provider.model.batching == "exact"

    def add(self, answer: Answer) -> None:
        """Queue a request. Refuse it if the budget has never room for it, or if its prompt cannot be made."""
        if (model := self._model_of(answer)) is not None:  # else tokenized() decides
            try:
                answer.tokenized = self._tokenize(self._provider.tokenizer, answer.request, answer.args)
                self._decide(answer, model, [])
            except _REQUEST_ERRORS as error:
                answer.put(error)
                return
        self.waiting.append(answer)

    def next(self, is_left: Callable[[Queue[Any]], bool]) -> Answer | None:
        """Return the next request, when the budget has room for it.

        Args:
            is_left: returns whether the client of a request is gone.
        """
        self.running = [answer for answer in self.running if not answer.is_done]
        while self.waiting:
            answer = self.waiting[0]
            if (self._ranks is not None or not is_left(answer.queue)) and not self._admit(answer):
                return None
            self.waiting.popleft()
            if answer in self.running:
                return answer
        return None

    def share_events(self, ranks: ServerRanks, stops: bool, is_left: Callable[[Queue[Any]], bool]) -> bool:
        """End requests whose clients left at the same point on all ranks. Return whether rank 0 stops."""
        known = [*self.waiting, *self.running]
        left = [answer.number for answer in known if is_left(answer.queue) or answer.is_stopped]
        stops, left_numbers = ranks.share_events(stops, left)
        self.waiting = deque(answer for answer in self.waiting if answer.number not in left_numbers)
        self.running = [answer for answer in self.running if answer.number not in left_numbers]
        return stops

    def tokenized(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """Return a tuple that begins with the tokens of a request's prompt, as mlx-lm's thread begins with it."""
        answer = self.joining = next((answer for answer in self.running if answer.request is request), None)
        if answer is not None and answer.tokenized is not None:
            return answer.tokenized
        tokenized = self._tokenize(tokenizer, request, args)
        if answer is not None and isinstance(self._provider.model, FlashLLM):  # it was just loaded for this request
            answer.tokenized = tokenized
            self._decide(answer, self._provider.model, [])
        return tokenized

    def may_batch(self, args: Any) -> bool:
        """Return False for a request that the budget has no room for in a batch."""
        return self._model_may_batch() and not any(answer.is_alone for answer in self.running if answer.args is args)

    def _model_may_batch(self) -> bool:
        """Return False where batches, whose caches are in memory, would keep what the settings send to disk."""
        model = self._provider.model
        return model.is_batchable if isinstance(model, FlashLLM) and not self.is_exact else True

    def _model_of(self, answer: Answer) -> FlashLLM | None:
        """Return the streamed model in memory if a request names it."""
        model, name = self._provider.model, answer.args.model.model
        if not isinstance(model, FlashLLM):
            return None
        wanted = self._provider.cli_args.model if name == "default_model" else name
        return model if self._provider.model_key[0] == wanted else None

    def _admit(self, answer: Answer) -> bool:
        """Let a request run if there is room now. Return False if it has to wait for others."""
        model = self._model_of(answer)
        if answer.tokenized is None or model is None:
            answer.tokenized = None
            if not self.running:
                self.running.append(answer)
            return self.running[-1] is answer  # others run: it may need another model
        lengths = [each.length for each in self.running]
        decision = self._decide(answer, model, lengths)
        if decision != "wait":
            answer.is_alone = decision == "alone"
            self.running.append(answer)
            self._bound_kept(answer, model, lengths)
        return decision != "wait"

    def _decide(self, answer: Answer, model: FlashLLM, lengths: Sequence[int]) -> Decision:
        """Return where a request is answered, beside others with so many tokens.

        Raises:
            RefusedError: the budget has no room for it even when nothing else runs.
        """
        model.start()
        num_prompt, num_new = len(answer.tokenized[0]), answer.args.max_tokens
        answer.length = num_prompt + num_new
        may_batch = self._would_batch(answer.args) and self._model_may_batch()
        batching = model.batching
        wish = partial(decide, model.plan, num_prompt, num_new, lengths, may_batch=may_batch, batching=batching)
        return wish() if self._ranks is None else self._ranks.agree(wish)

    def _bound_kept(self, answer: Answer, model: FlashLLM, lengths: Sequence[int]) -> None:
        """Leave kept prompt caches what is left when a request runs beside others with so many tokens."""
        plan, every = model.plan, [*lengths, answer.length]
        needed = alone_bytes(plan, answer.length) if answer.is_alone else together_bytes(plan, every, model.batching)
        self._prompt_cache.limit_bytes = room_bytes(plan) - needed
        self._prompt_cache.trim_to(n_bytes=self._prompt_cache.limit_bytes)

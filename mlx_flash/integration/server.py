"""mlx-lm's server, which goes on serving after a request that failed."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from queue import Queue
from typing import Any

import jinja2
import mlx.core as mx
from mlx_lm import server

from mlx_flash.compat.server import (
    RUN_HTTP_SERVER,
    BatchGenerator,
    LRUPromptCache,
    ResponseGenerator,
)
from mlx_flash.errors import BudgetError, FlashError, RefusedError
from mlx_flash.integration.admission import Decision, alone_bytes, decide, room_bytes, together_bytes
from mlx_flash.integration.answers import Answer, ServedRows
from mlx_flash.integration.followers import ServerRanks
from mlx_flash.integration.http import (
    ClientLeftError,
    Listener,
    UnansweredError,
    is_gone,
    known_as,
    wait_for_end_of_thread,
)
from mlx_flash.kv.kept import KeptCaches
from mlx_flash.layout.arrays import arrays_in
from mlx_flash.model import FlashLLM

_REQUEST_ERRORS = (FlashError, jinja2.TemplateError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of one request while its prompt is made: a chat template may fail in many ways."""


class SharingPromptCache(LRUPromptCache):  # type: ignore[misc]
    """mlx-lm's, of which conversations that begin alike hold that once, also when they were computed in batches.

    Attributes:
        model_provider: mlx-lm's; None while there is none.
        ranks: those that answer together; None for this process alone.
        limit_bytes: what is kept may take so much at most, beside the limits of mlx-lm; None for no such limit.
    """

    model_provider: Any = None
    ranks: ServerRanks | None = None
    limit_bytes: int | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept = KeptCaches()

    def insert_cache(self, model: Any, tokens: list[int], prompt_cache: list[Any], **options: Any) -> None:
        if not tokens:  # of a request that failed
            return
        streamed = None if self.model_provider is None else self.model_provider.model
        nbytes = sum(entry.nbytes for entry in prompt_cache)
        if self.limit_bytes is not None:
            if nbytes > self.limit_bytes:
                return
            self.trim_to(n_bytes=self.limit_bytes - nbytes)
        if isinstance(streamed, FlashLLM):
            if streamed.engine is not None:  # what a batch extracts is not evaluated yet
                lending = streamed.engine.lending
                lending.recall(min(nbytes, lending.nbytes))
            if streamed.kv is not None:
                prompt_cache = self._kept.take(prompt_cache, tokens, streamed.kv)
        for entry in prompt_cache:
            mx.eval(arrays_in(entry))
        super().insert_cache(model, tokens, prompt_cache, **options)

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> Any:
        """Return a copy of the kept cache with the longest prefix of some tokens, and the tokens after it."""
        if self.limit_bytes is not None and self.nbytes > self.limit_bytes // 2:
            self.trim_to(n_bytes=self.limit_bytes // 2)  # the copy is there beside the row of the batch for a moment
        found = super().fetch_nearest_cache(model, tokens)
        is_same = self.ranks is None or self.ranks.have_same(len(found[1]))
        return found if is_same else (None, tokens)  # another rank has let go of it

    @property
    def nbytes(self) -> int:
        """Bytes that all take together."""
        return int(super().nbytes) - self._kept.shared_bytes

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Drop what was used longest ago, until the rest fits."""
        super().trim_to(n_sequences=n_sequences)
        while n_bytes is not None and len(self) and self.nbytes > max(0, n_bytes):
            super().trim_to(n_sequences=len(self) - 1)


class SurvivingGenerator(ResponseGenerator):
    """mlx-lm's, whose thread would end with the first forward call that fails in a batch.

    A streamed model can be called again after a read that failed or a prompt that the budget has no room for. The
    requests that were being answered get the error; the next one is served.

    Attributes:
        client: for each thread of a client, its ``connection``.
        native_id: the system's number of the thread.
    """

    def __init__(self, model_provider: Any, prompt_cache: Any) -> None:
        self.client = threading.local()
        self.native_id: int | None = None
        self._under_way: weakref.WeakSet[Queue[Any]] = weakref.WeakSet()  # each one is held by its client's thread
        self._left: weakref.WeakSet[Queue[Any]] = weakref.WeakSet()
        self._waiting: deque[Answer] = deque()
        self._running: list[Answer] = []
        self._joining: Answer | None = None
        self._ranks = ServerRanks.of_process()
        self._is_asked_to_stop = False
        self._num_requests = 0
        if isinstance(prompt_cache, SharingPromptCache):
            prompt_cache.model_provider = model_provider
            prompt_cache.ranks = self._ranks
        super().__init__(model_provider, prompt_cache)

    def generate(self, request: Any, generation_args: Any, progress_callback: Any = None) -> Any:
        """Put a request in the queue, and return its context and answer.

        Raises:
            UnansweredError: the request failed before its answer began.
        """
        try:
            generation_args.model.model = known_as(generation_args.model.model, self.cli_args.model)
            return super().generate(request, generation_args, progress_callback)
        except Exception as error:
            raise UnansweredError from error

    def check_client(self, queue: Queue[Any]) -> None:
        """Raise an error if the client has closed its connection.

        Raises:
            ClientLeftError: it has.
        """
        connection = getattr(self.client, "connection", None)
        if connection is not None and is_gone(connection):
            self._left.add(queue)
            raise ClientLeftError("the client closed its connection")

    def is_left(self, queue: Queue[Any]) -> bool:
        """Return whether the client of a request is gone."""
        return queue in self._left

    def join(self) -> None:
        """Wait for the end of the thread. On other ranks than 0 that is all the main thread does."""
        super().join()
        wait_for_end_of_thread(self.native_id)

    @property
    def is_shared(self) -> bool:
        """True if other ranks answer the same requests."""
        return self._ranks is not None

    def ask_to_stop(self) -> None:
        """Have the thread end after its next pass, on all ranks."""
        self._is_asked_to_stop = True
        if self._ranks is None:
            super().ask_to_stop()

    @property
    def is_stopping(self) -> bool:
        """True once the thread was asked to end."""
        return self._is_asked_to_stop or super().is_stopping

    def _share_events(self, ranks: ServerRanks) -> None:
        """Stop, and end requests whose clients left, at the same point on all ranks."""
        known = [*self._waiting, *self._running]
        left = [answer.number for answer in known if self.is_left(answer.queue) or answer.is_stopped]
        stops, left_numbers = ranks.share_events(self._is_asked_to_stop, left)
        if stops:
            super().ask_to_stop()
        self._waiting = deque(answer for answer in self._waiting if answer.number not in left_numbers)
        self._running = [answer for answer in self._running if answer.number not in left_numbers]

    def next_request(self, timeout: float | None) -> Any:
        """Return the next request, in the order of their arrival, when the budget has room for it."""
        if self._ranks is not None:
            self._share_events(self._ranks)
        while (request := self._arrived(None if self._waiting else timeout)) is not None:
            queue, asked, args = request
            self._under_way.add(queue)
            self._num_requests += 1
            answer = Answer(queue, asked, args, self, self._num_requests)
            if self._may_ever_run(answer):
                self._waiting.append(answer)
        self._running = [answer for answer in self._running if not answer.is_done]
        while self._waiting:
            answer = self._waiting[0]
            if (self.is_shared or not self.is_left(answer.queue)) and not self._admit(answer):
                return None
            self._waiting.popleft()
            if answer in self._running:
                return answer, answer.request, answer.args
        return None

    def _arrived(self, timeout: float | None) -> Any:
        with contextlib.nullcontext() if self._ranks is None else self._ranks.waiting():
            return super().next_request(timeout)

    def _may_ever_run(self, answer: Answer) -> bool:
        """Refuse a request that the budget has no room for, or whose prompt cannot be made. Return False then."""
        model, tokenizer = self.model_provider.model, self.model_provider.tokenizer
        if not isinstance(model, FlashLLM) or not self._is_loaded(answer.args):
            return True  # tokenize() decides
        try:
            answer.tokenized = super().tokenize(tokenizer, answer.request, answer.args)
            self._decide(answer, model, [])
        except _REQUEST_ERRORS as error:
            answer.put(error)
            return False
        return True

    def _admit(self, answer: Answer) -> bool:
        """Let a request run if there is room now. Return False if it has to wait for others."""
        model = self.model_provider.model
        if answer.tokenized is None or not isinstance(model, FlashLLM) or not self._is_loaded(answer.args):
            answer.tokenized = None
            if not self._running:
                self._running.append(answer)
            return self._running[-1] is answer  # others run: it may need another model
        lengths = [each.length for each in self._running]
        decision = self._decide(answer, model, lengths)
        if decision != "wait":
            self._run(answer, model, lengths, is_alone=decision == "alone")
        return decision != "wait"

    def _is_loaded(self, args: Any) -> bool:
        """Return whether the model in memory is the one that a request names."""
        name, served = args.model.model, self.cli_args.model
        return bool(self.model_provider.model_key[0] == (served if name == "default_model" else name))

    def _decide(self, answer: Answer, model: FlashLLM, lengths: Sequence[int]) -> Decision:
        """Return where a request is answered, beside others with so many tokens.

        Raises:
            RefusedError: the budget has no room for it even when nothing else runs.
        """
        model.start()
        answer.length = len(answer.tokenized[0]) + answer.args.max_tokens
        may_batch = self.would_batch(answer.args) and self._model_may_batch()
        num_prompt, num_new = len(answer.tokenized[0]), answer.args.max_tokens
        batching = model.batching
        wish = partial(decide, model.plan, num_prompt, num_new, lengths, may_batch=may_batch, batching=batching)
        return wish() if self._ranks is None else self._ranks.agree(wish)

    def _run(self, answer: Answer, model: FlashLLM, lengths: Sequence[int], *, is_alone: bool) -> None:
        """Add a request to those that run, and leave kept prompt caches what is left then."""
        answer.is_alone = is_alone
        self._running.append(answer)
        plan, every = model.plan, [*lengths, answer.length]
        needed = alone_bytes(plan, answer.length) if is_alone else together_bytes(plan, every, model.batching)
        self.prompt_cache.limit_bytes = room_bytes(plan) - needed
        self.prompt_cache.trim_to(n_bytes=self.prompt_cache.limit_bytes)

    def tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """Return a tuple that begins with the tokens of a request's prompt."""
        found = [answer for answer in self._running if answer.request is request]
        self._joining = found[0] if found else None
        if found and found[0].tokenized is not None:
            return found[0].tokenized
        tokenized = super().tokenize(tokenizer, request, args)
        if found and isinstance(self.model_provider.model, FlashLLM):  # it was just loaded for this request
            found[0].tokenized = tokenized
            self._decide(found[0], self.model_provider.model, [])
        return tokenized

    def may_batch(self, args: Any) -> bool:
        """Return False for a request that the budget has no room for in a batch."""
        return self._model_may_batch() and not any(answer.is_alone for answer in self._running if answer.args is args)

    def would_batch(self, args: Any) -> bool:
        """Return whether a request may be answered together with others. Exact batches take caches of every kind."""
        if not self._is_exact:
            return super().would_batch(args)
        return args.seed is None and self.cli_args.kv_bits is None and self.model_provider.draft_model is None

    @property
    def _is_exact(self) -> bool:
        model = self.model_provider.model
        return isinstance(model, FlashLLM) and model.batching == "exact"

    def _model_may_batch(self) -> bool:
        """Return False where batches, whose caches are in memory, would keep what the settings send to disk."""
        model = self.model_provider.model
        return model.is_batchable if isinstance(model, FlashLLM) and not self._is_exact else True

    def make_batches(self, model: Any, **options: Any) -> Any:
        """Return what computes several requests together."""
        if not self._is_exact:
            return BatchGenerator(model, **options)
        return ServedRows(model, lambda: self._joining, **options)

    def answer_alone(self, request: Any, stream: Any) -> None:
        """Answer a request that is in no batch. Stop after the pass under way once its client has left."""
        request[0].is_alone = True
        super().answer_alone(request, stream)

    def answer_requests(self) -> None:
        """Answer requests until the server stops."""
        self.native_id = threading.get_native_id()
        vars(server)["BatchGenerator"] = self.make_batches
        while True:
            try:
                super().answer_requests()
                return
            except FlashError as failure:
                if self.model_provider.model is None:
                    raise  # it could not even be loaded
                logging.exception("a request failed")
                if self.is_shared and not isinstance(failure, BudgetError | RefusedError):  # those all ranks raise
                    signal.raise_signal(signal.SIGTERM)
                    raise
                error = failure.with_traceback(None)  # whose frames hold the caches of the requests that failed
            waiting = {answer.queue for answer in self._waiting}
            for queue in set(self._under_way) - waiting:
                queue.put(error)
            self._running = []
            gc.collect()


@contextlib.contextmanager
def surviving_server(listener: Listener | None = None) -> Iterator[None]:
    """While it lasts, requests to ``mlx_lm.server`` fail one by one, and kept prompt caches are shared.

    Args:
        listener: where the server answers; None leaves HTTP to mlx-lm.
    """
    replaced: dict[str, Any] = {"ResponseGenerator": SurvivingGenerator, "LRUPromptCache": SharingPromptCache}
    replaced["BatchGenerator"] = BatchGenerator  # SurvivingGenerator replaces it by its own
    if listener is not None:
        replaced[RUN_HTTP_SERVER] = lambda host, port, generator: listener.answer(generator)
    before = {name: getattr(server, name) for name in replaced}
    vars(server).update(replaced)
    try:
        yield
    finally:
        vars(server).update(before)

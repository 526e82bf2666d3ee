"""mlx-lm's server, which goes on serving after a request that failed."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import threading
import weakref
from collections.abc import Iterator
from queue import Queue
from typing import Any

import mlx.core as mx
from mlx_lm import server

from mlx_flash.compat.server import (
    RUN_HTTP_SERVER,
    BatchGenerator,
    LRUPromptCache,
    ResponseGenerator,
)
from mlx_flash.errors import BudgetError, FlashError, RefusedError
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
from mlx_flash.integration.queueing import RequestQueue
from mlx_flash.kv.kept import KeptCaches
from mlx_flash.layout.arrays import arrays_in
from mlx_flash.model import FlashLLM


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
        self._ranks = ServerRanks.of_process()
        self._requests = RequestQueue(model_provider, prompt_cache, self._ranks, super().tokenize, self.would_batch)
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

    def _is_over(self, queue: Queue[Any]) -> bool:
        return self.is_stopping or self.is_left(queue)

    def join(self) -> None:
        """Wait for the end of the thread. On other ranks than 0 that is all the main thread does."""
        super().join()
        wait_for_end_of_thread(self.native_id)

    def ask_to_stop(self) -> None:
        """Have the thread end after its next pass, on all ranks."""
        self._is_asked_to_stop = True
        if self._ranks is None:
            super().ask_to_stop()

    @property
    def is_stopping(self) -> bool:
        """True once the thread was asked to end."""
        return self._is_asked_to_stop or super().is_stopping

    def next_request(self, timeout: float | None) -> Any:
        """Return the next request, in the order of their arrival, when the budget has room for it."""
        requests, ranks = self._requests, self._ranks
        if ranks is not None and requests.share_events(ranks, self._is_asked_to_stop, self.is_left):
            super().ask_to_stop()
        while True:
            with contextlib.nullcontext() if ranks is None else ranks.waiting():
                arrived = super().next_request(None if requests.waiting else timeout)
            if arrived is None:
                break
            queue, asked, args = arrived
            self._under_way.add(queue)
            self._num_requests += 1
            number, is_shared = self._num_requests, ranks is not None
            requests.add(Answer(queue, asked, args, number, is_shared=is_shared, is_over=self._is_over))
        answer = requests.next(self.is_left)
        return None if answer is None else (answer, answer.request, answer.args)

    def tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """Return a tuple that begins with the tokens of a request's prompt."""
        return self._requests.tokenized(tokenizer, request, args)

    def may_batch(self, args: Any) -> bool:
        """Return False for a request that the budget has no room for in a batch."""
        return self._requests.may_batch(args)

    def would_batch(self, args: Any) -> bool:
        """Return whether a request may be answered together with others. Exact batches take caches of every kind."""
        if not self._requests.is_exact:
            return super().would_batch(args)
        return args.seed is None and self.cli_args.kv_bits is None and self.model_provider.draft_model is None

    def make_batches(self, model: Any, **options: Any) -> Any:
        """Return what computes several requests together."""
        if not self._requests.is_exact:
            return BatchGenerator(model, **options)
        return ServedRows(model, lambda: self._requests.joining, **options)

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
                is_raised_by_all = isinstance(failure, BudgetError | RefusedError)
                if self._ranks is not None and not is_raised_by_all:
                    signal.raise_signal(signal.SIGTERM)
                    raise
                error = failure.with_traceback(None)  # whose frames hold the caches of the requests that failed
            waiting = {answer.queue for answer in self._requests.waiting}
            for queue in set(self._under_way) - waiting:
                queue.put(error)
            self._requests.running = []
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

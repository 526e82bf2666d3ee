"""mlx-lm's server, which goes on serving after a request that failed."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from queue import Queue
from typing import Any

from mlx_lm import server

from mlx_flash.compat.server import RUN_HTTP_SERVER, GenerationContext, LRUPromptCache, ResponseGenerator, is_stopped
from mlx_flash.errors import FlashError
from mlx_flash.integration.http import ClientLeftError, Listener, UnansweredError, is_gone, known_as
from mlx_flash.kv.kept import KeptCaches
from mlx_flash.model import FlashLLM


class SharingPromptCache(LRUPromptCache):  # type: ignore[misc]
    """mlx-lm's, of which conversations that begin alike hold that once, also when they were computed in batches.

    Attributes:
        model_provider: mlx-lm's; None while there is none.
    """

    model_provider: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept = KeptCaches()

    def insert_cache(self, model: Any, tokens: list[int], prompt_cache: list[Any], **options: Any) -> None:
        streamed = None if self.model_provider is None else self.model_provider.model
        if isinstance(streamed, FlashLLM) and streamed.kv is not None:
            prompt_cache = self._kept.take(prompt_cache, tokens, streamed.kv)
        super().insert_cache(model, tokens, prompt_cache, **options)

    @property
    def nbytes(self) -> int:
        """Bytes that all take together."""
        return int(super().nbytes) - self._kept.shared_bytes

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Lets go of what was used longest ago, until what is left fits."""
        super().trim_to(n_sequences=n_sequences)
        while n_bytes is not None and len(self) and self.nbytes > max(0, n_bytes):
            super().trim_to(n_sequences=len(self) - 1)


class Answer:
    """The queue of a request, as mlx-lm's thread sees it.

    Args:
        queue: where the thread of the client waits.
        generator: what answers the request.
    """

    def __init__(self, queue: Queue[Any], generator: SurvivingGenerator) -> None:
        self.queue = queue
        self.is_alone = False
        self._generator = generator
        self._context: Any = None

    def put(self, item: Any) -> None:
        """Hand on a part of the answer. An answer whose client left is stopped here.

        Raises:
            ClientLeftError: the client left, or the server stops, while a prompt is computed alone.
        """
        if isinstance(item, GenerationContext):
            self._context = item
        if self._context is not None and (self._generator.is_stopping or self._generator.is_left(self.queue)):
            self._context.stop()
        self.queue.put(item)
        if self.is_alone and isinstance(item, tuple) and is_stopped(self._context):
            raise ClientLeftError("nobody waits for this answer any more")


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
        if isinstance(prompt_cache, SharingPromptCache):
            prompt_cache.model_provider = model_provider
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

    def next_request(self, timeout: float | None) -> Any:
        """Return the next request whose client is still there."""
        request = super().next_request(timeout)
        if request is None or self.is_left(request[0]):
            return None
        self._under_way.add(request[0])
        return (Answer(request[0], self), *request[1:])

    def may_batch(self, args: Any) -> bool:
        """Return False where batches, whose caches are in memory, would keep what the settings send to disk."""
        model = self.model_provider.model
        return model.is_batchable if isinstance(model, FlashLLM) else True

    def answer_alone(self, request: Any, stream: Any) -> None:
        """Answer a request that is in no batch. Stop after the pass under way once its client has left."""
        request[0].is_alone = True
        super().answer_alone(request, stream)

    def answer_requests(self) -> None:
        """Answer requests until the server stops."""
        self.native_id = threading.get_native_id()
        while True:
            try:
                super().answer_requests()
                return
            except FlashError as failure:
                if self.model_provider.model is None:
                    raise  # it could not even be loaded
                logging.exception("a request failed")
                error = failure.with_traceback(None)  # whose frames hold the caches of the requests that failed
            for queue in list(self._under_way):
                queue.put(error)
            gc.collect()


@contextlib.contextmanager
def surviving_server(listener: Listener | None = None) -> Iterator[None]:
    """While it lasts, requests to ``mlx_lm.server`` fail one by one, and kept prompt caches are shared.

    Args:
        listener: where the server answers; None leaves HTTP to mlx-lm.
    """
    replaced: dict[str, Any] = {"ResponseGenerator": SurvivingGenerator, "LRUPromptCache": SharingPromptCache}
    if listener is not None:
        replaced[RUN_HTTP_SERVER] = lambda host, port, generator: listener.answer(generator)
    before = {name: getattr(server, name) for name in replaced}
    vars(server).update(replaced)
    try:
        yield
    finally:
        vars(server).update(before)

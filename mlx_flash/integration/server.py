"""mlx-lm's server, which goes on serving after a request that failed."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any

from mlx_lm import server

from mlx_flash.compat.server import APIHandler, LRUPromptCache, ResponseGenerator, send_error
from mlx_flash.errors import FlashError
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


class SurvivingGenerator(ResponseGenerator):
    """mlx-lm's, whose thread would end with the first forward call that fails in a batch.

    A streamed model can be called again after a read that failed or a prompt that the budget has no room for. The
    requests that were being answered get the error; the next one is served.
    """

    def __init__(self, model_provider: Any, prompt_cache: Any) -> None:
        self._under_way: weakref.WeakSet[Queue[Any]] = weakref.WeakSet()
        if isinstance(prompt_cache, SharingPromptCache):
            prompt_cache.model_provider = model_provider
        super().__init__(model_provider, prompt_cache)

    def next_queue(self, queue: Queue[Any]) -> None:
        self._under_way.add(queue)

    def may_batch(self, args: Any) -> bool:
        """Return False where batches, whose caches are in memory, would keep what the settings send to disk."""
        model = self.model_provider.model
        return model.is_batchable if isinstance(model, FlashLLM) else True

    def answer_requests(self) -> None:
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


def _telling(handle: Callable[..., None]) -> Callable[..., None]:
    """mlx-lm's handling of a completion, which also tells the client when it fails half-way."""

    def handle_completion(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            handle(self, *args, **kwargs)
        except FlashError as error:
            send_error(self, error)

    return handle_completion


@contextlib.contextmanager
def surviving_server() -> Iterator[None]:
    """While it lasts, requests to ``mlx_lm.server`` fail one by one, their clients learn why, and what it keeps of
    conversations is shared."""
    generator, handle = server.ResponseGenerator, APIHandler.handle_completion
    kept = server.LRUPromptCache
    server.ResponseGenerator, server.LRUPromptCache = SurvivingGenerator, SharingPromptCache
    APIHandler.handle_completion = _telling(handle)
    try:
        yield
    finally:
        server.ResponseGenerator, APIHandler.handle_completion = generator, handle
        server.LRUPromptCache = kept

"""mlx-lm's server: the methods that are extended, under names without an underscore."""

from __future__ import annotations

import json
from queue import Queue
from typing import Any

from mlx_lm import server

from mlx_flash.compat.require import require, require_that

LRUPromptCache = require(server, "LRUPromptCache")
APIHandler = require(server, "APIHandler")
for _name in ("_next_request", "_is_batchable", "_generate"):
    require(server.ResponseGenerator, _name)
for _name in ("handle_completion", "_set_completion_headers"):
    require(APIHandler, _name)
require(LRUPromptCache, "insert_cache", "model", "tokens", "prompt_cache")
require(LRUPromptCache, "trim_to", "n_sequences", "n_bytes")
require_that(isinstance(LRUPromptCache.nbytes, property), "LRUPromptCache.nbytes is no property")


for _name in ("next_queue", "may_batch", "answer_requests"):
    require_that(not hasattr(server.ResponseGenerator, _name), f"ResponseGenerator has its own {_name}()")


class ResponseGenerator(server.ResponseGenerator):  # type: ignore[misc]
    """mlx-lm's thread that answers requests, with hooks for a subclass."""

    def next_queue(self, queue: Queue[Any]) -> None:
        """Note the queue that the answer of a request goes to, when its turn comes."""

    def may_batch(self, args: Any) -> bool:
        """Return whether a request may be answered together with others, if mlx-lm would."""
        return True

    def answer_requests(self) -> None:
        """Answer requests until the server stops."""
        super()._generate()

    def _next_request(self, *args: Any, **kwargs: Any) -> Any:
        request = super()._next_request(*args, **kwargs)
        if request is not None:
            self.next_queue(request[0])
        return request

    def _is_batchable(self, args: Any) -> bool:
        return bool(super()._is_batchable(args)) and self.may_batch(args)

    def _generate(self) -> None:
        self.answer_requests()


def send_error(handler: Any, error: Exception) -> None:
    """Send an error to the client of a completion that failed, as an event if the answer has begun to stream.

    Args:
        handler: mlx-lm's ``APIHandler``.
        error: what is sent.
    """
    body = json.dumps({"error": {"message": str(error), "type": type(error).__name__}}).encode()
    if handler.stream:
        handler.wfile.write(b"data: " + body + b"\n\n")
    else:
        handler._headers_buffer = []  # those of success were made, but not sent
        handler._set_completion_headers(500)
        handler.end_headers()
        handler.wfile.write(body)

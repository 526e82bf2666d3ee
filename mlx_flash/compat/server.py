"""mlx-lm's server: the methods that are extended, under names without an underscore."""

from __future__ import annotations

import json
from queue import Empty, Queue
from typing import Any

from mlx_lm import server

from mlx_flash.compat.require import require, require_that

LRUPromptCache = require(server, "LRUPromptCache")
GenerationContext = require(server, "GenerationContext")
BatchGenerator: Any = require(server, "BatchGenerator", "model")
RUN_HTTP_SERVER = "_run_http_server"
"""Name of the function that ``mlx_lm.server`` calls with (host, port, generator) to answer requests until Ctrl-C."""

require(server, RUN_HTTP_SERVER, "host", "port", "response_generator")
require(server.ResponseGenerator, "_next_request", "timeout")
require(server.ResponseGenerator, "_serve_single", "request", "stream")
require(server.ResponseGenerator, "_is_batchable", "args")
require(server.ResponseGenerator, "_tokenize", "tokenizer", "request", "args")
for _name in ("_generate", "_await_response", "generation_available", "join"):
    require(server.ResponseGenerator, _name)
require(server.APIHandler, "handle_completion", "request", "stop_words")
for _name in ("_set_completion_headers", "handle_models_request"):
    require(server.APIHandler, _name)
require(LRUPromptCache, "insert_cache", "model", "tokens", "prompt_cache")
require(LRUPromptCache, "trim_to", "n_sequences", "n_bytes")
require_that(isinstance(LRUPromptCache.nbytes, property), "LRUPromptCache.nbytes is no property")

WAIT_SECONDS = 0.25
"""Time between two looks at the client of an answer that takes long."""

_HOOKS = ("next_request", "may_batch", "would_batch", "tokenize", "answer_requests", "answer_alone", "check_client")
for _name in (*_HOOKS, "ask_to_stop", "is_stopping"):
    require_that(not hasattr(server.ResponseGenerator, _name), f"ResponseGenerator has its own {_name}()")


class ResponseGenerator(server.ResponseGenerator):  # type: ignore[misc]
    """mlx-lm's thread that answers requests, with hooks for a subclass."""

    def next_request(self, timeout: float | None) -> Any:
        """Return the next request: its queue, the request, and its arguments; None if there is none in time."""
        return super()._next_request(timeout)

    def may_batch(self, args: Any) -> bool:
        """Return whether a request may be answered together with others, if mlx-lm would."""
        return True

    def would_batch(self, args: Any) -> bool:
        """Return whether mlx-lm would answer a request together with others."""
        return bool(super()._is_batchable(args))

    def tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """Return a tuple that begins with the tokens of a request's prompt."""
        return super()._tokenize(tokenizer, request, args)

    def answer_requests(self) -> None:
        """Answer requests until the server stops."""
        super()._generate()

    def answer_alone(self, request: Any, stream: Any) -> None:
        """Answer a request that is in no batch."""
        super()._serve_single(request, stream)

    def check_client(self, queue: Queue[Any]) -> None:
        """Raise an error if nobody waits for the answer any more. Called by the thread of the client."""

    def ask_to_stop(self) -> None:
        """Have the thread end after its next pass."""
        self._stop = True

    @property
    def is_stopping(self) -> bool:
        """True once the thread was asked to end."""
        return bool(self._stop)

    def _next_request(self, timeout: float | None = None) -> Any:
        return self.next_request(timeout)

    def _is_batchable(self, args: Any) -> bool:
        return self.would_batch(args) and self.may_batch(args)

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        return self.tokenize(tokenizer, request, args)

    def _generate(self) -> None:
        self.answer_requests()

    def _serve_single(self, request: Any, stream: Any) -> None:
        self.answer_alone(request, stream)

    def _await_response(self, response_queue: Queue[Any]) -> Any:
        while True:
            self.check_client(response_queue)
            try:
                return response_queue.get(timeout=WAIT_SECONDS)
            except Empty:
                if not self.generation_available():
                    raise RuntimeError("generation thread died") from None


class APIHandler(server.APIHandler):  # type: ignore[misc]
    """mlx-lm's handler of HTTP requests."""

    def send_json(self, value: Any, status: int = 200) -> None:
        """Send a whole response, in place of headers that were made but not sent."""
        self._headers_buffer: list[bytes] = []
        self._set_completion_headers(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def send_error_json(self, error: Exception, status: int) -> None:
        """Send an error to the client of a completion, as an event if the answer has begun to stream."""
        value = {"error": {"message": str(error), "type": type(error).__name__}}
        if self.has_begun:
            self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        else:
            self.send_json(value, status)

    @property
    def has_begun(self) -> bool:
        """True once a part of the response was sent."""
        return bool(self._has_begun)

    _has_begun = False

    def _set_stream_headers(self, status_code: int = 200) -> None:
        super()._set_stream_headers(status_code)
        self._has_begun = True


def is_stopped(context: Any) -> bool:
    """Return whether an answer with this ``GenerationContext`` was stopped; False for None."""
    return context is not None and bool(context._should_stop)

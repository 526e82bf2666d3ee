"""A request on its way through the generation thread, where an error of its work ends that request alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_flash.compat.arrays import explained
from mlx_flash.errors import CheckpointError, FlashError, RefusedError
from mlx_flash.generation.batches import Reading
from mlx_flash.logs import log
from mlx_flash.server.catalog import Source
from mlx_flash.server.events import Client, End, Event, Failed, Reason
from mlx_flash.server.prompts import NO_PROMPT, Prompt
from mlx_flash.server.request import GenerationRequest
from mlx_flash.server.text import TextStream


@dataclass(eq=False)
class Job:
    """A request on its way."""

    request: GenerationRequest  # as the dialect made it, with the settings and the first messages of its model
    source: Source
    answer: Client | None  # the way to its client, which may have other answers; None on other ranks than 0
    prompt: Prompt = NO_PROMPT  # its prompt; without tokens until its model is in memory
    grammar: str | None = None  # that its answer follows; None for any text
    max_tokens: int = 0  # the most tokens of its answer
    reading: Reading | None = None  # what is wanted of the hidden states of its prompt; None for nothing
    inputs: dict[str, Any] = field(default_factory=dict)  # further options of the loop that answers it
    is_computed: bool = False  # it is in the batch; False while it waits
    is_prompt_done: bool = False  # its prompt is computed
    leader: Job | None = None  # the request for whose prompt it waits, or waited; None for none
    text: TextStream | None = None  # the text so far. There from the beginning of the computation
    num_cached: int = 0  # tokens of the prompt that a kept cache had; in the end, also those of the prefix cache
    num_restored: int = 0  # tokens of the prompt that the prefix cache had
    hidden: list[mx.array] = field(default_factory=list)  # states of its prompt, as far as it wants them
    tokens: list[int] = field(default_factory=list)  # of the answer so far
    is_over: bool = False  # nothing is sent any more
    load_seconds: float = 0.0
    _began: float | None = None
    _first: float | None = None

    @property
    def number(self) -> int:
        """Its number, in the batch too."""
        return self.request.number

    @property
    def length(self) -> int:
        """Tokens of the prompt and the longest answer."""
        return len(self.prompt.tokens) + self.max_tokens

    @property
    def is_apart(self) -> bool:
        """True if it gets the same answer each time: it has a seed, or the hidden states of its prompt are wanted."""
        return self.reading is not None or self.request.sampling.named_seed is not None

    def begin(self) -> None:
        """Note that its prompt is computed from now on."""
        self.is_computed, self._began = True, time.perf_counter()

    def note_token(self, token: int) -> None:
        """Note a token of the answer."""
        self.tokens.append(token)
        self._first = self._first or time.perf_counter()

    def send(self, event: Event) -> None:
        """Send an event to its client."""
        if self.answer is not None and not self.is_over:
            self.answer.put(self.number, event)

    def end(self, reason: Reason = "stop", vector: Sequence[float] = ()) -> None:
        """Send the end of a complete answer, or of a request that asks for none."""
        now, stop = time.perf_counter(), None
        began = self._began or now
        first = self._first or now
        if self.text is not None:
            stop, reason = self.text.stop, "tool_calls" if reason == "stop" and self.text.num_calls else reason
        counts = len(self.prompt.tokens), self.num_cached, len(self.tokens)
        self.send(End(reason, stop, *counts, vector, self.load_seconds, first - began, now - first))
        self.is_over = True

    def fail(self, error: RefusedError) -> None:
        """Send an error, the last event."""
        self.send(Failed(error))
        self.is_over = True


class LeftError(Exception):
    """The client of a request has left while its prompt was computed."""

    def __init__(self, number: int) -> None:
        super().__init__(f"the client of request {number} has left")
        self.number = number


@contextmanager
def ends_alone(fail: Callable[[RefusedError], None]) -> Iterator[None]:
    """Give what a block raises to the request that it works for. The thread goes on after the block."""
    try:
        yield
    except LeftError:
        raise
    except Exception as error:  # noqa: BLE001 a request may fail in any way: in a template, a sampler, a parser
        fail(refusal_of(error))


@contextmanager
def refused(field: str) -> Iterator[None]:
    """Turn what a block raises into a refusal of the request, whose content is wrong."""
    try:
        yield
    except (FlashError, MemoryError):
        raise
    except Exception as error:
        raise RefusedError(f"{field} cannot be used: {type(error).__name__}: {error}", 400, field) from error


def refusal_of(error: Exception) -> RefusedError:
    """Return an error as its client gets it, and log it without text that may quote the prompt."""
    if isinstance(error, RefusedError):
        cause = error.__cause__
        log.info("a request failed: %s", error if cause is None else type(cause).__name__)
        return error
    error = explained(error)
    is_ours = isinstance(error, FlashError)
    log.error("a request failed: %s", error if is_ours else type(error).__name__)
    log.debug("its origin:", exc_info=error)
    status = 400 if isinstance(error, CheckpointError) else 500  # of a model that the request names
    refused = RefusedError(str(error) if is_ours else f"{type(error).__name__}: {error}", status)
    refused.__cause__ = error.with_traceback(None)  # whose frames hold the caches of the request
    return refused

"""A request on its way through the generation thread."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_flash.errors import RefusedError
from mlx_flash.generation.batches import Reading
from mlx_flash.server.catalog import Source
from mlx_flash.server.events import Answer, End, Event, Failed, Reason
from mlx_flash.server.prompts import NO_PROMPT, Prompt
from mlx_flash.server.request import GenerationRequest
from mlx_flash.server.sampling import named_seed
from mlx_flash.server.text import TextStream


@dataclass(eq=False)
class Job:
    """A request.

    Attributes:
        request: as the dialect made it, with the messages that every conversation with the model begins with.
        source: its model.
        answer: the way to its client; None on other ranks than 0.
        prompt: its prompt; without tokens until its model is in memory.
        grammar: that its answer follows; None for any text.
        max_tokens: the most tokens of its answer.
        reading: what is wanted of the hidden states of its prompt; None for nothing.
        inputs: further options of the loop that answers it.
        is_computed: it is in the batch; False while it waits.
        is_prompt_done: its prompt is computed.
        leader: the request for whose prompt it waits, or waited; None for none.
        text: the text so far. There from the beginning of the computation.
        num_cached: tokens of the prompt that a kept cache had; once it is done, and those that the prefix cache had.
        num_restored: tokens of the prompt that the prefix cache had.
        hidden: what is kept of the hidden states of its prompt, once it is computed.
        tokens: of the answer so far.
        is_over: nothing is sent any more.
    """

    request: GenerationRequest
    source: Source
    answer: Answer | None
    prompt: Prompt = NO_PROMPT
    grammar: str | None = None
    max_tokens: int = 0
    reading: Reading | None = None
    inputs: dict[str, Any] = field(default_factory=dict)
    is_computed: bool = False
    is_prompt_done: bool = False
    leader: Job | None = None
    text: TextStream | None = None
    num_cached: int = 0
    num_restored: int = 0
    hidden: list[mx.array] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    is_over: bool = False
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
        return self.reading is not None or named_seed(self.request.sampling, self.source.defaults) is not None

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
            self.answer.put(event)

    def end(self, reason: Reason = "stop") -> None:
        """Send the end of a complete answer, or of a request that asks for none."""
        now, prompt = time.perf_counter(), self.prompt.tokens
        began, stop = self._began or now, None
        first = self._first or now
        if self.text is not None:
            stop, reason = self.text.stop, "tool_calls" if reason == "stop" and self.text.num_calls else reason
        tokens = (*prompt, *self.tokens) if self.request.tells_tokens else ()
        counts = len(prompt), self.num_cached, len(self.tokens)
        self.send(End(reason, stop, *counts, tokens, self.load_seconds, first - began, now - first))
        self.is_over = True

    def fail(self, error: RefusedError) -> None:
        """Send an error, the last event."""
        self.send(Failed(error))
        self.is_over = True

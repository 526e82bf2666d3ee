"""Requests on their way through the generation thread."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from mlx_flash.errors import RefusedError
from mlx_flash.generation.member import Reading
from mlx_flash.server.catalog import Source
from mlx_flash.server.events import Answer, End, Event, Failed, Progress, Reason
from mlx_flash.server.prompts import Prompt
from mlx_flash.server.request import GenerationRequest
from mlx_flash.server.rows import LeftError
from mlx_flash.server.sampling import named_seed
from mlx_flash.server.text import TextStream


@dataclass(eq=False)
class Job:
    """A request.

    Attributes:
        number: in the order of arrival.
        request: as the dialect made it.
        source: its model.
        answer: the way to its client; None on other ranks than 0.
        prompt: its prompt; None until its model is in memory.
        grammar: that its answer follows; None for any text.
        max_tokens: the most tokens of its answer.
        reading: what is wanted of the hidden states of its prompt; None for nothing.
        inputs: further options of the loop that answers it.
        uid: its number in the batch; None while it waits.
        is_prompt_done: its prompt is computed.
        leader: the request for whose prompt it waits, or waited; None for none.
        text: the text so far. There from the beginning of the computation.
        num_cached: tokens of the prompt that a kept cache had; once it is done, and those that the prefix cache had.
        tokens: of the answer so far.
        is_over: nothing is sent any more.
    """

    number: int
    request: GenerationRequest
    source: Source
    answer: Answer | None
    prompt: Prompt | None = None
    grammar: str | None = None
    max_tokens: int = 0
    reading: Reading | None = None
    inputs: dict[str, Any] = field(default_factory=dict)
    uid: int | None = None
    is_prompt_done: bool = False
    leader: Job | None = None
    text: TextStream | None = None
    num_cached: int = 0
    tokens: list[int] = field(default_factory=list)
    is_over: bool = False
    load_seconds: float = 0.0
    _began: float = 0.0
    _first: float = 0.0

    @property
    def length(self) -> int:
        """Tokens of the prompt and the longest answer; 0 while unknown."""
        return 0 if self.prompt is None else len(self.prompt.tokens) + self.max_tokens

    def begin(self) -> None:
        """Note that its prompt is computed from now on."""
        self._began = time.perf_counter()

    def note_token(self, token: int) -> None:
        """Note a token of the answer."""
        self.tokens.append(token)
        if len(self.tokens) == 1:
            self._first = time.perf_counter()

    def send(self, event: Event) -> None:
        """Send an event to its client."""
        if self.answer is not None and not self.is_over:
            self.answer.put(event)

    def end(self, reason: Reason) -> None:
        """Send the end of a complete answer."""
        assert self.prompt is not None and self.text is not None
        reason = "tool_calls" if reason == "stop" and self.text.num_calls else reason
        stop, now = self.text.stop, time.perf_counter()
        first = self._first or now
        counts = len(self.prompt.tokens), self.num_cached, len(self.tokens)
        tokens = (*self.prompt.tokens, *self.tokens) if self.request.tells_tokens else ()
        self.send(End(reason, stop, *counts, tokens, self.load_seconds, first - self._began, now - first))
        self.is_over = True

    def end_without_answer(self) -> None:
        """Send the end of a request that asks for no answer."""
        num_prompt = 0 if self.prompt is None else len(self.prompt.tokens)
        self.send(End("stop", None, num_prompt, 0, 0, load_seconds=self.load_seconds))
        self.is_over = True

    def fail(self, error: RefusedError) -> None:
        """Send an error, the last event."""
        self.send(Failed(error))
        self.is_over = True


class Jobs(dict[int, Job]):
    """The requests, by number. Most are computed; some wait for another one that computes the same prompt."""

    def __init__(self) -> None:
        super().__init__()
        self._computed: dict[int, Job] = {}

    def note_computed(self, job: Job, uid: int) -> None:
        """Note that a request is computed.

        Args:
            job: the request.
            uid: its number in the batch.
        """
        job.uid = uid
        self[job.number] = self._computed[uid] = job

    def computed(self, uid: int) -> Job | None:
        """Return the request with this number in the batch; None if it is gone."""
        return self._computed.get(uid)

    def note_prompt(self, uid: int, done: int, total: int) -> None:
        """Note how far a prompt is in the pass under way.

        Args:
            uid: number of the request in the batch.
            done, total: tokens of what the pass computes.

        Raises:
            LeftError: the client has left, so that the pass is in vain.
        """
        job = self._computed.get(uid)
        if job is None or job.prompt is None:
            return
        if job.answer is not None and job.answer.is_over:
            raise LeftError(uid)
        if total == len(job.prompt.tokens) - job.num_cached:
            job.send(Progress("prompt", job.num_cached + done, job.num_cached + total))

    def is_apart(self, uid: int) -> bool:
        """Return whether the request with this number in the batch gets the same answer each time.

        It has a seed, or the hidden states of its prompt are wanted.
        """
        job = self._computed.get(uid)
        has_seed = job is not None and named_seed(job.request.sampling, job.source.defaults) is not None
        return has_seed or self.reading_of(uid) is not None

    def reading_of(self, uid: int) -> Reading | None:
        """Return what is wanted of the hidden states of the prompt with this number in the batch."""
        job = self._computed.get(uid)
        return None if job is None else job.reading

    def inputs_of(self, uid: int) -> dict[str, Any]:
        """Return further options of the loop that answers the request with this number in the batch."""
        job = self._computed.get(uid)
        return {} if job is None else job.inputs

    def leader_of(self, job: Job) -> Job | None:
        """Return a request that computes the same prompt now; None if there is none."""
        assert job.prompt is not None
        for other in self._computed.values():
            if not other.is_prompt_done and other.prompt is not None and other.prompt.tokens == job.prompt.tokens:
                return other
        return None

    def is_awaited(self, job: Job) -> bool:
        """Return whether another request waits for the prompt of this one."""
        return any(other.leader is job and other.uid is None for other in self.values())

    def ready(self) -> list[Job]:
        """Return the requests that wait no longer."""
        waiting = [job for job in self.values() if job.uid is None]
        return [
            job for job in waiting if job.leader is None or job.leader.is_prompt_done or job.leader.number not in self
        ]

    def forget(self, job: Job) -> int | None:
        """Let go of a request. Return its number in the batch; None if it is not computed."""
        self.pop(job.number, None)
        found = None if job.uid is None else self._computed.pop(job.uid, None)
        return None if found is None else found.uid

    def take_all(self) -> list[Job]:
        """Return all requests, and let go of them."""
        jobs = list(self.values())
        self.clear()
        self._computed.clear()
        return jobs

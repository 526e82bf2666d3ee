"""The parts of an answer, as the generation thread sends them to a dialect, in this order:

any number of `Progress`, then `Begun`, then any number of `Progress`, `Piece`, calls and `Vector`, then `End`. `Failed`
may come at any time and is the last one. A call is `CallBegun`, any number of `CallArguments`, and `ToolCall`; one
without `ToolCall` is broken.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from mlx_flash.errors import RefusedError

Reason = Literal["stop", "length", "tool_calls"]
"""The reason for the end of an answer."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Work before the next token: weights of the model that are read, or tokens of the prompt that are computed.

    Attributes:
        stage: the work.
        done, total: bytes while loading, tokens of the prompt otherwise.
    """

    stage: Literal["loading", "prompt"]
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Begun:
    """The request was admitted.

    Attributes:
        num_prompt: tokens of the prompt.
        num_cached: the first of them, which a kept prompt cache has.
    """

    num_prompt: int
    num_cached: int


@dataclass(frozen=True, slots=True)
class TokenChance:
    """A token and the logarithm of its probability.

    Attributes:
        token: its number.
        text: its text; other tokens may be needed to complete a character.
        logprob: the logarithm; None for the first token of a prompt.
    """

    token: int
    text: str
    logprob: float | None


TokenDetail: TypeAlias = tuple[TokenChance, ...]
"""A token of the answer, or of a prompt that is part of it, and the likeliest ones in its place, in this order."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the text.

    Attributes:
        text: the part; may be empty where only details of tokens are sent.
        kind: the answer itself, or the reasoning before it.
        tokens: details of the tokens since the last piece.
    """

    text: str
    kind: Literal["text", "reasoning"] = "text"
    tokens: tuple[TokenDetail, ...] = ()


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The beginning of a call that the model asks for.

    Attributes:
        name: of the function.
        id: of the call, where the model gave one.
    """

    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A part of the arguments of the call that has begun.

    Attributes:
        text: the part. All parts together are a JSON object, the arguments of the `ToolCall` that ends the call. The
            parts of a broken call are none.
    """

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call.

    Attributes:
        name: of the function.
        arguments: of the call, by name.
        id: of the call, where the model gave one.
    """

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Vector:
    """A text as numbers.

    Attributes:
        values: the hidden state of its last token after the final norm, or probabilities.
    """

    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class End:
    """The end of a complete answer.

    Attributes:
        reason: the reason.
        stop: the stop text that ended it; None for other reasons.
        num_prompt: as of `Begun`.
        num_cached: as of `Begun`, and tokens of the prompt that were restored from disk.
        num_tokens: tokens of the answer, with those that end it.
        tokens: the prompt and the answer, if the request asks for them.
        load_seconds, prompt_seconds, answer_seconds: times of loading, the prompt, and the tokens after the first one.
    """

    reason: Reason
    stop: str | None
    num_prompt: int
    num_cached: int
    num_tokens: int
    tokens: tuple[int, ...] = ()
    load_seconds: float = 0.0
    prompt_seconds: float = 0.0
    answer_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer ends without being complete.

    Attributes:
        error: the reason; its ``status`` is that of HTTP, if nothing was sent yet.
    """

    error: RefusedError


Event: TypeAlias = Progress | Begun | Piece | CallBegun | CallArguments | ToolCall | Vector | End | Failed


MAX_EVENTS = 256
"""Events that may wait for a client. Further pieces of text are joined to the last one, so that none is lost."""


class Answer:
    """The events of an answer, up to ``End`` or ``Failed``. :func:`merged` yields them.

    Made in the event loop of the client. :meth:`put` belongs to the generation thread, everything else to the loop.

    Args:
        on_leave: called when the client has left before the end.
        arrived: set when an event has come. The answers to one client share it, so one coroutine waits for all.

    Attributes:
        arrived: as given.
        is_over: the last event was taken, or the client has left.
    """

    def __init__(self, on_leave: Callable[[], None], arrived: asyncio.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._on_leave, self.arrived = on_leave, arrived
        self.is_over = False

    def put(self, event: Event) -> None:
        """Send an event. Never blocks."""
        with self._lock:
            is_awaited = not self._events  # otherwise the loop is awake already
            if len(self._events) >= MAX_EVENTS and (joined := _joined(self._events[-1], event)) is not None:
                self._events[-1] = joined
            else:
                self._events.append(event)
        try:
            if is_awaited:
                self._loop.call_soon_threadsafe(self.arrived.set)
        except RuntimeError:  # the loop is closed, and the client with it
            self._events.clear()

    def leave(self) -> None:
        """End the answer, because its client has left. Harmless after its end."""
        if not self.is_over:
            self.is_over = True
            self._on_leave()

    @property
    def first(self) -> Event | None:
        """The next event; None if it has not come yet."""
        return self._events[0] if self._events else None

    def take(self) -> Event | None:
        """Take the next event. Return None if it has not come yet, or the answer is over."""
        with self._lock:
            event = self._events.popleft() if self._events and not self.is_over else None
        self.is_over = self.is_over or isinstance(event, End | Failed)
        return event


async def merged(answers: Sequence[Answer]) -> AsyncIterator[tuple[int, Event]]:
    """Yield the events of the answers to one client as they come, each with the number of its answer.

    Callers that stop early call :meth:`Answer.leave`.
    """
    arrived = answers[0].arrived
    arrived.set()  # some may be here
    while not all(answer.is_over for answer in answers):
        await arrived.wait()
        arrived.clear()
        for number, answer in enumerate(answers):
            if (event := answer.take()) is not None:
                arrived.set()  # there may be more
                yield number, event


def _joined(last: Event, event: Event) -> Event | None:
    """Return an event that replaces two; None if both have to stay."""
    if isinstance(last, Progress) and isinstance(event, Progress):
        return event
    if isinstance(last, Piece) and isinstance(event, Piece) and last.kind == event.kind:
        return Piece(last.text + event.text, last.kind, last.tokens + event.tokens)
    if isinstance(last, CallArguments) and isinstance(event, CallArguments):
        return CallArguments(last.text + event.text)
    return None

"""The parts of an answer, as the generation thread sends them to a dialect, in this order:

any number of `Progress`, then `Begun`, then any number of `Progress`, `Piece` and `ToolCall`, then `End`. `Failed` may
come at any time and is the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from mlx_flash.errors import RefusedError

Reason = Literal["stop", "length", "tool_calls"]
"""The reason for the end of an answer."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Work before the next token: weights of the model that are read, or tokens of the prompt that are computed."""

    stage: Literal["loading", "prompt"]
    done: int  # bytes while loading, tokens of the prompt otherwise
    total: int


@dataclass(frozen=True, slots=True)
class Begun:
    """The request was admitted."""

    num_prompt: int  # tokens of the prompt
    num_cached: int  # the first of them, which a kept prompt cache has


@dataclass(frozen=True, slots=True)
class TokenChance:
    """A token and the logarithm of its probability."""

    token: int
    text: str  # its text; other tokens may be needed to complete a character
    logprob: float | None  # the logarithm; None for the first token of a prompt


TokenDetail: TypeAlias = tuple[TokenChance, ...]
"""A token of the answer, or of a prompt that is part of it, and the likeliest ones in its place, in this order."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the text."""

    text: str  # the part; may be empty where only details of tokens are sent
    kind: Literal["text", "reasoning"] = "text"  # the answer itself, or the reasoning before it
    tokens: tuple[TokenDetail, ...] = ()  # details of the tokens since the last piece


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None

    @property
    def text(self) -> str:
        """The arguments as JSON."""
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class End:
    """The end of a complete answer."""

    reason: Reason
    stop: str | None  # the stop text that ended it; None for other reasons
    num_prompt: int  # as of `Begun`
    num_cached: int  # as of `Begun`, and tokens of the prompt that were restored from disk
    num_tokens: int  # tokens of the answer, with those that end it
    vector: Sequence[float] = ()  # the hidden state of the last token of a text after the final norm, if it is wanted
    load_seconds: float = 0.0
    prompt_seconds: float = 0.0
    answer_seconds: float = 0.0  # of the tokens after the first one


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer ends without being complete."""

    error: RefusedError


Event: TypeAlias = Progress | Begun | Piece | ToolCall | End | Failed


class Client(Protocol):
    """The one who asked, as the generation thread sees it."""

    @property
    def open(self) -> Collection[int]:
        """Numbers of the answers that are still wanted."""

    def put(self, number: int, event: Event) -> None:
        """Take an event of an answer."""


class Answers:
    """The way of the events of a client's answers, each up to ``End`` or ``Failed``.

    Made in the event loop of the client. :meth:`put` belongs to the generation thread, everything else to the loop.
    """

    def __init__(self, numbers: Sequence[int], on_leave: Callable[[Collection[int]], None]) -> None:
        self._loop, self._on_leave = asyncio.get_running_loop(), on_leave
        self._numbers = numbers
        self.open = set(numbers)  # answers whose last event was not taken
        self.is_whole = False  # set by a client that wants complete answers only
        self._events: deque[tuple[int, Event]] = deque()
        self._is_told = False  # the loop will hear of the events so far
        self._waiting: asyncio.Future[None] | None = None

    def put(self, number: int, event: Event) -> None:
        """Send an event. Never blocks: a client that reads nothing is dropped."""
        self._events.append((number, event))
        if not self._is_told and (not self.is_whole or isinstance(event, End | Failed)):
            self._is_told = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the client with it
                self._loop.call_soon_threadsafe(self.wake)

    def wake(self) -> None:
        """Let the client look for events. Those that come from now on wake it again."""
        self._is_told = False
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def wait(self) -> None:
        self._waiting = self._loop.create_future()
        await self._waiting

    async def begin(self) -> None:
        """Wait until each answer has an event. Raises: RefusedError: one of them has failed before."""
        while True:
            silent = {*self.open}
            for number, event in list(self._events):
                silent.discard(number)
                if isinstance(event, Failed):
                    raise event.error
                if not silent:
                    return
            await self.wait()

    def take(self) -> tuple[int, Event] | None:
        """Return the next event, and the place of its answer among all; None if there is none yet."""
        if not self._events:
            return None
        number, event = self._events.popleft()
        if isinstance(event, End | Failed):
            self.open.discard(number)
        return self._numbers.index(number), event

    async def next(self) -> tuple[int, Event]:
        while (found := self.take()) is None:
            await self.wait()
        return found

    def leave(self) -> None:
        """End the answers, because their client has left. Harmless after their ends."""
        numbers, self.open = self.open, set()
        if numbers:
            self._on_leave(numbers)

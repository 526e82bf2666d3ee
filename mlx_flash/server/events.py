"""The parts of an answer, as the generation thread sends them to a dialect, in this order:

any number of `Progress`, then `Begun`, then any number of `Progress`, `Piece` and `ToolCall`, then `End`. `Failed` may
come at any time and is the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
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
        self._numbers, self._silent = numbers, set(numbers)
        self.open = set(numbers)  # answers whose last event was not taken
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.begun = asyncio.Event()  # each answer has an event, or one has failed
        self.error: RefusedError | None = None  # of one that failed while others had no event yet

    def put(self, number: int, event: Event) -> None:
        """Send an event. Never blocks: a client that reads nothing is dropped after a minute."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the client with it
            self._loop.call_soon_threadsafe(self._add, number, event)

    def _add(self, number: int, event: Event) -> None:
        self._events.put_nowait((number, event))
        if not self.begun.is_set():
            self._silent.discard(number)
            self.error = event.error if isinstance(event, Failed) else None
            if self.error is not None or not self._silent:
                self.begun.set()

    async def next(self) -> tuple[int, Event]:
        """Return the next event, and the place of its answer among all."""
        number, event = await self._events.get()
        if isinstance(event, End | Failed):
            self.open.discard(number)
        return self._numbers.index(number), event

    def leave(self) -> None:
        """End the answers, because their client has left. Harmless after their ends."""
        numbers, self.open = self.open, set()
        if numbers:
            self._on_leave(numbers)

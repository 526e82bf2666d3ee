"""From the tokens of an answer to its text: reasoning, tool calls, and texts that end it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeAlias

from mlx_lm.generate import TextStateMachine, make_text_state_machine

from mlx_flash.errors import RefusedError
from mlx_flash.server.events import CallArguments, CallBegun, Piece, ToolCall

Part: TypeAlias = Piece | CallBegun | CallArguments | ToolCall
"""A part of an answer that a token completes."""


class StopTexts:
    """Finds the first text that ends an answer, in text that comes in pieces.

    Args:
        texts: the texts; none may be empty.

    Attributes:
        found: the text that was found; None before.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(dict.fromkeys(texts))
        self._held = ""
        self.found: str | None = None

    def add(self, text: str) -> str:
        """Return the text that is surely part of the answer. What may begin a stop text is held back."""
        self._held += text
        places = [(at, stop) for stop in self._texts if (at := self._held.find(stop)) >= 0]
        if places:
            at, self.found = min(places)
            return self._cut(at)
        most = max((len(stop) - 1 for stop in self._texts), default=0)
        for length in range(min(most, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._texts):
                return self._cut(len(self._held) - length)
        return self._cut(len(self._held))

    def end(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        return self._cut(len(self._held)) if self.found is None else ""

    def _cut(self, at: int) -> str:
        text, self._held = self._held[:at], self._held[at:]
        return text


class TextStream:
    """The text of an answer, token by token.

    Args:
        tokenizer: mlx-lm's wrapper.
        stop: texts that end the answer.
        state: in which the prompt leaves it: ``"normal"``, ``"reasoning"`` ...; ``"raw"`` leaves all marks in the text.
        tools: descriptions of functions that the model may call; None leaves calls in the text.
        after: the token that the text goes on from; None drops a space at its beginning.

    Attributes:
        num_calls: tool calls so far.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str],
        state: str,
        tools: Sequence[dict[str, Any]] | None,
        after: int | None = None,
    ) -> None:
        self._detokenizer = tokenizer.detokenizer
        if after is not None:
            self._detokenizer.add_token(after)
            _ = self._detokenizer.last_segment  # reading it takes it
        self._stops = StopTexts(stop)
        self._state = make_text_state_machine(tokenizer).make_state(state)
        self._parse = tokenizer.tool_parser
        self._tools = tools
        self._before = state
        self._call = ""
        self.num_calls = 0

    @property
    def stop(self) -> str | None:
        """The stop text that ended the answer; None if none has yet."""
        return self._stops.found

    def add(self, token: int) -> list[Part]:
        """Return what a token completes."""
        self._detokenizer.add_token(token)
        return self._advance(self._stops.add(self._detokenizer.last_segment), ends=self._stops.found is not None)

    def end(self) -> list[Part]:
        """Return what is left when the answer ends."""
        self._detokenizer.finalize()
        text = self._stops.add(self._detokenizer.last_segment)
        return self._advance(text + self._stops.end(), ends=True)

    def _advance(self, text: str, *, ends: bool) -> list[Part]:
        self._state, segments = TextStateMachine.split(self._state, text)
        if ends:
            self._state, rest, state = TextStateMachine.flush(self._state)
            segments.append((state, rest))
        found: list[Part] = []
        for state, part in segments:
            if state == "tool":
                self._call += part
            elif self._before == "tool":
                found += self._calls()
            if state in ("normal", "raw", "reasoning") and part:
                found.append(Piece(part, "reasoning" if state == "reasoning" else "text"))
            self._before = state
        if ends and self._before == "tool":
            found += self._calls()
            self._before = "normal"
        return found

    def _calls(self) -> list[Part]:
        """Return the calls in the text between the model's own marks; text that is no call stays text."""
        text, self._call = self._call, ""
        try:
            parsed = self._parse(text, list(self._tools or ()))
            calls = [_tool_call(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
        except (ValueError, LookupError, TypeError, AttributeError, SyntaxError):  # cut off, or not well-formed
            return [Piece(text)] if text else []
        self.num_calls += len(calls)
        return [
            event
            for call in calls
            for event in (
                CallBegun(call.name, call.id),
                CallArguments(json.dumps(call.arguments, ensure_ascii=False)),
                call,
            )
        ]


def _tool_call(call: dict[str, Any]) -> ToolCall:
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(call["name"], str) or not isinstance(arguments, dict):
        raise TypeError("a tool call needs a name and arguments")
    return ToolCall(call["name"], arguments, call.get("id"))


def check_tools(tokenizer: Any, tools: Sequence[dict[str, Any]] | None) -> None:
    """Check that the model can call functions.

    Raises:
        RefusedError: it cannot.
    """
    if tools and not tokenizer.has_tool_calling:
        raise RefusedError("this model's chat template has no tool calls. Hint: use another model.", 400, "tools")

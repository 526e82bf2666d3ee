"""From the tokens of an answer to its text: reasoning, tool calls, and texts that end it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine

from mlx_flash.errors import RefusedError
from mlx_flash.server.calls import CALL, Part, Section, syntax_of
from mlx_flash.server.events import Piece, ToolCall


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
        tools: descriptions of functions that the model may call.
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
        self._tools = tools or ()
        self._is_marked = bool(tokenizer.tool_call_end)
        self._syntax = syntax_of(tokenizer.tool_parser) if tokenizer.has_tool_calling else None
        self._opening = None if self._syntax is None else self._syntax.opening_of(self._tools)
        self._held = ""
        self._before = state
        self._section: Section | None = None
        self._is_call = False
        self._blanks: str | None = "" if self._tools else None
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
        found = [each for state, part in segments for each in self._take(state, part)]
        if ends:
            found += self._end_section(is_cut=self._is_marked)
            found += [Piece(self._held)] if self._held else []
            self._held = ""
        self.num_calls += sum(isinstance(part, ToolCall) for part in found)
        return list(self._without_blanks(found, ends=ends))

    def _without_blanks(self, parts: Sequence[Part], *, ends: bool) -> Iterator[Part]:
        """Yield parts. Blanks beside calls are left out: clients take any text for an answer."""
        for part in parts:
            if not isinstance(part, Piece):
                self._blanks = ""
            elif part.kind == "text" and self._blanks is not None:
                self._blanks += part.text
                if not self._blanks.strip():
                    continue
                part, self._blanks = Piece(self._blanks), None
            yield part
        if ends and self._blanks and not self.num_calls:
            yield Piece(self._blanks)
            self._blanks = ""

    def _take(self, state: str, text: str) -> Iterator[Part]:
        """Yield what a text completes that the model wrote in a state. All states of calls begin with "tool"."""
        state = CALL if self._is_call else state
        if state != self._before:
            yield from self._end_section()
        self._before = state
        if state.startswith(CALL):
            assert self._syntax is not None
            self._section = self._section or Section(self._syntax, self._tools)
            yield from self._section.add(text)
        elif state == "normal" and self._opening is not None:
            yield from self._open(text)
        elif state in ("normal", "raw", "reasoning") and text:
            yield Piece(text, "reasoning" if state == "reasoning" else "text")

    def _open(self, text: str) -> Iterator[Part]:
        """Yield the beginning of an answer. What may begin a call without a mark is held back."""
        assert self._opening is not None
        self._held += text
        match = self._opening.match(self._held, partial=True)
        if match is None or not match.partial:
            held, self._held, self._opening = self._held, "", None
            self._is_call = match is not None
            yield from self._take("normal", held)

    def _end_section(self, *, is_cut: bool = False) -> Iterator[Part]:
        if self._section is not None:
            yield from self._section.end(is_cut=is_cut)
            self._section = None


def check_tools(tokenizer: Any, tools: Sequence[dict[str, Any]] | None) -> None:
    """Check that the model can call functions.

    Raises:
        RefusedError: it cannot.
    """
    if tools and not tokenizer.has_tool_calling:
        raise RefusedError("this chat template shows the model no tools. Hint: use another model.", 400, "tools")

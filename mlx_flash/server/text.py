"""From the tokens of an answer to its text: reasoning, tool calls, and texts that end it.

Tool calls are read while the text grows. Arguments that are JSON are sent as the model writes them. Arguments that are
elements, such as Qwen3-Coder's, are sent one by one: what mlx-lm's parser finds in the text so far, with the end that
it needs. Other forms are read at the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import regex
from mlx_lm.generate import TextStateMachine, make_text_state_machine

from mlx_flash.errors import RefusedError
from mlx_flash.modelfile.conversation import StopTexts
from mlx_flash.server.events import CallArguments, CallBegun, Piece, ToolCall

Part: TypeAlias = Piece | CallBegun | CallArguments | ToolCall
"""A part of an answer that a token completes."""

Parser: TypeAlias = Callable[[str, list[Any]], Any]

CALL = "tool"
"""The beginning of the names of the states in which the model writes calls."""

JSON_NAME = (
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"id"\s*:\s*"(?P<id>[^"]*)"\s*,\s*)?'
    r'"name"\s*:\s*"(?P<name>[^"\\]+)"'
)
JSON_GAP = r'\s*,\s*"(?:arguments|parameters)"\s*:'
OPENING = (
    r'\s*(?:(?:```(?:json)?\s*)?\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"NAMES"'
    rf"{JSON_GAP}\s*\{{|\[\s*NAMES\()"
)
"""The beginning of an answer that is a call without a mark: small models forget it, and Llama has none."""

_BETWEEN = r"(?:<[^<>]*>|```json|[\s\[\]}`;,])*+"
"""Marks and brackets between calls."""

_REST = rf'{_BETWEEN}(?:"\w+"\s*:\s*"[^"]*"{_BETWEEN})?'
"""The end of a section after its last call: a call may have an id behind its arguments."""

_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, SyntaxError, RecursionError)
"""Errors of parsers for a call that is cut off or not well-formed."""


@dataclass(frozen=True, slots=True)
class Syntax:
    """The form of calls.

    Attributes:
        parse: returns the calls of a section: the text between the marks of the model.
        name: a pattern of the beginning of a call whose arguments are JSON, up to its name; None for others.
        gap: a pattern of the text between the name and the arguments.
        closing: completes a section after any of its elements, so that ``parse`` reads the arguments before; None if
            there are no elements.
        first: text of a section that ``parse`` needs to find the name.
        text: a pattern of the beginning of a section that is text; None if all are calls.
        opening: a pattern of the beginning of an answer that is a call without a mark, with ``NAMES`` for the names of
            the functions; None if calls have marks.
    """

    parse: Parser
    name: str | None = None
    gap: str = ""
    closing: str | None = None
    first: str = ""
    text: str | None = None
    opening: str | None = None

    def __call__(self, text: str, tools: list[Any]) -> Any:
        """Return the calls of a section, as mlx-lm's parsers do."""
        return self.parse(text, tools)

    def opening_of(self, tools: Sequence[dict[str, Any]]) -> regex.Pattern[str] | None:
        """Return the pattern of the beginning of an answer that is a call of a function without a mark."""
        names = "|".join(regex.escape(tool["function"]["name"]) for tool in tools)
        return regex.compile(self.opening.replace("NAMES", f"(?:{names})")) if self.opening and names else None


_STOCK: Mapping[str, Mapping[str, str]] = {
    "json_tools": {"name": JSON_NAME, "gap": JSON_GAP, "opening": OPENING},
    "mistral": {
        "name": rf"(?:{JSON_NAME}|(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?=\[ARGS\]))",
        "gap": rf"(?:{JSON_GAP}|\[ARGS\])",
    },
    "kimi_k2": {
        "name": r"(?P<id>(?:functions\.)?(?P<name>[^\s:<>]+):\d+)\s*(?=<\|tool_call_argument_begin\|>)",
        "gap": r"<\|tool_call_argument_begin\|>",
    },
    "glm47": {"closing": "", "first": "<arg_key>"},
    "longcat": {"closing": ""},
    "minicpm5": {"closing": ""},
    "qwen3_coder": {"closing": "</function>"},
    "minimax_m2": {"closing": "</invoke>"},
    "muse_spark": {"closing": "</atem:invoke>"},
    "kimi_k3": {"closing": "<|close|>call<|sep|>"},
}
"""The forms that mlx-lm's parsers read, by the names of their modules. Other parsers read whole sections."""


def syntax_of(parse: Any) -> Syntax:
    """Return the form that a parser reads."""
    if isinstance(parse, Syntax):
        return parse
    fields: Any = _STOCK.get(parse.__module__.rpartition(".")[2], {})
    return Syntax(parse, **fields)


@dataclass
class Section:
    """A section of an answer, as it grows.

    A call whose name was sent may prove broken. Then the parts of its arguments are no JSON object, and the call is
    sent once more as text.

    Attributes:
        syntax: the form of its calls.
        tools: descriptions of the functions.
    """

    syntax: Syntax
    tools: Sequence[Any]
    _text: str = ""
    _at: int = 0
    _begin: int = 0
    _num_calls: int = 0
    _open: CallBegun | None = None
    _sent: str = field(default="", repr=False)

    def add(self, part: str) -> Iterator[Part]:
        """Yield what a part of the text completes."""
        self._text += part
        if (begin := self._text_begin()) is not None:
            if text := self._text[max(begin, len(self._text) - len(part)) :]:
                yield Piece(text)
        elif self.syntax.name is not None:
            yield from self._read_json(self.syntax.name)
        elif self.syntax.closing is not None and ">" in part and self.syntax.first in self._text:
            yield from self._read_elements(self._text[: self._text.rindex(">") + 1] + self.syntax.closing)

    def end(self, *, is_cut: bool) -> Iterator[Part]:
        """Yield what is left at its end.

        Args:
            is_cut: the answer ends without the mark. Some parsers would take a part of a call for all of it.
        """
        rest = self._text[self._begin :]
        if self._text_begin() is not None or (self._num_calls and not self._open and regex.fullmatch(_REST, rest)):
            return
        calls = [] if is_cut and self.syntax.closing == "" else self._calls(self._text)
        for call in calls:
            yield from self._end_call(call, json.dumps(call.arguments, ensure_ascii=False))
        if not calls and rest:
            yield Piece(rest)

    def _text_begin(self) -> int | None:
        """Return where the text of a section begins that is text."""
        match = None if self.syntax.text is None else regex.match(self.syntax.text, self._text)
        return None if match is None else match.end()

    def _read_json(self, name: str) -> Iterator[Part]:
        while True:
            if self._open is None:
                match = regex.match(_BETWEEN + name, self._text, pos=self._at)
                if match is None:
                    return
                self._at = match.end()
                yield self._begin_call(match["name"], match.groupdict().get("id"))
            assert self._open is not None
            if not self._sent:
                match = regex.match(self.syntax.gap + r"\s*(?=\{)", self._text, pos=self._at)
                if match is None:
                    return
                self._at = match.end()
            new = self._text[self._at + len(self._sent) :]
            value, end = _object_at(self._text, self._at) if "}" in new else ({}, 0)
            if not end:
                yield from self._send(new)
                return
            text, self._at, self._begin = self._text[self._at : end], end, end
            yield from self._end_call(ToolCall(self._open.name, value, self._open.id), text)

    def _read_elements(self, text: str) -> Iterator[Part]:
        calls = self._calls(text)
        for call in calls[:-1]:
            yield from self._end_call(call, json.dumps(call.arguments, ensure_ascii=False))
        for call in calls[-1:]:
            if self._open is None:
                yield self._begin_call(call.name, call.id)
            arguments = json.dumps(call.arguments, ensure_ascii=False)[:-1]
            if arguments.startswith(self._sent):
                yield from self._send(arguments[len(self._sent) :])

    def _begin_call(self, name: str, number: str | None) -> CallBegun:
        self._open, self._sent = CallBegun(name, number), ""
        return self._open

    def _send(self, text: str) -> Iterator[Part]:
        self._sent += text
        if text:
            yield CallArguments(text)

    def _end_call(self, call: ToolCall, arguments: str) -> Iterator[Part]:
        """Yield the rest of a call. If what was sent of it is not its beginning, all of it is sent as another call."""
        if self._open is None or self._open.name != call.name or not arguments.startswith(self._sent):
            yield self._begin_call(call.name, call.id)
        yield from self._send(arguments[len(self._sent) :])
        self._open = None
        self._num_calls += 1
        yield call

    def _calls(self, text: str) -> list[ToolCall]:
        """Return the calls of a text after those that are complete; none if it cannot be read."""
        try:
            found = self.syntax.parse(text, list(self.tools))
            calls = [_tool_call(call) for call in (found if isinstance(found, list) else [found])]
        except _UNREADABLE:
            return []
        return calls[self._num_calls :]


def _object_at(text: str, at: int) -> tuple[dict[str, Any], int]:
    """Return the JSON object that begins at a place, and its end; 0 if it is not complete."""
    try:
        found: tuple[dict[str, Any], int] = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return {}, 0
    return found


def _tool_call(call: dict[str, Any]) -> ToolCall:
    arguments = call.get("arguments", call.get("parameters", {}))
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(call["name"], str) or not isinstance(arguments, dict):
        raise TypeError("a tool call needs a name and arguments")
    return ToolCall(call["name"], arguments, call.get("id"))


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

"""Tool calls in the text of an answer, read while it grows.

Arguments that are JSON are sent as the model writes them. Arguments that are elements, such as Qwen3-Coder's, are sent
one by one: what mlx-lm's parser finds in the text so far, with the end that it needs. Other forms are read at the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import regex

from mlx_flash.server.events import CallArguments, CallBegun, Piece, ToolCall

Part: TypeAlias = Piece | CallBegun | CallArguments | ToolCall
"""A part of an answer that a token completes."""

CALL = "tool"
"""The beginning of the names of the states in which the model writes calls."""

Parser: TypeAlias = Callable[[str, list[Any]], Any]

_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, SyntaxError, RecursionError)
"""Errors of parsers for a call that is cut off or not well-formed."""

_BETWEEN = r"(?:<[^<>]*>|[\s\[\]}`;,])*"
"""Marks and brackets between calls."""

_REST = regex.compile(rf'{_BETWEEN}(?:,\s*"\w+"\s*:\s*"[^"]*"\s*{_BETWEEN})?')
"""The end of a section after its last call: a call may have an id behind its arguments."""

_decoder = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Syntax:
    """The form of calls.

    Attributes:
        parse: returns the calls of a section: the text between the marks of the model.
        name: matches the beginning of a call whose arguments are JSON, up to the end of its name; None for others.
        gap: matches the text between the name and the arguments.
        closing: completes a section after any of its elements, so that ``parse`` reads the arguments before; None if
            there are no elements.
        first: text of a section that ``parse`` needs to find the name.
        text: matches the beginning of a section that is text; None if all are calls.
        header: text before an answer that is neither reasoning nor a call; empty where answers have no headers.
        opening: a pattern of the beginning of an answer that is a call without a mark, with ``NAMES`` for the names of
            the functions; None if calls have marks.
    """

    parse: Parser
    name: regex.Pattern[str] | None = None
    gap: regex.Pattern[str] | None = None
    closing: str | None = None
    first: str = ""
    text: regex.Pattern[str] | None = None
    header: str = ""
    opening: str | None = None

    def __call__(self, text: str, tools: list[Any]) -> Any:
        """Return the calls of a section, as mlx-lm's parsers do."""
        return self.parse(text, tools)

    def opening_of(self, tools: Sequence[dict[str, Any]]) -> regex.Pattern[str] | None:
        """Return the pattern of the beginning of an answer that is a call of a function without a mark."""
        if self.opening is None or not tools:
            return None
        names = "|".join(regex.escape(tool["function"]["name"]) for tool in tools)
        return regex.compile(self.opening.replace("NAMES", f"(?:{names})"))


def json_syntax(name: str, gap: str, parse: Parser | None = None, **fields: Any) -> Syntax:
    """Return the form of calls whose arguments are JSON.

    Args:
        name: a pattern of the beginning of a call, with the groups ``name`` and, maybe, ``id``.
        gap: a pattern of the text between the name and the arguments.
        parse: of sections in which no call is found by these; None for none.
        fields: of the form.
    """
    return Syntax(parse or _no_calls, regex.compile(_BETWEEN + name), regex.compile(gap + r"\s*(?=\{)"), **fields)


def _no_calls(text: str, tools: list[Any]) -> Any:
    raise ValueError("no call is found")


JSON_NAME = (
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"id"\s*:\s*"(?P<id>[^"]*)"\s*,\s*)?'
    r'"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")'
)
JSON_GAP = r'\s*,\s*"(?:arguments|parameters)"\s*:'
_MISTRAL_NAME = r"(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?=\[ARGS\])"
_KIMI_NAME = r"(?P<id>(?:functions\.)?(?P<name>[^\s:<>]+):\d+)\s*(?=<\|tool_call_argument_begin\|>)"
_STOCK: Mapping[str, Callable[[Parser], Syntax]] = {
    "json_tools": lambda parse: json_syntax(JSON_NAME, JSON_GAP, parse),
    "mistral": lambda parse: json_syntax(f"(?:{JSON_NAME}|{_MISTRAL_NAME})", rf"(?:{JSON_GAP}|\[ARGS\])", parse),
    "kimi_k2": lambda parse: json_syntax(_KIMI_NAME, r"<\|tool_call_argument_begin\|>", parse),
    "glm47": lambda parse: Syntax(parse, closing="", first="<arg_key>"),
    "longcat": lambda parse: Syntax(parse, closing=""),
    "minicpm5": lambda parse: Syntax(parse, closing=""),
    "qwen3_coder": lambda parse: Syntax(parse, closing="</function>"),
    "minimax_m2": lambda parse: Syntax(parse, closing="</invoke>"),
    "muse_spark": lambda parse: Syntax(parse, closing="</atem:invoke>"),
    "kimi_k3": lambda parse: Syntax(parse, closing="<|close|>call<|sep|>"),
}
"""The forms that mlx-lm's parsers read, by the names of their modules. Other parsers read whole sections."""


def syntax_of(parse: Parser) -> Syntax:
    """Return the form that a parser reads."""
    if isinstance(parse, Syntax):
        return parse
    return _STOCK.get(parse.__module__.rpartition(".")[2], Syntax)(parse)


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
        if self.syntax.text is not None and (match := self.syntax.text.match(self._text)) is not None:
            if text := self._text[max(match.end(), len(self._text) - len(part)) :]:
                yield Piece(text)
        elif self.syntax.name is not None:
            yield from self._read_json()
        elif self.syntax.closing is not None and ">" in part and self.syntax.first in self._text:
            yield from self._read_elements(self._text[: self._text.rindex(">") + 1] + self.syntax.closing)

    def end(self, *, is_cut: bool) -> Iterator[Part]:
        """Yield what is left at its end.

        Args:
            is_cut: the answer ends without the mark. Some parsers would take a part of a call for all of it.
        """
        if self.syntax.text is not None and self.syntax.text.match(self._text) is not None:
            return
        rest = self._text[self._begin :]
        if self._num_calls and self._open is None and _REST.fullmatch(rest):
            return
        try:
            is_broken = is_cut and self.syntax.closing == ""
            calls = [] if is_broken else _calls_in(self.syntax, self._text, self.tools)[self._num_calls :]
        except _UNREADABLE:
            calls = []
        for call in calls:
            yield from self._end_call(call, json.dumps(call.arguments, ensure_ascii=False))
        if not calls and rest:
            yield Piece(rest)

    def _read_json(self) -> Iterator[Part]:
        assert self.syntax.name is not None and self.syntax.gap is not None
        while True:
            if self._open is None:
                match = self.syntax.name.match(self._text, self._at)
                if match is None:
                    return
                name = match["name"]
                self._at = match.end()
                yield self._begin_call(json.loads(name) if name[0] == '"' else name, match.groupdict().get("id"))
            assert self._open is not None
            if not self._sent:
                match = self.syntax.gap.match(self._text, self._at)
                if match is None:
                    return
                self._at = match.end()
            new = self._text[self._at + len(self._sent) :]
            value, end = _value_at(self._text, self._at) if "}" in new else ({}, 0)
            if not end:
                yield from self._send(new)
                return
            text = self._text[self._at : end]
            self._at = self._begin = end
            yield from self._end_call(ToolCall(self._open.name, value, self._open.id), text)

    def _read_elements(self, text: str) -> Iterator[Part]:
        try:
            calls = _calls_in(self.syntax, text, self.tools)[self._num_calls :]
        except _UNREADABLE:
            return
        for number, call in enumerate(calls):
            text = json.dumps(call.arguments, ensure_ascii=False)
            if number < len(calls) - 1:
                yield from self._end_call(call, text)
                continue
            if self._open is None:
                yield self._begin_call(call.name, call.id)
            if text[:-1].startswith(self._sent):
                yield from self._send(text[len(self._sent) : -1])

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


def _value_at(text: str, at: int) -> tuple[dict[str, Any], int]:
    """Return the JSON object that begins at a place, and its end; 0 if it is not complete."""
    try:
        found: tuple[dict[str, Any], int] = _decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
        return {}, 0
    return found


def _calls_in(syntax: Syntax, text: str, tools: Sequence[Any]) -> list[ToolCall]:
    found = syntax.parse(text, list(tools))
    return [_tool_call(call) for call in (found if isinstance(found, list) else [found])]


def _tool_call(call: dict[str, Any]) -> ToolCall:
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(call["name"], str) or not isinstance(arguments, dict):
        raise TypeError("a tool call needs a name and arguments")
    return ToolCall(call["name"], arguments, call.get("id"))

"""From the tokens of an answer to its text: reasoning, tool calls in many forms, and texts that end it.

A call is read once it is complete. One that is broken, or cut off, is text.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jinja2
import regex
from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tool_parsers import json_tools, pythonic

from mlx_flash.compat.tokenizers import change_messages, give_calls
from mlx_flash.errors import RefusedError
from mlx_flash.server.events import Piece, ToolCall

Part: TypeAlias = Piece | ToolCall
"""A part of an answer that a token completes."""

Parser: TypeAlias = Callable[[str, list[Any]], Any]
"""Returns the calls of a section, which is the text between the marks of the model, as mlx-lm's parsers do."""

CALL = "tool"
"""The beginning of the names of the states in which the model writes calls."""

_BEFORE_NAME = r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"id"\s*:\s*"(?P<id>[^"]*)"\s*,\s*)?"name"\s*:\s*"'
_AFTER_NAME = r'"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
JSON_CALL = rf'{_BEFORE_NAME}(?P<name>[^"\\]+){_AFTER_NAME}(?=\{{)'
"""A pattern of the beginning of a call in JSON, up to its arguments."""

_OPENING = rf"\s*(?:(?:```(?:json)?\s*)?{_BEFORE_NAME}NAMES{_AFTER_NAME}\{{|\[\s*NAMES\()"
"""The beginning of an answer that is a call without a mark: small models forget it, and Llama has none."""

_WITH_END = {"glm47", "kimi_k2", "longcat", "minicpm5"}
"""Modules of mlx-lm's parsers that read a call that is cut off wrongly."""

_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, SyntaxError, RecursionError)
"""Errors of parsers for a call that is cut off or not well-formed."""


def named_calls(pattern: str, text: str, tools: list[Any]) -> list[dict[str, Any]]:
    """Return calls whose arguments are JSON objects, by a pattern of all before these, with ``name`` and ``id``."""
    calls, at = [], 0
    while match := regex.search(pattern, text, pos=at):
        arguments, at = json.JSONDecoder().raw_decode(text, match.end())
        calls.append({**match.groupdict(), "arguments": arguments})
    return calls


def parse_any(text: str, tools: list[Any]) -> Any:
    """Return calls in JSON or Python."""
    return (
        pythonic.parse_tool_call(text, tools) if regex.match(r"\s*\[\s*\w", text) else named_calls(JSON_CALL, text, [])
    )


def _tool_call(call: dict[str, Any]) -> ToolCall:
    arguments = call.get("arguments", call.get("parameters", {}))
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(call["name"], str) or not isinstance(arguments, dict):
        raise TypeError("a tool call needs a name and arguments")
    return ToolCall(call["name"], arguments, call.get("id"))


class StopTexts:
    """Finds the first text that ends an answer, in text that comes in pieces, as mlx-lm finds marks.

    Empty texts end none.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts: dict[str, list[Any]] = {text: [] for text in texts if text}
        self._state = TextStateMachine({"": [(text, text) for text in self._texts], **self._texts}).make_state("")
        self.found: str | None = None

    def add(self, text: str) -> str:
        if self.found or not self._texts:
            return "" if self.found else text
        self._state, segments = TextStateMachine.split(self._state, text)
        self.found = self._state[0] or None
        return str(segments[0][1])

    def end(self) -> str:
        return "" if self.found else str(TextStateMachine.flush(self._state)[1])


class TextStream:
    """The text of an answer, token by token."""

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str],
        state: str,  # in which the prompt leaves it: ``"normal"``, ``"reasoning"``; ``"raw"`` leaves all marks in
        tools: Sequence[dict[str, Any]] | None,
        after: int | None = None,  # the token before it; None drops a space at its beginning
        must_call: bool = False,  # the text is a call, in JSON whatever the model's own form is
    ) -> None:
        self._detokenizer = tokenizer.detokenizer
        if after is not None:
            self._detokenizer.add_token(after)
            _ = self._detokenizer.last_segment  # reading it takes it
        self._stops = StopTexts(stop)
        self._state = make_text_state_machine(tokenizer).make_state(state)
        self._tools = tools or ()
        self._is_marked = bool(tokenizer.tool_call_end)
        self._parse: Parser = tokenizer.tool_parser
        self._opening = None
        is_json = tokenizer.has_tool_calling and self._parse in (json_tools.parse_tool_call, parse_any)
        if tools and (must_call or is_json):
            names = "|".join(regex.escape(tool["function"]["name"]) for tool in tools)
            self._opening = regex.compile(_OPENING.replace("NAMES", f"(?:{names})"))
        self._held = ""
        self._before = state
        self._section = ""
        self._is_call = False
        self._blanks: str | None = "" if self._tools else None
        self.num_calls = 0

    @property
    def stop(self) -> str | None:
        """The stop text that ended the answer; None if none has yet."""
        return self._stops.found

    def add(self, token: int) -> list[Part]:
        self._detokenizer.add_token(token)
        return self._advance(self._stops.add(self._detokenizer.last_segment), ends=self._stops.found is not None)

    def end(self) -> list[Part]:
        self._detokenizer.finalize()
        text = self._stops.add(self._detokenizer.last_segment)
        return self._advance(text + self._stops.end(), ends=True)

    def _advance(self, text: str, *, ends: bool) -> list[Part]:
        self._state, segments = TextStateMachine.split(self._state, text)
        if ends:
            self._state, rest, state = TextStateMachine.flush(self._state)
            segments.append((state, rest))
        found: list[Part] = []
        for name, part in segments:
            self._take(name, part, found)
        if ends:
            self._end_section(found, is_cut=self._is_marked)
            found += [Piece(self._held)] if self._held else []
            self._held = ""
        has_calls = self._tools or self.num_calls
        return list(self._without_blanks(found, ends=ends)) if has_calls else found

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

    def _take(self, state: str, text: str, found: list[Part]) -> None:
        """Add what a text completes that the model wrote in a state. All states of calls begin with "tool"."""
        state = CALL if self._is_call else state
        if state != self._before:
            self._end_section(found)
        self._before = state
        if state.startswith(CALL):
            self._section += text
        elif state == "normal" and self._opening is not None:
            self._open(text, found)
        elif state in ("normal", "raw", "reasoning") and text:
            found.append(Piece(text, "reasoning" if state == "reasoning" else "text"))

    def _open(self, text: str, found: list[Part]) -> None:
        """Add the beginning of an answer. What may begin a call without a mark is held back."""
        assert self._opening is not None
        self._held += text
        match = self._opening.match(self._held, partial=True)
        if match is None or not match.partial:
            held, self._held, self._opening = self._held, "", None
            self._is_call = match is not None
            self._take("normal", held, found)

    def _end_section(self, parts: list[Part], *, is_cut: bool = False) -> None:
        """Add the calls of a section, or its text if it cannot be read. One that is cut off ends without its mark."""
        text, self._section = self._section, ""
        calls: list[ToolCall] = []
        with contextlib.suppress(*_UNREADABLE):
            parser = parse_any if self._is_call else self._parse
            if text and not (is_cut and parser.__module__.rpartition(".")[2] in _WITH_END):
                found = parser(text, list(self._tools))
                calls = [_tool_call(call) for call in (found if isinstance(found, list) else [found])]
        parts += calls
        self.num_calls += len(calls)
        if text and not calls:
            parts.append(Piece(text))


# --- calls of templates -----------------------------------------------------------------------------------------------

_NAME, _KEY = "zqfirst", "zqkey"
"""Words of conversations with calls, which no template contains."""

_USER = {"role": "user", "content": "Hi"}
_DESCRIBED = {"type": "object", "properties": {"x": {"type": "string", "description": ""}}}

_ERRORS = (jinja2.TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError)
"""Errors of templates, some of which are programs, beside those of wrong types and values."""

_BAR = "\uff5c"
_DSML = f"{_BAR}DSML{_BAR}"
_BEGIN, _END, _SEPARATOR = (f"<{_BAR}tool▁{word}{_BAR}>" for word in ("calls▁begin", "calls▁end", "sep"))


class _Form(NamedTuple):
    """The form of a template's calls."""

    sign: str  # text of a rendered call
    start: str
    end: str
    parse: Parser  # reads the text between the marks
    states: Mapping[str, Any] = {}  # further ones of an answer: texts and the states after them, by states before


def complete(tokenizer: Any) -> None:
    """Give a tokenizer what its template needs: a parser of calls if mlx-lm has none, and arguments as text."""
    if not tokenizer.has_chat_template:
        return
    text = _rendered(tokenizer, _USER, _call({_KEY: "x"}))
    if not text or f"{{'{_KEY}'" in text:  # a template that joins texts, or prints Python's form of an object
        with_text = _rendered(tokenizer, _USER, _call(json.dumps({_KEY: "x"})))
        if with_text:
            text = with_text
            change_messages(tokenizer, _with_text_arguments)
    prompt = _rendered(tokenizer, _USER)
    if not tokenizer.has_tool_calling and _NAME in prompt:
        found = next((form for form in _FORMS if form.sign in text), None) or _other_form(text, prompt)
        initial = {"initial_state": "header"} if "header" in found.states else {}
        give_calls(tokenizer, found.start, found.end, found.parse, {**initial, "transitions": found.states})


def _call(arguments: Any) -> dict[str, Any]:
    call = {"id": "zqcall001", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _rendered(tokenizer: Any, *messages: dict[str, Any]) -> str:
    """Return a conversation with a function, up to where the model's answer begins if there is none.

    An empty text means that the template refuses it.
    """
    functions = [{"type": "function", "function": {"name": _NAME, "description": "", "parameters": _DESCRIBED}}]
    render = partial(tokenizer.apply_chat_template, list(messages), tools=functions, tokenize=False)
    try:
        return str(render(add_generation_prompt=messages[-1] is _USER))
    except (TypeError, ValueError, *_ERRORS):
        return ""


def _with_text_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose calls have arguments as text."""
    found = [dict(message) for message in messages]
    for message in found:
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        texts = [json.dumps(function["arguments"], ensure_ascii=False) for function in functions]
        if texts:
            pairs = zip(message["tool_calls"], functions, texts, strict=True)
            message["tool_calls"] = [{**call, "function": {**each, "arguments": text}} for call, each, text in pairs]
    return found


def _parse_dsml(text: str, tools: list[Any]) -> Any:
    """Return calls whose arguments are elements: texts, and others as JSON."""
    invoke = rf'<{_DSML}invoke name="([^"]+)">(.*?)</{_DSML}invoke>'
    parameter = rf'<{_DSML}parameter name="([^"]+)" string="(true|false)">(.*?)</{_DSML}parameter>'
    return [
        {
            "name": name,
            "arguments": {
                key: value if is_text == "true" else json.loads(value)
                for key, is_text, value in regex.findall(parameter, body, regex.DOTALL)
            },
        }
        for name, body in regex.findall(invoke, text, regex.DOTALL)
    ]


_RECIPIENT = " to=functions."
_HARMONY = {
    "header": [("<|channel|>analysis<|message|>", "reasoning"), ("<|message|>", "normal"), (_RECIPIENT, CALL)],
    "reasoning": [("<|end|>", "header")],
    "normal": [("<|end|>", "header")],
    CALL: [("<|call|>", "header"), ("<|end|>", "header")],
}
_FORMS = (
    _Form(
        f"{_RECIPIENT}{_NAME}",
        _RECIPIENT,
        "",
        partial(named_calls, r"(?P<name>[\w.-]+)[\s<][^{]*?<\|message\|>\s*(?=\{)"),
        _HARMONY,
    ),
    _Form(
        _BEGIN,
        _BEGIN,
        _END,
        partial(
            named_calls,
            rf"(?:function{_SEPARATOR})?(?P<name>[^\s<>{{]+)(?:{_SEPARATOR}|\s*```(?:json)?)\s*(?=\{{)",
        ),
    ),
    *(
        _Form(f"<{_DSML}{it}>", f"<{_DSML}{it}>", f"</{_DSML}{it}>", _parse_dsml)
        for it in ("function_calls", "tool_calls")
    ),
    _Form(f"<function={_NAME}>{{", "<function=", "</function>", partial(named_calls, r"(?P<name>[^>\s]+)>\s*(?=\{)")),
)
"""GPT-OSS's, DeepSeek's, DeepSeek V3.2's and V4's, and that of Functionary 3.1."""


def _other_form(text: str, prompt: str) -> _Form:
    """Return a form for calls in JSON or Python: between marks, or all of an answer."""
    marks = rf"(?P<start><[^<>\n]+>)[\s\[]*{JSON_CALL}[^<]*{_KEY}[^<]*(?P<end></[^<>\n]+>)?"
    match = regex.search(marks, text)
    start, end = ("", "") if match is None else (match["start"], match["end"] or "")
    if prompt.rstrip().endswith(start):  # the mark of a role
        start = end = ""
    starts, ends = ("<|python_tag|>", "<|python_start|>", start), ("<|python_end|>", end)
    states = {"normal": [(mark, CALL) for mark in starts], CALL: [(mark, "normal") for mark in ends]}
    return _Form("", start, end, parse_any, states)


@dataclass(frozen=True, slots=True)
class Headers:
    """The texts around the parts of an answer, each of which has a header."""

    reasoning: str  # the header of reasoning
    end: str  # the end of reasoning, and what follows it before the next header
    text: str  # the header of text


def headers_of(tokenizer: Any) -> Headers:
    """Return the headers of a model's answers, as its chat template renders them."""
    states, first = tokenizer.response_transitions, tokenizer.response_initial_state
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": _NAME}]
    try:
        asked, begun, whole = (
            str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generates))
            for messages, generates in ((said[:1], False), (said[:1], True), (said, False))
        )
        reasoning = next(mark for mark, state in states[first] if state == "reasoning")
        end = next(mark for mark, state in states["reasoning"] if state == first)
        text = whole[len(begun) : whole.index(_NAME)]
        ends = [mark for mark, state in states[first] if state == "normal"]
        if not begun.startswith(asked) or not whole.startswith(begun) or not text.endswith(tuple(ends)):
            raise ValueError("answers in a conversation do not begin as new ones")
        return Headers(reasoning, end + begun[len(asked) :], text)
    except (jinja2.TemplateError, ValueError, TypeError, LookupError, StopIteration) as error:
        message = "answers of this model cannot follow a schema: its chat template does not show how they begin."
        raise RefusedError(message, 400, "response_format") from error

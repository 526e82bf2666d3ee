"""Tool calls of chat templates whose calls mlx-lm does not parse."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jinja2
import regex

from mlx_flash.compat.tokenizers import change_messages, give_calls
from mlx_flash.errors import RefusedError
from mlx_flash.server.text import CALL, JSON_CALL, Parser, named_calls, parse_any

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

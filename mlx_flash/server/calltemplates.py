"""Tool calls of chat templates whose calls mlx-lm does not parse."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import regex
from mlx_lm.tool_parsers import json_tools, pythonic

from mlx_flash.compat.tokenizers import change_messages, give_calls
from mlx_flash.server.calls import CALL, JSON_GAP, JSON_NAME, OPENING, Syntax

_NAME, _KEY = "zqfunction", "zqkey"
"""Words of a conversation with a call, which no template contains."""

_USER = {"role": "user", "content": "Hi"}
_DESCRIBED = {"type": "object", "properties": {"x": {"type": "string", "description": ""}}}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": _DESCRIBED}}

_ERRORS = (jinja2.TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError)
"""Errors of templates, some of which are programs, beside those of wrong types and values."""

_BAR = "\uff5c"
_DSML = f"{_BAR}DSML{_BAR}"
_BEGIN, _END, _SEPARATOR = (f"<{_BAR}tool▁{word}{_BAR}>" for word in ("calls▁begin", "calls▁end", "sep"))


class _Form(NamedTuple):
    """The form of a template's calls.

    Attributes:
        sign: text of a rendered call.
        start, end: the marks around calls.
        syntax: of the text between the marks.
        states: further states of an answer: texts and the states that follow them, by states before them.
    """

    sign: str
    start: str
    end: str
    syntax: Syntax
    states: Mapping[str, Any] = {}


def complete(tokenizer: Any) -> None:
    """Give a tokenizer what its template needs: a parser of calls if mlx-lm has none, and arguments as text.

    Args:
        tokenizer: mlx-lm's wrapper.
    """
    if not tokenizer.has_chat_template:
        return
    text = _render(tokenizer, _USER, _call({_KEY: "x"}))
    if not text or f"{{'{_KEY}'" in text:  # a template that joins texts, or prints Python's form of an object
        with_text = _render(tokenizer, _USER, _call(json.dumps({_KEY: "x"})))
        if with_text:
            text = with_text
            change_messages(tokenizer, _with_text_arguments)
    prompt = _render(tokenizer, _USER)
    if not tokenizer.has_tool_calling and _NAME in prompt:
        found = next((form for form in _FORMS if form.sign in text), None) or _other_form(text, prompt)
        initial = {"initial_state": "header"} if "header" in found.states else {}
        initial = {"initial_state": CALL} if found.syntax.text is not None else initial
        give_calls(tokenizer, found.start, found.end, found.syntax, {**initial, "transitions": found.states})


def _call(arguments: Any) -> dict[str, Any]:
    call = {"id": "zqcall001", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _render(tokenizer: Any, *messages: dict[str, Any]) -> str:
    """Return a conversation, up to where the model's answer begins if there is none; an empty text if it is refused."""
    generates = messages[-1] is _USER
    try:
        render = tokenizer.apply_chat_template
        return str(render(list(messages), tools=[_TOOL], tokenize=False, add_generation_prompt=generates))
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


def _parse_any(text: str, tools: list[Any]) -> Any:
    return (json_tools if text.lstrip().startswith(("{", "[{")) else pythonic).parse_tool_call(text, tools)


def _json(name: str, gap: str, **fields: Any) -> Syntax:
    return Syntax(json_tools.parse_tool_call, name, gap, **fields)


_HARMONY = {
    "header": [("<|channel|>analysis<|message|>", "reasoning"), ("<|message|>", "normal"), (" to=functions.", CALL)],
    "reasoning": [("<|end|>", "header")],
    "normal": [("<|end|>", "header")],
    CALL: [("<|call|>", "header"), ("<|end|>", "header")],
}
_RECIPIENTS = {CALL: [(">>>", f"{CALL} again")], f"{CALL} again": [(">>>", CALL)]}

_FORMS = (
    _Form(
        f"to=functions.{_NAME}",
        " to=functions.",
        "",
        _json(r"(?P<name>[\w.-]+)(?=[\s<])", r"[^{]*?<\|message\|>"),
        _HARMONY,
    ),
    _Form(
        _BEGIN,
        _BEGIN,
        _END,
        _json(
            rf"(?:function{_SEPARATOR})?(?P<name>[^\s<{{]+)(?={_SEPARATOR}\s*\{{|\s*```)",
            rf"(?:{_SEPARATOR}|\s*```(?:json)?)",
        ),
    ),
    *(
        _Form(f"<{_DSML}{it}>", f"<{_DSML}{it}>", f"</{_DSML}{it}>", Syntax(_parse_dsml, closing=f"</{_DSML}invoke>"))
        for it in ("function_calls", "tool_calls")
    ),
    _Form(f"<function={_NAME}>{{", "<function=", "</function>", _json(r"(?P<name>[^>\s]+)(?=>)", ">")),
    _Form(f">>>{_NAME}\n", ">>>", "", _json(r"(?!all\n)(?P<name>[\w.-]+)(?=\n)", r"\n", text=r"all\n"), _RECIPIENTS),
)
"""GPT-OSS's, DeepSeek's, DeepSeek V3.2's and V4's, those of Functionary 3.1 and 3.2."""


def _other_form(text: str, prompt: str) -> _Form:
    """Return a form for calls in JSON or Python: between marks, or all of an answer.

    Args:
        text: a rendered call.
        prompt: a rendered conversation, up to where an answer begins.
    """
    marks = rf"(?P<start><[^<>\n]+>)[\s\[]*{JSON_NAME}{JSON_GAP}[^<]*{_KEY}[^<]*(?P<end></[^<>\n]+>)?"
    match = regex.search(marks, text)
    start, end = ("", "") if match is None else (match["start"], match["end"] or "")
    if prompt.rstrip().endswith(start):  # the mark of a role
        start = end = ""
    starts, ends = ("<|python_tag|>", "<|python_start|>", start), ("<|python_end|>", end)
    states = {"normal": [(mark, CALL) for mark in starts], CALL: [(mark, "normal") for mark in ends]}
    return _Form("", start, end, Syntax(_parse_any, JSON_NAME, JSON_GAP, opening=OPENING), states)

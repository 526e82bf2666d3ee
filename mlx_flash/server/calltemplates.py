"""Tool calls of chat templates whose calls mlx-lm does not parse."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import regex
from mlx_lm.tool_parsers import pythonic

from mlx_flash.compat.tokenizers import change_messages, give_calls
from mlx_flash.server.calls import CALL, JSON_GAP, JSON_NAME, Syntax, json_syntax

_NAME, _KEY = "zqfunction", "zqkey"
"""Words of a conversation with a call, which no template contains."""

_ERRORS = (
    jinja2.TemplateError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    NotImplementedError,
)
"""Errors of templates, some of which are programs."""

_BAR = "\uff5c"
_DSML = f"{_BAR}DSML{_BAR}"
_BEGIN, _END, _SEPARATOR = (f"<{_BAR}tool▁{word}{_BAR}>" for word in ("calls▁begin", "calls▁end", "sep"))
"""DeepSeek's marks."""


def complete(tokenizer: Any) -> None:
    """Give a tokenizer what its template needs: a parser of calls if mlx-lm has none, and arguments as text.

    Args:
        tokenizer: mlx-lm's wrapper.
    """
    if not tokenizer.has_chat_template:
        return
    text = _rendered(tokenizer, {_KEY: "x"})
    if text is None or f"{{'{_KEY}'" in text:  # a template that joins texts, or prints Python's form of an object
        with_text = _rendered(tokenizer, json.dumps({_KEY: "x"}))
        if with_text is not None:
            text = with_text
            change_messages(tokenizer, _with_text_arguments)
    if not tokenizer.has_tool_calling and _shows_tools(tokenizer):
        found = next((form for form in _FORMS if form.sign in (text or "")), None)
        found = found or _other_form(text or "", _render(tokenizer, [_USER], generates=True) or "")
        give_calls(tokenizer, found.start, found.end, found.syntax, found.states)


def _rendered(tokenizer: Any, arguments: Any) -> str | None:
    """Return a conversation with a call; None if the template refuses it."""
    function = {"name": _NAME, "arguments": arguments}
    calls = [{"id": "zqcall001", "type": "function", "function": function}]
    return _render(tokenizer, [_USER, {"role": "assistant", "content": "", "tool_calls": calls}])


def _shows_tools(tokenizer: Any) -> bool:
    return _NAME in (_render(tokenizer, [_USER]) or "")


def _render(tokenizer: Any, messages: list[dict[str, Any]], *, generates: bool = False) -> str | None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "description": ""}}}
    tool = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": schema}}
    try:
        return str(
            tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=generates)
        )
    except _ERRORS:
        return None


_USER = {"role": "user", "content": "Hi"}


def _with_text_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose calls have arguments as text."""

    def changed(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [
        {**message, "tool_calls": [changed(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def _parse_dsml(text: str, tools: list[Any]) -> Any:
    """Return calls whose arguments are elements: texts, and others as JSON."""
    found = []
    for name, body in regex.findall(rf'<{_DSML}invoke name="([^"]+)">(.*?)</{_DSML}invoke>', text, regex.DOTALL):
        elements = regex.findall(
            rf'<{_DSML}parameter name="([^"]+)" string="(true|false)">(.*?)</{_DSML}parameter>', body, regex.DOTALL
        )
        arguments = {key: value if is_text == "true" else json.loads(value) for key, is_text, value in elements}
        found.append({"name": name, "arguments": arguments})
    if not found:
        raise ValueError("no call is found")
    return found


def _parse_any(text: str, tools: list[Any]) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return pythonic.parse_tool_call(text, tools)


_HARMONY: dict[str, Any] = {
    "initial_state": "header",
    "transitions": {
        "header": [
            ("<|channel|>analysis<|message|>", "reasoning"),
            ("<|message|>", "normal"),
            (" to=functions.", CALL),
        ],
        "reasoning": [("<|end|>", "header")],
        "normal": [("<|end|>", "header")],
        CALL: [("<|call|>", "header"), ("<|end|>", "header")],
    },
}

_RECIPIENTS: dict[str, Any] = {
    "initial_state": CALL,
    "transitions": {CALL: [(">>>", f"{CALL} again")], f"{CALL} again": [(">>>", CALL)]},
}
"""Each section begins with the name of a function or with "all"."""

_OPENING = r'\s*(?:\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"NAMES"|\[\s*NAMES\()'


class _Form(NamedTuple):
    """The form of a template's calls.

    Attributes:
        sign: text of a rendered call.
        start, end: the marks around calls.
        syntax: of the text between the marks.
        states: further states of an answer.
    """

    sign: str
    start: str
    end: str
    syntax: Syntax
    states: dict[str, Any] = {}  # noqa: RUF012 a default of a tuple


_FORMS = (
    _Form(
        f"to=functions.{_NAME}",
        " to=functions.",
        "",
        json_syntax(r"(?P<name>[\w.-]+)(?=[\s<])", r"[^{]*?<\|message\|>", header="<|channel|>final<|message|>"),
        _HARMONY,
    ),
    _Form(
        _BEGIN,
        _BEGIN,
        _END,
        json_syntax(
            rf"(?:function{_SEPARATOR})?(?P<name>[^\s<{{]+)(?={_SEPARATOR}\s*\{{|\s*```)",
            rf"(?:{_SEPARATOR}|\s*```(?:json)?)",
        ),
    ),
    *(
        _Form(
            f"<{_DSML}{word}>",
            f"<{_DSML}{word}>",
            f"</{_DSML}{word}>",
            Syntax(_parse_dsml, closing=f"</{_DSML}invoke>"),
        )
        for word in ("function_calls", "tool_calls")
    ),
    _Form(f"<function={_NAME}>{{", "<function=", "</function>", json_syntax(r"(?P<name>[^>\s]+)(?=>)", ">")),
    _Form(
        f">>>{_NAME}\n",
        ">>>",
        "",
        json_syntax(r"(?!all\n)(?P<name>[\w.-]+)(?=\n)", r"\n", text=regex.compile(r"all\n")),
        _RECIPIENTS,
    ),
)
"""GPT-OSS's, DeepSeek's, DeepSeek V3.2's and V4's, those of Functionary 3.1 and 3.2."""

_MARKED = regex.compile(rf"(?P<start><[^<>\n]+>)[\s\[]*{JSON_NAME}{JSON_GAP}[^<]*{_KEY}[^<]*(?P<end></[^<>\n]+>)?")
"""A call in JSON between marks."""


def _other_form(text: str, prompt: str) -> _Form:
    """Return a form for calls in JSON or Python: between marks, or all of an answer.

    Args:
        text: a rendered call.
        prompt: a rendered conversation, up to where an answer begins.
    """
    match = _MARKED.search(text)
    start, end = ("", "") if match is None else (match["start"], match["end"] or "")
    if prompt.rstrip().endswith(start):  # the mark of a role
        start = end = ""
    starts, ends = ["<|python_tag|>", "<|python_start|>", start], ["<|python_end|>", end]
    transitions = {"normal": [(mark, CALL) for mark in starts], CALL: [(mark, "normal") for mark in ends]}
    syntax = json_syntax(JSON_NAME, JSON_GAP, _parse_any, opening=_OPENING)
    return _Form("", start, end, syntax, {"transitions": transitions})

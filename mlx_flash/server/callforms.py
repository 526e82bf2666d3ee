"""The form of tool calls, read from the model's own chat template: how it renders calls of an earlier answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from mlx_flash.errors import RefusedError
from mlx_flash.server.events import ToolCall
from mlx_flash.server.text import TextStream

_NAMES = ("zqfirst", "zqsecond")
_IDS = ("zqcall001", "zqcall002")
_ARGUMENTS = {"zqkey": "zqvalue"}
"""Words of a conversation with two calls, which no template contains."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """The text around names and arguments of calls. Arguments are JSON objects.

    Attributes:
        start: the mark with which calls begin.
        opening: the text from there to the first name.
        middle: between a name and its arguments.
        gap: between arguments and the name of the next call.
        closing: after the last arguments.
        call_id: stands for the number of a call in ``gap`` and ``closing``: nine letters or digits.
    """

    start: str
    opening: str
    middle: str
    gap: str
    closing: str
    call_id: str = _IDS[0]


def form_of(tokenizer: Any, field: str) -> CallForm:
    """Return the form of a model's calls.

    Args:
        tokenizer: mlx-lm's wrapper.
        field: of the request, to name in an error.

    Raises:
        RefusedError: its template renders calls in another form than JSON, or mlx-lm cannot read them back.
    """
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": _calls()}]
    other = {"type": "function", "function": {"name": "other", "description": "", "parameters": {"type": "object"}}}
    try:
        text = str(tokenizer.apply_chat_template(messages, tools=[other], tokenize=False, add_generation_prompt=False))
        form, sample = _split(text, tokenizer)
    except (jinja2.TemplateError, ValueError, TypeError, LookupError) as error:
        raise _no_form(field) from error
    if _read_back(sample, tokenizer) != [(name, _ARGUMENTS) for name in _NAMES]:
        raise _no_form(field)
    return form


@dataclass(frozen=True, slots=True)
class Headers:
    """The texts around the parts of an answer, each of which has a header.

    Attributes:
        reasoning: the header of reasoning.
        end: the end of reasoning, and what follows it before the next header.
        text: the header of text.
    """

    reasoning: str
    end: str
    text: str


def headers_of(tokenizer: Any) -> Headers:
    """Return the headers of a model's answers, as its chat template renders them.

    Args:
        tokenizer: mlx-lm's wrapper, with a state of answers for the headers.

    Raises:
        RefusedError: the template does not show them.
    """
    states, first = tokenizer.response_transitions, tokenizer.response_initial_state
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": _NAMES[0]}]
    try:
        asked, begun, whole = (
            str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generates))
            for messages, generates in ((said[:1], False), (said[:1], True), (said, False))
        )
        reasoning = next(mark for mark, state in states[first] if state == "reasoning")
        end = next(mark for mark, state in states["reasoning"] if state == first)
        text = whole[len(begun) : whole.index(_NAMES[0])]
        ends = [mark for mark, state in states[first] if state == "normal"]
        if not begun.startswith(asked) or not whole.startswith(begun) or not text.endswith(tuple(ends)):
            raise ValueError("answers in a conversation do not begin as new ones")
        return Headers(reasoning, end + begun[len(asked) :], text)
    except (jinja2.TemplateError, ValueError, TypeError, LookupError, StopIteration) as error:
        message = "answers of this model cannot follow a schema: its chat template does not show how they begin."
        raise RefusedError(message, 400, "response_format") from error


def _no_form(field: str) -> RefusedError:
    return RefusedError(
        "calls of this model cannot be forced or checked: its chat template has no form of calls with JSON arguments. "
        "Hint: use tool_choice auto without strict, and no schema of the answer.",
        400,
        field,
    )


def _calls() -> list[dict[str, Any]]:
    return [
        {"id": number, "type": "function", "function": {"name": name, "arguments": _ARGUMENTS}}
        for number, name in zip(_IDS, _NAMES, strict=True)
    ]


def _split(text: str, tokenizer: Any) -> tuple[CallForm, str]:
    """Return the form of calls in a rendered conversation, and the text of these calls.

    Raises:
        ValueError: it has no such form.
    """
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    first, second = (text.index(name) for name in _NAMES)
    begin = text.rindex(start, 0, first)
    middle, first_end = _arguments(text, first + len(_NAMES[0]))
    other_middle, second_end = _arguments(text, second + len(_NAMES[1]))
    if middle != other_middle or any(text.count(name) != 1 for name in _NAMES):
        raise ValueError("calls in a row have different forms")
    rest = text[second_end:]
    closing = rest[: rest.index(end) + len(end)] if end else _before_end(rest, tokenizer)
    gap = text[first_end:second]
    form = CallForm(start, text[begin:first], middle, gap, closing.replace(_IDS[1], _IDS[0]))
    return form, text[begin:second_end] + closing


def _arguments(text: str, at: int) -> tuple[str, int]:
    """Return the text before a call's arguments, and where these end.

    Raises:
        ValueError: they are not JSON.
    """
    begin = text.index("{", at)
    value, end = json.JSONDecoder().raw_decode(text, begin)
    if value != _ARGUMENTS or any(number in text[at:begin] for number in _IDS):
        raise ValueError("the arguments are not JSON")
    return text[at:begin], end


def _before_end(rest: str, tokenizer: Any) -> str:
    """Return what an answer has before its last token, which ends it."""
    places = [rest.find(text) for text in tokenizer.convert_ids_to_tokens(sorted(tokenizer.eos_token_ids)) if text]
    return rest[: min((at for at in places if at >= 0), default=len(rest))].rstrip()


def _read_back(sample: str, tokenizer: Any) -> Sequence[tuple[str, dict[str, Any]]]:
    """Return the calls that mlx-lm's parser finds in a text."""
    stream = TextStream(tokenizer, (), "normal", ())
    parts = [part for token in tokenizer.encode(sample, add_special_tokens=False) for part in stream.add(token)]
    return [(part.name, part.arguments) for part in [*parts, *stream.end()] if isinstance(part, ToolCall)]

"""Grammars of answers: reasoning, then calls of functions, or text that follows a schema."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLMatcher

from mlx_flash.errors import RefusedError
from mlx_flash.server.callforms import CallForm
from mlx_flash.server.grammar import json_grammar
from mlx_flash.server.prompts import Reasoning
from mlx_flash.server.request import GenerationRequest

_JSON_OPTIONS = {"whitespace_pattern": "[ \\t\\r\\n]{0,4}"}
"""Arguments are on one line in what models have learnt. Without a limit, small models go on with spaces for ever."""

_TEXT = r"TEXT: /(.|\n)*/"
_BLANKS = r"BLANKS: /[ \t\r\n]{1,4}/"


def answer_grammar(request: GenerationRequest, form: CallForm | None, tokenizer: Any, reasoning: Reasoning) -> str:
    """Return the grammar of an answer. All of it that is bound follows the reasoning, which may be any text.

    Args:
        request: with a schema, functions that it must call, or functions whose arguments are checked.
        form: of the model's calls; None leaves everything between their marks free.
        tokenizer: mlx-lm's wrapper.
        reasoning: before the rest.

    Raises:
        RefusedError: a schema that is to be followed is not supported.
    """
    marks = _Marks(tokenizer, None if form is None else form.call_id)
    rules = [_TEXT, _BLANKS, "CALL_ID: /[a-zA-Z0-9]{9}/"]
    bodies = []
    if request.tools and form is None:
        bodies.append("calls")
        rules.append(f"calls: ({marks.rule(tokenizer.tool_call_start)} inside BLANKS?)+")
        rules += marks.until("inside", "TEXT", tokenizer.tool_call_end)
    elif form is not None:
        bodies.append("calls")
        rules.append(f"calls: {marks.rule(form.opening)} listed")
        rules += _listed_calls(request, form, marks)
    if request.grammar is not None and not request.must_call:
        bodies.append("answer")
        rules.append(f"answer: {request.grammar}")
    if form is not None and bodies == ["calls"] and not request.must_call:
        rest = marks.rule(form.opening.removeprefix(form.start))
        rules += marks.until("before", "TEXT", form.start)
        rules.append(f"start: (before {rest} listed)* {marks.others('TEXT', form.start)} TEXT")
        return str(LLMatcher.grammar_from_lark("\n".join(rules)))
    thought = ""
    if reasoning != "none":
        call_start = tokenizer.tool_call_start if tokenizer.has_tool_calling else ""
        rules += marks.without("THOUGHT", call_start)
        rules += marks.until("thought", "THOUGHT", tokenizer.think_end, call_start)
        opened = f"({marks.rule(tokenizer.think_start)} thought BLANKS?)?"
        thought = opened if reasoning == "possible" else "thought BLANKS?"
    rules.append(f"start: {thought} ({' | '.join(bodies)})")
    return str(LLMatcher.grammar_from_lark("\n".join(rules)))


def _listed_calls(request: GenerationRequest, form: CallForm, marks: _Marks) -> list[str]:
    """Return the rules of calls after the opening of the first one.

    Raises:
        RefusedError: a schema that is to be followed is not supported.
    """
    functions = [tool["function"] for tool in request.tools or ()]
    functions = [each for each in functions if not request.must_call or each["name"] in request.must_call]
    more = "" if request.one_call else f"({marks.rule(form.gap)} call)*"
    rules = [
        f"listed: call {more} {marks.rule(form.closing)}",
        f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}",
    ]
    for i, function in enumerate(functions):
        schema = _schema(function, is_strict=function["name"] in request.strict_tools)
        rules.append(f"call_{i}: {marks.rule(function['name'] + form.middle)} arguments_{i}")
        rules.append(f"arguments_{i}: %json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}")
    return rules


def _schema(function: dict[str, Any], *, is_strict: bool) -> dict[str, Any]:
    """Return the schema of a function's arguments.

    Raises:
        RefusedError: it is to be followed, and is not supported.
    """
    schema = {**(function.get("parameters") or {}), "type": "object"}
    try:
        json_grammar(schema, "tools")
    except RefusedError as error:
        if is_strict:
            raise RefusedError(
                f"parameters of the strict function {function['name']!r}: {error}", 400, "tools"
            ) from None
        return {"type": "object"}
    return schema


class _Marks:
    """Texts in a grammar, in which special tokens are named by number: their text is none to llguidance.

    Args:
        tokenizer: mlx-lm's wrapper.
        call_id: stands for the number of a call; None if there is none.
    """

    def __init__(self, tokenizer: Any, call_id: str | None) -> None:
        added = tokenizer.added_tokens_decoder.items()
        self._special = {token.content: number for number, token in added if token.special}
        self._ends = set(tokenizer.eos_token_ids)
        self._call_id = call_id

    def rule(self, text: str) -> str:
        """Return what stands for a text in a rule."""
        return " ".join(map(self._part, self._parts(text)))

    def until(self, name: str, text: str, mark: str, *avoided: str) -> list[str]:
        """Return the rules of text that ends with a mark.

        Args:
            name: of the rule.
            text: the terminal of the text.
            mark: its end; empty for the end of the answer.
            avoided: marks whose special tokens are not in it.
        """
        first, *rest = self._parts(mark) or [""]
        others = self.others(text, mark, *avoided)
        if not first or first in self._special:
            return [f"{name}: {others} {text} {self.rule(mark)}"]
        return [
            f"{name}: {others} {name}_end {self.rule(''.join(rest))}",
            f"{name}_end[lazy]: {text} {json.dumps(first)}",
        ]

    def others(self, text: str, *marks: str) -> str:
        """Return a part of a rule: text with special tokens that neither begin one of some marks nor end the answer."""
        begin = {self._special.get(part) for mark in marks for part in self._parts(mark)[:1]}
        numbers = sorted(set(self._special.values()) - self._ends - begin)
        return f"({text} <[{','.join(map(str, numbers))}]>)*" if numbers else ""

    def without(self, name: str, mark: str) -> list[str]:
        """Return the terminal of text in which a mark does not begin. Special tokens are in no such text anyway."""
        first = next(iter(self._parts(mark)), "")
        if not first or first in self._special:
            return [f"{name}: TEXT"]
        return [f"{name}: TEXT & ~WITH_{name}", f"WITH_{name}: TEXT {json.dumps(first)} TEXT"]

    def _parts(self, text: str) -> list[str]:
        words = [*self._special, *([] if self._call_id is None else [self._call_id])]
        words = sorted((word for word in words if word in text), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, words))})", text) if words else [text]
        return [part for part in parts if part]

    def _part(self, part: str) -> str:
        if part == self._call_id:
            return "CALL_ID"
        return f"<[{self._special[part]}]>" if part in self._special else json.dumps(part, ensure_ascii=False)

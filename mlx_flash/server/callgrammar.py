"""Grammars of answers: reasoning, then calls of functions, or text that follows a schema."""

from __future__ import annotations

import json
import re
from dataclasses import astuple
from typing import Any

from llguidance import LLMatcher

from mlx_flash.errors import RefusedError
from mlx_flash.server.callforms import CallForm, headers_of
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
    headers = headers_of(tokenizer) if reasoning == "headers" else None
    marks = _Marks(tokenizer, form.call_id if form else None, "".join(astuple(headers)) if headers else "")
    start, end = tokenizer.tool_call_start or "", tokenizer.tool_call_end or ""
    rules = [_TEXT, _BLANKS, "CALL_ID: /[a-zA-Z0-9]{9}/"]
    bodies = ["calls"] if request.tools else []
    if form is not None:
        rules += [f"calls: {marks.rule(form.opening)} listed", *_listed_calls(request, form, marks)]
    elif request.tools and headers is not None:
        rules += ["calls: begun inside", *marks.until("begun", "TEXT", start, *marks.parts(headers.text)[-1:])]
        rules += marks.until("inside", "TEXT", end, *marks.parts(headers.end))
    elif request.tools:
        rules += [f"calls: ({marks.rule(start)} inside BLANKS?)+", *marks.until("inside", "TEXT", end)]
    if request.grammar is not None and not request.must_call:
        bodies.append("answer")
        rules += [f"answer: {marks.rule(headers.text if headers else '')} text", f"text: {request.grammar}"]
    if form is not None and bodies == ["calls"] and not request.must_call:
        rest = marks.rule(form.opening.removeprefix(form.start))
        rules += marks.until("before", "TEXT", form.start)
        rules.append(f"start: (before {rest} listed)* {marks.others('TEXT', form.start)} TEXT")
    elif headers is not None:
        rules += marks.until("thought", "TEXT", headers.end)
        rules.append(f"start: (BLANKS? {marks.rule(headers.reasoning)} thought)* ({' | '.join(bodies)})")
    elif reasoning == "none":
        rules.append(f"start: {' | '.join(bodies)}")
    else:
        opened = "" if reasoning == "open" else marks.rule(tokenizer.think_start)
        rules += [*marks.without("THOUGHT", start), *marks.until("thought", "THOUGHT", tokenizer.think_end, start)]
        rules.append(f"start: ({opened} thought BLANKS?){'' if reasoning == 'open' else '?'} ({' | '.join(bodies)})")
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
        alone: text whose special tokens may be those of others at the same place. Each is a terminal of its own then,
            since llguidance follows one of several terminals that have a special token.
    """

    def __init__(self, tokenizer: Any, call_id: str | None, alone: str = "") -> None:
        added = tokenizer.added_tokens_decoder.items()
        self._special = {token.content: number for number, token in added if token.special}
        self._ends = set(tokenizer.eos_token_ids)
        self._call_id = call_id
        self._alone = {self._special.get(part) for part in self.parts(alone)}

    def rule(self, text: str) -> str:
        """Return what stands for a text in a rule."""
        return " ".join(map(self._part, self.parts(text)))

    def until(self, name: str, text: str, mark: str, *avoided: str) -> list[str]:
        """Return the rules of text that ends with a mark.

        Args:
            name: of the rule.
            text: the terminal of the text.
            mark: its end; empty for the end of the answer.
            avoided: marks whose special tokens are not in it.
        """
        first, *rest = self.parts(mark) or [""]
        others = self.others(text, mark, *avoided)
        if not first or first in self._special:
            return [f"{name}: {others} {text}? {self.rule(mark)}"]
        return [
            f"{name}: {others} {name}_end {self.rule(''.join(rest))}",
            f"{name}_end[lazy]: {text} {json.dumps(first)}",
        ]

    def others(self, text: str, *marks: str) -> str:
        """Return a part of a rule: text with special tokens that neither begin one of some marks nor end the answer."""
        begin = {self._special.get(part) for mark in marks for part in self.parts(mark)[:1]}
        numbers = set(self._special.values()) - self._ends - begin
        groups = [[number] for number in sorted(numbers & self._alone)] + [sorted(numbers - self._alone)]
        allowed = " | ".join(f"<[{','.join(map(str, group))}]>" for group in groups if group)
        return f"({text}? ({allowed}))*" if allowed else ""

    def without(self, name: str, mark: str) -> list[str]:
        """Return the terminal of text in which a mark does not begin. Special tokens are in no such text anyway."""
        first = next(iter(self.parts(mark)), "")
        if not first or first in self._special:
            return [f"{name}: TEXT"]
        return [f"{name}: TEXT & ~WITH_{name}", f"WITH_{name}: TEXT {json.dumps(first)} TEXT"]

    def parts(self, text: str) -> list[str]:
        """Return the special tokens of a text, and the texts between them."""
        words = [*self._special, *([] if self._call_id is None else [self._call_id])]
        words = sorted((word for word in words if word in text), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, words))})", text) if words else [text]
        return [part for part in parts if part]

    def _part(self, part: str) -> str:
        if part == self._call_id:
            return "CALL_ID"
        return f"<[{self._special[part]}]>" if part in self._special else json.dumps(part, ensure_ascii=False)

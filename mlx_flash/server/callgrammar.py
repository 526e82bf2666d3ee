"""Grammars of answers that have to call a function, or whose calls have to follow a schema."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLMatcher

from mlx_flash.errors import RefusedError
from mlx_flash.server.callforms import CallForm
from mlx_flash.server.grammar import json_grammar
from mlx_flash.server.request import GenerationRequest

_JSON_OPTIONS = {"whitespace_pattern": "[ \\t\\r\\n]{0,4}"}
"""Arguments are on one line in what models have learnt. Without a limit, small models go on with spaces for ever."""


def call_grammar(request: GenerationRequest, form: CallForm, tokenizer: Any) -> str:
    """Return the grammar of an answer.

    Args:
        request: with functions that it must call, or whose arguments are checked.
        form: of the model's calls.
        tokenizer: mlx-lm's wrapper.

    Raises:
        RefusedError: a schema that is to be followed is not supported.
    """
    marks = _Marks(tokenizer, form.call_id)
    functions = [tool["function"] for tool in request.tools or ()]
    callable_now = [
        function for function in functions if not request.must_call or function["name"] in request.must_call
    ]
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(callable_now)))}"]
    for i, function in enumerate(callable_now):
        schema = _schema(function, is_strict=function["name"] in request.strict_tools)
        rules.append(f"call_{i}: {marks.rule(function['name'] + form.middle)} arguments_{i}")
        rules.append(f"arguments_{i}: %json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}")
    more = "" if request.one_call else f"({marks.rule(form.gap)} call)*"
    if request.must_call:
        rules.insert(0, f"start: {marks.rule(form.opening)} call {more} {marks.rule(form.closing)}")
    else:
        rest = marks.rule(form.opening.removeprefix(form.start))
        rules.insert(0, f"start: (head {rest} call {more} {marks.rule(form.closing)}{marks.others(form.start)})* TEXT")
        rules += [marks.head(form.start), r"TEXT: /(.|\n)*/"]
    rules.append("CALL_ID: /[a-zA-Z0-9]{9}/")
    return str(LLMatcher.grammar_from_lark("\n".join(rules)))


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
        call_id: stands for the number of a call.
    """

    def __init__(self, tokenizer: Any, call_id: str) -> None:
        added = tokenizer.added_tokens_decoder.items()
        self._special = {token.content: number for number, token in added if token.special}
        self._ends = set(tokenizer.eos_token_ids)
        self._call_id = call_id
        words = sorted([call_id, *self._special], key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, words)) + ")")

    def rule(self, text: str) -> str:
        """Return what stands for a text in a rule."""
        return " ".join(self._part(part) for part in self._split.split(text) if part)

    def head(self, start: str) -> str:
        """Return the rule of text that ends with the mark of a call."""
        if start in self._special:
            return f"head: TEXT {self._part(start)}"
        return f"head[lazy]: TEXT {json.dumps(start)}"

    def others(self, start: str) -> str:
        """Return a branch for special tokens in text that neither begin a call nor end the answer."""
        numbers = sorted(set(self._special.values()) - self._ends - {self._special.get(start)})
        return f" | TEXT <[{','.join(map(str, numbers))}]>" if numbers else ""

    def _part(self, part: str) -> str:
        if part == self._call_id:
            return "CALL_ID"
        return f"<[{self._special[part]}]>" if part in self._special else json.dumps(part, ensure_ascii=False)

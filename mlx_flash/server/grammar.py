"""Answers that follow a grammar: llguidance masks the logits of tokens that it does not allow.

Functions import llguidance themselves: it takes 8 MB, which few servers need.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import astuple
from decimal import Decimal
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mlx_flash.errors import RefusedError
from mlx_flash.server.prompts import Prompt, Reasoning, reasoning_of
from mlx_flash.server.request import GenerationRequest
from mlx_flash.server.text import headers_of

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_SCHEMA_CHARACTERS = 100_000
"""The longest JSON schema."""

MAX_JOINED_PATTERNS = 8
"""Patterns in a schema that joins some. llguidance looks for a text that fits them all: 15 took 2 GB and 26 s."""

MAX_MULTIPLE = 10_000
"""The greatest ``multipleOf``, and the greatest product of all where some are joined. llguidance counts remainders."""

_JOINS = ("allOf", "$ref", "anyOf", "oneOf")
_JOINED = ("pattern", "multipleOf", "patternProperties", "properties", "additionalProperties", "items", "prefixItems")

_JSON_OPTIONS = {"whitespace_pattern": "( |\n{1,2}[ \t]{0,20})?"}
"""Blanks between the parts of JSON. Without a limit, small models go on with them to the end of the answer."""

_SPECIAL = b"\xff"
"""The first byte of tokens that are no text, for llguidance."""


def json_grammar(schema: dict[str, Any] | None, field: str) -> str:
    """Return a rule of JSON texts, for a grammar in llguidance's form of Lark."""
    from llguidance import LLMatcher

    _check_costs(schema, field)
    text = json.dumps({"x-guidance": _JSON_OPTIONS, **({"type": "object"} if schema is None else schema)})
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise RefusedError(f"the schema has {len(text)} characters, {MAX_SCHEMA_CHARACTERS} are allowed.", 400, field)
    try:
        grammar = LLMatcher.grammar_from_json_schema(text)
    except ValueError as error:
        raise RefusedError(f"the schema cannot be used: {error}", 400, field) from error
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_wrong:
        reason = " ".join(map(str, messages)).partition("\n")[0]
        raise RefusedError(f"the schema cannot be used: {reason}", 400, field)
    return f"%json {text}"


def _check_costs(schema: object, field: str) -> None:
    """Refuse parts of a schema that cost llguidance far more memory and time than their length suggests."""
    num_patterns, is_joined, multiples, left = 0, False, [1], [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            joins = [name for name in _JOINS if name in part]
            parts = part["allOf"] if isinstance(part.get("allOf"), list) else ()
            is_joined |= len(joins) > 1 or len(parts) > 1 or (bool(joins) and any(name in part for name in _JOINED))
            num_patterns += isinstance(part.get("pattern"), str)
            named = part.get("patternProperties")
            num_patterns += len(named) if isinstance(named, dict) else 0
            if isinstance(multiple := part.get("multipleOf"), int | float) and math.isfinite(multiple):
                multiples.append(int(Decimal(str(multiple)).scaleb(max(0, -_exponent(multiple)))))
        if isinstance(part, dict | list):
            left += part.values() if isinstance(part, dict) else part
    if is_joined and num_patterns > MAX_JOINED_PATTERNS:
        raise RefusedError(
            f"the schema joins parts (allOf, $ref) and has {num_patterns} patterns, {MAX_JOINED_PATTERNS} are allowed.",
            400,
            field,
        )
    if (math.prod(multiples) if is_joined else max(multiples)) > MAX_MULTIPLE:
        raise RefusedError(
            f"the schema has a multipleOf, or a product of several, of more than {MAX_MULTIPLE}.", 400, field
        )


def _exponent(number: float) -> int:
    exponent = Decimal(str(number)).as_tuple().exponent
    return exponent if isinstance(exponent, int) else 0


def grammar_tokenizer(tokenizer: Any, vocab_size: int) -> LLTokenizer:
    """Return the tokenizer as llguidance needs it: the bytes of each token.

    llguidance could read the whole tokenizer again, which takes five times the memory.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    to_bytes = _bytes_of(tokenizer)
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    texts = tokenizer.convert_ids_to_tokens(list(range(min(len(tokenizer), vocab_size))))
    tokens = [
        _SPECIAL + (text or "").encode() if i in special else to_bytes(text or "") for i, text in enumerate(texts)
    ]
    tokens += [_SPECIAL + f"<unused {i}>".encode() for i in range(len(tokens), vocab_size)]
    return LLTokenizer(
        TokenizerWrapper(_Tokens(tokenizer, tokens)), eos_token=sorted(tokenizer.eos_token_ids), slices=[]
    )


class _Tokens:
    bos_token_id = None

    def __init__(self, tokenizer: Any, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self.eos_token_id = min(tokenizer.eos_token_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _bytes_of(tokenizer: Any) -> Callable[[str], bytes]:
    """Return a function from the text of a token in the vocabulary to its bytes."""
    decoder = str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
    if "ByteLevel" in decoder:
        numbers = {character: number for number, character in bytes_to_unicode().items()}
        return lambda text: b"".join(
            bytes([numbers[character]]) if character in numbers else character.encode() for character in text
        )
    if "ByteFallback" in decoder:
        return lambda text: (
            bytes([int(text[3:5], 16)])
            if re.fullmatch("<0x[0-9A-F]{2}>", text)
            else text.replace("\u2581", " ").encode()
        )
    raise RefusedError("this model's tokenizer cannot follow a grammar.", 400, "response_format")


class GrammarProcessor:
    """A logits processor that allows only tokens with which the answer follows a grammar."""

    def __init__(self, tokenizer: LLTokenizer, grammar: str) -> None:
        from llguidance import LLMatcher

        self._matcher = LLMatcher(tokenizer, grammar, log_level=0)
        self._mask = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
        self._has_begun = False
        self._check()

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Return logits of minus infinity for tokens that are not allowed. Called once for each token."""
        if self._has_begun:
            self._matcher.consume_token(cast(int, tokens[-1].item()))
            self._check()
        self._has_begun = True
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check()
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little", count=logits.shape[-1])
        return mx.where(mx.array(bits.astype(np.bool_)), logits, mx.array(-mx.inf, logits.dtype))

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]  # the rest is the state of llguidance
            raise RefusedError(f"the grammar cannot be followed: {reason}", 400, "response_format")


_ARGUMENT_OPTIONS = {"whitespace_pattern": "[ \\t\\r\\n]{0,4}"}
"""Arguments are on one line in what models have learnt. Without a limit, small models go on with spaces for ever."""

_TEXT = r"TEXT: /(.|\n)*/"
_BLANKS = r"BLANKS: /[ \t\r\n]{1,4}/"


def answer_grammar(request: GenerationRequest, tokenizer: Any, reasoning: Reasoning) -> str:
    """Return the grammar of an answer. All of it that is bound follows the reasoning, which may be any text.

    A forced call is JSON for every model, as in vLLM: its arguments follow their schema whatever the form in which the
    model was taught to write calls. Beside a schema, calls have the model's own marks and are free between them.
    """
    from llguidance import LLMatcher

    headers = headers_of(tokenizer) if reasoning == "headers" else None
    marks = _Marks(tokenizer, "".join(astuple(headers)) if headers else "")
    start, end = tokenizer.tool_call_start or "", tokenizer.tool_call_end or ""
    rules, bodies = [_TEXT, _BLANKS], ["answer"]
    text = request.grammar
    if request.must_call or (request.tools and not start):  # a call without marks is JSON in any case
        rules += _calls(request)
        text = "call" if request.must_call else f"call | json\njson: {text}"
    elif request.tools and headers is not None:
        bodies.append("calls")
        rules += ["calls: begun inside", *marks.until("begun", "TEXT", start, *marks.parts(headers.text)[-1:])]
        rules += marks.until("inside", "TEXT", end, *marks.parts(headers.end))
    elif request.tools:
        bodies.append("calls")
        rules += [f"calls: ({marks.rule(start)} inside BLANKS?)+", *marks.until("inside", "TEXT", end)]
    rules += [f"answer: {marks.rule(headers.text if headers else '')} text", f"text: {text}"]
    if headers is not None:
        rules += marks.until("thought", "TEXT", headers.end)
        rules.append(f"start: (BLANKS? {marks.rule(headers.reasoning)} thought)* ({' | '.join(bodies)})")
    elif reasoning == "none":
        rules.append(f"start: {' | '.join(bodies)}")
    else:
        opened = "" if reasoning == "open" else marks.rule(tokenizer.think_start)
        rules += [*marks.without("THOUGHT", start), *marks.until("thought", "THOUGHT", tokenizer.think_end, start)]
        rules.append(f"start: ({opened} thought BLANKS?){'' if reasoning == 'open' else '?'} ({' | '.join(bodies)})")
    return str(LLMatcher.grammar_from_lark("\n".join(rules)))


def _calls(request: GenerationRequest) -> list[str]:
    """Return the rules of a call in JSON."""
    functions = [tool["function"] for tool in request.tools or ()]
    functions = [each for each in functions if not request.must_call or each["name"] in request.must_call]
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}"]
    rules.append(f"key: {json.dumps(json.dumps('arguments'))} | {json.dumps(json.dumps('parameters'))}")
    for i, function in enumerate(functions):
        # in parts, of which other JSON may have the first ones
        parts = " ".join(map(json.dumps, ("{", '"name"', ":", " ", json.dumps(function["name"]), ",", " ")))
        rules.append(f'call_{i}: {parts} key ":" " " arguments_{i} "}}"')
        rules.append(f"arguments_{i}: %json {json.dumps({**_schema(function), 'x-guidance': _ARGUMENT_OPTIONS})}")
    return rules


def _schema(function: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments; that of any object where it is not supported."""
    schema = {**(function.get("parameters") or {}), "type": "object"}
    try:
        json_grammar(schema, "tools")
    except RefusedError:
        return {"type": "object"}
    return schema


class _Marks:
    """Texts in a grammar, in which special tokens are named by number: their text is none to llguidance."""

    def __init__(self, tokenizer: Any, alone: str) -> None:
        added = tokenizer.added_tokens_decoder.items()
        self._special = {token.content: number for number, token in added if token.special}
        self._ends = set(tokenizer.eos_token_ids)
        # several terminals of which one has a special token exclude each other in llguidance
        self._alone = {self._special.get(part) for part in self.parts(alone)}

    def rule(self, text: str) -> str:
        return " ".join(map(self._part, self.parts(text)))

    def until(self, name: str, text: str, mark: str, *avoided: str) -> list[str]:
        """Return the rules of text that ends with a mark, or with the answer, and begins no other one of some marks."""
        first, *rest = self.parts(mark) or [""]
        begin = {self._special.get(part) for each in (mark, *avoided) for part in self.parts(each)[:1]}
        numbers = set(self._special.values()) - self._ends - begin
        groups = [[number] for number in sorted(numbers & self._alone)] + [sorted(numbers - self._alone)]
        allowed = " | ".join(f"<[{','.join(map(str, group))}]>" for group in groups if group)
        others = f"({text}? ({allowed}))*" if allowed else ""
        if not first or first in self._special:
            return [f"{name}: {others} {text}? {self.rule(mark)}"]
        return [
            f"{name}: {others} {name}_end {self.rule(''.join(rest))}",
            f"{name}_end[lazy]: {text} {json.dumps(first)}",
        ]

    def without(self, name: str, mark: str) -> list[str]:
        """Return the terminal of text in which a mark does not begin. Special tokens are in no such text anyway."""
        first = next(iter(self.parts(mark)), "")
        if not first or first in self._special:
            return [f"{name}: TEXT"]
        return [f"{name}: TEXT & ~WITH_{name}", f"WITH_{name}: TEXT {json.dumps(first)} TEXT"]

    def parts(self, text: str) -> list[str]:
        """Return the special tokens of a text, and the texts between them."""
        words = sorted((word for word in self._special if word in text), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, words))})", text) if words else [text]
        return [part for part in parts if part]

    def _part(self, part: str) -> str:
        return f"<[{self._special[part]}]>" if part in self._special else json.dumps(part, ensure_ascii=False)


_TOKEN_BYTES = 200
"""Memory that the first grammar takes for each token of the vocabulary. Measured: 158 (Qwen2.5, 152 000 tokens)."""

_LEAST_BYTES = 4_000_000
"""Memory that it takes at least: the library."""


class Grammars:
    """The tokenizer as llguidance needs it, made for the first request with a grammar."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.nbytes = 0  # in use beside the plan's
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._made: LLTokenizer | None = None

    @property
    def needed_bytes(self) -> int:
        """Memory that a grammar takes, if it is in use or not."""
        return _LEAST_BYTES + _TOKEN_BYTES * self._vocab_size

    def of(self, request: GenerationRequest, prompt: Prompt) -> str | None:
        """Return the grammar of the answer to a request; None if it may be any text."""
        if not request.has_form:
            return None
        return answer_grammar(request, self._tokenizer, reasoning_of(request, prompt, self._tokenizer))

    def processor(self, grammar: str) -> GrammarProcessor:
        if self._made is None:
            self._made = grammar_tokenizer(self._tokenizer, self._vocab_size)
            self.nbytes = self.needed_bytes
        return GrammarProcessor(self._made, grammar)

"""Tool calls in the forms of many models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from call_forms import FUNCTIONS, STOCK, TEMPLATES, rendered, stock_answer, tokenizer_of
from live import Live
from mlx_flash.engine.prepare import load_tokenizer
from mlx_flash.server.events import Piece, ToolCall
from mlx_flash.server.text import Part, StopTexts, TextStream
from scripted import saying

TOKENIZERS = {name: tokenizer_of(template) for name, template in TEMPLATES.items()}
TOKENIZERS |= {name: tokenizer_of("{{ tools }}", name) for name in STOCK}
TEXT = st.text("ab\"'\\{}[]<>:,\n é🦊", max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(TEXT, VALUES, max_size=4)
CALLS = st.lists(st.tuples(st.sampled_from(["weather", "find_all"]), OBJECTS), min_size=1, max_size=3)
CUTS = st.lists(st.integers(0, 400), max_size=30)
WORDS = st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), st.from_regex(r"[a-zé{}\"]{2,9}", fullmatch=True))


def read(tokenizer: Any, text: str, cuts: Sequence[int] = (), tools: Any = FUNCTIONS) -> list[Part]:
    """Return the parts of an answer that comes in pieces: characters, or pieces that begin at some places."""
    stream = TextStream(tokenizer, (), tokenizer.response_initial_state or "normal", tools)
    places = sorted({0, *(cut for cut in cuts if cut < len(text))}) if cuts else range(len(text))
    pieces = [text[begin:end] for begin, end in zip(places, [*places[1:], None], strict=False)]
    return [part for piece in pieces for part in stream.add(piece)] + stream.end()  # type: ignore[arg-type]


def called(parts: Sequence[Part]) -> list[tuple[str, dict[str, Any]]]:
    return [(part.name, part.arguments) for part in parts if isinstance(part, ToolCall)]


def text_of(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Piece) and part.kind == "text")


@pytest.mark.parametrize("name", TEMPLATES)
@given(calls=CALLS, cuts=CUTS)
@settings(max_examples=25, deadline=None)
def test_calls_of_a_template_are_read_back(name: str, calls: list[tuple[str, dict[str, Any]]], cuts: list[int]) -> None:
    calls = calls[:1] if name == "harmony" else calls  # such an answer ends with its call
    tokenizer = TOKENIZERS[name]
    answer = rendered(tokenizer, calls)
    parts = read(tokenizer, answer, cuts)
    assert called(parts) == calls and text_of(parts).strip() == ""


@pytest.mark.parametrize("name", STOCK)
@given(words=WORDS, cuts=CUTS)
@settings(max_examples=25, deadline=None)
def test_calls_are_those_of_mlx_lms_parser(name: str, words: dict[str, str], cuts: list[int]) -> None:
    tokenizer, answer = TOKENIZERS[name], stock_answer(name, "weather", words)
    parts = read(tokenizer, answer, cuts)
    end = tokenizer.tool_call_end
    section = answer.removeprefix(tokenizer.tool_call_start)[: -len(end) or None]
    stock = tokenizer.tool_parser(section, FUNCTIONS)
    stock = stock if isinstance(stock, list) else [stock]
    assert called(parts) == [(call["name"], call["arguments"]) for call in stock] and text_of(parts) == ""


@pytest.mark.parametrize("name", [*TEMPLATES, *STOCK])
def test_a_call_may_break_off(name: str) -> None:
    """Wherever an answer is cut off, a call is complete, or all of it is text."""
    tokenizer, arguments = TOKENIZERS[name], {"city": "Paris {x}", "day": "monday", "more": "a long text," * 5}
    answer = (
        rendered(tokenizer, [("weather", arguments)]) if name in TEMPLATES else stock_answer(name, "weather", arguments)
    )
    for cut in range(len(answer)):
        parts = read(tokenizer, answer[:cut])
        found = called(parts)
        assert found == [("weather", arguments)] or (not found and answer[:cut].endswith(text_of(parts)))


def test_arguments_may_be_a_text() -> None:
    text = '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>'
    assert called(read(TOKENIZERS["json_tools"], text)) == [("weather", {"city": "Rome"})]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "weather", "parameters": {"city": "Rome"}}', [("weather", {"city": "Rome"})]),
        ('  {"type": "function", "name": "weather", "parameters": {}}', [("weather", {})]),
        ('{"name": "weather", "parameters": {}}; {"name": "find_all", "parameters": {"a": [1]}}', 2),
        (
            '[weather(city="Rome", days=[1, 2]), find_all()]',
            [("weather", {"city": "Rome", "days": [1, 2]}), ("find_all", {})],
        ),
        ('<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}', [("weather", {"city": "Rome"})]),
        ('<|python_start|>[weather(city="Rome")]<|python_end|>', [("weather", {"city": "Rome"})]),
        ('```json\n{\n  "name": "weather",\n  "arguments": {"city": "Rome"}\n}\n```', [("weather", {"city": "Rome"})]),
        ('{"name": "weather", "age": 3}', []),
        ('```json\n{"name": "weather"}\n```', []),
        ('{"name": "Jane", "parameters": {}}', []),
        ('{"age": 3}', []),
        ("[1] A source.", []),
        ("[weather is fine]", []),
        ('  {"na', []),
        ("", []),
    ],
)
def test_calls_without_a_mark_begin_the_answer(text: str, calls: Any) -> None:
    parts = read(TOKENIZERS["llama"], text)
    found = called(parts)
    assert len(found) == calls if isinstance(calls, int) else found == calls
    assert found or text_of(parts) == text
    assert text_of(read(TOKENIZERS["llama"], text, tools=None)) == text or "python" in text


def test_a_forgotten_mark_is_no_harm() -> None:
    """Qwen2.5-Coder 1.5B writes such calls where its template has marks."""
    call = '```json\n{\n  "name": "weather",\n  "arguments": {\n    "city": "Rome"\n  }\n}\n```'
    assert called(read(TOKENIZERS["json_tools"], call)) == [("weather", {"city": "Rome"})]
    assert text_of(read(TOKENIZERS["json_tools"], f"Such as\n{call}")) == f"Such as\n{call}"


def test_text_around_calls_of_harmony() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    parts = read(TOKENIZERS["harmony"], text + "<|start|>assistant<|channel|>final<|message|>Sunny {1}.")
    assert text_of(parts) == "I look.Sunny {1}."
    assert "".join(part.text for part in parts if isinstance(part, Piece) and part.kind == "reasoning") == "Hm."


@pytest.mark.parametrize("text", ["<call fn=weather>Rome</call>", '{"tool_name": "weather", "parameters": {}}'])
def test_a_form_that_nobody_knows_stays_text(text: str) -> None:
    tokenizer = tokenizer_of("{{ tools }}" + TEMPLATES["llama"].replace('{"name": "{{ f.name }}"', "{{ f.name }}"))
    assert tokenizer.has_tool_calling
    assert text_of(read(tokenizer, text)) == text


def test_only_a_template_without_tools_has_no_calls() -> None:
    assert not tokenizer_of("{% for m in messages %}{{ m.content }}{% endfor %}").has_tool_calling


@pytest.mark.parametrize("shown", ["{{ '' + f.arguments }}", "{{ f.arguments }}", "{{ f.arguments | tojson }}"])
def test_arguments_have_the_form_that_the_template_joins(shown: str) -> None:
    template = TEMPLATES["llama"].replace("{{ f.arguments | tojson }}", shown)
    assert '"parameters": {"city": "Séoul"}}' in rendered(tokenizer_of(template), [("weather", {"city": "Séoul"})])


# --- as OpenAI's clients get them, and texts that end an answer -------------------------------------------------------


FUNCTION: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
TWO_CALLS = "".join(
    f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': {'city': city}})}\n</tool_call>"
    for city in ("Paris", "Rome")
)


def test_tool_calls(server: Live) -> None:
    create = server.client().chat.completions.create
    messages: Any = [{"role": "user", "content": "Weather?"}]
    options: Any = {"model": "default_model", "messages": messages, "max_tokens": 300, "tools": [FUNCTION]}
    with saying(f"Let me see. {TWO_CALLS}"):
        whole = create(**options)
        chunks = list(create(stream=True, **options))
        one = create(parallel_tool_calls=False, **options)
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == "tool_calls" and message.content == "Let me see. "
    found: Any = message.tool_calls
    assert [json.loads(each.function.arguments) for each in found] == [{"city": "Paris"}, {"city": "Rome"}]
    assert {each.function.name for each in found} == {"weather"} and len({each.id for each in found}) == 2
    calls: dict[int, str] = {}
    for chunk in chunks:
        for each in chunk.choices[0].delta.tool_calls or []:
            calls[each.index] = calls.get(each.index, "") + each.function.arguments
    assert {number: json.loads(each) for number, each in calls.items()} == {0: {"city": "Paris"}, 1: {"city": "Rome"}}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Let me see. "
    assert (chunks[0].choices[0].delta.role, chunks[-1].choices[0].finish_reason) == ("assistant", "tool_calls")
    assert len(one.choices[0].message.tool_calls or []) == 1
    prompts: list[str] = []
    with saying("Sunny.", prompts):
        result = {"role": "tool", "tool_call_id": found[0].id, "content": "sunny"}
        answer = create(**{**options, "messages": [*messages, message, result]})
        create(tool_choice="none", **options)
    assert answer.choices[0].message.content == "Sunny." and answer.choices[0].finish_reason == "stop"
    assert ["weather" in prompt for prompt in prompts] == [True, False]


# --- without a server -------------------------------------------------------------------------------------------------


def stream(tokenizer: Any, text: str, stop: Sequence[str] = ()) -> tuple[str, list[ToolCall], str | None]:
    """Return what is left of a text after its way through the tokens."""
    made = TextStream(tokenizer, stop, "normal", [FUNCTION])
    found: list[Any] = []
    for token in tokenizer.encode(text, add_special_tokens=False):
        found += made.add(token)
        if made.stop is not None:
            break
    else:
        found += made.end()
    pieces = [part.text for part in found if isinstance(part, Piece)]
    return "".join(pieces), [part for part in found if isinstance(part, ToolCall)], made.stop


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(folder)


@given(text=st.text(alphabet="ab<tool_call>é🦊 ", max_size=30), stop=st.lists(st.text("abt<", min_size=1, max_size=3)))
def test_text_ends_at_the_first_stop_text(tokenizer: Any, text: str, stop: list[str]) -> None:
    said, calls, found = stream(tokenizer, text, stop)
    ends = {each: text.find(each) + len(each) for each in stop if each in text}
    if "<tool_call>" not in text and not text.startswith(" "):
        first = max((each for each in ends if ends[each] == min(ends.values())), key=len, default="")
        expected = text[: ends[first] - len(first)] if ends else text  # as mlx-lm, which sees the end of a text first
        assert (said, calls, found or "") == (expected, [], first)


@given(pieces=st.lists(st.text("ab", max_size=3), max_size=8), stop=st.lists(st.text("ab", max_size=4)))
def test_held_text_is_neither_lost_nor_repeated(pieces: list[str], stop: list[str]) -> None:
    texts, said = StopTexts(stop), ""
    for piece in pieces:
        said += texts.add(piece)
        if texts.found is not None:
            break
    else:
        said += texts.end()
    whole = "".join(pieces)
    assert whole.startswith(said)
    assert whole[len(said) :].startswith(texts.found) if texts.found is not None else said == whole

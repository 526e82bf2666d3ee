"""Tool calls as OpenAI's clients get them, and the texts that end an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from live import Live
from mlx_flash.engine.prepared import load_tokenizer
from mlx_flash.server.events import Piece, ToolCall
from mlx_flash.server.text import StopTexts, TextStream
from scripted import saying

WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALLS = "".join(
    f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': {'city': city}})}\n</tool_call>"
    for city in ("Paris", "Rome")
)


def test_tool_calls(server: Live) -> None:
    create = server.client().chat.completions.create
    messages: Any = [{"role": "user", "content": "Weather?"}]
    options: Any = {"model": "default_model", "messages": messages, "max_tokens": 300, "tools": [WEATHER]}
    with saying(f"Let me see. {CALLS}"):
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
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
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
    made = TextStream(tokenizer, stop, "normal", [WEATHER])
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


@given(pieces=st.lists(st.text("ab", max_size=3), max_size=8), stop=st.lists(st.text("ab", min_size=1, max_size=4)))
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

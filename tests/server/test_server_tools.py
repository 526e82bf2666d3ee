"""Tool calls and reasoning, with a model whose words are written down."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from live import Live, live
from mlx_flash.engine.tokenizer import load_tokenizer
from mlx_flash.modelfile.conversation import StopTexts
from mlx_flash.server import loaded
from mlx_flash.server.events import Piece, ToolCall
from mlx_flash.server.text import TextStream
from models import make_random_model

SHAPE = "--layers 2 --hidden-size 64 --intermediate-size 128 --heads 4 --kv-heads 2 --vocab-size 1000"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for tool_call in m.tool_calls or [] %}<tool_call>{{ tool_call.name }}{{ tool_call.function.arguments.city }}"
    "{% endfor %}{% endfor %}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
)
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def call(city: str) -> str:
    return "<tool_call>\n" + json.dumps({"name": "weather", "arguments": {"city": city}}) + "\n</tool_call>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_random_model(tmp_path_factory.mktemp("models") / "tools", *SHAPE.split())
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    (path / "chat_template.jinja").unlink(missing_ok=True)
    return path


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Live]:
    with live(str(model)) as running:
        yield running


@pytest.fixture
def says(server: Live, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes the model say a text."""

    def say(text: str) -> None:
        tokenizer = next(iter(server.room.models)).tokenizer
        tokens = [*tokenizer.encode(text, add_special_tokens=False), min(tokenizer.eos_token_ids)]

        def scripted(*_: Any) -> Any:
            left = iter(tokens)
            return lambda logprobs: mx.array([next(left)])

        monkeypatch.setattr(loaded, "sampler_of", scripted)

    return say


def test_tool_calls(server: Live, says: Any) -> None:
    says("Let me see. " + call("Paris") + call("Rome"))
    client = server.client()
    messages: Any = [{"role": "user", "content": "Weather?"}]
    options: Any = {"model": "default_model", "messages": messages, "max_tokens": 300, "tools": [WEATHER]}
    whole = client.chat.completions.create(**options)
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == "tool_calls" and message.content == "Let me see. "
    found: Any = message.tool_calls
    assert [json.loads(each.function.arguments) for each in found] == [{"city": "Paris"}, {"city": "Rome"}]
    assert {each.function.name for each in found} == {"weather"} and len({each.id for each in found}) == 2
    calls: dict[int, str] = {}
    text, reasons = "", []
    for chunk in client.chat.completions.create(stream=True, **options):
        delta: Any = chunk.choices[0].delta
        text += delta.content or ""
        for each in delta.tool_calls or []:
            calls[each.index] = calls.get(each.index, "") + each.function.arguments
        reasons.append(chunk.choices[0].finish_reason)
    assert {number: json.loads(each) for number, each in calls.items()} == {0: {"city": "Paris"}, 1: {"city": "Rome"}}
    assert (text, reasons[-1]) == ("Let me see. ", "tool_calls")
    one = client.chat.completions.create(parallel_tool_calls=False, **options)
    assert len(one.choices[0].message.tool_calls or []) == 1
    result = {"role": "tool", "tool_call_id": found[0].id, "content": "sunny"}
    says("Sunny.")
    answer = client.chat.completions.create(
        model="default_model", messages=[*messages, message, result], tools=[WEATHER], max_tokens=20
    )
    assert answer.choices[0].message.content == "Sunny." and answer.choices[0].finish_reason == "stop"


def test_calls_in_responses(server: Live, says: Any) -> None:
    says(call("Paris"))
    client = server.client()
    tools: Any = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
    options: Any = {"model": "default_model", "input": "Weather?", "tools": tools}
    (item,) = client.responses.create(**options).output
    assert item.type == "function_call" and json.loads(item.arguments) == {"city": "Paris"}
    kinds = [event.type for event in client.responses.create(stream=True, **options)]
    assert "response.function_call_arguments.done" in kinds and kinds[-1] == "response.completed"


def test_tools_can_be_switched_off(server: Live, says: Any) -> None:
    says("No.")
    _, with_tools = server.post("/v1/chat/completions", {"messages": MESSAGES, "tools": [WEATHER], "max_tokens": 5})
    body = {"messages": MESSAGES, "tools": [WEATHER], "tool_choice": "none", "max_tokens": 5}
    _, without = server.post("/v1/chat/completions", body)
    assert with_tools["usage"]["prompt_tokens"] > without["usage"]["prompt_tokens"]


MESSAGES = [{"role": "user", "content": "Weather?"}]


def test_a_call_that_is_cut_off_stays_text(server: Live, says: Any) -> None:
    says('<tool_call>\n{"name": "wea')
    _, reply = server.post("/v1/chat/completions", {"messages": MESSAGES, "tools": [WEATHER], "max_tokens": 300})
    assert '{"name": "wea' in reply["choices"][0]["message"]["content"]
    assert reply["choices"][0]["finish_reason"] == "stop"


# --- without a server -------------------------------------------------------------------------------------------------


def stream(tokenizer: Any, text: str, stop: Sequence[str] = ()) -> tuple[str, list[ToolCall], str | None]:
    """Return what is left of a text after its way through the tokens."""
    made = TextStream(tokenizer, stop, "normal", [WEATHER])
    found: list[Piece | ToolCall] = []
    for token in tokenizer.encode(text, add_special_tokens=False):
        found += made.add(token)
        if made.stop is not None:
            break
    else:
        found += made.end()
    pieces = [part.text for part in found if isinstance(part, Piece)]
    return "".join(pieces), [part for part in found if isinstance(part, ToolCall)], made.stop


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return load_tokenizer(model)


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

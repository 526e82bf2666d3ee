"""The server as Anthropic's clients use it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from live import Live
from mlx_flash.errors import RefusedError
from mlx_flash.server import loaded
from scripted import saying

anthropic: Any = None


@pytest.fixture(autouse=True, scope="module")
def _library() -> None:
    """Import the client's library here: each worker imports every file, and the tests of this one run in one."""
    global anthropic
    anthropic = pytest.importorskip("anthropic")


HELLO = [{"role": "user", "content": "Tell me about the sea"}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Seoul"}}</tool_call>'
TOOL = {
    "name": "weather",
    "description": "The weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as found:
        yield found


def ask(client: Any, messages: list[Any], streams: bool = False, **fields: Any) -> Any:
    given = {"model": "default_model", "messages": messages, "max_tokens": 8, **fields}
    if not streams:
        return client.messages.create(**given)
    with client.messages.stream(**given) as stream:
        return stream.get_final_message()


@pytest.mark.parametrize("streams", [False, True])
def test_messages_equal_openais(server: Live, client: Any, streams: bool) -> None:
    found = ask(client, HELLO, streams, system="Be brief", extra_body={"temperature": 0.0})
    messages = [{"role": "system", "content": "Be brief"}, *HELLO]
    _, same = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 8})
    assert "".join(block.text for block in found.content) == same["choices"][0]["message"]["content"]
    assert (found.role, found.stop_reason, found.usage.output_tokens) == ("assistant", "max_tokens", 8)
    num_prompt = found.usage.input_tokens + found.usage.cache_read_input_tokens
    assert num_prompt == same["usage"]["prompt_tokens"]
    again = ask(client, HELLO, streams, system=[{"type": "text", "text": "Be brief"}])
    assert again.usage.cache_read_input_tokens > 0


@pytest.mark.parametrize("streams", [False, True])
def test_tools_and_thinking(client: Any, streams: bool) -> None:
    prompts: list[str] = []
    with saying(f"<think>Hm.</think>Wait. {CALL}", prompts):
        found = ask(client, HELLO, streams, tools=[TOOL], max_tokens=300)
    thinking, text, call = found.content
    assert (thinking.thinking, text.text.strip(), call.name, call.input) == (
        "Hm.",
        "Wait.",
        "weather",
        {"city": "Seoul"},
    )
    assert (found.stop_reason, thinking.signature) == ("tool_use", "unsigned")  # without one, clients leave it out
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "Rain"}, {"type": "text", "text": "So?"}]
    messages = [*HELLO, {"role": "assistant", "content": found.content}, {"role": "user", "content": results}]
    with saying("It rains.", prompts):
        found = ask(client, messages, streams, tools=[TOOL], thinking={"type": "disabled"}, max_tokens=300)
    assert (found.content[0].text, found.stop_reason) == ("It rains.", "end_turn")
    assert '"name": "weather"' in prompts[0]
    assert "<think>Hm.</think>Wait." in prompts[-1] and CALL in prompts[-1]
    assert "<|tool|>Rain<|user|>So?" in prompts[-1] and prompts[-1].endswith("-")


@pytest.mark.parametrize("streams", [False, True])
def test_stop_sequences(client: Any, streams: bool) -> None:
    with saying("One. Two. Three."):
        found = ask(client, HELLO, streams, stop_sequences=["Four", "Two"], max_tokens=300)
    assert (found.content[0].text, found.stop_reason, found.stop_sequence) == ("One. ", "stop_sequence", "Two")


def test_tokens_are_counted_without_an_answer(server: Live, client: Any) -> None:
    passes = server.model.counters.num_passes
    found = client.messages.count_tokens(model="default_model", messages=HELLO, system="Be brief", tools=[TOOL])
    assert server.model.counters.num_passes == passes
    answer = ask(client, HELLO, system="Be brief", tools=[TOOL], max_tokens=1)
    assert found.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


def test_errors_have_anthropics_form(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> Any:
        raise RefusedError("late", 500)

    def late(*given: Any) -> Any:
        return fail

    monkeypatch.setattr(loaded, "sampler_of", late)
    with pytest.raises(anthropic.APIStatusError, match="late"):
        ask(client, HELLO, streams=True)
    with pytest.raises(anthropic.InternalServerError, match="late"):
        ask(client, HELLO)

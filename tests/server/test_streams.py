"""Streams as clients that give up soon see them: an event in time, whatever the generation thread does."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

import pytest

from dialects import text_of
from live import TIMEOUT, Live
from mlx_flash.errors import RefusedError
from mlx_flash.server import anthropic, loaded, service
from mlx_flash.server.events import Answers, Failed, Piece
from scripted import saying

HELLO = [{"role": "user", "content": "Tell me about the sea"}]
BEAT_SECONDS, READ_LIMIT, STALL_SECONDS = 0.1, 1.4, 1.8
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 300},
    "/v1/completions": {"prompt": "The sea", "max_tokens": 300},
    "/v1/responses": {"input": "Tell me about the sea", "max_output_tokens": 300},
    "/v1/messages": {"messages": HELLO, "max_tokens": 300},
    "/api/chat": {"messages": HELLO, "options": {"num_predict": 300}},
}


def events(server: Live, path: str, body: dict[str, Any] | None = None, limit: float = TIMEOUT) -> list[dict[str, Any]]:
    """Return the events of a stream. Comments are none. The client gives up if there is none for so many seconds."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=limit)
    sent = {"model": server_name(server), "stream": True, **BODIES[path], **(body or {})}
    connection.request("POST", path, json.dumps(sent), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    assert reply.status == 200
    found, last = [], time.monotonic()
    for line in reply:
        data = line.removeprefix(b"data: ").strip()
        if data.startswith(b"{"):
            assert time.monotonic() - last < limit
            last = time.monotonic()
            found.append(json.loads(data))
    connection.close()
    return found


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "The weather", "parameters": SCHEMA}
TOOLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"type": "function", "function": FUNCTION},
    "/v1/responses": {"type": "function", **FUNCTION},
    "/v1/messages": {"name": "weather", "description": "The weather", "input_schema": SCHEMA},
    "/api/chat": {"type": "function", "function": FUNCTION},
}
ARGUMENTS = {"city": "Seoul {1}", "days": [1, 2], "note": 'a "long" note'}


@pytest.mark.parametrize("path", TOOLS)
def test_a_broken_call_is_text(server: Live, path: str) -> None:
    text = json.dumps({"name": "weather", "arguments": ARGUMENTS})[:-6]
    body = {"tools": [TOOLS[path]]}
    with saying(f"<tool_call>{text}"):
        found = events(server, path, body)
        status, whole = server.post(path, {**BODIES[path], **body, "model": server_name(server), "stream": False})
    assert status == 200 and json.dumps(text)[1:-1] in json.dumps(whole) and text_of(found) == text
    assert not any(f'"{kind}"' in json.dumps([found, whole]) for kind in ("tool_calls", "tool_use", "function_call"))
    reason = {"/v1/chat/completions": '"finish_reason": "stop"', "/v1/messages": '"stop_reason": "end_turn"'}
    assert reason.get(path, "") in json.dumps(found) and reason.get(path, "") in json.dumps(whole)


def server_name(server: Live) -> str:
    return next(iter(server.room.catalog.names()))


def at_once(server: Live) -> dict[str, list[dict[str, Any]]]:
    """Return the events of a stream of each dialect. While the thread works for one client, the others wait, too."""
    with ThreadPoolExecutor(len(BODIES)) as threads:
        futures = {path: threads.submit(events, server, path, None, READ_LIMIT) for path in BODIES}
        return {path: future.result() for path, future in futures.items()}


def stalling(monkeypatch: pytest.MonkeyPatch, name: str, seconds: float, *, fails: bool = False) -> None:
    """Let a function of the generation thread take long once."""
    stock, stalls = getattr(loaded, name), [seconds]

    def slow(*args: Any) -> Any:
        time.sleep(stalls.pop() if stalls else 0)
        if fails:
            raise RefusedError("the prompt is bad.", 400, "messages")
        return stock(*args)

    monkeypatch.setattr(loaded, name, slow)


def test_an_event_comes_in_time(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "BEAT_SECONDS", BEAT_SECONDS)
    with saying("The sea is blue. " * 3), monkeypatch.context() as patch:  # which ends before what it was made in
        stock, calls = loaded.sampler_of, iter(range(1000))

        def sampler_of(*args: Any) -> Any:
            sample = stock(*args)
            return lambda logprobs: (time.sleep(STALL_SECONDS if next(calls) == 40 else 0), sample(logprobs))[1]

        patch.setattr(loaded, "sampler_of", sampler_of)
        stalling(patch, "make_prompt", STALL_SECONDS)  # no event has come yet
        found = at_once(server)
    assert {path: text_of(each).strip() for path, each in found.items()} == dict.fromkeys(
        BODIES, ("The sea is blue. " * 3).strip()
    )
    beats = {
        "/v1/chat/completions": lambda each: each["choices"][0]["delta"] == {},
        "/v1/completions": lambda each: each["choices"][0]["text"] == "",
        "/v1/responses": lambda each: each["type"] == "response.in_progress",
        "/v1/messages": lambda each: each["type"] == "ping",
        "/api/chat": lambda each: each["message"]["content"] == "",
    }
    for path, is_beat in beats.items():
        assert sum(map(is_beat, found[path])) > STALL_SECONDS / READ_LIMIT, path
    numbers = [each["sequence_number"] for each in found["/v1/responses"]]
    assert numbers == list(range(len(numbers)))


def test_claude_code_has_more_than_pings(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives up after a time without other events, before and after the beginning of a message."""
    monkeypatch.setattr(service, "BEAT_SECONDS", BEAT_SECONDS)
    monkeypatch.setattr(anthropic, "NUM_PINGS", 3)
    with saying("The sea is blue."), monkeypatch.context() as patch:
        stalling(patch, "make_prompt", STALL_SECONDS)
        stalling(patch, "processors_of", STALL_SECONDS / 2)
        stalling(patch, "sampler_of", STALL_SECONDS)
        found = events(server, "/v1/messages")
    kinds = [each["type"] for each in found]
    assert next(list(group) for _, group in groupby(kinds)) == ["ping"] * 3
    assert max(len(list(group)) for kind, group in groupby(kinds) if kind == "ping") == 3
    assert kinds.count("message_start") == 1 and kinds.count("message_delta") > 2
    assert text_of(found) == "The sea is blue." and found[-2]["delta"]["stop_reason"] == "end_turn"
    assert (
        found[kinds.index("message_start")]["message"]["usage"]["input_tokens"]
        == 0
        < found[-2]["usage"]["input_tokens"]
    )


def test_a_late_refusal_is_part_of_the_stream(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "BEAT_SECONDS", BEAT_SECONDS)
    stalling(monkeypatch, "make_prompt", 5 * BEAT_SECONDS, fails=True)
    for path, found in at_once(server).items():
        assert "the prompt is bad" in json.dumps(found[-1]), path
        assert "error" in json.dumps(found[-1]) and text_of(found) == "", path


def test_text_before_an_error_is_sent() -> None:
    """Also if the event loop hears of both at once."""

    async def begun() -> None:
        answers = Answers([1, 2], lambda numbers: None)
        for number, event in [(1, Piece("The")), (2, Piece("A")), (1, Failed(RefusedError("odd", 500)))]:
            answers.put(number, event)
        await answers.begin()
        assert [await answers.next() for _ in "ab"] == [(0, Piece("The")), (1, Piece("A"))]

    asyncio.run(begun())


def test_reasoning_grows_in_responses(server: Live) -> None:
    with saying("<think>Let me think about the sea.</think>It is blue."):
        found = events(server, "/v1/responses")
        _, whole = server.post("/v1/responses", {"input": "Tell me about the sea", "max_output_tokens": 300})
    kinds = [each["type"].removeprefix("response.") for each in found]
    parts = [each["delta"] for each in found if each["type"] == "response.reasoning_summary_text.delta"]
    assert len(parts) > 3 and "".join(parts) == "Let me think about the sea."
    ends = ("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done", "output_item.added")
    at = kinds.index(ends[0])
    assert tuple(kinds[at : at + 4]) == ends and kinds.index("reasoning_summary_part.added") < at
    streamed, same = found[-1]["response"]["output"], whole["output"]
    assert [{**item, "id": ""} for item in streamed] == [{**item, "id": ""} for item in same]
    assert streamed[0]["summary"] == [{"type": "summary_text", "text": "".join(parts)}]
    assert streamed[0]["content"] == [{"type": "reasoning_text", "text": "".join(parts)}]


def history(path: str, arguments: Any) -> dict[str, Any]:
    """Return a conversation with a call, its result, and a question."""
    if path == "/v1/responses":
        call = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": arguments}
        result = {"type": "function_call_output", "call_id": "a", "output": "An error."}
        return {"input": [*HELLO, call, result, *HELLO]}
    function = {"name": "weather", "arguments": arguments}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    return {"messages": [*HELLO, call, {"role": "tool", "tool_call_id": "a", "content": "An error."}, *HELLO]}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/api/chat"])
@pytest.mark.parametrize("arguments", ['{"city": "Seo', "[1]", "null", '{"city": "Seoul"}'])
def test_a_broken_call_does_not_block_a_conversation(server: Live, path: str, arguments: str) -> None:
    prompts: list[str] = []
    body = {**BODIES[path], **history(path, arguments), "model": server_name(server), "stream": False}
    with saying("Sorry.", prompts):
        status, reply = server.post(path, body)
    assert status == 200 and "Sorry." in json.dumps(reply)
    if arguments.endswith('l"}'):
        assert (
            '<tool_call>{"name": "weather", "arguments": {"city": "Seoul"}}</tool_call><|tool|>An error.' in prompts[0]
        )
    else:
        assert f'<|assistant|>{{"name": "weather", "arguments": {arguments}<|user|>An error.' in prompts[0]


def test_the_result_of_a_broken_call_may_come_with_the_next_request(server: Live) -> None:
    prompts: list[str] = []
    *first, result, _ = history("/v1/responses", "[1]")["input"]
    with saying("Sorry.", prompts):
        _, reply = server.post("/v1/responses", {"input": first})
        server.post("/v1/responses", {"input": [result], "previous_response_id": reply["id"]})
    assert prompts[1].replace("\n", "").count("<|user|>An error.") == 1

"""Streams as clients that give up soon see them: an event in time, whatever the generation thread does."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from live import Live, live
from mlx_flash.errors import RefusedError
from mlx_flash.server import loaded, replies
from scripted import make_scripted_model, saying

HELLO = [{"role": "user", "content": "Tell me about the sea"}]
BEAT_SECONDS, READ_LIMIT, STALL_SECONDS = 0.1, 0.8, 1.6
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 99},
    "/v1/completions": {"prompt": "The sea", "max_tokens": 99},
    "/v1/responses": {"input": "Tell me about the sea", "max_output_tokens": 99},
    "/v1/messages": {"messages": HELLO, "max_tokens": 99},
    "/api/chat": {"messages": HELLO, "options": {"num_predict": 99}},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(str(make_scripted_model(tmp_path_factory.mktemp("models") / "tiny"))) as running:
        yield running


def events(server: Live, path: str, body: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the events of a stream. Comments are none. The client gives up if there is none for too long."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=READ_LIMIT)
    name = next(iter(server.room.catalog.names()))
    sent = {"model": name, "stream": True, **BODIES[path], **(body or {})}
    connection.request("POST", path, json.dumps(sent), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    assert reply.status == 200
    found, last = [], time.monotonic()
    for line in reply:
        data = line.removeprefix(b"data: ").strip()
        if data.startswith(b"{"):
            assert time.monotonic() - last < READ_LIMIT
            last = time.monotonic()
            found.append(json.loads(data))
    connection.close()
    return found


def text_of(found: list[dict[str, Any]]) -> str:
    """Return the text of an answer in any dialect."""
    text = ""
    for event in found:
        choice = (event.get("choices") or [{}])[0]
        delta = event.get("delta", "") if event.get("type") == "response.output_text.delta" else ""
        block = event.get("delta", {}) if event.get("type") == "content_block_delta" else {}
        message = event.get("message", {}) if "type" not in event else {}
        text += choice.get("text", "") or choice.get("delta", {}).get("content", "") or delta
        text += block.get("text", "") or message.get("content", "")
    return text


def at_once(server: Live) -> dict[str, list[dict[str, Any]]]:
    """Return the events of a stream of each dialect. While the thread works for one client, the others wait, too."""
    with ThreadPoolExecutor(len(BODIES)) as threads:
        futures = {path: threads.submit(events, server, path) for path in BODIES}
        return {path: future.result() for path, future in futures.items()}


def stalling(monkeypatch: pytest.MonkeyPatch, name: str, *, fails: bool = False) -> None:
    """Let a function of the generation thread take long once."""
    stock, stalls = getattr(loaded, name), [STALL_SECONDS]

    def slow(*args: Any) -> Any:
        time.sleep(stalls.pop() if stalls else 0)
        if fails:
            raise RefusedError("the prompt is bad.", 400, "messages")
        return stock(*args)

    monkeypatch.setattr(loaded, name, slow)


def test_an_event_comes_in_time(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "BEAT_SECONDS", BEAT_SECONDS)
    with saying("The sea is blue. " * 3):
        stock, calls = loaded.sampler_of, iter(range(1000))

        def sampler_of(*args: Any) -> Any:
            sample = stock(*args)
            return lambda logprobs: (time.sleep(STALL_SECONDS if next(calls) == 40 else 0), sample(logprobs))[1]

        monkeypatch.setattr(loaded, "sampler_of", sampler_of)
        stalling(monkeypatch, "make_prompt")  # no event has come yet
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


def test_a_late_refusal_is_part_of_the_stream(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "BEAT_SECONDS", BEAT_SECONDS)
    stalling(monkeypatch, "make_prompt", fails=True)
    for path, found in at_once(server).items():
        assert "the prompt is bad" in json.dumps(found[-1]), path
        assert "error" in json.dumps(found[-1]) and text_of(found) == "", path


def test_reasoning_grows_in_responses(server: Live) -> None:
    with saying("<think>Let me think about the sea.</think>It is blue."):
        found = events(server, "/v1/responses")
        _, whole = server.post("/v1/responses", {"input": "Tell me about the sea", "max_output_tokens": 99})
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

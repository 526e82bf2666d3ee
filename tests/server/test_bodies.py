"""Bodies that real programs send, with words of ours in the place of theirs. Each gets an answer, whole and streamed.

``bodies/PROGRAM/*.json`` are recorded, ``bodies/MANIFEST.json`` says with which version, and to which path they go.
``bodies/ollama/*.json`` are those of clients of Ollama's API, each with its path and the answer that it gets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dialects import events_of, text_of
from live import Live, live
from mlx_flash import FlashConfig
from mlx_flash.server.catalog import Source
from scripted import saying

BODIES = Path(__file__).parent / "bodies"
PATHS: dict[str, str] = {
    name: entry["path"] for name, entry in json.loads((BODIES / "MANIFEST.json").read_text()).items()
}
LAST = {
    "/v1/chat/completions": '"finish_reason": "stop"',
    "/v1/responses": '"status": "completed"',
    "/v1/messages": '"stop_reason": "end_turn"',
}
OF_OLLAMA = {path.stem: json.loads(path.read_text()) for path in BODIES.glob("ollama/*.json")}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
SAID = {"text": "Aye.", "thinking": "<think>Hm.</think>Aye.", "json": '{"age": 7}', "call": CALL, "openai call": CALL}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Live]:
    with live(Source(name="tiny", base=str(folder), config=FlashConfig(ram_budget_gb=2.0, telemetry=False))) as running:
        yield running


@pytest.mark.parametrize("name", PATHS)
def test_bodies_of_programs_are_answered(server: Live, name: str) -> None:
    path, body = PATHS[name], json.loads((BODIES / f"{name}.json").read_text())
    for streams in (False, True):
        with saying("It rains."):
            status, reply = server.post(path, {**body, "stream": streams})
        assert status == 200, reply
        assert text_of(reply) == "It rains."
        assert LAST[path] in ("\n".join(reply) if streams else json.dumps(reply))


@pytest.mark.parametrize("name", sorted(OF_OLLAMA))
def test_bodies_of_clients_of_ollama_are_answered(server: Live, name: str) -> None:
    sent = OF_OLLAMA[name]
    kind = sent["answer"]
    with saying(SAID.get(kind, "")):
        status, reply = server.post(sent["path"], sent["body"])
    assert status == 200, reply
    if kind == "facts":  # as VS Code reads them
        info = reply["model_info"]
        assert info["general.basename"] == "tiny" and info[f"{info['general.architecture']}.context_length"] == 32768
        assert {"completion", "tools"} <= set(reply["capabilities"]) and reply["details"]["family"]
        return
    if kind == "openai call":
        choices = [choice for event in events_of(reply) for choice in event["choices"]]
        found = [call["function"] for choice in choices for call in choice["delta"].get("tool_calls", ())]
        assert found[0]["name"] == "weather"
        assert json.loads("".join(call.get("arguments", "") for call in found)) == {"city": "Oslo"}
        return
    parts = events_of(reply) if isinstance(reply, list) else [reply]
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True] and parts[-1]["eval_count"] > 0
    assert text_of(parts).strip() == {"call": "", "json": SAID["json"]}.get(kind, "Aye.")
    messages = [part.get("message", part) for part in parts]
    reasoning = "".join(message.get("thinking") or "" for message in messages)
    assert reasoning == ("Hm." if kind == "thinking" else "")
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert [(call["name"], call["arguments"]) for call in calls] == [("weather", {"city": "Oslo"})] * (kind == "call")

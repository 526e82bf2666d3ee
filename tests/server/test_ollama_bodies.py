"""Requests that clients of Ollama's API send, with texts of our own. `tests/server/bodies/ollama` has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from live import Live, live
from mlx_flash import FlashConfig
from mlx_flash.server.catalog import Source
from scripted import make_scripted_model, saying

BODIES = {path.stem: json.loads(path.read_text()) for path in Path(__file__).parent.glob("bodies/ollama/*.json")}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
SAID = {"text": "Aye.", "thinking": "<think>Hm.</think>Aye.", "json": '{"age": 7}', "call": CALL, "openai call": CALL}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = make_scripted_model(tmp_path_factory.mktemp("models") / "tiny")
    with live(Source(name="tiny", base=str(folder), config=FlashConfig(ram_budget_gb=2.0, telemetry=False))) as running:
        yield running


def answer_of(reply: Any) -> tuple[str, str, list[Any]]:
    """Return text, reasoning and calls of a reply of Ollama's, whole or in lines."""
    parts = [json.loads(line) for line in reply] if isinstance(reply, list) else [reply]
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True] and parts[-1]["eval_count"] > 0
    messages = [
        part.get("message") or {"content": part["response"], "thinking": part.get("thinking")} for part in parts
    ]
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    text, reasoning = ("".join(message.get(key) or "" for message in messages) for key in ("content", "thinking"))
    return text, reasoning, calls


@pytest.mark.parametrize("name", sorted(BODIES))
def test_body_of_a_client_is_answered(server: Live, name: str) -> None:
    sent = BODIES[name]
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
        deltas = [json.loads(line[6:])["choices"] for line in reply if line.startswith("data: {")]
        found = [
            call["function"] for choices in deltas for each in choices for call in each["delta"].get("tool_calls", ())
        ]
        assert found[0]["name"] == "weather"
        assert json.loads("".join(call.get("arguments", "") for call in found)) == {"city": "Oslo"}
        return
    text, reasoning, calls = answer_of(reply)
    assert text.strip() == {"call": "", "json": SAID["json"]}.get(kind, "Aye.")
    assert reasoning == ("Hm." if kind == "thinking" else "")
    assert [(call["name"], call["arguments"]) for call in calls] == [("weather", {"city": "Oslo"})] * (kind == "call")

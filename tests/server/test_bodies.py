"""Bodies that real programs send, with words of ours in the place of theirs. Each gets an answer, whole and streamed.

``bodies/PROGRAM/*.json`` are recorded, ``bodies/MANIFEST.json`` says with which version, and to which path they go.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from live import Live, live
from scripted import make_scripted_model, saying

BODIES = Path(__file__).parent / "bodies"
PATHS: dict[str, str] = {
    name: entry["path"] for name, entry in json.loads((BODIES / "MANIFEST.json").read_text()).items()
}
LAST = {
    "/v1/chat/completions": '"finish_reason": "stop"',
    "/v1/responses": '"status": "completed"',
    "/v1/messages": '"stop_reason": "end_turn"',
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(str(make_scripted_model(tmp_path_factory.mktemp("models") / "tiny"))) as running:
        yield running


def answer_of(path: str, reply: Any) -> str:
    """Return the text of a reply; of a stream, that of its deltas."""
    events = [json.loads(line[6:]) for line in reply if line.startswith("data: {")] if isinstance(reply, list) else None
    if path == "/v1/chat/completions":
        if events is None:
            return str(reply["choices"][0]["message"]["content"])
        return "".join(each["choices"][0]["delta"].get("content") or "" for each in events if each["choices"])
    if path == "/v1/messages":
        if events is None:
            return "".join(block.get("text", "") for block in reply["content"])
        return "".join(each["delta"].get("text", "") for each in events if each["type"] == "content_block_delta")
    if events is None:
        return "".join(part["text"] for item in reply["output"] for part in item["content"])
    return "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta")


@pytest.mark.parametrize("name", PATHS)
def test_bodies_of_programs_are_answered(server: Live, name: str) -> None:
    path, body = PATHS[name], json.loads((BODIES / f"{name}.json").read_text())
    for streams in (False, True):
        with saying("It rains."):
            status, reply = server.post(path, {**body, "stream": streams})
        assert status == 200, reply
        assert answer_of(path, reply) == "It rains."
        assert LAST[path] in ("\n".join(reply) if streams else json.dumps(reply))

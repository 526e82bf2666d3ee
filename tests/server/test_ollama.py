"""The server as Ollama's clients use it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from live import Live, live
from mlx_flash import FlashConfig
from mlx_flash.server.catalog import Source
from mlx_flash.server.ollama import seconds_of
from scripted import saying
from waiting import eventually

ollama: Any = None


@pytest.fixture(autouse=True, scope="module")
def _library() -> None:
    """Import the client's library here: each worker imports every file, and the tests of this one run in one."""
    global ollama
    ollama = pytest.importorskip("ollama")


CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Tell me about the sea"}]


@pytest.fixture(scope="module")
def server(plain: str) -> Iterator[Live]:
    config = FlashConfig(ram_budget_gb=2.0, telemetry=False)
    with live(Source(name="sea", base=plain, config=config)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[Any]:
    with closing(ollama.Client(server.url)) as found:
        yield found


def reference(server: Live, **fields: Any) -> str:
    return str(server.post(CHAT, {"messages": HELLO, **fields})[1]["choices"][0]["message"]["content"])


@pytest.mark.parametrize("name", ["sea", "sea:latest"])
def test_chats_equal_openais(server: Live, client: Any, name: str) -> None:
    options = {"num_predict": 8, "num_ctx": 4096, "num_thread": 3, "num_gpu": 99}
    reply = client.chat(name, HELLO, options=options)
    assert reply.message.content == reference(server, max_tokens=8)
    assert (reply.model, reply.done, reply.done_reason, reply.eval_count) == (name, True, "length", 8)
    assert 0 < reply.prompt_eval_duration + reply.eval_duration <= reply.total_duration < 60e9
    parts = list(client.chat(name, HELLO, options=options, stream=True))
    assert "".join(part.message.content for part in parts) == reply.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].prompt_eval_count == reply.prompt_eval_count > 0


def test_options_are_mapped(server: Live, client: Any) -> None:
    shared = {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 7, "presence_penalty": 0.5}
    shared |= {"frequency_penalty": 0.25}
    options = {**shared, "num_predict": 12, "repeat_penalty": 1.3, "repeat_last_n": 5}
    contexts = ("repetition_context_size", "presence_context_size", "frequency_context_size")
    same = {**shared, "max_tokens": 12, "repetition_penalty": 1.3, **dict.fromkeys(contexts, 5)}
    found = client.chat("sea", HELLO, options=options).message.content
    assert found == reference(server, **same) != reference(server, max_tokens=12)
    whole = client.chat("sea", HELLO, options={"num_predict": 12}).message.content
    stop = next(whole[i : i + 2] for i in range(2, len(whole)) if "\ufffd" not in whole[i : i + 2])
    stopped = client.chat("sea", HELLO, options={"num_predict": 12, "stop": [stop]})
    assert stopped.message.content == whole[: whole.index(stop)] and stopped.done_reason == "stop"


def test_generate(server: Live, client: Any) -> None:
    text = HELLO[0]["content"]
    assert client.generate("sea", text, options={"num_predict": 6}).response == reference(server, max_tokens=6)
    raw = server.post("/v1/completions", {"prompt": text, "max_tokens": 6})[1]["choices"][0]["text"]
    parts = list(client.generate("sea", text, raw=True, options={"num_predict": 6}, stream=True))
    assert "".join(part.response for part in parts) == raw
    assert client.generate("sea", "x", format="json", options={"num_predict": 4}).response.lstrip().startswith("{")
    system = [{"role": "system", "content": "Be brief"}, *HELLO]
    found = client.generate("sea", text, system="Be brief", options={"num_predict": 6}).response
    assert found == client.chat("sea", system, options={"num_predict": 6}).message.content


def test_logprobs(client: Any) -> None:
    reply = client.chat("sea", HELLO, options={"num_predict": 3}, logprobs=True, top_logprobs=2)
    assert len(reply.logprobs) == 3
    assert all(token.logprob == token.top_logprobs[0].logprob for token in reply.logprobs)


def test_models_are_listed_shown_and_running(server: Live, client: Any, plain: str) -> None:
    (model,) = client.list().models
    assert model.model == "sea:latest" and model.details.family == "llama" and len(model.digest) == 64
    assert model.size == sum(path.stat().st_size for path in Path(plain).glob("*.safetensors"))
    shown = client.show("sea:latest")
    assert shown.details.family == "llama" and shown.capabilities[0] == "completion"
    assert (shown.modelinfo["general.basename"], shown.modelinfo["llama.context_length"]) == ("sea", 32768)
    assert shown.modelinfo["llama.block_count"] == 3
    empty = {"system": "", "template": "", "verbose": False, "options": None}  # as Ollama's own command sends them
    for names in ({"model": "sea", "name": ""}, {"model": "", "name": "sea"}):
        status, reply = server.post("/api/show", {**names, **empty})
        assert status == 200 and reply["model_info"] == shown.modelinfo
    assert server.post("/api/show", {"model": "", "name": ""})[0] == 404
    with pytest.raises(ollama.ResponseError, match="no model 'lake' here") as found:
        client.show("lake:latest")
    assert found.value.status_code == 404
    client.chat("sea", HELLO, options={"num_predict": 1})
    (running,) = client.ps().models
    assert running.model == "sea:latest" and running.context_length > 0 and running.size_vram > 0
    status, version = server.get("/api/version")
    assert status == 200 and version["version"].count(".") == 2


def test_models_are_loaded_and_unloaded(server: Live, client: Any) -> None:
    assert client.generate("sea").done_reason == "load" and len(client.ps().models) == 1
    assert client.generate("sea", keep_alive=0).done_reason == "unload"
    eventually(lambda: not client.ps().models)
    assert client.chat("sea", keep_alive=0).done_reason == "unload" and not client.ps().models
    parts = list(client.chat("sea", HELLO, options={"num_predict": 2}, stream=True, keep_alive="1h30m"))
    assert parts[0].message.content == "" and parts[-1].load_duration > 0
    (running,) = client.ps().models
    assert 5000 < running.expires_at.timestamp() - time.time() < 5401
    _, lines = server.post("/api/generate", {"model": "sea", "keep_alive": "-1s"})
    assert json.loads(lines[-1])["done"] is True
    assert client.ps().models[0].expires_at.timestamp() - time.time() > 1e9
    client.chat("sea", HELLO, options={"num_predict": 2}, keep_alive=0)
    eventually(lambda: not client.ps().models)


@pytest.mark.parametrize("keep_alive", [1e308, 10**18, "999999999999999h", threading.TIMEOUT_MAX])
def test_a_model_that_stays_longer_than_a_thread_can_wait(client: Any, keep_alive: Any) -> None:
    """The generation thread died of it, and with it the server."""
    client.generate("sea", keep_alive=keep_alive)
    assert client.ps().models[0].expires_at.timestamp() - time.time() > 1e9
    assert client.chat("sea", HELLO, options={"num_predict": 1}).done_reason == "length"


def test_keep_alive_begins_at_the_end_of_the_answer(client: Any) -> None:
    began = time.time()
    reply = client.chat("sea", HELLO, options={"num_predict": 400}, keep_alive="100s")
    seconds = 100 + (reply.prompt_eval_duration + reply.eval_duration) / 1e9
    eventually(lambda: client.ps().models[0].expires_at.timestamp() - began >= seconds, 60)
    client.generate("sea", keep_alive=-1)


def test_loading_is_shown_by_status_lines(server: Live, client: Any) -> None:
    client.generate("sea", keep_alive=0)
    eventually(lambda: not client.ps().models)
    _, lines = server.post("/api/chat", {"model": "sea", "messages": HELLO, "options": {"num_predict": 2}})
    parts = [json.loads(line) for line in lines]
    assert parts[0]["status"] == "loading" and parts[0]["message"]["content"] == "" and not parts[0]["done"]
    assert any(part.get("status") == "prompt" and part["total"] > 0 for part in parts)


def test_unknown_paths_have_ollamas_errors(server: Live, client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="Not Found"):
        client.pull("sea")
    assert server.get("/api/chat") == (405, {"error": "Method Not Allowed"})
    assert server.get("/api/nothing") == (404, {"error": "Not Found"})


def test_thoughts_are_part_of_a_conversation(folder: Path) -> None:
    """test_tolerance.py and test_streams.py have those that are answered, and calls."""
    prompts: list[str] = []
    told = [*HELLO, {"role": "assistant", "content": "Wait.", "thinking": "Hm."}, *HELLO]
    with live(str(folder)) as server, saying("It rains.", prompts), closing(ollama.Client(server.url)) as client:
        assert client.chat(str(folder), told, think=False).message.content == "It rains."
        client.chat(str(folder), told)
    assert all("<think>Hm.</think>Wait." in prompt for prompt in prompts)
    assert [prompt.strip().endswith("-") for prompt in prompts] == [True, False]


def test_durations() -> None:
    found = [seconds_of(text) for text in ("5m", "1h30m", "-1", "0", "500ms", "-1h", "1.5s", 3, 0.25)]
    assert found == [300, 5400, -1, 0, 0.5, -3600, 1.5, 3, 0.25]
    for text in ("", "m", "5 m", "5x", "1h-1m"):
        with pytest.raises(ValueError, match="duration"):
            seconds_of(text)

"""Models that Ollama's clients pull, create, copy and delete."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from huggingface_hub import constants

from hub import Hub, serving
from live import Live, live
from mlx_flash import FlashConfig
from mlx_flash.modelfile.parse import models_folder, named_models, read_modelfile
from mlx_flash.server.access import Access
from mlx_flash.server.catalog import Source
from scripted import saying

ollama: Any = None


@pytest.fixture(autouse=True, scope="module")
def _library() -> None:
    global ollama
    ollama = pytest.importorskip("ollama")


HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Live]:
    with live(Source(name="sea", base=str(folder), config=FlashConfig(ram_budget_gb=2.0, telemetry=False))) as running:
        yield running


@pytest.fixture
def client(server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of a server that has no names yet, and an empty cache of Hugging Face's."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub").mkdir()
    for name, value in {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    with closing(ollama.Client(server.url)) as found:
        yield found


def test_create_copy_and_delete(server: Live, client: Any, folder: Path) -> None:
    own = {"system": 'Be "brief".\nAlways.', "parameters": {"temperature": 0.25, "stop": ["ye"], "num_thread": 4}}
    assert client.create("lake:latest", from_="sea", **own).status == "success"
    assert list(named_models()) == ["lake"] and models_folder().stat().st_mode & 0o077 == 0
    made = read_modelfile(named_models()["lake"])
    assert (made.base, made.system, made.stop) == (str(folder), own["system"], ("ye",))
    prompts: list[str] = []
    with saying("Aye.", prompts):
        assert client.chat("lake", HELLO).message.content == "A"
    assert own["system"] in prompts[-1]
    assert "temperature 0.25" in client.show("lake:latest").parameters
    assert "lake:latest" in [model.model for model in client.list().models]
    client.copy("lake", "pond")
    lines = client.create("lake", from_="pond", system="Be long.", messages=HELLO, stream=True)
    assert [part.status for part in lines] == ["writing manifest", "success"]
    found, copied = read_modelfile(named_models()["lake"]), read_modelfile(named_models()["pond"])
    assert (found.system, found.stop, found.messages[0].content) == ("Be long.", ("ye",), "Hello")
    assert copied.system == own["system"]
    assert client.chat("lake", HELLO, options={"num_predict": 1}).done
    with saying("Aye.", prompts):
        client.chat("lake", HELLO)
    assert "Be long." in prompts[-1] and "brief" not in prompts[-1]  # the model in memory got the new settings
    with saying("Aye.", prompts):
        context = client.generate("lake", "Ahoy").context
        client.generate("lake", "Again", context=context)
    assert prompts[-1].startswith(prompts[-2]) and prompts[-1].count("Be long.") == 2
    assert prompts[-2].count("Hello") == prompts[-1].count("Hello") == 1
    client.delete("lake:latest")
    assert list(named_models()) == ["pond"] and folder.is_dir()
    for call in (lambda: client.show("lake"), lambda: client.delete("lake"), lambda: client.copy("lake", "x")):
        with pytest.raises(ollama.ResponseError, match="no model 'lake'") as error:
            call()
        assert error.value.status_code == 404


def test_a_modelfile_is_created(server: Live, client: Any, tmp_path: Path) -> None:
    text = 'FROM sea\nSYSTEM "Speak."\nPARAMETER num_ctx 128\nPARAMETER mirostat 1'
    status, lines = server.post("/api/create", {"name": "lake", "modelfile": text, "license": ["free", "open"]})
    assert status == 200 and lines[-1] == '{"status": "success"}' and "mirostat has no effect" in "".join(lines)
    made = read_modelfile(named_models()["lake"])
    assert (made.system, made.licenses, made.flash) == ("Speak.", ("free", "open"), {"context_length": "128"})
    with saying("Aye."):
        assert client.chat("lake", HELLO).message.content == "Aye."


WRONG: list[tuple[str, dict[str, Any], int, str]] = [
    ("create", {"model": "../lake", "from": "sea"}, 400, "is no name for a model"),
    ("create", {"model": "/tmp/lake", "from": "sea"}, 400, "is no name for a model"),
    ("create", {"model": "..", "from": "sea"}, 400, "is no name for a model"),
    ("create", {"model": "a\nb", "from": "sea"}, 400, "model"),
    ("create", {"model": "sea", "from": "sea"}, 403, "command line"),
    ("create", {"model": "default_model", "from": "sea"}, 403, "command line"),
    ("create", {"model": "lake"}, 400, "FROM has no value"),
    ("create", {"from": "sea"}, 400, "model is missing"),
    ("create", {"model": "lake", "from": "sea", "files": {"a": "sha256:0"}}, 400, "files"),
    ("create", {"model": "lake", "from": "sea", "quantize": "q4_0"}, 400, "quantize"),
    ("create", {"model": "lake", "from": "sea", "parameters": {"temperature": "hot"}}, 400, "temperature"),
    ("create", {"model": "lake", "from": "sea", "parameters": {"x\nFLASH_KV_DIRECTORY /tmp/x": 1}}, 400, "parameters"),
    ("create", {"model": "lake", "from": "sea", "system": 'a\n"""\nADAPTER /tmp'}, 400, "ends a text"),
    ("create", {"model": "lake", "from": "sea", "modelfile": "FROM x\nFLASH_KV_DIRECTORY /tmp/x"}, 400, "FLASH"),
    ("create", {"model": "lake", "from": "sea", "system": "x" * (1 << 20 | 1)}, 400, "system"),
    ("copy", {"source": "sea", "destination": "../x"}, 400, "is no name for a model"),
    ("copy", {"source": "sea"}, 400, "destination"),
    ("push", {"model": "sea"}, 501, "/api/push"),
    ("blobs/sha256:0", {}, 501, "/api/blobs"),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), WRONG)
def test_wrong_requests_write_nothing(
    server: Live, client: Any, tmp_path: Path, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    found, reply = server.post(f"/api/{path}", {"stream": False, **body})
    assert found == status and words in reply["error"]
    assert not (tmp_path / "config").exists()


def test_weights_and_names_of_the_command_line_stay(server: Live, client: Any, folder: Path) -> None:
    for name, words in (("sea", "command line"), (str(folder), "weights stay"), ("default_model", "command line")):
        with pytest.raises(ollama.ResponseError, match=words) as error:
            client.delete(name)
        assert error.value.status_code == 403
    assert (folder / "config.json").is_file()
    with pytest.raises(ollama.ResponseError) as error:
        client._request_raw("HEAD", "/api/blobs/sha256:0")
    assert error.value.status_code == 404


def test_models_are_not_managed_without_a_key_from_other_machines(folder: Path) -> None:
    with live(str(folder), access=Access(is_open=True)) as server:
        for path, body in {"pull": {"model": "a/b"}, "create": {"model": "a", "from": "b"}}.items():
            status, reply = server.post(f"/api/{path}", body)
            assert status == 403 and "--no-auth" in reply["error"]


def test_a_model_that_is_here_is_not_pulled(server: Live, client: Any) -> None:
    assert [part.status for part in client.pull("sea:latest", stream=True)] == ["success"]
    client.copy("sea", "lake")
    assert client.pull("lake").status == "success"


def test_a_model_that_cannot_be_reached(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="HF_HUB_OFFLINE is set") as error:
        client.create("lake", from_="some/nothing")
    assert error.value.status_code == 404 and not named_models()
    with pytest.raises(ollama.ResponseError, match="is a name of Ollama"):
        list(client.pull("llama3.2:3b", stream=True))


def test_a_model_is_pulled(client: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models_folder().mkdir(parents=True)
    (models_folder().parent / "config.toml").write_text('[models]\nmine = "some/model"\n')
    with serving(folder) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        parts = list(client.pull("hf.co/some/model", stream=True))
        assert parts[0].status == "pulling manifest" and parts[-1].status == "success"
        counts = [(part.completed, part.total) for part in parts if part.completed is not None]
        total = sum(path.stat().st_size for path in folder.iterdir())
        assert counts == sorted(counts) and counts[-1] == (total, total)
        digests = {part.digest for part in parts if part.completed is not None}  # others may repeat the first line
        assert len(digests) == 1 and all(digests)
        Hub.requests = []
        assert [part.status for part in client.pull("some/model", stream=True)] == ["success"] and not Hub.requests
        assert client.pull("mine").status == "success" and not Hub.requests
        for name in ("some/model", "mine:latest"):
            with saying("Aye."):
                assert client.chat(name, HELLO).message.content == "Aye."
        assert client.create("lake", from_="mine").status == "success"
        assert read_modelfile(named_models()["lake"]).base == "some/model"


def test_a_client_that_leaves_ends_its_download(client: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def answer(self: Any, *, with_body: bool) -> None:
        begun.set()
        goes_on.wait(30)

    monkeypatch.setattr(Hub, "_answer", answer)
    with serving(folder) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        parts = client.pull("some/model", stream=True)
        assert next(parts).status == "pulling manifest"
        assert begun.wait(30)
        (process,) = (child for child in psutil.Process().children() if "some/model" in child.cmdline())
        parts.close()
        assert process.wait(10) != 0
        goes_on.set()

"""``mlx-flash plan`` of a repository that is not downloaded: from headers, served by a local server."""

from __future__ import annotations

import hashlib
import io
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants

from mlx_flash import CheckpointNotFoundError
from mlx_flash.commands import preview as module
from mlx_flash.commands.arguments import parse_arguments
from mlx_flash.commands.plan import plan
from mlx_flash.commands.preview import is_remote, preview
from mlx_flash.storage import probe
from mlx_flash.storage.safetensors import read_checkpoint
from models import LLAMA, save

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """The parts of Hugging Face's server that are asked for a model. Counts the bytes of shards that it sends."""

    sent = 0

    def __init__(self, folder: Path, *args: Any) -> None:
        self.folder = folder
        super().__init__(*args)

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        parts = self.path.partition("?")[0].split("/")
        if parts[1:3] == ["api", "models"]:
            names = sorted(path.name for path in self.folder.iterdir())
            files = [{"rfilename": name, "size": (self.folder / name).stat().st_size} for name in names]
            body = json.dumps({"id": "some/model", "sha": COMMIT, "siblings": files}).encode()
        elif parts[1:4] == ["some", "model", "resolve"] and (self.folder / parts[-1]).exists():
            body = (self.folder / parts[-1]).read_bytes()
        else:
            self.send_error(404)
            return
        etag = hashlib.sha1(body).hexdigest()
        wanted = self.headers.get("Range")
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            total, body = len(body), body[int(first) : int(last or len(body)) + 1]
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(body) - 1}/{total}")
        for name, value in {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Content-Length": len(body)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if with_body:
            Hub.sent += len(body) if parts[-1].endswith(".safetensors") else 0
            self.wfile.write(body)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model that the hub has, whose tensors are not aligned."""
    found = save(tmp_path / "model", LLAMA, num_shards=2, header_shift=3)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, found))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(module, "HfApi", lambda: HfApi(endpoint=endpoint, token=False))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(probe, "SAMPLE_BYTES", 1 << 20)
    Hub.sent = 0
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def planned(model: object) -> dict[str, Any]:
    out = io.StringIO()
    words = ["plan", "--model", str(model), "--ram-budget-gb", "min", "--budgets", "--json"]
    assert plan(parse_arguments(words), out) == 0
    return dict(json.loads(out.getvalue()))


def test_stand_in_has_the_headers_of_the_model(folder: Path) -> None:
    with preview("some/model") as found:
        assert read_checkpoint(found).tensors.keys() == read_checkpoint(folder).tensors.keys()
        for name, tensor in read_checkpoint(found).tensors.items():
            real = read_checkpoint(folder).tensors[name]
            assert (tensor.dtype, tensor.shape) == (real.dtype, real.shape)
            assert (tensor.extent.offset, tensor.extent.nbytes) == (real.extent.offset, real.extent.nbytes)
        assert (found / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert not found.exists()


def test_plan_is_that_of_the_downloaded_model(folder: Path) -> None:
    remote, local = planned("some/model"), planned(folder)
    for name in ("model_bytes", "resident_bytes", "num_layers", "kv_bytes_per_token"):
        assert remote[name] == local[name]
    assert remote["streaming"]["read_bytes"] == local["streaming"]["read_bytes"] > 0
    assert len(remote["budgets"]) > 1
    assert 0 < Hub.sent <= 2 * 100_001 < sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("name", ["some/missing", "other/model"])
def test_missing_repository_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (folder / "model-00001-of-00002.safetensors").unlink()
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"no header")
    with pytest.raises(CheckpointNotFoundError, match="Hugging Face has no such model here"), preview(name):
        pass


def test_folders_are_not_remote(tmp_path: Path) -> None:
    (tmp_path / "some" / "model").mkdir(parents=True)
    assert not is_remote(str(tmp_path / "some" / "model"))
    assert not is_remote("./some/model") and not is_remote("model")
    assert is_remote("some/model")

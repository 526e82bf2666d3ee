"""mlx-vlm's own programs under the patch: what they print and answer equals stock's, with and without a picture."""

from __future__ import annotations

import base64
import io
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

mlx_vlm = pytest.importorskip("mlx_vlm")
testclient = pytest.importorskip("fastapi.testclient")

from mlx_vlm import chat, server  # noqa: E402
from mlx_vlm.generate import batch_generate, dispatch  # noqa: E402

from mlx_flash import FlashConfig, apply_flash_patch  # noqa: E402
from mlx_flash.engine.lifecycle import ModelManager  # noqa: E402
from tiny_vlms import picture, save, write_processor  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")  # by the tiny model

CONFIG = FlashConfig(ram_budget_gb="min", context_length=1024, prefill_step_size=512, telemetry=False)
CHAT = "/v1/chat/completions"
NUM_LETTERS = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_processor(save(tmp_path_factory.mktemp("models") / "model", "qwen2_vl"))


@pytest.fixture(scope="module")
def png(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return picture(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    for model in ModelManager.of_process().running:
        model.close()


def both(run: Callable[[], Any]) -> tuple[Any, Any]:
    """Return what a program gives stock, and under the patch, where it has streamed."""
    stock = run()
    with apply_flash_patch(CONFIG):
        streamed = run()
        assert any(model.counters.num_passes for model in ModelManager.of_process().running)
    return stock, streamed


@pytest.mark.parametrize("has_picture", [False, True])
def test_generate(
    folder: Path, png: Path, has_picture: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompt", "one two", "--max-tokens", "8", "--temperature", "0", "--no-verbose"]
    options += ["--image", str(png)] if has_picture else []
    monkeypatch.setattr(sys, "argv", ["mlx_vlm.generate", "--model", str(folder), *options])

    def run() -> str:
        dispatch.main()
        return capsys.readouterr().out

    stock, streamed = both(run)
    assert stock.strip() and stock == streamed


def test_chat(folder: Path, png: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The second answer is after a picture, and the third uses what the chat kept of the second."""
    options = ["--temperature", "0", "--max-tokens", "8"]
    monkeypatch.setattr(sys, "argv", ["mlx_vlm.chat", "--model", str(folder), *options])

    def run() -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"hello\n/image {png}\nwhat is it?\nand now?\n/exit\n"))
        chat.main()
        return capsys.readouterr().out

    stock, streamed = both(run)
    assert stock == streamed and "Goodbye" in stock and "Error" not in stock


def test_server(folder: Path, png: Path) -> None:
    url = f"data:image/png;base64,{base64.b64encode(png.read_bytes()).decode()}"

    def asked(text: str, has_picture: bool, stream: bool) -> dict[str, Any]:
        parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]
        messages = [{"role": "user", "content": parts[: 1 + has_picture]}]
        options = {"max_tokens": 8, "temperature": 0, "stream": stream}
        return {"model": str(folder), "messages": messages, **options}

    def answer(client: Any, request: dict[str, Any]) -> str:
        text = client.post(CHAT, json=request).raise_for_status().text
        if not request["stream"]:
            return str(json.loads(text)["choices"][0]["message"]["content"])
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    def run() -> list[str]:
        with testclient.TestClient(server.app) as client:
            found = [answer(client, asked("what", picture, stream)) for picture in (0, 1) for stream in (0, 1)]
            with ThreadPoolExecutor(2) as pool:  # computed as a batch
                requests = [asked(text, picture, False) for picture in (0, 1) for text in ("what", "and a longer one")]
                for i in (0, 2):
                    found += pool.map(lambda request: answer(client, request), requests[i : i + 2])
            server.unload_model_sync()
        return found

    stock, streamed = both(run)
    assert all(stock) and stock == streamed


class Letters:
    """Takes the tokens that the tiny tokenizer lacks out of a choice."""

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        return mx.where(mx.arange(logits.shape[-1]) < NUM_LETTERS, logits, -mx.inf)

    def clone(self) -> Letters:
        return self


@pytest.mark.parametrize("num_pictures", [0, 2, 3])
def test_batches(folder: Path, png: Path, num_pictures: int) -> None:
    """Pictures of one shape make a batch, those of another and text alone make others."""
    prompts = ["what is it", "and this, a longer question of several words", "third"]
    pictures = [str(png), str(picture(png.parent, (112, 84))), str(png)][:num_pictures] or None

    def run() -> list[str]:
        model, processor = mlx_vlm.load(str(folder))
        options: dict[str, Any] = {"max_tokens": [8, 12, 5], "logits_processors": [Letters()]}
        found: list[str] = batch_generate(model, processor, images=pictures, prompts=prompts, **options).texts
        return found

    stock, streamed = both(run)
    assert all(stock) and stock == streamed

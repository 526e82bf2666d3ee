"""Pictures in requests: what is refused, and answers equal to mlx-vlm's in every dialect."""

from __future__ import annotations

import base64
import json
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dialects import text_of
from live import Live, live
from mlx_flash import FlashConfig, RefusedError
from mlx_flash.server import request as requests
from mlx_flash.server.catalog import Source
from mlx_flash.server.ollama import shown
from mlx_flash.server.request import GenerationRequest, content_of, data_url, decoded, picture_part, with_pictures

pytestmark = pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")  # by the tiny model

CHAT = "/v1/chat/completions"
PNG = b"\x89PNG\r\n\x1a\n" + b"rest"
TEXT = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{TEXT}"


def asked(*sources: str, role: str = "user") -> GenerationRequest:
    parts = [picture_part(source, f"field.{i}") for i, source in enumerate(sources)]
    content = content_of([*parts, {"type": "text", "text": "What?"}])
    return GenerationRequest(model="m", messages=[{"role": role, "content": content}])


def test_pictures_leave_messages_and_their_places_stay() -> None:
    found = with_pictures(asked(URL, data_url(TEXT)))
    assert found.messages is not None and [*decoded(found.pictures)] == [PNG, PNG]
    assert found.messages[0]["content"] == [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "What?"}]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("https://example.com/cat.png", r"this server fetches nothing"),
        ("file:///cat.png", r"this server fetches nothing"),
        ("x" * 31_000_000, r"this server fetches nothing"),
        ("data:" + ";a=a" * 50 + ";base64,aGk=", r"is a data URL, data:image/TYPE;base64,"),
        ("data:image/png,abc", r"is a data URL, data:image/TYPE;base64,"),
        ("data:text/plain;base64,aGk=", r"is a data URL, data:image/TYPE;base64,"),
        ("data:image/png;base64,a*b", r"is not base64"),
    ],
)
def test_what_is_no_picture_or_elsewhere_is_refused(source: str, words: str) -> None:
    with pytest.raises(RefusedError, match=words) as found:
        with_pictures(asked(source))
    assert found.value.status == 400 and found.value.field == "field.0"


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RefusedError, match="17 pictures, 16 are allowed"):
        with_pictures(asked(*[URL] * 17))
    with pytest.raises(RefusedError, match="pictures belong to messages of the user"):
        with_pictures(asked(URL, role="assistant"))
    monkeypatch.setattr(requests, "MAX_PICTURE_BYTES", 20)
    words = "the pictures of the request have 24 bytes up to this one, 20 are allowed"
    with pytest.raises(RefusedError, match=words) as found:
        with_pictures(asked(URL, URL, "data:broken"))
    assert (found.value.status, found.value.field) == (413, "field.1")
    monkeypatch.setattr(requests, "MAX_PICTURE_BYTES", 9)
    with pytest.raises(RefusedError, match="12 bytes up to this one, 9 are allowed"):
        with_pictures(asked(URL))


def test_refused_pictures_take_no_memory() -> None:
    """The head of a data URL is short."""
    request = asked("data:" + ";a=a" * 100_000)
    tracemalloc.start()
    try:
        with pytest.raises(RefusedError, match="is a data URL, data:image"):
            with_pictures(request)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_pictures_are_no_text_of_a_body(blind: Live) -> None:
    data = "QUJD" * 1_200_000
    for path, body in bodies(data).items():
        status, reply = blind.post(path, body)
        assert status == 400 and "takes no pictures here" in str(reply)
    for wrong in ({"prompt": data}, {"messages": [{"role": "user", "content": data}]}):
        status, reply = blind.post("/v1/completions" if "prompt" in wrong else CHAT, wrong)
        assert status == 413 and "characters of text" in str(reply)


@pytest.fixture(scope="module")
def blind(plain: str) -> Iterator[Live]:
    with live(plain) as server:
        yield server


def bodies(data: str, text: str = "What is it?", kind: str = "image/png") -> dict[str, dict[str, Any]]:
    """Requests of each dialect with the same picture and text."""
    url = f"data:{kind};base64,{data}"
    message = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    item = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": text}]
    source = {"type": "base64", "media_type": kind, "data": data}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": text}]
    limits = {"temperature": 0, "model": "default_model"}
    ollama = {"model": "default_model", "options": {"num_predict": 8, "temperature": 0}, "stream": False}
    return {
        CHAT: {"messages": [{"role": "user", "content": message}], "max_tokens": 8, **limits},
        "/v1/responses": {"input": [{"role": "user", "content": item}], "max_output_tokens": 8, **limits},
        "/v1/messages": {"messages": [{"role": "user", "content": blocks}], "max_tokens": 8, **limits},
        "/api/chat": {"messages": [{"role": "user", "content": text, "images": [data]}], **ollama},
        "/api/generate": {"prompt": text, "images": [data], **ollama},
    }


@pytest.mark.parametrize("path", bodies(""))
def test_a_model_of_text_refuses_pictures(blind: Live, path: str) -> None:
    status, reply = blind.post(path, bodies(TEXT)[path])
    assert status == 400 and "takes no pictures here" in json.dumps(reply) and "--vision" in json.dumps(reply)
    assert blind.say("hello")


def known(text: str) -> str:
    """Text without marks of bytes that are no characters, which mlx-vlm's detokenizer leaves out."""
    return text.replace("\ufffd", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mlx_vlm")
    from tiny_vlms import save, write_processor

    return write_processor(save(tmp_path_factory.mktemp("model"), "qwen2_vl"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Live]:
    config = FlashConfig(ram_budget_gb=1.0, telemetry=False, prefill_step_size=16)
    with live(Source(name="seer", base=str(folder), config=config, vision=True)) as running:
        yield running


def expected(folder: Path, names: list[Path], text: str = "What is it?") -> str:
    """The answer of mlx-vlm alone."""
    import mlx_vlm
    from mlx_vlm.prompt_utils import apply_chat_template

    model, processor = mlx_vlm.load(str(folder))
    content = [*({"type": "image"} for _ in names), {"type": "text", "text": text}]
    messages = [{"role": "user", "content": content if names else text}]
    prompt = apply_chat_template(processor, model.config, messages, num_images=len(names), enable_thinking=False)
    options = {"max_tokens": 8, "temperature": 0, "prefill_step_size": 16}
    return known(mlx_vlm.generate(model, processor, prompt, image=[str(name) for name in names], **options).text)


@pytest.mark.parametrize("size", [(56, 84), (112, 56)])
def test_answers_equal_those_of_mlx_vlm_in_all_dialects(
    server: Live, folder: Path, tmp_path: Path, size: tuple[int, int]
) -> None:
    from tiny_vlms import picture

    file = picture(tmp_path, size)
    wanted = expected(folder, [file])
    assert wanted != expected(folder, [])
    for path, body in bodies(base64.b64encode(file.read_bytes()).decode()).items():
        status, reply = server.post(path, body)
        assert status == 200, reply
        assert known(text_of(reply)) == wanted, path


@pytest.mark.parametrize(
    ("kind", "wish", "sees"),
    [("qwen2_vl", True, True), ("qwen2_vl", None, False), ("paligemma", None, True), ("paligemma", False, False)],
)
def test_capabilities_tell_if_the_model_is_loaded_with_sight(
    tmp_path: Path, kind: str, wish: bool | None, sees: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "vision_config": {}}))
    source = Source(name="seer", base=str(tmp_path), config=FlashConfig(ram_budget_gb=1.0), vision=wish)
    assert ("vision" in shown(source)["capabilities"]) == sees


def test_text_alone_streams_and_several_pictures_work_too(server: Live, folder: Path, tmp_path: Path) -> None:
    from tiny_vlms import picture

    files = [picture(tmp_path, size) for size in ((56, 84), (84, 56))]
    assert known(server.say("What is it?", temperature=0)) == expected(folder, [])
    urls = [f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}" for file in files]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": "What is it?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
    assert known(text_of(server.post(CHAT, body)[1])) == expected(folder, files)
    assert known(text_of(server.post(CHAT, {**body, "stream": True})[1])) == expected(folder, files)
    assert known(server.say("What is it?", temperature=0)) == expected(folder, [])


def test_broken_and_huge_pictures_are_refused_and_the_server_goes_on(
    server: Live, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_flash.vision import pictures as files
    from tiny_vlms import picture

    whole = picture(tmp_path, (56, 84)).read_bytes()
    for data, words in ((whole[:200], "broken picture"), (PNG, "no picture of a known kind")):
        status, reply = server.post(CHAT, bodies(base64.b64encode(data).decode())[CHAT])
        assert status == 400 and words in reply["error"]["message"], reply
        assert reply["error"]["param"] == "messages"
    monkeypatch.setattr(files, "MAX_PIXELS", 100)
    status, reply = server.post(CHAT, bodies(base64.b64encode(whole).decode())[CHAT])
    assert status == 400 and "56 x 84 pixels, 100 are allowed" in reply["error"]["message"]
    monkeypatch.undo()
    assert known(server.say("What is it?", temperature=0)) == expected(folder, [])


def test_a_picture_too_large_for_the_budget_is_refused_before_it_is_computed(folder: Path, tmp_path: Path) -> None:
    from tiny_vlms import picture, write_processor

    fine = Path(shutil.copytree(folder, tmp_path / "model"))
    write_processor(fine, min_pixels=3_000_000, max_pixels=4_000_000)  # 15 000 patches, 4 GB of scores
    config = FlashConfig(ram_budget_gb=1.0, telemetry=False)
    data = base64.b64encode(picture(tmp_path, (56, 84)).read_bytes()).decode()
    with live(Source(name="seer", base=str(fine), config=config, vision=True)) as server:
        status, reply = server.post(CHAT, bodies(data)[CHAT])
        assert status == 400 and "the pictures need" in reply["error"]["message"], reply
        assert server.say("What is it?")

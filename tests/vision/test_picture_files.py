"""Pictures from files: the same as mlx-vlm's own, of known kinds and sizes, and errors for all others."""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import struct
import zlib
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mlx_vlm")

import mlx_vlm.utils
from mlx_vlm.utils import load_image
from PIL import Image, PngImagePlugin

from mlx_flash.errors import BudgetError, CheckpointError, PictureError, RefusedError
from mlx_flash.server.request import GenerationRequest
from mlx_flash.server.seeing import Sight
from mlx_flash.vision import pictures
from mlx_flash.vision.flashvlm import load_processor_of
from mlx_flash.vision.pictures import open_picture, preparing_bytes, sample_picture, size_of
from vocabularies import write_tokenizer

ORIENTATION = 0x0112


def encoded(kind: str, image: Any = None, **options: Any) -> bytes:
    file = BytesIO()
    (image or sample_picture((40, 30))).save(file, kind, **options)
    return file.getvalue()


def turned(words: str | None = None) -> Any:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    if words:
        exif[0x010E] = words
    return exif


def files() -> dict[str, bytes]:
    palette = sample_picture((40, 30)).quantize(16)
    return {
        "png": encoded("PNG"),
        "palette.png": encoded("PNG", palette, transparency=3),
        "grey.png": encoded("PNG", sample_picture((40, 30)).convert("LA")),
        "turned.jpg": encoded("JPEG", exif=turned()),
        "turned.png": encoded("PNG", exif=turned()),
        "gif": encoded("GIF", palette),
        "frames.gif": encoded("GIF", palette, save_all=True, append_images=[palette.rotate(90)]),
        "webp": encoded("WEBP"),
        "bmp": encoded("BMP"),
        "tiff": encoded("TIFF", exif=turned()),
    }


@pytest.mark.parametrize("name", files())
def test_a_picture_is_the_same_as_mlx_vlms(name: str, tmp_path: Path) -> None:
    data = files()[name]
    path = tmp_path / name
    path.write_bytes(data)
    wanted = load_image(BytesIO(data))
    for source in (path, data):
        found = open_picture(source, name)
        assert (found.mode, found.size, found.tobytes()) == (wanted.mode, wanted.size, wanted.tobytes())
    assert found.mode == "RGB" and found.size == ((30, 40) if name.startswith(("turned", "tiff")) else (40, 30))


def two_kinds() -> bytes:
    """Return a file that is a TIFF of one pixel, and an FLI of 300 x 300."""
    at = 0x1AF11  # the mark of FLI, and the place of the TIFF's directory
    head = bytearray(128)
    head[:12] = struct.pack("<4sIHH", b"II*\0", at, 300, 300)
    chunk = struct.pack("<IH", 32, 13) + bytes(26)  # all pixels are black
    frame = struct.pack("<IHH", 16 + len(chunk), 0xF1FA, 1) + bytes(8) + chunk
    tags = [(256, 3, 1), (257, 3, 1), (258, 3, 8), (259, 3, 1), (262, 3, 1)]
    tags += [(273, 4, 512), (277, 3, 1), (278, 3, 1), (279, 4, 1)]
    directory = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    return (bytes(head) + frame).ljust(at, b"\0") + struct.pack("<H", len(tags)) + directory + bytes(4)


def test_a_file_of_two_kinds_is_decoded_as_the_one_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    Image.init()
    monkeypatch.setattr(Image, "ID", ["FLI", *Image.ID])  # the order of plugins is that of their imports
    assert Image.open(BytesIO(two_kinds())).size == (300, 300)
    assert open_picture(two_kinds(), "it").size == size_of(two_kinds(), "it") == (1, 1)


def with_texts(num_texts: int) -> bytes:
    """Return a PNG file of one pixel, with texts of 1 MB each."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    text = zlib.compress(b"x" * (1 << 20))
    parts = [chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))]
    parts += [chunk(b"zTXt", b"k%d\0\0" % i + text) for i in range(num_texts)]
    parts += [chunk(b"IDAT", zlib.compress(bytes(4))), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_texts_of_png_files_are_short_and_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 texts of 1 MB took 267 MB of memory for each picture of one pixel."""
    monkeypatch.setattr(PngImagePlugin, "MAX_TEXT_MEMORY", 99 << 20)  # PIL's own limit, which stays
    assert Image.open(BytesIO(with_texts(2))).info
    assert open_picture(with_texts(2), "it").info == {}
    with pytest.raises(PictureError, match=r"it cannot be read as a picture: .*MAX_TEXT_MEMORY"):
        open_picture(with_texts(6), "it")
    assert PngImagePlugin.MAX_TEXT_MEMORY == 99 << 20


ERRORS = [*(kind("why") for kind in pictures._DAMAGE), KeyError("why"), ZeroDivisionError("why"), EOFError("why")]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("place", ["load_image", "Image.open"])
def test_errors_of_damaged_files_name_the_picture(
    error: Exception, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(f"mlx_flash.vision.pictures.{place}", fail)
    with pytest.raises(PictureError, match=r"^picture 7 .*why"):
        open_picture(encoded("PNG"), "picture 7")


def test_a_file_with_a_damaged_tag_is_a_broken_picture() -> None:
    """PIL raises ``struct.error`` when it writes the tags of a picture that it has turned."""
    data = encoded("JPEG", exif=turned(words="words")).replace(b"\x01\x0e\x00\x02", b"\x01\x01\x00\x02")
    with pytest.raises(PictureError, match="it is a broken picture: required argument is not an integer") as found:
        open_picture(data, "it")
    assert type(found.value.__cause__) is struct.error


def test_room_is_made_for_all_pictures_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor takes memory for each picture, beside the pictures themselves."""
    asked: list[tuple[int, str]] = []

    def make_room(need: int, words: str) -> None:
        asked.append((need, words))
        raise BudgetError(f"{words}: no room", need)

    sight = Sight(SimpleNamespace(towers=SimpleNamespace(make_room=make_room)), None, None)  # type: ignore[arg-type]
    monkeypatch.setattr("mlx_flash.server.seeing.open_picture", lambda *_: pytest.fail("decoded"))
    text = base64.b64encode(encoded("PNG")).decode()
    request = GenerationRequest(model="m", messages=[{"role": "user", "content": "x"}], pictures=[text, text])
    with pytest.raises(RefusedError, match="preparing the pictures for a call: no room"):
        sight.inputs(request, {})
    assert asked == [(2 * preparing_bytes([(40, 30)]), "preparing the pictures for a call")]
    assert preparing_bytes([(40, 30)]) >= 24 * 40 * 30


@pytest.mark.parametrize(
    "name", ["num_audios", "num_images", "video", "fps", "max_pixels", "return_messages", "processor", "config", "role"]
)
def test_a_request_gives_no_arguments_of_mlx_vlms_chat_template(name: str) -> None:
    """``num_audios`` of a million took 26 s and 3.4 GB."""
    sight = Sight(SimpleNamespace(), None, None)  # type: ignore[arg-type]
    request = GenerationRequest(model="m", messages=[{"role": "user", "content": "x"}], template_options={name: 2})
    with pytest.raises(RefusedError, match=f"chat_template_kwargs.{name} is not taken from requests") as found:
        sight.inputs(request, {})
    assert (found.value.status, found.value.field) == (400, f"chat_template_kwargs.{name}")


# --- code in a model's folder -----------------------------------------------------------------------------------------


EVIL = """
from pathlib import Path
Path({ran!r}).touch()
from transformers import PreTrainedTokenizerFast
class T(PreTrainedTokenizerFast):
    pass
class P:
    @classmethod
    def from_pretrained(cls, *args, **options):
        return cls()
    @classmethod
    def register_for_auto_class(cls):
        pass
"""
ARCHITECTURES = ["gemma4", "glm4v", "got", "inkling", "molmo2", "phi3_v", "qwen2_vl", "of no library"]
"""Some trust code by default, some whatever they are told, and some never."""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes a folder whose code leaves the file ``ran``."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")

    def make(architecture: str) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        write_tokenizer(folder, 300)
        (folder / "evil.py").write_text(EVIL.format(ran=str(tmp_path / "ran")))
        maps = {"AutoTokenizer": ["evil.T", "evil.T"], "AutoProcessor": "evil.P", "AutoImageProcessor": "evil.P"}
        file = folder / "tokenizer_config.json"
        values = {"processor_class": "P", "auto_map": maps}
        file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer_class": "T", **values}))
        for name in ("config.json", "processor_config.json", "preprocessor_config.json"):
            (folder / name).write_text(json.dumps({"model_type": architecture, "image_processor_type": "P", **values}))
        return folder

    return make


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_code_of_a_processor_runs_only_if_it_is_trusted(make: Any, tmp_path: Path, architecture: str) -> None:
    folder = make(architecture)
    model: Any = SimpleNamespace(config=SimpleNamespace(eos_token_id=None))
    with contextlib.suppress(CheckpointError):  # some need it, others have all they need in mlx-vlm
        load_processor_of(folder, model)
    assert not (tmp_path / "ran").exists()
    if architecture == "of no library":
        load_processor_of(folder, model, trust_remote_code=True)
        assert (tmp_path / "ran").exists()


def test_mlx_vlm_alone_runs_the_code(make: Any, tmp_path: Path) -> None:
    """Otherwise the tests above prove nothing."""
    importlib.import_module("mlx_vlm.models.inkling")  # as loading its model does: it registers the processor
    mlx_vlm.utils.load_processor(make("inkling"), trust_remote_code=False)
    assert (tmp_path / "ran").exists()

"""Pictures from files and from bytes, checked before they take memory."""

from __future__ import annotations

import struct
import threading
import warnings
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from PIL import Image, PngImagePlugin, UnidentifiedImageError

from mlx_flash.compat.vlm import apply_chat_template, generate_step, load_image, prepare_inputs, stream_generate
from mlx_flash.errors import PictureError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Kinds of files that are read. PIL knows more, some of which start other programs."""

MAX_PIXELS = 100_000_000
"""The largest picture. A file of a few kilobytes can hold any number of pixels of one colour."""

_BYTES_PER_PIXEL = 24
"""Memory of pictures until a processor has made them smaller. Measured: up to 16 bytes while one is decoded, and 14
while it is processed. Processors that keep a picture's size take up to 56."""

_MAX_TEXT = 4 << 20
"""The most characters of all texts in a PNG file. PIL takes 64 MB of them, of four bytes each."""

_pil_limits = threading.Lock()
"""Held while PIL's own limits, which belong to the process, are changed."""

_DAMAGE = (
    OSError,
    ValueError,
    SyntaxError,
    MemoryError,
    TypeError,
    EOFError,
    AttributeError,
    AssertionError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    struct.error,
    zlib.error,
)
"""Exceptions that PIL raises for damaged files. Its plugins do not check the types and numbers in them."""


def open_picture(source: Path | bytes, name: str) -> Any:
    """Return a picture as mlx-vlm gives it to processors: upright, in RGB. Raises: PictureError."""
    with _opened(source, name) as image:
        try:
            found = load_image(image)
        except _DAMAGE as error:
            raise PictureError(f"{name} is a broken picture: {error}") from error
    found.info.clear()  # texts and profiles of the file
    return found


def size_of(source: Path | bytes, name: str) -> tuple[int, int]:
    """Return width and height, by the picture's header."""
    with _opened(source, name) as image:
        width, height = image.size
    return width, height


@contextmanager
def _opened(source: Path | bytes, name: str) -> Iterator[Any]:
    """Yield a picture whose size is checked, before it is decoded. Only plugins of known kinds see the file."""
    try:
        with _short_texts(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damage, and of sizes, which are compared with our own limit
            with Image.open(BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise PictureError(
                        f"{name} has {image.width} x {image.height} pixels, {MAX_PIXELS} are allowed at most. Hint: "
                        "make it smaller."
                    )
                yield image
    except PictureError:
        raise
    except FileNotFoundError as error:
        raise PictureError(f"{name} does not exist.") from error
    except Image.DecompressionBombError as error:
        raise PictureError(f"{name} has more than {MAX_PIXELS} pixels. Hint: make it smaller.") from error
    except UnidentifiedImageError as error:
        raise PictureError(f"{name} is no picture of a known kind ({', '.join(FORMATS)}).") from error
    except _DAMAGE as error:
        raise PictureError(f"{name} cannot be read as a picture: {error}") from error


@contextmanager
def _short_texts() -> Iterator[None]:
    """Refuse PNG files with long texts in a block, which PIL reads before and after the picture."""
    with _pil_limits:
        known = PngImagePlugin.MAX_TEXT_MEMORY
        PngImagePlugin.MAX_TEXT_MEMORY = _MAX_TEXT
        try:
            yield
        finally:
            PngImagePlugin.MAX_TEXT_MEMORY = known


def preparing_bytes(sizes: Iterable[tuple[int, int]]) -> int:
    """Return the memory that decoding and processing the pictures of a call take, by their widths and heights."""
    return _BYTES_PER_PIXEL * sum(width * height for width, height in sizes)


def sample_picture(size: tuple[int, int] = (448, 336)) -> Any:
    """Return a picture with colours that change everywhere, the same in every run."""
    horizontal, vertical = Image.linear_gradient("L").resize(size), Image.radial_gradient("L").resize(size)
    return Image.merge("RGB", (horizontal, vertical, horizontal.rotate(180)))


_NAMES = {"input_ids": "input_ids", "pixel_values": "pixel_values", "attention_mask": "mask"}
"""Names of a processor's results, and mlx-vlm's loops' names of them."""


@dataclass(frozen=True, slots=True)
class PicturePrompt:
    """A prompt as a model is called with it."""

    inputs: Mapping[str, Any]

    @property
    def tokens(self) -> list[int]:
        """All tokens, those that stand for pictures included."""
        tokens: mx.array = self.inputs["input_ids"]
        return cast("list[int]", tokens.flatten().tolist())

    @property
    def keywords(self) -> dict[str, Any]:
        given = {_NAMES.get(name, name): value for name, value in self.inputs.items()}
        return {"pixel_values": None, "mask": None, **given}

    def responses(self, model: nn.Module, processor: Any, **options: Any) -> Generator[Any, None, None]:
        """Yield ``mlx_vlm.stream_generate``'s results, one for each token and one for the end of the text."""
        return stream_generate(model, processor, "", **self.keywords, **options)

    def steps(self, model: nn.Module, **options: Any) -> Iterator[tuple[int, mx.array]]:
        """Yield tokens and log probabilities, as ``mlx_vlm``'s ``generate_step`` does."""
        given = self.keywords
        inputs = given.pop("input_ids"), model, given.pop("pixel_values"), given.pop("mask")
        return generate_step(*inputs, **given, **options)


def make_prompt(
    model: nn.Module,
    processor: Any,
    messages: str | Sequence[Mapping[str, Any]],
    pictures: Sequence[Any],
    *,
    is_chat: bool = True,
    **options: Any,
) -> PicturePrompt:
    """Return a prompt of the user's text, or a conversation.

    Pictures are in the order of their places in it; those without one belong to the last message. A text that is no
    chat has the marks of pictures itself. Options are variables of the chat template.
    """
    text: Any = messages
    if is_chat:
        given = messages if isinstance(messages, str) else [dict(message) for message in messages]
        text = apply_chat_template(processor, model.config, given, num_images=len(pictures), **options)
    try:
        return PicturePrompt(prepare_inputs(model, processor, text, list(pictures)))
    except ValueError as error:  # what a processor raises, in mlx-vlm's words
        raise PictureError(f"the model's processor refuses prompt and pictures: {error}") from error


def of_tokens(tokens: list[int]) -> PicturePrompt:
    """Return a prompt of tokens alone."""
    array = mx.array([tokens])
    return PicturePrompt({"input_ids": array, "attention_mask": mx.ones(array.shape, mx.int32)})

"""Pictures from files and from bytes, checked before they take memory."""

from __future__ import annotations

import struct
import threading
import warnings
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin, UnidentifiedImageError

from mlx_flash.compat.vlm import load_image
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
    """Return a picture as mlx-vlm gives it to processors: upright, in RGB.

    Args:
        source: a file, or what is in one.
        name: what to call it in errors.

    Raises:
        PictureError: it is not a picture, is broken, or is too large.
    """
    with _opened(source, name) as image:
        try:
            found = load_image(image)
        except _DAMAGE as error:
            raise PictureError(f"{name} is a broken picture: {error}") from error
    found.info.clear()  # texts and profiles of the file
    return found


def size_of(source: Path | bytes, name: str) -> tuple[int, int]:
    """Return width and height, by the picture's header.

    Raises:
        PictureError: as :func:`open_picture`.
    """
    with _opened(source, name) as image:
        width, height = image.size
    return width, height


@contextmanager
def _opened(source: Path | bytes, name: str) -> Iterator[Any]:
    """Yield a picture whose size is checked, before it is decoded. Only plugins of known kinds see the file.

    Raises:
        PictureError: it is not a picture, or is too large.
    """
    try:
        with _short_texts(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damage, and of sizes, which are compared with our own limit
            with Image.open(BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image:
                _check_size(image.size, name)
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


def _check_size(size: tuple[int, int], name: str) -> None:
    if size[0] * size[1] > MAX_PIXELS:
        raise PictureError(
            f"{name} has {size[0]} x {size[1]} pixels, {MAX_PIXELS} are allowed at most. Hint: make it smaller."
        )


def preparing_bytes(sizes: Iterable[tuple[int, int]]) -> int:
    """Return the memory that decoding and processing the pictures of a call take, by their widths and heights."""
    return _BYTES_PER_PIXEL * sum(width * height for width, height in sizes)


def sample_picture(size: tuple[int, int] = (448, 336)) -> Any:
    """Return a picture with colours that change everywhere, the same in every run."""
    horizontal, vertical = Image.linear_gradient("L").resize(size), Image.radial_gradient("L").resize(size)
    return Image.merge("RGB", (horizontal, vertical, horizontal.rotate(180)))

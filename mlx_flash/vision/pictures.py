"""Pictures from files and from bytes, checked before they take memory."""

from __future__ import annotations

import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from mlx_flash.compat.vlm import load_image
from mlx_flash.errors import PictureError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Kinds of files that are read. PIL knows more, some of which start other programs."""

MAX_PIXELS = 100_000_000
"""The largest picture. A file of a few kilobytes can hold any number of pixels of one colour."""

_BYTES_PER_PIXEL = 12
"""Memory of a picture while it is decoded: as it is in the file, turned upright, and in RGB, four bytes each."""


def open_picture(source: Path | bytes, name: str) -> Any:
    """Return a picture as mlx-vlm gives it to processors: upright, in RGB.

    Args:
        source: a file, or what is in one.
        name: what to call it in errors.

    Raises:
        PictureError: it is not a picture, is broken, or is too large.
    """
    size_of(source, name)
    try:
        return load_image(BytesIO(source) if isinstance(source, bytes) else source)
    except (OSError, ValueError, SyntaxError, MemoryError) as error:
        raise PictureError(f"{name} is a broken picture: {error}") from error


def size_of(source: Path | bytes, name: str) -> tuple[int, int]:
    """Return width and height, by the picture's header.

    Raises:
        PictureError: as :func:`open_picture`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # compared with our own limit
            with Image.open(BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image:
                width, height = image.size
    except FileNotFoundError as error:
        raise PictureError(f"{name} does not exist.") from error
    except Image.DecompressionBombError as error:
        raise PictureError(f"{name} has more than {MAX_PIXELS} pixels. Hint: make it smaller.") from error
    except UnidentifiedImageError as error:
        raise PictureError(f"{name} is no picture of a known kind ({', '.join(FORMATS)}).") from error
    except (OSError, ValueError, SyntaxError) as error:
        raise PictureError(f"{name} cannot be read as a picture: {error}") from error
    if width * height > MAX_PIXELS:
        raise PictureError(
            f"{name} has {width} x {height} pixels, {MAX_PIXELS} are allowed at most. Hint: make it smaller."
        )
    return width, height


def decoding_bytes(size: tuple[int, int]) -> int:
    """Return the memory that decoding a picture takes at most."""
    return _BYTES_PER_PIXEL * size[0] * size[1]


def sample_picture(size: tuple[int, int] = (448, 336)) -> Any:
    """Return a picture with colours that change everywhere, the same in every run."""
    horizontal, vertical = Image.linear_gradient("L").resize(size), Image.radial_gradient("L").resize(size)
    return Image.merge("RGB", (horizontal, vertical, horizontal.rotate(180)))

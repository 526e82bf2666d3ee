"""Pictures in requests, as data URLs. Nothing is read from files or fetched.

What is checked here needs no library of pictures: how a picture is given, its length, and the first bytes of it.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mlx_flash.errors import RefusedError
from mlx_flash.server.request import GenerationRequest

MAX_PICTURES = 16
"""The most pictures of a request."""

MAX_PICTURE_BYTES = 20 << 20
"""The longest file of a picture, and the most bytes of all pictures of a request."""

_MAX_HEAD = 200
"""The most characters before the data in a data URL. Matching takes 70 bytes for each."""

_MARKS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM", b"II*\x00", b"MM\x00*")
"""First bytes of PNG, JPEG, GIF, BMP and TIFF files. WebP has its mark further on."""

_DATA_URL = re.compile(r"data:(image/[\w.+-]+)?(;[\w-]+=[\w-]+)*;base64,", re.IGNORECASE)


def picture_part(source: str, field: str) -> dict[str, str]:
    """Return a picture as a part of a message, for :func:`with_pictures`."""
    return {"type": "image", "source": source, "field": field}


def data_url(data: str) -> str:
    """Return base64 text as a data URL."""
    return f"data:;base64,{data}"


def with_pictures(request: GenerationRequest) -> GenerationRequest:
    """Return a request with its pictures taken out of its messages, where their places stay marked."""
    sources: list[dict[str, str]] = []
    messages = []
    for message in request.messages or ():
        content = message.get("content")
        if isinstance(content, list):
            own = [part for part in content if part["type"] == "image"]
            if message["role"] != "user":
                raise RefusedError("pictures belong to messages of the user.", 400, own[0]["field"])
            sources += own
            content = [part if part["type"] == "text" else {"type": "image"} for part in content]
            message = {**message, "content": content}
        messages.append(message)
    if len(sources) > MAX_PICTURES:
        raise RefusedError(f"the request has {len(sources)} pictures, {MAX_PICTURES} are allowed.", 400, "messages")
    found: list[str] = []
    total = 0
    for part in sources:
        found.append(_checked(part["source"], part["field"]))
        total += len(found[-1]) * 3 // 4
        if total > MAX_PICTURE_BYTES:
            raise RefusedError(
                f"the pictures of the request have {total} bytes up to this one, {MAX_PICTURE_BYTES} are allowed.",
                413,
                part["field"],
            )
    return replace(request, messages=messages, pictures=tuple(found)) if found else request


def decoded(pictures: Sequence[str]) -> Iterator[bytes]:
    """Yield the files of pictures of a request."""
    return (base64.b64decode(text) for text in pictures)


def _checked(source: str, field: str) -> str:
    """Return the file of a picture as base64."""
    head = _DATA_URL.match(source, 0, _MAX_HEAD)
    if head is None:
        raise RefusedError(
            "a picture is a data URL, data:image/TYPE;base64,...: this server fetches nothing.", 400, field
        )
    text = source[head.end() :]
    nbytes = len(text) * 3 // 4
    if nbytes > MAX_PICTURE_BYTES:
        raise RefusedError(f"the picture has {nbytes} bytes, {MAX_PICTURE_BYTES} are allowed.", 413, field)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RefusedError("the data of the picture is not base64.", 400, field) from None
    is_webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    if not is_webp and not data.startswith(_MARKS):
        raise RefusedError("the data is no PNG, JPEG, WebP, GIF, BMP or TIFF file.", 400, field)
    return text

"""Pictures in requests: data URLs, and files of one folder. Nothing is fetched from other machines.

What is checked here needs no library of pictures: how a picture is given, its length, and the first bytes of it.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mlx_flash.errors import RefusedError
from mlx_flash.files import check_regular
from mlx_flash.server.request import GenerationRequest

MAX_PICTURES = 16
"""The most pictures of a request."""

MAX_PICTURE_BYTES = 20 << 20
"""The longest file of a picture."""

_MARKS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM", b"II*\x00", b"MM\x00*")
"""First bytes of PNG, JPEG, GIF, BMP and TIFF files. WebP has its mark further on."""

_DATA_URL = re.compile(r"data:(image/[\w.+-]+)?(;[\w-]+=[\w-]+)*;base64,", re.IGNORECASE)


def picture_part(source: str, field: str) -> dict[str, str]:
    """Return a picture as a part of a message, for :func:`with_pictures`.

    Args:
        source: a data URL, the URL of a file, or a name in the server's folder of pictures.
        field: its place in the request.
    """
    return {"type": "image", "source": source, "field": field}


def data_url(data: str) -> str:
    """Return base64 text as a data URL."""
    return f"data:;base64,{data}"


def content_of(parts: Sequence[dict[str, str]], between: str = "") -> str | list[dict[str, str]]:
    """Return the content of a message: text alone if it has no picture.

    Args:
        parts: texts and pictures.
        between: what separates texts.
    """
    if all(part["type"] == "text" for part in parts):
        return between.join(part["text"] for part in parts)
    return list(parts)


def with_pictures(request: GenerationRequest, folder: Path | None) -> GenerationRequest:
    """Return a request with its pictures taken out of its messages, where their places stay marked.

    Args:
        request: a request whose messages may have parts of :func:`picture_part`.
        folder: the only folder that files are read from; None for none.

    Raises:
        RefusedError: a picture cannot be used. It names the field.
    """
    found: list[str] = []
    messages = []
    for message in request.messages or ():
        content = message.get("content")
        if isinstance(content, list):
            sources = [part for part in content if part["type"] == "image"]
            if message["role"] != "user":
                raise RefusedError("pictures belong to messages of the user.", 400, sources[0]["field"])
            found += (_read(part["source"], part["field"], folder) for part in sources)
            content = [part if part["type"] == "text" else {"type": "image"} for part in content]
            message = {**message, "content": content}
        messages.append(message)
    if len(found) > MAX_PICTURES:
        raise RefusedError(f"the request has {len(found)} pictures, {MAX_PICTURES} are allowed.", 400, "messages")
    total = sum(map(len, found)) * 3 // 4
    if total > MAX_PICTURE_BYTES:
        raise RefusedError(
            f"the pictures of the request have {total} bytes, {MAX_PICTURE_BYTES} are allowed.", 413, "messages"
        )
    return replace(request, messages=messages, pictures=tuple(found)) if found else request


def decoded(pictures: Sequence[str]) -> Iterator[bytes]:
    """Yield the files of pictures of a request."""
    return (base64.b64decode(text) for text in pictures)


def _read(source: str, field: str, folder: Path | None) -> str:
    """Return the file of a picture as base64."""
    if source[:5].lower() == "data:":
        return _of_data(source, field)
    parts = urlsplit(source)
    if parts.scheme not in ("", "file"):
        raise RefusedError(
            f"this server fetches nothing: {parts.scheme}: cannot be used. Hint: send the picture as a data URL, "
            "data:image/png;base64,...",
            400,
            field,
        )
    if folder is None:
        raise RefusedError(
            "this server reads no files. Hint: send the picture as a data URL, or start the server with "
            "--image-folder DIR.",
            400,
            field,
        )
    return _of_file(Path(unquote(parts.path)) if parts.scheme else Path(source), field, folder)


def _of_data(source: str, field: str) -> str:
    head = _DATA_URL.match(source)
    if head is None:
        raise RefusedError("a data URL of a picture begins with data:image/TYPE;base64,", 400, field)
    text = source[head.end() :]
    _check_length(len(text) * 3 // 4, field)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RefusedError("the data of the picture is not base64.", 400, field) from None
    _check_kind(data, field)
    return text


def _of_file(name: Path, field: str, folder: Path) -> str:
    """Return a file of the folder. What lies outside of it is as if it did not exist, links included."""
    missing = RefusedError("there is no such file in the server's folder of pictures.", 400, field)
    try:
        root, path = folder.resolve(), (folder / name).resolve()
        if not path.is_relative_to(root) or not path.is_file():
            raise missing
        check_regular(path)
        _check_length(path.stat().st_size, field)
        data = path.read_bytes()
    except (OSError, ValueError):  # no permission, a loop of links, a name with a zero byte
        raise missing from None
    _check_length(len(data), field)
    _check_kind(data, field)
    return base64.b64encode(data).decode()


def _check_length(nbytes: int, field: str) -> None:
    if nbytes > MAX_PICTURE_BYTES:
        raise RefusedError(f"the picture has {nbytes} bytes, {MAX_PICTURE_BYTES} are allowed.", 413, field)


def _check_kind(data: bytes, field: str) -> None:
    is_webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    if not is_webp and not data.startswith(_MARKS):
        raise RefusedError("the data is no PNG, JPEG, WebP, GIF, BMP or TIFF file.", 400, field)

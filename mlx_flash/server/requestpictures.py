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
from urllib.parse import unquote

from mlx_flash.errors import RefusedError
from mlx_flash.files import check_regular
from mlx_flash.server.request import GenerationRequest

MAX_PICTURES = 16
"""The most pictures of a request."""

MAX_PICTURE_BYTES = 20 << 20
"""The longest file of a picture, and the most bytes of all pictures of a request."""

MAX_NAME = 4096
"""The most characters of a name or URL of a picture, as of paths in Linux. Resolving a path takes quadratic time."""

_MAX_HEAD = 200
"""The most characters before the data in a data URL. Matching takes 70 bytes for each."""

_MARKS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM", b"II*\x00", b"MM\x00*")
"""First bytes of PNG, JPEG, GIF, BMP and TIFF files. WebP has its mark further on."""

_DATA_URL = re.compile(r"data:(image/[\w.+-]+)?(;[\w-]+=[\w-]+)*;base64,", re.IGNORECASE)

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE)
"""Not by ``urlsplit``, which keeps its last arguments in memory and raises errors of its own."""

_FILE_URL = re.compile(r"file:(?://(?:localhost)?(?=/))?([^?#]*)", re.IGNORECASE)


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


def with_pictures(request: GenerationRequest, folder: Path | None) -> GenerationRequest:
    """Return a request with its pictures taken out of its messages, where their places stay marked.

    Args:
        request: a request whose messages may have parts of :func:`picture_part`.
        folder: the only folder that files are read from; None for none.

    Raises:
        RefusedError: a picture cannot be used. It names the field.
    """
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
        found.append(_read(part["source"], part["field"], folder))
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


def _read(source: str, field: str, folder: Path | None) -> str:
    """Return the file of a picture as base64."""
    if source[:5].lower() == "data:":
        return _of_data(source, field)
    url = _FILE_URL.match(source, 0, MAX_NAME)  # that of 31 MB takes a second
    scheme = _SCHEME.match(source, 0, MAX_NAME) if url is None else None
    if len(source) > MAX_NAME:
        fault = f"the name of the picture has {len(source)} characters, {MAX_NAME} are allowed"
    elif scheme is not None:
        fault = f"this server fetches nothing: {scheme[0].lower()} cannot be used"
    elif folder is None:
        fault = "this server reads no files without --image-folder DIR"
    else:
        return _of_file(Path(source if url is None else unquote(url[1])), field, folder)
    raise RefusedError(f"{fault}. Hint: send the picture as a data URL, data:image/png;base64,...", 400, field)


def _of_data(source: str, field: str) -> str:
    head = _DATA_URL.match(source, 0, _MAX_HEAD)
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
        root, path = folder.resolve(), (folder / name).resolve(strict=True)
        if not path.is_relative_to(root) or not path.is_file():
            raise missing
        check_regular(path)
        _check_length(path.stat().st_size, field)
        data = path.read_bytes()
    except (OSError, ValueError, RuntimeError):  # no permission, a name with a zero byte, before 3.13 a loop of links
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

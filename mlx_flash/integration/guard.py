"""Limits of the server: who may ask, from which web pages, how much, and how slowly."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mlx_flash.errors import ConfigError, RefusedError
from mlx_flash.files import read_regular

API_KEY_VARIABLE = "MLX_FLASH_API_KEY"

MAX_BODY_BYTES = 32 << 20
"""The longest body: some pictures, which are part of it."""

MAX_TEXT_CHARACTERS = 4_000_000
"""The most text of a request, about a million tokens. The tokenizer works through it before its length is known."""

MAX_REQUESTS = 128
"""The most requests that are answered or wait."""

MAX_CONNECTIONS = 512
"""The most open connections: each has a thread."""

REQUEST_SECONDS = 30.0
"""The longest time from a connection to the end of its request's body."""

SEND_SECONDS = 60.0
"""The longest time that a client may leave what was sent to it unread."""

_MAX_KEY_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Access:
    """Keys and origins that may use the server.

    Attributes:
        api_key: the key that each request must bring; None asks for none.
        origins: origins of web pages that may ask, as browsers name them; ``*`` is any.
    """

    api_key: str | None = None
    origins: Sequence[str] = ()

    def check(self, authorization: str | None, origin: str | None) -> None:
        """Check the headers of a request.

        Raises:
            RefusedError: it comes from another web page (status 403), or its key is missing or wrong (401).
        """
        if origin is not None and not {"*", origin} & set(self.origins):
            raise RefusedError(
                "this server answers no web pages of this origin. Hint: name it with --allowed-origins at the start.",
                403,
            )
        if self.api_key is not None:
            scheme, _, key = (authorization or "").partition(" ")
            is_right = hmac.compare_digest(key.strip().encode(), self.api_key.encode())
            if scheme.lower() != "bearer" or not is_right:
                raise RefusedError("the API key is missing or wrong. Hint: send 'Authorization: Bearer KEY'.", 401)


def make_access(host: str, origins: Sequence[str], key_file: Path | None, is_open: bool) -> Access:
    """Return who may use a server.

    Args:
        host: the address that it listens on.
        origins: origins of web pages that may ask.
        key_file: a file with the API key; None takes that of the environment, if any.
        is_open: other machines may connect without a key.

    Raises:
        ConfigError: other machines could connect without a key, or there is no usable key.
    """
    key = os.environ.get(API_KEY_VARIABLE) if key_file is None else _read_key(key_file)
    if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
        raise ConfigError(
            "the API key must be printable ASCII without spaces. Hint: make one with `openssl rand -hex 32`."
        )
    if key is None and not is_open and not _is_loopback(host):
        raise ConfigError(
            f"--host {host}: other machines could use this server without a key. Hint: put a key in a file and name it "
            f"with --api-key-file, or set {API_KEY_VARIABLE}, or say --no-auth."
        )
    return Access(key, tuple(origins))


def _read_key(path: Path) -> str:
    try:
        return read_regular(path, _MAX_KEY_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read the API key from {path}: {reason}.") from error


def _is_loopback(host: str) -> bool:
    """Return whether all addresses of a host are this machine's own."""
    try:
        infos = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(info[4][0]).partition("%")[0]).is_loopback for info in infos)


def read_body(stream: BinaryIO, length: str | None) -> bytes:
    """Read the body of a request, and check that mlx-lm's handler can use it. Nothing of it gets into errors.

    Args:
        stream: of the connection.
        length: the header ``Content-Length``.

    Raises:
        RefusedError: it is too long, or no JSON object.
        ConnectionError: the client has not sent all of it.
    """
    if length is None:
        raise RefusedError("the header Content-Length is missing.", 411)
    if not (length.isascii() and length.isdigit()):
        raise RefusedError("the header Content-Length is not a number.", 400)
    if len(length) > 15 or int(length) > MAX_BODY_BYTES:
        raise RefusedError(f"the request is too long: {MAX_BODY_BYTES} bytes are allowed.", 413)
    body = stream.read(int(length))
    if len(body) < int(length):
        raise ConnectionError("the client has not sent its whole request")
    try:
        value = json.loads(body)
        num_characters = _text_length(value)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"the request is not JSON ({type(error).__name__}).", 400) from None
    if not isinstance(value, dict):
        raise RefusedError("the request must be a JSON object.", 400)
    if num_characters > MAX_TEXT_CHARACTERS:
        raise RefusedError(
            f"the request has {num_characters} characters of text, {MAX_TEXT_CHARACTERS} are allowed.", 413
        )
    return body


def _text_length(value: Any) -> int:
    """Return the number of characters in a JSON value; those of pictures do not count."""
    if isinstance(value, str):
        return 0 if value.startswith("data:") else len(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_text_length, parts)) + len(parts)


class Occupancy:
    """The number of requests under way, or connections, up to a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0
        self._changed = threading.Condition()

    @property
    def count(self) -> int:
        """The number now."""
        return self._count

    @contextmanager
    def one_more(self) -> Iterator[bool]:
        """Count one as long as the block lasts. Yield False, and count none, at the limit."""
        with self._changed:
            fits = self._count < self._limit
            self._count += fits
        try:
            yield fits
        finally:
            with self._changed:
                self._count -= fits
                self._changed.notify_all()

    def wait_until_empty(self, seconds: float) -> bool:
        """Wait until none is left, at most so long. Return whether none is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._count, seconds)


class Deadlines:
    """Connections whose request must come in time."""

    def __init__(self, seconds: float = REQUEST_SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._ends: dict[socket.socket, float] = {}

    def begin(self, connection: socket.socket) -> None:
        """Note a new connection. Bound the time that its client may leave answers unread."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(SEND_SECONDS), 0))
        with self._lock:
            self._ends[connection] = time.monotonic() + self._seconds

    def meet(self, connection: socket.socket) -> None:
        """Note that the request is there, or will not come."""
        with self._lock:
            self._ends.pop(connection, None)

    def enforce(self) -> None:
        """End the reading of requests that are late."""
        with self._lock:
            late = [connection for connection, end in self._ends.items() if end < time.monotonic()]
            for connection in late:
                with contextlib.suppress(OSError):  # its client has left
                    connection.shutdown(socket.SHUT_RD)

"""Keys that clients bring, and origins of web pages that may ask."""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_flash.errors import ConfigError, RefusedError
from mlx_flash.files import read_regular
from mlx_flash.server.replies import error_reply

API_KEY_VARIABLE = "MLX_FLASH_API_KEY"

OPEN_PATHS = {"/health", "/ready", "/"}
"""Paths that need no key: the state of the server is no secret, and the page at ``/`` asks for the key itself."""

OPEN_FOLDER = "/page/"
"""The files of the page, which need no key either."""

_MAX_KEY_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Access:
    """Keys and origins that may use the server.

    Attributes:
        api_key: the key that each request must bring; None asks for none.
        origins: origins of web pages that may ask, as browsers name them; ``*`` is any.
        is_open: other machines may ask without a key. They may not change which models this machine has.
    """

    api_key: str | None = None
    origins: Sequence[str] = ()
    is_open: bool = False

    def check(self, path: str, method: str, headers: Headers) -> None:
        """Check the length, the origin and the key of a request.

        Web pages send their origin, programs send none. A request with two lengths is refused: a proxy may use one and
        the server the other, so that they disagree where the request ends.

        Args:
            path, method, headers: of the request.

        Raises:
            RefusedError: it has two lengths, comes from a web page that is not allowed, or its key is missing or wrong.
        """
        if "content-length" in headers and "transfer-encoding" in headers:
            raise RefusedError("a request has Content-Length or Transfer-Encoding, not both.", 400)
        origin, host = headers.get("origin"), headers.get("host")
        if origin is not None and not {"*", origin} & set(self.origins) and not _is_own_page(origin, host):
            raise RefusedError(
                "this server answers no web pages of this origin. Hint: name it with --allowed-origins at the start.",
                403,
            )
        if path not in OPEN_PATHS and not path.startswith(OPEN_FOLDER) and method != "OPTIONS":
            self.check_key(headers.get("authorization"), headers.get("x-api-key"))

    def check_key(self, authorization: str | None, key_header: str | None = None) -> None:
        """Check the key of a request.

        Args:
            authorization: the header, ``Bearer KEY``.
            key_header: ``x-api-key``, which clients of Anthropic send instead.

        Raises:
            RefusedError: the key is missing or wrong.
        """
        if self.api_key is None:
            return
        scheme, _, key = (authorization or "").partition(" ")
        if key_header is not None:
            scheme, key = "bearer", key_header
        is_right = hmac.compare_digest(key.strip().encode(), self.api_key.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise RefusedError("the API key is missing or wrong. Hint: send 'Authorization: Bearer KEY'.", 401)


class AccessMiddleware:
    """Refuses requests before anything else sees them.

    Args:
        app: the rest.
        access: who may ask.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] == "http":
            try:
                self._access.check(scope["path"], scope["method"], Headers(scope=scope))
            except RefusedError as error:
                response = error_reply(scope["path"], error, {"Connection": "close"})
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


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
    return Access(key, tuple(origins), is_open=key is None and is_open and not _is_loopback(host))


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


def _is_own_page(origin: str, host: str | None) -> bool:
    """Return whether a page came from this server, by an address that no other site can have.

    A site may give its own name the address of this machine. So only ``localhost`` and numbers count.
    """
    if host is None or origin != f"http://{host}":
        return False
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    try:
        return name == "localhost" or bool(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return False

"""Keys that clients bring, and origins of web pages that may ask."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_flash.errors import ConfigError, RefusedError
from mlx_flash.files import read_regular
from mlx_flash.logs import log
from mlx_flash.server.service import error_reply

API_KEY_VARIABLE = "MLX_FLASH_API_KEY"

OPEN_PATHS = {"/health", "/ready", "/"}
"""Paths that need no key: the state of the server is no secret, and the page at ``/`` asks for the key itself."""

OPEN_FOLDER = "/page/"
"""The files of the page, which need no key either."""

_MAX_FILE_BYTES = 1 << 20
_KEY = re.compile(r"[!-~]{1,4096}")
_NAMED_KEY = re.compile(r"([\w.@-]{1,64})\s+sha256:([0-9a-f]{64})(?:\s+([1-9][0-9]{0,3}))?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Key:
    """A key that requests may bring."""

    digest: bytes  # its SHA-256. Keys are random, so no slower hash is needed
    name: str = ""  # in the log and in metrics; empty for a key that has none
    most: int | None = None  # the most requests with it at a time; None for no limit of its own


def plain_key(text: str) -> Key:
    """Return a key without a name."""
    if not _KEY.fullmatch(text):
        raise ConfigError(
            "the API key must be printable ASCII without spaces. Hint: make one with `openssl rand -hex 32`."
        )
    return Key(hashlib.sha256(text.encode()).digest())


@dataclass(frozen=True, slots=True)
class Access:
    """Keys and origins that may use the server."""

    keys: Sequence[Key] = ()  # each request must bring one of them; none asks for none
    origins: Sequence[str] = ()  # origins of web pages that may ask, as browsers name them; ``*`` is any
    num_requests: Counter[str] = field(default_factory=Counter)  # requests so far, by names of keys

    def check(self, path: str, method: str, headers: Headers) -> Key | None:
        """Check the length, the origin and the key of a request. Return its key if it needs one.

        Web pages send their origin, programs send none. A request with two lengths is refused: a proxy may use one and
        the server the other, so that they disagree where the request ends.
        """
        if "content-length" in headers and "transfer-encoding" in headers:
            raise RefusedError("a request has Content-Length or Transfer-Encoding, not both.", 400)
        origin, host = headers.get("origin"), headers.get("host")
        if origin is not None and not {"*", origin} & set(self.origins) and not _is_own_page(origin, host):
            raise RefusedError(
                "this server answers no web pages of this origin. Hint: name it with --allowed-origins at the start.",
                403,
            )
        if path in OPEN_PATHS or path.startswith(OPEN_FOLDER) or method == "OPTIONS":
            return None
        return self.check_key(headers.get("authorization"), headers.get("x-api-key"))

    def check_key(self, authorization: str | None, key_header: str | None = None) -> Key | None:
        """Check the key of a request. Return it, or None if none is asked for."""
        if not self.keys:
            return None
        scheme, _, given = (authorization or "").partition(" ")
        if key_header is not None:
            scheme, given = "bearer", key_header
        digest = hashlib.sha256(given.strip().encode()).digest()
        found = [key for key in self.keys if hmac.compare_digest(digest, key.digest)]  # takes as long for each key
        if scheme.lower() != "bearer" or not found:
            raise RefusedError("the API key is missing or wrong. Hint: send 'Authorization: Bearer KEY'.", 401)
        return found[0]


class AccessMiddleware:
    """Refuses requests before anything else sees them."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access
        self._num_open: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on. Log it by the name of its key, if that has one."""
        name, began = "", time.monotonic()
        if scope["type"] == "http":
            try:
                key = self._access.check(scope["path"], scope["method"], Headers(scope=scope))
                if key is not None and key.most is not None and self._num_open[key.name] >= key.most:
                    raise RefusedError(f"{key.most} requests with this key wait already. Hint: ask again later.", 429)
            except RefusedError as error:
                response = error_reply(scope["path"], error, {"Connection": "close"})
                await response(scope, receive, send)
                return
            name = "" if key is None else key.name
        if name:
            self._access.num_requests[name] += 1
        self._num_open[name] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_open[name] -= 1
            if name:
                path, seconds = scope["raw_path"].decode("ascii", "replace"), time.monotonic() - began
                log.info("%s: %s %s took %.1f s", name, scope["method"], path, seconds)


def make_access(host: str, origins: Sequence[str], key_file: Path | None, is_open: bool) -> Access:
    """Return who may use a server."""
    key = os.environ.get(API_KEY_VARIABLE)
    keys = [] if key is None else [plain_key(key)]
    if key_file is not None:
        keys = _keys_in(key_file)
    if not keys and not is_open and not _is_loopback(host):
        raise ConfigError(
            f"--host {host}: other machines could use this server without a key. Hint: put a key in a file and name it "
            f"with --api-key-file, or set {API_KEY_VARIABLE}, or say --no-auth."
        )
    return Access(keys, tuple(origins))


def _keys_in(path: Path) -> list[Key]:
    """Return the keys of a file: one key as it is, or lines with names and hashes."""
    try:
        text = read_regular(path, _MAX_FILE_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read the API key from {path}: {reason}.") from error
    if "sha256:" not in text.lower():
        return [plain_key(text)]
    keys: dict[str, Key] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _NAMED_KEY.fullmatch(line.strip())
        if match is None or match[1] in keys:
            fault = "is no API key with a name" if match is None else f"has another API key of {match[1]}"
            raise ConfigError(
                f"{path}: line {number} {fault}. Hint: lines are NAME sha256:HASH, or with the most "
                "requests at a time behind it; printf %s KEY | sha256sum"
            )
        keys[match[1]] = Key(bytes.fromhex(match[2]), match[1], int(match[3]) if match[3] else None)
    if not keys:
        raise ConfigError(f"{path}: each line is a comment, so there is no API key. Hint: lines are NAME sha256:HASH")
    return [*keys.values()]


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

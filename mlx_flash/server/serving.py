"""The application, which has the paths of all dialects and the page at ``/``; who may use it; its port, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import os
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import uvicorn
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_flash import __version__
from mlx_flash.errors import ConfigError, RefusedError
from mlx_flash.files import read_regular
from mlx_flash.logs import log
from mlx_flash.server.anthropic import Conversation, MessagesRequest, answer_messages, count_tokens
from mlx_flash.server.ollama import ollama_routes
from mlx_flash.server.openai import ChatRequest, CompletionRequest, EmbeddingRequest, chat, complete, embed
from mlx_flash.server.responses import KeptResponses, ResponseRequest, respond
from mlx_flash.server.room import EngineRoom
from mlx_flash.server.service import Service, error_reply
from mlx_flash.telemetry import find, read
from mlx_flash.telemetry import metrics as metrics_of

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


MAX_CONNECTIONS = 512
"""The most open connections."""

CLIENT_SECONDS = 30.0
"""The least time that a client has for the rest of a request, or to read some of its reply. The longest is twice it."""


class Connection(H11Protocol):
    """A connection that ends when its request is late, when its client reads nothing, or when there are too many."""

    _num_pauses = 0  # how often its client had left too much unread

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, unless there are too many connections."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._num_pauses += 1

    def _look(self, before: object = None) -> None:
        """End the connection if it still waits for what it waited for when it was looked at before."""
        cycle, awaited = self.cycle, tuple[object, ...]()
        if self.flow.write_paused:
            awaited = ("reply", self._num_pauses)
        elif cycle is None or cycle.response_complete or cycle.more_body:  # a request's head, or its body
            awaited = (cycle, cycle is None or cycle.response_complete)
        if awaited and awaited == before:
            self.transport.abort()
        self._timer = self.loop.call_later(CLIENT_SECONDS, self._look, awaited)


DRAIN_SECONDS = 8.0
"""The longest time that SIGTERM leaves to answers that have begun. Docker kills after 10 seconds."""

CLOSE_SECONDS = 2
"""The longest time that clients have to read the end of their streams."""

MAX_HEAD_BYTES = 1 << 16


def take_port(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Clients can connect to it; they wait until the server answers."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port}: ports are numbers from 0 to 65535.")
    try:
        infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = infos[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error
        raise ConfigError(
            f"the server cannot listen on {host}:{port}: {reason}. Hint: end the program that uses this port, or "
            "choose another one with --port."
        ) from error


class Server(uvicorn.Server):
    """uvicorn's server, which ends in order: answers, then streams with an error, then the generation thread."""

    def __init__(self, room: EngineRoom, access: Access) -> None:
        self._room = room
        self.service = Service(room)
        self._number: int | None = None
        self._is_dead = False
        super().__init__(
            uvicorn.Config(
                make_app(self.service, access),
                http=Connection,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=CLOSE_SECONDS,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            )
        )

    def answer(self, listener: socket.socket) -> int:
        """Answer requests until Ctrl-C, SIGTERM or SIGHUP. Return the exit status: 1 if the generation thread died.

        SIGTERM leaves :data:`DRAIN_SECONDS` to requests under way, the others none. The second signal ends the process
        at once.
        """
        log.info("listening on %s:%d", *listener.getsockname()[:2])
        self.run(sockets=[listener])
        return int(self._is_dead)

    def stop_by(self, number: int) -> None:
        self._number = number
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let the first Ctrl-C, SIGTERM, or SIGHUP of a terminal that closes end the server.

        A process that ignores SIGINT or SIGHUP, as background jobs do, goes on ignoring it.
        """

        def stop(number: int, frame: FrameType | None) -> None:
            for each in signals:
                signal.signal(each, signal.SIG_DFL)
            self.stop_by(number)

        asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        signals = [number for number in asked if signal.getsignal(number) is not signal.SIG_IGN]
        if threading.current_thread() is threading.main_thread():
            for each in signals:
                signal.signal(each, stop)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer. One thread does what would hold up the event loop: parsing holds Python's lock anyway.

        With several of them, that many large bodies would be parsed, and in memory as objects, at once.
        """
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1, "server"))
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End: accept no more, wait for answers after SIGTERM, end the others with an error."""
        for server in self.servers:
            server.close()
        if self._number == signal.SIGTERM:
            log.info("the server stops when its requests are answered, at most in %d seconds", DRAIN_SECONDS)
            await self._until_idle(DRAIN_SECONDS)
        elif self._number is not None:
            log.info("the server stops after the pass under way; Ctrl-C again ends it at once")
        self._is_dead = not self._room.is_alive
        self._room.stop()
        await asyncio.to_thread(self._room.join)
        await super().shutdown(sockets)

    async def _until_idle(self, seconds: float) -> None:
        end = asyncio.get_running_loop().time() + seconds
        while self._room.num_answers and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)


_FOLDER = Path(__file__).with_name("web")

_HEADERS = {
    # The page runs and shows its own files, talks to its own server, and makes HTML only of sanitized text.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class _Files(StaticFiles):
    """The files of the page, each with its headers."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(_HEADERS)
        return response


def page_routes(service: Service) -> list[BaseRoute]:
    """Return the paths of the page."""
    files = _Files(directory=_FOLDER, follow_symlink=True)  # some installers link files to their cache

    async def page(request: Request) -> Response:
        return await files.get_response("page.html", request.scope)

    async def facts(request: Request) -> Response:
        engines = await asyncio.to_thread(_engines)
        return JSONResponse({"version": __version__, "requests": service.num_requests, "engines": engines})

    return [Route("/", page), Mount("/page", files), Route("/facts", facts)]


def _engines() -> list[dict[str, Any]]:
    """Return the numbers that the engines of this process publish."""
    return [
        {
            "model": str(engine.state["model"]["name"]),
            "number": engine.number,
            "clock": engine.clock,
            "facts": read(engine.state),
        }
        for engine in find()
        if engine.pid == os.getpid()
    ]


def _families(num_requests: int, keys: Mapping[str, int]) -> Iterator[Metric]:
    """Yield the metrics that have a value, of this process."""
    yield GaugeMetricFamily("mlx_flash_requests", "Requests that run or wait", num_requests)
    counts = CounterMetricFamily("mlx_flash_key_requests", "Requests with a key", labels=["key"])
    for each, number in keys.items():
        counts.add_metric([each], number)
    if keys:
        yield counts
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    for engine in find():
        for fact, value in metrics_of(engine.state) if engine.pid == os.getpid() else ():
            kind = CounterMetricFamily if fact.kind == "counter" else GaugeMetricFamily
            name = f"mlx_flash_{fact.metric}"
            family = families.setdefault(name, kind(name, fact.help, labels=["model", "number"]))
            family.add_metric([str(engine.state["model"]["name"]), str(engine.number)], value)
    yield from families.values()


def openai_routes(service: Service) -> list[BaseRoute]:
    """Return the paths of OpenAI's dialect."""
    created = int(time.time())

    def shown(name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": created, "owned_by": "mlx-flash"}

    async def models(request: Request) -> Response:
        names = await asyncio.to_thread(service.catalog.names)
        return JSONResponse({"object": "list", "data": [shown(name) for name in names]})

    async def model(request: Request) -> Response:
        name = str(request.path_params["name"])
        try:
            await asyncio.to_thread(service.catalog.find, name)
        except RefusedError as error:
            return error_reply(request.url.path, error)
        return JSONResponse(shown(name))

    return [
        *(service.generates(path, ChatRequest, chat) for path in ("/v1/chat/completions", "/chat/completions")),
        service.generates("/v1/completions", CompletionRequest, complete),
        service.generates("/v1/responses", ResponseRequest, partial(respond, KeptResponses())),
        service.post("/v1/embeddings", EmbeddingRequest, embed),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
    ]


def make_app(service: Service, access: Access) -> Starlette:
    """Return the application."""

    async def health(request: Request) -> Response:
        is_alive = service.room.is_alive
        return JSONResponse({"status": "ok" if is_alive else "unavailable"}, 200 if is_alive else 503)

    async def ready(request: Request) -> Response:
        is_ready = service.room.is_alive and service.room.is_ready
        return JSONResponse({"status": "ready" if is_ready else "loading"}, 200 if is_ready else 503)

    async def show_metrics(request: Request) -> Response:
        collect = partial(_families, service.num_requests, dict(access.num_requests))
        registry: Any = SimpleNamespace(collect=collect)
        return Response(await asyncio.to_thread(generate_latest, registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    middleware = [Middleware(AccessMiddleware, access=access)]
    if access.origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(access.origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
            )
        )
    routes = [
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", show_metrics),
        *page_routes(service),
        *openai_routes(service),
        *ollama_routes(service),
        service.generates("/v1/messages", MessagesRequest, answer_messages),
        service.post("/v1/messages/count_tokens", Conversation, count_tokens),
    ]
    return Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _http_error})


async def _http_error(request: Request, error: Exception) -> Response:
    """Return an error of the application itself: a path or a method that it does not have."""
    assert isinstance(error, HTTPException)
    return error_reply(request.url.path, RefusedError(error.detail, error.status_code), error.headers)

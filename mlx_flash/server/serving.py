"""The port, the event loop, and the end of the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_flash.errors import ConfigError
from mlx_flash.logs import log
from mlx_flash.server.access import Access
from mlx_flash.server.app import make_app
from mlx_flash.server.room import EngineRoom
from mlx_flash.server.service import Service

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
        cycle, awaited = self.cycle, None
        if self.flow.write_paused:
            awaited = ("reply", self._num_pauses)
        elif cycle is None or cycle.response_complete or cycle.more_body:  # a request's head, or its body
            awaited = (cycle, cycle is None or cycle.response_complete)
        if awaited is not None and awaited == before:
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
        """End the server as a signal asks for."""
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

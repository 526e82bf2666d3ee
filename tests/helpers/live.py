"""Servers as their clients see them, and a whole one in this process."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import children
from mlx_flash import FlashConfig
from mlx_flash.model import FlashLLM
from mlx_flash.modelfile.parse import read_modelfile
from mlx_flash.server.batch import BatchOptions
from mlx_flash.server.catalog import Catalog, Source, source_of
from mlx_flash.server.request import Defaults
from mlx_flash.server.room import EngineRoom
from mlx_flash.server.service import Service
from mlx_flash.server.serving import Access, Server, take_port

if TYPE_CHECKING:  # half a second, of which the workers with other tests need nothing
    import openai

TIMEOUT = 60
"""Seconds that a client waits for an answer."""


ENV = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "80", "PYTHONUNBUFFERED": "1"}


@contextlib.contextmanager
def served(command: Sequence[object], port: int, log: Path, *, forks: bool = True) -> Iterator[BaseProcess]:
    """Start a server, and kill it afterwards."""
    process = children.start(*command, files=(Path(os.devnull), log, log), forks=forks)
    try:
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                break
            assert process.is_alive(), log.read_text()
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.join()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Port:
    """A server on a port of this machine, as its clients see it."""

    def __init__(self, port: int) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self._clients = contextlib.ExitStack()

    def close(self) -> None:
        self._clients.close()

    @contextlib.contextmanager
    def leaving(self, path: str, **body: Any) -> Iterator[socket.socket]:
        """Ask over a connection of its own, which closes with the block."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT) as connection:
            connection.sendall(head.encode() + data)
            yield connection

    def client(self) -> openai.OpenAI:
        import openai

        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT)
        return self._clients.enter_context(client)

    def post(self, path: str, body: Any, data: bytes | None = None) -> tuple[int, Any]:
        """Return status and JSON of a reply; the lines of a stream as a list."""
        payload = json.dumps(body).encode() if data is None else data
        request = urllib.request.Request(self.url + path, payload, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
                text, kind = reply.read().decode(), reply.headers["Content-Type"]
                return reply.status, json.loads(text) if kind.startswith("application/json") else text.splitlines()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def get(self, path: str) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=TIMEOUT) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def say(self, text: str, **fields: Any) -> str:
        """Return the answer to a message."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}
        status, reply = self.post("/v1/chat/completions", body)
        assert status == 200, reply
        return str(reply["choices"][0]["message"]["content"])


class Live(Port):
    """A server in this process: its generation thread, the event loop, and a port."""

    def __init__(self, room: EngineRoom, access: Access | None = None) -> None:
        self.room = room
        self._socket = take_port("127.0.0.1", 0)
        super().__init__(self._socket.getsockname()[1])
        self.server = Server(room, access or Access())
        self._thread = threading.Thread(target=self.server.answer, args=(self._socket,))
        self._thread.start()
        while not self.server.started:
            time.sleep(0.005)

    def close(self) -> None:
        super().close()
        self.server.should_exit = True
        self._thread.join()

    @property
    def service(self) -> Service:
        return self.server.service

    @property
    def model(self) -> FlashLLM:
        return next(iter(self.room.models)).model


@contextlib.contextmanager
def live(
    *models: str | Source,
    options: BatchOptions | None = None,
    defaults: Defaults | None = None,
    keep_alive: float | None = None,
    access: Access | None = None,
    any_name: bool | None = None,
    **settings: Any,
) -> Iterator[Live]:
    """Run a server of some models, and of Modelfiles with names."""
    config = FlashConfig(**({"ram_budget_gb": 2.0, "telemetry": False} | settings))
    other = Source(config=config, defaults=defaults or Defaults())
    sources = [replace(other, name=model, base=model) if isinstance(model, str) else model for model in models]

    def describe(name: str, path: Path) -> Source:
        return source_of(read_modelfile(path), name, other)

    room = EngineRoom(Catalog(sources, other, describe=describe, any_name=any_name), options, keep_alive)
    room.start()
    running = Live(room, access)
    try:
        yield running
    finally:
        running.close()

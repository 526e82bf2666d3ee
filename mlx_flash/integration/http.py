"""The HTTP side of mlx-lm's server: its port, the models it names, its errors, and its end."""

from __future__ import annotations

import io
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, cast

from huggingface_hub import CacheNotFound, scan_cache_dir, try_to_load_from_cache
from mlx_lm.server import get_system_fingerprint

from mlx_flash.compat.server import APIHandler
from mlx_flash.errors import ConfigError, FlashError, RefusedError
from mlx_flash.integration.guard import MAX_CONNECTIONS, MAX_REQUESTS, Access, Deadlines, Occupancy, read_body
from mlx_flash.integration.metrics import CONTENT_TYPE, metrics

_log = logging.getLogger("mlx_flash")
_FILES = {"config.json", "model.safetensors.index.json", "tokenizer_config.json"}
"""Files of a repository that mlx-lm's server lists as a model."""

DRAIN_SECONDS = 8.0
"""The longest time that SIGTERM leaves to answers that have begun. Docker kills after 10 seconds."""

_TASKS = Path("/proc/self/task")


class UnansweredError(BaseException):
    """A request that failed before its answer began. mlx-lm answers every ``Exception`` here with status 404."""


class TerminatedError(KeyboardInterrupt):
    """SIGTERM came."""


class ClientLeftError(ConnectionError):
    """The client closed its connection before its answer was complete."""


class Handler(APIHandler):
    """mlx-lm's handler, with limits, errors in JSON, and a list of models that begins with the served one."""

    server: Listener
    rfile: BinaryIO

    def do_POST(self) -> None:  # noqa: N802
        """Answer a completion, if the request is one that the server accepts."""
        stream: BinaryIO = self.rfile
        try:
            self._check_access()
            body = read_body(stream, self.headers.get("Content-Length"))
            self.server.deadlines.meet(self.connection)
            with self.server.requests.one_more() as fits:
                if not fits:
                    raise RefusedError(f"{MAX_REQUESTS} requests wait already. Hint: ask again later.", 503)
                self.rfile = io.BytesIO(body)
                super().do_POST()
        except RefusedError as error:
            self.send_error_json(error, error.status)
        finally:
            self.rfile = stream

    def do_GET(self) -> None:  # noqa: N802
        """Answer anything but a completion. The state of the server is no secret."""
        try:
            if self.path != "/health":
                self._check_access()
            if self.path == "/metrics":
                self._send_metrics()
            else:
                super().do_GET()
        except RefusedError as error:
            self.send_error_json(error, error.status)

    def _send_metrics(self) -> None:
        body = metrics(self.server.requests.count).encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _check_access(self) -> None:
        self.server.access.check(self.headers.get("Authorization"), self.headers.get("Origin"))

    def handle_completion(self, request: Any, stop_words: list[str]) -> None:
        """Answer a completion, or say why not."""
        self.response_generator.client.connection = self.connection
        try:
            super().handle_completion(request, stop_words)
        except (ConnectionError, BlockingIOError):
            _log.info("a client left, or stopped reading, before its answer was complete")
        except UnansweredError as error:
            self._send_failure(error.__cause__)
        except FlashError as error:
            self._send_failure(error)

    def _send_failure(self, error: BaseException | None) -> None:
        if isinstance(error, ConnectionError):
            _log.info("a client left before its answer began")
            return
        is_ours = isinstance(error, FlashError | RuntimeError)  # others may quote the prompt
        _log.error("a request failed: %s", error if is_ours else type(error).__name__)
        if isinstance(error, RefusedError):
            self.send_error_json(error, error.status)
        elif isinstance(error, FlashError | RuntimeError):
            self.send_error_json(error, 500)
        elif isinstance(error, Exception):  # the request itself is wrong
            self.send_error_json(error, 400)

    def handle_models_request(self) -> None:
        """Send the names that a request may give as its model."""
        wanted = "/".join(self.path.split("/")[3:])
        names = [name for name in model_names(self.response_generator.cli_args.model) if wanted in ("", name)]
        models = [{"id": name, "object": "model", "created": self.created} for name in names]
        self.send_json({"object": "list", "data": models})


def model_names(served: str | None) -> list[str]:
    """Return the served model, then those in Hugging Face's cache folder."""
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        repos = frozenset()
    found = [r.repo_id for r in repos if "main" in r.refs and _FILES <= {f.file_name for f in r.refs["main"].files}]
    return list(dict.fromkeys([*([served] if served else ()), *sorted(found)]))


def known_as(name: str, served: str | None) -> str:
    """Return mlx-lm's name for the model of a request.

    Raises:
        RefusedError: no such model is on this machine.
    """
    if served and (
        name in ("default_model", served) or (Path(served).exists() and name == str(Path(served).resolve()))
    ):
        return "default_model"
    if (Path(name) / "config.json").exists() or ("/" in name and isinstance(_cached_config(name), str)):
        return name
    names = ", ".join(repr(known) for known in ["default_model"] * bool(served) + model_names(served))
    raise RefusedError(f"there is no model {name!r} here. Hint: this server has {names or 'none'}.", 404)


def _cached_config(name: str) -> Any:
    try:
        return try_to_load_from_cache(name, "config.json")
    except ValueError:  # it is no name of a repository
        return None


class Listener(ThreadingHTTPServer):
    """A port that clients can connect to; their requests wait until :meth:`answer`.

    Attributes:
        access: who may ask.
        requests: those that are answered or wait.
        deadlines: of connections whose request has not come yet.

    Raises:
        ConfigError: the port cannot be had.
    """

    request_queue_size = 128

    def __init__(self, host: str, port: int, access: Access) -> None:
        self.access = access
        self.requests = Occupancy(MAX_REQUESTS)
        self.deadlines = Deadlines()
        self._connections = Occupancy(MAX_CONNECTIONS)
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self.address_family, _, _, _, address = infos[0]
            super().__init__(cast(tuple[str, int], address), Handler)
        except OSError as error:
            raise ConfigError(
                f"the server cannot listen on {host}:{port}: {error.strerror or error}. Hint: end the program that "
                "uses this port, or choose another one with --port."
            ) from error

    def answer(self, generator: Any) -> None:
        """Answer requests until Ctrl-C or SIGTERM. The second one ends the process at once.

        SIGTERM leaves :data:`DRAIN_SECONDS` to requests under way, Ctrl-C none.
        """
        self._generator = generator
        _log.info("listening on %s:%d", *self.server_address[:2])
        with _ended_by_signals():
            try:
                self.serve_forever()
            except TerminatedError:
                self.socket.close()
                _log.info("the server stops when its requests are answered, at most in %d seconds", DRAIN_SECONDS)
                self.requests.wait_until_empty(DRAIN_SECONDS)
            except KeyboardInterrupt:
                _log.info("the server stops after the pass under way; Ctrl-C again ends it at once")
        generator.ask_to_stop()
        generator.join()
        self.server_close()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer one request, in a thread of its own. Further connections are closed while there are too many."""
        with self._connections.one_more() as fits:
            if not fits:
                return
            self.deadlines.begin(request)
            try:
                Handler(self._generator, request, client_address, self, system_fingerprint=get_system_fingerprint())
            finally:
                self.deadlines.meet(request)

    def service_actions(self) -> None:
        """Do what is due; called twice a second."""
        self.deadlines.enforce()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error of a connection. Its text may quote the request."""
        error = sys.exc_info()[1]
        level = logging.INFO if isinstance(error, OSError) else logging.ERROR  # a client that leaves is no fault
        _log.log(level, "a connection ended with %s", type(error).__name__)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM raise ``KeyboardInterrupt``, and the next one end the process.

    A process that ignores SIGINT, as background jobs do, goes on ignoring it.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_DFL)
        raise TerminatedError if number == signal.SIGTERM else KeyboardInterrupt

    signals = [s for s in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(s) is not signal.SIG_IGN]
    if threading.current_thread() is threading.main_thread():
        for each in signals:
            signal.signal(each, interrupt)
    yield


def wait_for_end_of_thread(native_id: int | None) -> None:
    """Wait for a thread that Python has joined to end, at most 5 seconds.

    Before Python 3.13 it is still alive then. MLX's cache of compiled functions, one for each thread, is freed at its
    end and needs Python for that, which must not be ending meanwhile.
    """
    deadline = time.monotonic() + 5
    while native_id is not None and _TASKS.joinpath(str(native_id)).exists() and time.monotonic() < deadline:
        time.sleep(0.005)


def is_gone(connection: socket.socket) -> bool:
    """Return whether the client at the other end of a connection has closed it."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True

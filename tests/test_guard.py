"""Requests that the server refuses, before a model sees them."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlx_lm import server as mlx_lm_server

from mlx_flash.errors import ConfigError, RefusedError
from mlx_flash.integration import guard
from mlx_flash.integration import http as http_side
from mlx_flash.integration.guard import Access, Deadlines, Occupancy, make_access, read_body
from mlx_flash.integration.http import Listener, TerminatedError

KEY = "a-key-of-some-length"


class Generator:
    """Stands for mlx-lm's thread: it refuses every request, after a while."""

    is_healthy = True
    is_stopping = False
    native_id = None

    def __init__(self) -> None:
        options = {"allowed_origins": [""], "model": "m", "num_draft_tokens": 0, "max_tokens": 8, "temp": 0.0}
        self.cli_args = SimpleNamespace(**options, top_p=1.0, top_k=0, min_p=0.0)
        self.client = threading.local()
        self.seconds = 0.0
        self.has_begun = threading.Event()

    def generate(self, request: Any, args: Any, progress_callback: Any = None) -> Any:
        self.has_begun.set()
        time.sleep(self.seconds)
        raise http_side.UnansweredError from RefusedError("no room", 413)

    def ask_to_stop(self) -> None:
        pass

    join = ask_to_stop


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setattr(mlx_lm_server, "scan_cache_dir", lambda: SimpleNamespace(repos=()))
    with Listener("127.0.0.1", 0, Access(KEY)) as made:
        made._generator = Generator()
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(listener: Listener, body: bytes | str = "{}", path: str = "/v1/completions", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", listener.server_address[1], timeout=10)
    names = {name.replace("_", "-"): value for name, value in {"Authorization": f"Bearer {KEY}", **headers}.items()}
    connection.request("GET" if path in ("/v1/models", "/metrics") else "POST", path, body, names)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


# --- keys and origins ------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics", "/elsewhere"])
@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer ключ"])
def test_a_missing_or_wrong_key(listener: Listener, path: str, header: str) -> None:
    status, text = ask(listener, path=path, Authorization=header.encode().decode("latin-1"))
    assert status == 401 and KEY not in text


def test_the_right_key(listener: Listener) -> None:
    assert ask(listener, '{"prompt": "x"}') == (413, '{"error": {"message": "no room", "type": "RefusedError"}}')
    assert ask(listener, '{"prompt": "x"}', authorization=f"bearer  {KEY} ")[0] == 413


def test_health_needs_no_key(listener: Listener) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", listener.server_address[1])
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(guard.hmac, "compare_digest", lambda *pair: compared.append(pair))
    with pytest.raises(RefusedError):
        Access(KEY).check(f"Bearer {KEY}", None)
    assert compared == [(KEY.encode(), KEY.encode())]


def test_web_pages_of_other_origins_are_refused(listener: Listener) -> None:
    assert ask(listener, Origin="http://evil.example")[0] == 403
    for origins in (["http://good.example"], ["*"]):
        listener.access = Access(KEY, origins)
        assert ask(listener, '{"prompt": "x"}', Origin="http://good.example")[0] == 413


def test_key_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    assert make_access("0.0.0.0", [], tmp_path / "key", False).api_key == KEY
    monkeypatch.setenv("MLX_FLASH_API_KEY", "other")
    assert make_access("0.0.0.0", [], None, False).api_key == "other"
    for text in ("", "two words", "ключ", "x" * 5000):
        (tmp_path / "key").write_text(text)
        with pytest.raises(ConfigError, match="API key"):
            make_access("127.0.0.1", [], tmp_path / "key", False)
    with pytest.raises(ConfigError, match=r"cannot read the API key from .*missing"):
        make_access("127.0.0.1", [], tmp_path / "missing", False)


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("", False), ("192.0.2.1", False)],
)
def test_a_server_for_other_machines_needs_a_key(host: str, is_loopback: bool) -> None:
    assert make_access(host, [], None, True).api_key is None
    if is_loopback:
        assert make_access(host, [], None, False).api_key is None
    else:
        with pytest.raises(ConfigError, match="--api-key-file, or set MLX_FLASH_API_KEY, or say --no-auth"):
            make_access(host, [], None, False)


# --- limits ----------------------------------------------------------------------------

BODIES: dict[str, tuple[bytes, str | None, int]] = {
    "no length": (b"{}", None, 411),
    "negative length": (b"{}", "-1", 400),
    "no number": (b"{}", "two", 400),
    "other digits": (b"{}", "²", 400),
    "huge": (b"{}", str(guard.MAX_BODY_BYTES + 1), 413),
    "endless number": (b"{}", "9" * 5000, 413),
    "no JSON": (b"{secret", "7", 400),
    "no UTF-8": (b'{"secret": "\xff"}', "15", 400),
    "nested": (b"[" * 100_000, "100000", 400),
    "a list": (b'["secret"]', "10", 400),
    "much text": (json.dumps({"prompt": ["x" * 3_000_000] * 2}).encode(), "6000020", 413),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_are_refused(name: str) -> None:
    body, length, status = BODIES[name]
    with pytest.raises(RefusedError) as caught:
        read_body(io.BytesIO(body), length)
    assert caught.value.status == status and "secret" not in str(caught.value)


def test_pictures_are_not_text() -> None:
    body = json.dumps({"messages": [{"image_url": {"url": "data:image/png;base64," + "A" * 5_000_000}}]}).encode()
    assert read_body(io.BytesIO(body), str(len(body))) == body


def test_prompts_are_not_logged(listener: Listener, caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    caplog.set_level(logging.INFO)
    for body in ('{"prompt": "my secret"', '["my secret"]', '{"prompt": "my secret"}', '{"messages": "my secret"}'):
        ask(listener, body)
        ask(listener, body, "/v1/chat/completions")
    assert "secret" not in caplog.text + "".join(capfd.readouterr())


def test_requests_beyond_the_limit(listener: Listener) -> None:
    listener.requests = Occupancy(2)
    listener._generator.seconds = 0.3
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(ask(listener, '{"prompt": "x"}')[0])) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [413, 413, 503, 503, 503]
    assert ask(listener, '{"prompt": "x"}')[0] == 413
    assert listener.requests.wait_until_empty(5)


@pytest.mark.parametrize(
    "start", [b"", b"POST /v1/completions HTTP/1.1\r\nX-Head", b"POST /v1/completions HTTP/1.1\r\n"]
)
def test_slow_requests_end_in_time_and_hold_up_nobody(listener: Listener, start: bytes) -> None:
    listener.deadlines = Deadlines(0.3)
    if start.endswith(b"\n"):
        start += f"Authorization: Bearer {KEY}\r\nContent-Length: 100\r\n\r\n".encode()
    with socket.create_connection(listener.server_address) as slow:
        slow.sendall(start)
        began = time.monotonic()
        ended = threading.Event()

        def drip() -> None:
            while not ended.wait(0.05):
                slow.sendall(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        assert ask(listener, '{"prompt": "x"}')[0] == 413
        slow.settimeout(5)
        try:
            while slow.recv(1000):
                pass
        except ConnectionResetError:
            pass
        assert 0.2 < time.monotonic() - began < 3
        ended.set()
        dripping.join()
    assert not listener.deadlines._ends


def test_connections_beyond_the_limit_are_closed(listener: Listener) -> None:
    listener._connections = Occupancy(3)
    address = listener.server_address
    with socket.create_connection(address), socket.create_connection(address), socket.create_connection(address):
        with socket.create_connection(address) as fourth:
            fourth.settimeout(5)
            assert fourth.recv(10) == b""
        time.sleep(0.05)
    time.sleep(0.1)
    assert ask(listener, '{"prompt": "x"}')[0] == 413


@pytest.fixture
def _handlers_put_back() -> Iterator[None]:
    """A server that stops leaves its handlers in place, so that a second signal still ends the process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers_put_back")
@pytest.mark.parametrize(("seconds", "limit"), [(0.3, 5.0), (5.0, 0.2)])
def test_sigterm_leaves_requests_some_time(seconds: float, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that take less than the limit are complete."""
    monkeypatch.setattr(http_side, "DRAIN_SECONDS", limit)
    with Listener("127.0.0.1", 0, Access()) as listener:
        generator = Generator()
        generator.seconds = seconds
        found: list[int] = []

        def client() -> None:
            with contextlib.suppress(OSError):  # the answer came too late
                found.append(ask(listener, '{"prompt": "x"}')[0])

        asking = threading.Thread(target=client, daemon=True)
        asking.start()

        def stop() -> None:
            if generator.has_begun.wait(0.2):
                raise TerminatedError

        monkeypatch.setattr(listener, "service_actions", stop)
        began = time.monotonic()
        listener.answer(generator)
        assert time.monotonic() - began < limit + 4
        if seconds < limit:
            asking.join(5)
            assert found == [413]

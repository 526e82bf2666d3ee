"""Requests that the server refuses, before a model sees them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import fuzzing
from live import Live, live
from mlx_flash.config import FlashConfig
from mlx_flash.errors import ConfigError, RefusedError
from mlx_flash.server import ollama, serving
from mlx_flash.server import service as service_module
from mlx_flash.server.anthropic import Conversation, MessagesRequest
from mlx_flash.server.catalog import Catalog, Source
from mlx_flash.server.events import Answers, Failed
from mlx_flash.server.grammar import json_grammar
from mlx_flash.server.openai import ChatRequest, CompletionRequest
from mlx_flash.server.request import Defaults
from mlx_flash.server.responses import ResponseRequest
from mlx_flash.server.service import MAX_BODY_BYTES, checked, parse
from mlx_flash.server.serving import Access, make_access, plain_key
from models import make_random_model
from scripted import with_template
from waiting import eventually

KEY, BOB = "a-key-of-some-length", "bob@work"


class Room:
    """Stands for the generation thread: it refuses every request, after a while."""

    is_alive = is_ready = True

    def __init__(self) -> None:
        self.catalog = Catalog([], Source(config=FlashConfig()))
        self.seconds = 0.0
        self.has_begun = threading.Event()
        self.num_answers = 0
        self.is_stopped = threading.Event()

    def submit(self, *requests: Any) -> Answers:
        self.has_begun.set()
        self.num_answers += len(requests)
        answers = Answers(range(len(requests)), lambda numbers: None)
        for number in range(len(requests)):
            asyncio.get_running_loop().call_later(self.seconds, self.refuse, answers, number)
        return answers

    def refuse(self, answers: Answers, number: int) -> None:
        self.num_answers -= 1
        answers.put(number, Failed(RefusedError("no room", 413)))

    def stop(self) -> None:
        self.is_stopped.set()

    def join(self) -> None:
        pass


@pytest.fixture
def listener(request: Any) -> Iterator[Live]:
    made = Live(Room(), Access([plain_key(KEY)], getattr(request, "param", ())))  # type: ignore[arg-type]
    yield made
    made.close()


def connected(listener: Live) -> socket.socket:
    return socket.create_connection(("127.0.0.1", listener.port), timeout=10)


def ask(
    listener: Live, body: Any = "{}", path: str = "/v1/completions", method: str = "POST", **headers: str
) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", listener.port, timeout=10)
    names = {name.replace("_", "-"): value for name, value in {"Authorization": f"Bearer {KEY}", **headers}.items()}
    connection.request(method, path, body, names)
    answer = connection.getresponse()
    text = f"{answer.headers}{answer.read().decode()}"
    connection.close()
    return answer.status, text


# --- requests inside of requests ------------------------------------------------------

BODY = b'{"prompt": "x"}'
HEAD = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {KEY}\r\n".encode()
HIDDEN = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nx-api-key: {KEY}\r\n\r\n".encode()
LENGTH, CHUNKED = b"Content-Length: %d\r\n", b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
SMUGGLED = {
    "length, then chunks": HEAD + LENGTH % len(CHUNKS) + CHUNKED + b"\r\n" + CHUNKS + HIDDEN,
    "chunks, then length": HEAD + CHUNKED + LENGTH % 4 + b"\r\n" + CHUNKS + HIDDEN,
}
"""Requests whose end a proxy may see elsewhere than the server, with another one behind it."""


@pytest.mark.parametrize("name", SMUGGLED)
def test_a_request_whose_end_is_unclear_is_the_last_of_its_connection(listener: Live, name: str) -> None:
    found = b""
    with connected(listener) as connection, contextlib.suppress(OSError):
        connection.sendall(SMUGGLED[name])
        connection.settimeout(0.3)
        while part := connection.recv(1 << 16):
            found += part
    assert re.findall(rb"HTTP/1\.1 (\d+)", found) in ([], [b"400"])
    assert ask(listener, '{"prompt": "x"}')[0] == 413


# --- keys and origins ------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics", "/elsewhere"])
@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer ключ"])
def test_a_missing_or_wrong_key(listener: Live, path: str, header: str) -> None:
    method = "GET" if path in ("/v1/models", "/metrics") else "POST"
    status, text = ask(listener, path=path, method=method, Authorization=header.encode().decode("latin-1"))
    assert status == 401 and KEY not in text


def test_the_right_key(listener: Live) -> None:
    status, text = ask(listener, '{"prompt": "x"}')
    assert status == 413 and '"message":"no room"' in text.replace(": ", ":")
    assert ask(listener, '{"prompt": "x"}', authorization=f"bearer  {KEY} ")[0] == 413
    assert ask(listener, '{"prompt": "x"}', authorization="", x_api_key=KEY)[0] == 413
    assert '"authentication_error"' in ask(listener, path="/v1/messages", x_api_key="wrong")[1]
    assert ask(listener, None, "/health", "GET", Authorization="")[0] == 200  # needs none


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(serving.hmac, "compare_digest", lambda *pair: compared.append(pair))
    with pytest.raises(RefusedError):
        Access([plain_key(KEY)]).check_key(f"Bearer {KEY}")
    assert compared == [(plain_key(KEY).digest,) * 2]


def test_web_pages_of_other_origins_are_refused(listener: Live) -> None:
    assert ask(listener, Origin="http://evil.example")[0] == 403
    port = listener.port
    assert ask(listener, '{"prompt": "x"}', Origin=f"http://127.0.0.1:{port}")[0] == 413  # its own page
    assert ask(listener, Origin=f"http://evil.example:{port}", Host=f"evil.example:{port}")[0] == 403  # another name


@pytest.mark.parametrize("listener", [["http://good.example"], ["*"]], indirect=True)
def test_web_pages_of_origins_that_are_named(listener: Live) -> None:
    origin = "http://good.example"
    assert ask(listener, '{"prompt": "x"}', Origin=origin)[0] == 413
    status, text = ask(listener, None, method="OPTIONS", Origin=origin, Access_Control_Request_Method="POST")
    allowed = [line.partition(": ")[2] for line in text.lower().splitlines() if "access-control-allow-origin" in line]
    assert status == 200 and allowed in (["*"], [origin])


def test_key_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    assert make_access("0.0.0.0", [], tmp_path / "key", False).keys == [plain_key(KEY)]
    monkeypatch.setenv("MLX_FLASH_API_KEY", "other")
    assert make_access("0.0.0.0", [], None, False).keys == [plain_key("other")]
    for text in ("", "two words", "ключ", "x" * 5000, f"# al sha256:{plain_key(KEY).digest.hex()}"):
        (tmp_path / "key").write_text(text)
        with pytest.raises(ConfigError, match="API key"):
            make_access("127.0.0.1", [], tmp_path / "key", False)
    with pytest.raises(ConfigError, match=r"cannot read the API key from .*missing"):
        make_access("127.0.0.1", [], tmp_path / "missing", False)


def test_named_keys_are_hashed_counted_and_limited(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [
        f"{name} SHA256:{plain_key(key).digest.hex()}{more}" for name, key, more in ((BOB, "b", " 1"), ("al", "a", ""))
    ]
    path = tmp_path / "keys"
    path.write_text("# who may ask\n\n" + "\n".join(lines))
    access = make_access("0.0.0.0", [], path, False)
    room = Room()
    room.seconds = 1.0
    listener: Any = Live(room, access)  # type: ignore[arg-type]
    asks = partial(ask, listener, '{"prompt": "x"}')
    caplog.set_level(logging.INFO, "mlx_flash")
    with contextlib.closing(listener), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(asks, Authorization="Bearer b")
        assert room.has_begun.wait(10)
        status, text = asks(Authorization="Bearer b")
        assert status == 429 and "1 requests with this key wait already" in text
        assert asks(Authorization="Bearer a")[0] == waiting.result()[0] == 413
        assert asks(Authorization="Bearer c")[0] == 401
        metrics = ask(listener, None, "/metrics", "GET", Authorization="Bearer a")[1]
    assert f'mlx_flash_key_requests_total{{key="{BOB}"}} 1.0' in metrics
    assert any(record.message.startswith(f"{BOB}: POST /v1/completions took") for record in caplog.records)
    for wrong in (
        f"{lines[0]}\n{lines[0]}",
        "al sha256:12",
        f"two words {lines[0]}",
        f"{lines[0]} 0",
        f"{lines[0]}\nsecret",
    ):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=r"keys: line \d .*API key.*sha256sum") as caught:
            make_access("0.0.0.0", [], path, False)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("", False), ("192.0.2.1", False)],
)
def test_a_server_for_other_machines_needs_a_key(host: str, is_loopback: bool) -> None:
    assert not make_access(host, [], None, True).keys
    if is_loopback:
        assert not make_access(host, [], None, False).keys
    else:
        with pytest.raises(ConfigError, match="--api-key-file, or set MLX_FLASH_API_KEY, or say --no-auth"):
            make_access(host, [], None, False)


# --- limits ----------------------------------------------------------------------------

BODIES: dict[str, tuple[bytes, int]] = {
    "nothing": (b"", 400),
    "no JSON": (b"{secret", 400),
    "no UTF-8": (b'{"secret": "\xff"}', 400),
    "nested": (b"[" * 100_000, 400),
    "a list": (b'["secret"]', 400),
    "no number": (b'{"prompt": "secret", "temperature": NaN}', 400),
    "endless": (b'{"prompt": "secret", "seed": ' + b"9" * 5000 + b"}", 400),
    "half of a surrogate pair": (b'{"prompt": "secret \xed\xa0\xbd"}', 400),
    "UTF-16": ('{"prompt": "secret \\ud83e"}'.encode("utf-16"), 400),
    "many values": (b'{"secret": [' + b"{}," * 1_000_000 + b"{}]}", 413),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_are_refused(name: str) -> None:
    body, status = BODIES[name]
    with pytest.raises(RefusedError) as caught:
        parse(body)
    assert caught.value.status == status and "secret" not in str(caught.value)


def test_one_error_of_a_list_is_enough() -> None:
    """The errors of a list of two million numbers took 2 GB."""
    for value in ({"prompt": [{}] * 5000}, {"prompt": [[0.5] * 5000]}, {"prompt": "x", "stop": [1.5] * 5000}):
        with pytest.raises(ValidationError) as caught:
            CompletionRequest.model_validate(value)
        assert caught.value.error_count() < 10


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"prompt": [[]]}, "prompt.0: List should have at least 1 item"),
        ({"prompt": ["a", 1]}, "prompt.1: Input should be a valid string"),
        ({"prompt": [[1], ["a"]]}, "prompt.1.0: Input should be a valid integer"),
        ({"prompt": "a", "stop": ["b"] * 1000}, "stop: List should have at most 64 items"),
    ],
)
def test_an_error_is_that_of_the_kind_that_was_meant(value: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedError, match=re.escape(message)):
        checked(value, CompletionRequest)


def test_many_unknown_fields_are_not_logged() -> None:
    body = {"prompt": "x"} | {f"secret {i}\n": 0 for i in range(5000)} | {f"field_{i}": 0 for i in range(5000)}
    service_module.IGNORED.clear()
    checked(body, CompletionRequest)
    assert {"?", "field_0"} <= service_module.IGNORED and len(service_module.IGNORED) < 1000


def test_bodies_of_all_requests_have_a_limit(listener: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_HELD_BYTES", 10_000)
    body = json.dumps({"prompt": "x" * 5000})
    assert ask(listener, body)[0] == 413
    with connected(listener) as waiting:
        waiting.sendall(HEAD + LENGTH % 9000 + b"\r\n" + b"{" * 8000)
        eventually(lambda: ask(listener, body)[0] == 503)
        assert "10000 are allowed. Hint: ask again later." in ask(listener, body)[1]
        assert ask(listener, '{"prompt": "x"}')[0] == 413
    eventually(lambda: ask(listener, body)[0] == 413)


def test_large_bodies_are_parsed_in_one_thread(listener: Live) -> None:
    """With more of them, as many would be in memory as objects at once."""
    body = json.dumps({"prompt": "x" * 200_000, "stop": ["y"] * 20_000})
    with ThreadPoolExecutor(12, "asking") as pool:
        list(pool.map(lambda _: ask(listener, body), range(12)))
    assert sum(thread.name.startswith(("server_", "asyncio_")) for thread in threading.enumerate()) == 1


LENGTHS = {"-1": 400, "two": 400, "\xb2": 400, str(MAX_BODY_BYTES + 1): 413, "9" * 5000: 400, "2, 3": 400}


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths_that_are_refused(listener: Live, length: str) -> None:
    with connected(listener) as connection:
        connection.sendall(HEAD + f"Content-Length: {length}\r\n\r\n".encode("latin-1") + b"{}")
        assert int(connection.recv(1000).split()[1]) == LENGTHS[length]


def test_a_body_without_a_length_is_cut_off(listener: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_BODY_BYTES", 10_000)
    assert ask(listener, "x" * 20_000)[0] == 413
    parts = (b"x" * 1000 for _ in range(20))  # in chunks
    assert ask(listener, parts)[0] == 413


def test_prompts_are_not_logged(listener: Live, caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    caplog.set_level(logging.INFO)
    for body in ('{"prompt": "my secret"', '["my secret"]', '{"prompt": "my secret"}', '{"messages": "my secret"}'):
        ask(listener, body)
        ask(listener, body, "/v1/chat/completions")
    assert "secret" not in caplog.text + "".join(capfd.readouterr())


def test_requests_beyond_the_limit(listener: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_REQUESTS", 2)
    listener.room.seconds = 0.3
    with ThreadPoolExecutor(5) as pool:
        found = list(pool.map(lambda _: ask(listener, '{"prompt": "x"}')[0], range(5)))
    assert sorted(found) == [413, 413, 503, 503, 503]
    assert ask(listener, '{"prompt": "x"}')[0] == 413
    assert listener.room.num_answers == 0


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """A listener that waits a short time for the end of a request."""
    monkeypatch.setattr(serving, "CLIENT_SECONDS", 0.3)
    return request.getfixturevalue("listener")


@pytest.mark.parametrize(
    "start", [b"", b"POST /v1/completions HTTP/1.1\r\nX-Head", b"POST /v1/completions HTTP/1.1\r\n"]
)
def test_slow_requests_end_in_time_and_hold_up_nobody(hurried: Live, start: bytes) -> None:
    if start.endswith(b"\n"):
        start += f"Host: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 100\r\n\r\n".encode()
    with connected(hurried) as slow:
        slow.sendall(start)
        began = time.monotonic()
        ended = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not ended.wait(0.05):
                    slow.sendall(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        assert ask(hurried, '{"prompt": "x"}')[0] == 413
        slow.settimeout(5)
        try:
            while slow.recv(1000):
                pass
        except ConnectionResetError:
            pass
        assert 0.2 < time.monotonic() - began < 3
        ended.set()
        dripping.join()


def test_each_request_of_a_connection_has_a_deadline_of_its_own(hurried: Live) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", hurried.port, timeout=10)
    connection.connect()
    first, began = connection.sock, time.monotonic()
    while time.monotonic() - began < 1:
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {KEY}"})
        assert connection.getresponse().read()
        assert connection.sock is first
    connection.close()


def test_the_second_of_two_requests_sent_at_once_ends_in_time(hurried: Live) -> None:
    with connected(hurried) as connection:
        connection.sendall(HEAD + LENGTH % len(BODY) + b"\r\n" + BODY + HEAD + LENGTH % 100 + b"\r\n{")
        began = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(1000):
                pass
        assert time.monotonic() - began < 3


def test_connections_beyond_the_limit_are_closed(listener: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 3)
    with connected(listener), connected(listener), connected(listener):
        with connected(listener) as fourth:
            fourth.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert fourth.recv(10) == b""
        time.sleep(0.05)
    time.sleep(0.1)
    assert ask(listener, '{"prompt": "x"}')[0] == 413


@pytest.mark.parametrize(("seconds", "limit"), [(0.3, 5.0), (5.0, 0.2)])
def test_sigterm_leaves_requests_some_time(seconds: float, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that take less than the limit are complete."""
    monkeypatch.setattr(serving, "DRAIN_SECONDS", limit)
    monkeypatch.setattr(serving, "CLOSE_SECONDS", 1)
    listener: Any = Live(Room(), Access())  # type: ignore[arg-type]
    listener.room.seconds = seconds
    found: list[int] = []

    def client() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # the answer came too late
            found.append(ask(listener, '{"prompt": "x"}')[0])

    asking = threading.Thread(target=client, daemon=True)
    asking.start()
    assert listener.room.has_begun.wait(5)
    began = time.monotonic()
    listener.server.stop_by(signal.SIGTERM)
    listener.close()
    assert time.monotonic() - began < limit + 4 and listener.room.is_stopped.is_set()
    asking.join(5)
    assert (found == [413]) == (seconds < limit)


def _joined(num: int, kind: str) -> dict[str, Any]:
    patterns = [{"type": "string", "pattern": f".*{'[ab]' * (i + 1)}.*"} for i in range(num)]
    if kind == "allOf":
        return {"allOf": patterns}
    if kind == "properties":
        return {"allOf": [{"type": "object", "properties": {"a": pattern}} for pattern in patterns]}
    named = {f"d{i}": {**pattern, "$ref": f"#/$defs/d{i + 1}"} for i, pattern in enumerate(patterns)}
    return {"$ref": "#/$defs/d0", "$defs": {**named, f"d{num}": {"type": "string"}}}


@pytest.mark.parametrize("kind", ["allOf", "properties", "$ref"])
def test_patterns_that_have_to_fit_together_are_few(kind: str) -> None:
    """15 of them took 2 GB and 26 s."""
    with pytest.raises(RefusedError, match=r"joins parts \(allOf, \$ref\) and has 15 patterns, 8 are allowed"):
        json_grammar(_joined(15, kind), "response_format")
    assert json_grammar(_joined(2, kind), "response_format")
    alone = {f"k{i}": {"type": "string", "pattern": f"^[a-z]{{{i}}}$"} for i in range(30)}
    assert json_grammar({"type": "object", "properties": alone}, "response_format")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 99_999_989},
        {"type": "number", "multipleOf": 99_999.989},
        {"allOf": [{"type": "integer", "multipleOf": number} for number in (97, 89, 83)]},
    ],
)
def test_multiples_are_small(schema: dict[str, Any]) -> None:
    """Remainders are the states of a grammar: the first one took minutes, and five in a list 217 MB."""
    with pytest.raises(RefusedError, match="a multipleOf, or a product of several, of more than 10000"):
        json_grammar(schema, "response_format")
    assert json_grammar({"type": "number", "multipleOf": 0.01}, "") and json_grammar({"multipleOf": 1000}, "")


# --- damaged requests of real programs --------------------------------------------------------------------------------

# They get an answer or a 4xx, and so does the next one. DAMAGED_REQUESTS=1000 looks for longer.

KINDS: dict[str, Any] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponseRequest,
    "/api/chat": ollama.ChatRequest,
    "/api/generate": ollama.GenerateRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": Conversation,
}


def sent(path: str) -> list[dict[str, Any]]:
    """Return requests that programs sent to a path, which ask for few tokens."""
    folder = Path(__file__).parent / "bodies"
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    of_ollama = [json.loads(file.read_text()) for file in sorted(folder.glob("ollama/*.json"))]
    found = [each["body"] for each in of_ollama if each["path"] == path]
    same = path.removesuffix("/count_tokens")
    found += [json.loads((folder / f"{name}.json").read_text()) for name in manifest if manifest[name]["path"] == same]
    few = dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict", "n"), 2)
    return [body | {name: few[name] for name in few.keys() & body} for body in found or [{"prompt": "x"}]]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    shape = "--layers 1 --hidden-size 64 --intermediate-size 64 --heads 4 --kv-heads 2 --vocab-size 300"
    path = make_random_model(tmp_path_factory.mktemp("models") / "damaged", *shape.split())
    with live(str(with_template(path)), defaults=Defaults(max_tokens=2)) as running:
        yield running


@pytest.mark.parametrize("path", KINDS)
def test_damaged_requests_get_an_answer_or_a_4xx(small: Live, path: str) -> None:
    dice, bodies = random.Random(path), sent(path)
    for _ in range(int(os.environ.get("DAMAGED_REQUESTS", "15"))):
        body = dice.choice(bodies) | {dice.choice(sorted(KINDS[path].model_fields)): dice.choice(fuzzing.VALUES)}
        status, reply = small.post(path, None, fuzzing.damaged_json(body, dice))
        assert status == 200 or 400 <= status < 500, (body, reply)
        assert status != 200 or '"error": {' not in json.dumps(reply), (body, reply)
        assert small.post("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200

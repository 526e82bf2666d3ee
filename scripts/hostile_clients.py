"""A server under clients that stream, leave, send garbage, huge and slow bodies, while others ask properly.

Every proper answer is compared with the answer to the same request alone. At the end the server must be healthy, have
no more descriptors than before, have stayed in its budget, and end on SIGTERM with status 0.

Example:
    python scripts/hostile_clients.py --requests 10000
    python scripts/hostile_clients.py --seconds 7200 --pause 1 --json clients.json
    python scripts/hostile_clients.py --requests 100 --crowd 1000 --slow-readers 100
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import resource
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import stress
from stress import Clients, Server, make_model, serving, wait_for_no_client

CLIENTS = 8
BUDGET_GB = 0.5
PROMPTS = ["The sea", "Why is the sky blue?", "Count to ten, slowly: one", "x", " ".join(map(str, range(60)))]
SLOW_PROMPT = {"prompt": "x", "max_tokens": 2}
ONE_IN = 100
"""One request of so many has a body of a byte a second."""

BODY_SECONDS = 30
"""The time that the server gives to a body."""


class Visitors:
    """The things that clients do to a server, and the answers that they expect."""

    def __init__(self, server: Server) -> None:
        self._server, self._port = server, server.port
        self._expected = {prompt: ask(self._port, {"prompt": prompt, "max_tokens": 12}) for prompt in PROMPTS}
        self._slow = ask(self._port, SLOW_PROMPT)

    def act(self, number: int, dice: random.Random) -> str:
        """Do one thing to the server. Return its name, and "right" or "failed" where there is something to check."""
        if number % ONE_IN == ONE_IN // 2:
            return self._drip(number % (2 * ONE_IN) < ONE_IN)
        prompt = dice.choice(PROMPTS)
        act = dice.choice(("ask", "ask", "stream", "stream", "health", *ACTS))
        if act == "health":
            return "right: health" if self._server.is_healthy() else "failed: health"
        if act in ("ask", "stream"):
            text = ask(self._port, {"prompt": prompt, "max_tokens": 12, "stream": act == "stream"})
            return f"right: {act}" if text == self._expected[prompt] else f"failed: {act} {prompt!r}: {text!r}"
        with contextlib.suppress(OSError):  # the server may close first
            send(self._port, ACTS[act], dice)
        return act

    def _drip(self, is_in_time: bool) -> str:
        """Send a body of a byte a second, either a request that is just in time, or one that the server must end."""
        if not is_in_time:
            return "right: ended" if is_ended(self._port) else "failed: a slow body was not ended"
        body = json.dumps(SLOW_PROMPT).encode()
        with socket.create_connection(("127.0.0.1", self._port), 60) as connection:
            connection.sendall(head(len(body)) + body[:15])
            for byte in body[15:]:
                time.sleep(1)
                connection.sendall(bytes([byte]))
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            text = json.loads(answer.read())["choices"][0]["text"]
        return "right: slow" if text == self._slow else f"failed: slow {text!r}"


def main(arguments: list[str] | None = None) -> int:
    """Return 1 when an answer was wrong, or something was left."""
    args = make_parser().parse_args(arguments)
    if not args.seconds and not args.requests:
        args.requests = 1000
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        model = make_model(Path(folder) / "model")
        words = ["mlx_flash", "serve", "--model", model, "--ram-budget-gb", BUDGET_GB]
        with serving(words, Path(folder) / "log") as server:
            clients = Clients(server, Visitors(server).act, CLIENTS, args, args.requests)
            samples = [clients.idle_sample()]
            for name, meet in (("crowd", crowd), ("slow readers", read_slowly)):
                number = getattr(args, name.replace(" ", "_"))
                if number:
                    print(f"{name}: {meet(server.port, number)}, {clients.sample()}", flush=True)
                    wait_for_no_client(server.process)
            samples += clients.run()
            is_right = samples[-1].failed == 0 and server.is_healthy()
            peak = server.peak_bytes
            status = server.end()
    share = peak / BUDGET_GB / 1e7
    print(f"{clients.summary(samples)}, peak {share:.0f} % of the budget, exit status {status}")
    clients.write(args.json, samples, exit_status=status, peak_bytes=peak)
    is_more = samples[-1].descriptors > samples[0].descriptors
    return int(not is_right or is_more or peak > BUDGET_GB * 1e9 or status != 0)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = stress.make_parser(__doc__, seconds=None, pause=None)
    parser.add_argument("--requests", type=int, help="end after so many (default: 1000, or none with --seconds)")
    parser.add_argument("--crowd", type=int, default=0, help="connections that are opened at once before")
    parser.add_argument("--slow-readers", type=int, default=0, help="streams that nobody reads for a while before")
    return parser


def crowd(port: int, number: int) -> dict[str, int]:
    """Open connections at once, each second one with a request. Return how many were answered, refused and closed."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, number + 500), limit))
    body = json.dumps(SLOW_PROMPT).encode()
    counts: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 60)) for _ in range(number)]
        for connection in found[::2]:
            with contextlib.suppress(OSError):
                connection.sendall(head(len(body)) + body)
        for connection in found[::2]:
            try:
                reply = connection.recv(1000)
            except OSError:
                reply = b""
            counts[reply[9:12].decode() or "closed"] += 1
        for connection in found[1::2]:  # the server ends those that are silent, once their time is over
            with contextlib.suppress(OSError):
                counts["silent, open" if connection.recv(1) else "silent, closed"] += 1
    return dict(counts)


def read_slowly(port: int, number: int) -> str:
    """Ask for streams and read nothing for a while, then everything. Return the tokens that came."""
    body = json.dumps({"prompt": "x y z", "max_tokens": 1000, "stream": True, "logprobs": 20}).encode()
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(number):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(120)
            connection.connect(("127.0.0.1", port))
            connection.sendall(head(len(body)) + body)
            found.append(connection)
        time.sleep(20)
        num_complete = 0
        for connection in found:
            data = b""
            with contextlib.suppress(OSError):
                while b"[DONE]" not in data and (part := connection.recv(1 << 16)):
                    data = data[-20:] + part
            num_complete += b"[DONE]" in data
    return f"{num_complete} of {number} streams complete"


def ask(port: int, request: dict[str, Any]) -> str:
    """Return an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", "/v1/completions", json.dumps(request))
        data = connection.getresponse().read()
    finally:
        connection.close()
    if not request.get("stream"):
        return str(json.loads(data)["choices"][0]["text"])
    events = [line.removeprefix(b"data: ") for line in data.splitlines() if line.startswith(b"data: ")]
    if events[-1] != b"[DONE]":
        raise ValueError(f"the stream ends with {events[-1]!r}")
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def is_ended(port: int) -> bool:
    """Send a byte a second. Return whether the server ends the connection when its time is over."""
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), 30) as connection, contextlib.suppress(OSError):
        connection.sendall(head(200))
        connection.settimeout(1)
        while time.monotonic() - began < 2 * BODY_SECONDS:
            connection.sendall(b"{")
            with contextlib.suppress(TimeoutError):
                if not connection.recv(1000):
                    break
    return time.monotonic() - began < 2 * BODY_SECONDS


def head(length: object) -> bytes:
    """Return the head of a request for a completion."""
    return f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()


def a_list(item: bytes) -> list[bytes]:
    """Return the pieces of a request with a long list in the place of text."""
    pieces = [b'{"prompt": [', *[item * 9_500] * 100, item[:-1] + b"]}"]
    return [head(sum(map(len, pieces))), *pieces]


LONG = json.dumps({"prompt": "x y z", "max_tokens": 400, "stream": True}).encode()
ACTS: dict[str, list[bytes]] = {
    "leaves": [head(len(LONG)) + LONG],
    "leaves early": [head(100) + b"{"],
    "garbage": [b"\x16\x03\x01" + os.urandom(300) + b"\r\n\r\n"],
    "no JSON": [head(5) + b"{]}[!"],
    "huge": [head(10**12) + b"x" * 100_000],
    "large": [head(20_000_000) + b'{"prompt": "', *[b"x" * 100_000] * 20],
    "objects": a_list(b"{},"),
    "numbers": a_list(b"1.5,"),
    "slow": [head(200), *[b"{"] * 5],
    "negative": [head(-1)],
}
"""The bytes that clients send, piece by piece."""


def send(port: int, pieces: list[bytes], dice: random.Random) -> None:
    """Send something, listen for a moment, and leave."""
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        for piece in pieces:
            connection.sendall(piece)
            if len(piece) == 1:
                time.sleep(0.2)
        connection.settimeout(dice.uniform(0.01, 0.5))
        for _ in range(dice.choice((1, 1, 3, 30))):
            if not connection.recv(1000):
                break


if __name__ == "__main__":
    sys.exit(main())

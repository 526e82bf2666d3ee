"""A server under clients that stream, leave, send garbage, huge and slow bodies, while others ask properly.

Every proper answer is compared with the answer to the same request alone. At the end the server must be healthy, have
no more descriptors than before, and end on SIGTERM with status 0.

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
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
SHAPE = "--layers=2 --hidden-size=64 --intermediate-size=128 --heads=4 --kv-heads=2 --vocab-size=300 --dtype=float32"
CLIENTS = 8
PROMPTS = ["The sea", "Why is the sky blue?", "Count to ten, slowly: one", "x", " ".join(map(str, range(60)))]
SLOW_PROMPT = {"prompt": "x", "max_tokens": 2}
ONE_IN = 100
"""One request of so many has a body of a byte a second."""

BODY_SECONDS = 30
"""The time that the server gives to a body."""


@dataclass(frozen=True)
class Sample:
    """The server at a moment, and the requests until then."""

    seconds: float
    requests: int
    right: int
    failed: int
    resident_bytes: int
    descriptors: int
    threads: int

    def __str__(self) -> str:
        return (
            f"{self.seconds:.0f} s: {self.requests} requests, {self.right} right, {self.failed} failed, resident "
            f"{self.resident_bytes / 1e6:.1f} MB, {self.descriptors} descriptors, {self.threads} threads"
        )


class Clients:
    """Clients of one server, each in a thread, and their record."""

    def __init__(self, port: int, args: argparse.Namespace) -> None:
        self.counts: Counter[str] = Counter()
        self.began = time.monotonic()
        self._port = port
        self._args = args
        self._lock = threading.Lock()
        self._expected = {prompt: ask(port, {"prompt": prompt, "max_tokens": 12}) for prompt in PROMPTS}
        self._slow = ask(port, SLOW_PROMPT)
        self._numbers = iter(range(args.requests or sys.maxsize))
        self._threads = [threading.Thread(target=self._work) for _ in range(CLIENTS)]

    def start(self) -> None:
        """Begin to ask."""
        self.began = time.monotonic()
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait until all requests are done, at most so long. Return whether they are."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def sample(self, process: psutil.Process) -> Sample:
        """Return the state of the server's process now."""
        with self._lock, process.oneshot():
            return Sample(
                time.monotonic() - self.began,
                self.counts.total(),
                sum(count for act, count in self.counts.items() if act.startswith("right")),
                sum(count for act, count in self.counts.items() if act.startswith("failed")),
                process.memory_info().rss,
                process.num_fds(),
                process.num_threads(),
            )

    def samples(self, process: psutil.Process) -> Iterator[Sample]:
        """Yield samples of half a second: the server opens a file for a moment each time that it tells its state."""
        for _ in range(10):
            yield self.sample(process)
            time.sleep(0.05)

    def _work(self) -> None:
        while not self._args.seconds or time.monotonic() - self.began < self._args.seconds:
            with self._lock:
                number = next(self._numbers, None)
            if number is None:
                return
            dice = random.Random(f"{self._args.seed} {number}")
            try:
                result = self._act(number, dice)
            except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
                result = f"failed: {error!r}"
                print(f"request {number}: {result}", file=sys.stderr, flush=True)
            with self._lock:
                self.counts[result] += 1
            if self._args.pause:
                time.sleep(dice.expovariate(1 / self._args.pause))

    def _act(self, number: int, dice: random.Random) -> str:
        """Do one thing to the server. Return its name, and "right" or "failed" where there is something to check."""
        if number % ONE_IN == ONE_IN // 2:
            return self._drip(number % (2 * ONE_IN) < ONE_IN)
        prompt = dice.choice(PROMPTS)
        act = dice.choice(("ask", "ask", "stream", "stream", "health", *ACTS))
        if act == "health":
            return "right: health" if is_healthy(self._port) else "failed: health"
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
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder, serving(Path(folder)) as (port, server):
        process = psutil.Process(server.pid)
        clients = Clients(port, args)
        wait_for_no_client(process)
        samples = [min(clients.samples(process), key=lambda sample: sample.descriptors)]
        for words, meet in (("crowd", crowd), ("slow readers", read_slowly)):
            number = getattr(args, words.replace(" ", "_"))
            if number:
                print(f"{words}: {meet(port, number)}, {clients.sample(process)}", flush=True)
                wait_for_no_client(process)
        clients.start()
        while not clients.wait(args.interval):
            samples.append(clients.sample(process))
            print(samples[-1], flush=True)
        seconds = time.monotonic() - clients.began
        wait_for_no_client(process)
        samples.append(min(clients.samples(process), key=lambda sample: sample.descriptors))
        is_right = samples[-1].failed == 0 and is_healthy(port)
        server.terminate()
        status = server.wait(60)
    before, after = samples[0], samples[-1]
    print(
        f"{after.requests} requests in {seconds:.0f} s: {dict(sorted(clients.counts.items()))}; descriptors "
        f"{before.descriptors} -> {after.descriptors}, resident {before.resident_bytes / 1e6:.1f} -> "
        f"{after.resident_bytes / 1e6:.1f} MB ({growth(samples):+.3f} kB a request), exit status {status}"
    )
    if args.json:
        numbers = {"settings": {**vars(args), "json": None}, "counts": clients.counts, "exit_status": status}
        numbers |= {"kb_a_request": growth(samples), "samples": [asdict(sample) for sample in samples]}
        args.json.write_text(json.dumps(numbers, indent=1) + "\n")
    return int(not is_right or after.descriptors > before.descriptors or status != 0)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="Attack a server while others use it.")
    parser.add_argument("--requests", type=int, help="end after so many (default: 1000, or none with --seconds)")
    parser.add_argument("--seconds", type=float, help="end after this time")
    parser.add_argument("--pause", type=float, help="mean seconds between two requests of a client")
    parser.add_argument("--crowd", type=int, default=0, help="connections that are opened at once before")
    parser.add_argument("--slow-readers", type=int, default=0, help="streams that nobody reads for a while before")
    parser.add_argument("--interval", type=float, default=60, help="seconds between two samples (default: 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for all numbers")
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


def growth(samples: list[Sample]) -> float:
    """Return the slope of a line through the last three quarters of the samples, in kB a request."""
    late = samples[len(samples) // 4 :]
    if len({sample.requests for sample in late}) < 2:
        return 0.0
    requests, resident = [sample.requests for sample in late], [sample.resident_bytes for sample in late]
    return statistics.linear_regression(requests, resident).slope / 1e3


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Start a server of a tiny model."""
    make = [sys.executable, ROOT / "scripts" / "make_random_model.py", folder / "model", *SHAPE.split()]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlx_flash", "serve", "--model", folder / "model", "--ram-budget-gb", "0.5"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log, env=env)
    try:
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            if server.poll() is not None:
                raise SystemExit((folder / "log").read_text())
            time.sleep(0.1)
        yield port, server
    finally:
        server.kill()
        server.wait()


def wait_for_no_client(process: psutil.Process, seconds: float = 60) -> None:
    """Wait until the server has closed its end of every connection, at most so long.

    A client has its answer, and may have gone, before the server closes its end.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all(connection.status == psutil.CONN_LISTEN for connection in process.net_connections("tcp")):
            return
        time.sleep(0.02)


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


def is_healthy(port: int) -> bool:
    """Return whether the server says that it works."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        return answer.status == 200 and json.loads(answer.read()) == {"status": "ok"}
    finally:
        connection.close()


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


LONG = json.dumps({"prompt": "x y z", "max_tokens": 400, "stream": True}).encode()
ACTS: dict[str, list[bytes]] = {
    "leaves": [head(len(LONG)) + LONG],
    "leaves early": [head(100) + b"{"],
    "garbage": [b"\x16\x03\x01" + os.urandom(300) + b"\r\n\r\n"],
    "no JSON": [head(5) + b"{]}[!"],
    "huge": [head(10**12) + b"x" * 100_000],
    "large": [head(20_000_000) + b'{"prompt": "', *[b"x" * 100_000] * 20],
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

"""A server under mixed and hostile clients of all dialects for a long time, in a kernel limit of its budget plus 5 %.

Clients ask whole and streamed, leave in between, and send wrong requests, garbage, and bytes one by one. Every answer
is compared with that of the same request alone. With ``--crowd`` and ``--slow-readers`` many connections are opened at
once before the clients start. At the end the server must be healthy, have no more descriptors and threads than before,
have stayed in its budget, and end on SIGTERM with status 0.

Example:
    python scripts/soak.py --seconds 7200 --under 'scripts/small_machine --warm {limit}' --json soak.json
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import random
import resource
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from servers import LIMIT_ROOM, Server, serving  # noqa: E402

SHAPE = "--layers=2 --hidden-size=64 --intermediate-size=128 --heads=4 --kv-heads=2 --vocab-size=300 --dtype=float32"


def make_model(path: Path) -> Path:
    """Make a tiny model."""
    make = [sys.executable, ROOT / "scripts" / "make_random_model.py", path, *SHAPE.split()]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    return path


# --- samples ---------------------------------------------------------------------------------------------------------


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


def growth(samples: list[Sample]) -> float:
    """Return the slope of a line through the last three quarters of the samples, in kB a request."""
    late = samples[len(samples) // 4 :]
    if len({sample.requests for sample in late}) < 2:
        return 0.0
    requests, resident = [sample.requests for sample in late], [sample.resident_bytes for sample in late]
    return statistics.linear_regression(requests, resident).slope / 1e3


def wait_for_no_client(process: psutil.Process, seconds: float = 60) -> None:
    """Wait until the server has closed its end of every connection, at most so long.

    A client has its answer, and may have gone, before the server closes its end.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all(connection.status == psutil.CONN_LISTEN for connection in process.net_connections("tcp")):
            return
        time.sleep(0.02)


# --- clients ---------------------------------------------------------------------------------------------------------


class Clients:
    """Clients of one server, each in a thread, and their record.

    Args:
        server: the server.
        act: does one thing to the server, with the number of the request and its dice. Returns its name, which begins
            with "right" or "failed" where there is something to check.
        number: of clients.
        args: the options of ``soak.py``.
    """

    def __init__(
        self,
        server: Server,
        act: Callable[[int, random.Random], str],
        number: int,
        args: argparse.Namespace,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._server, self._act, self._args = server, act, args
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._threads = [threading.Thread(target=self._work) for _ in range(number)]

    def run(self) -> list[Sample]:
        """Send all requests. Return samples of the server meanwhile, and one when it is idle again."""
        samples = []
        self._began = time.monotonic()
        for thread in self._threads:
            thread.start()
        while not self._wait(self._args.interval):
            samples.append(self.sample())
            print(samples[-1], flush=True)
        return [*samples, self.idle_sample()]

    def sample(self) -> Sample:
        """Return the state of the server's process now."""
        process = self._server.process
        with self._lock, process.oneshot():
            right, failed = (
                sum(count for act, count in self.counts.items() if act.startswith(word)) for word in ("right", "failed")
            )
            seconds, memory = time.monotonic() - self._began, process.memory_info().rss
            threads = process.num_threads()
            return Sample(seconds, self.counts.total(), right, failed, memory, process.num_fds(), threads)

    def idle_sample(self) -> Sample:
        """Return the state of the server without clients: the least of some seconds.

        The server opens a file for a moment each time that it tells its state.
        """
        wait_for_no_client(self._server.process)
        samples = []
        for _ in range(20):
            time.sleep(0.1)
            samples.append(self.sample())
        return min(samples, key=lambda sample: (sample.descriptors, sample.threads))

    def write(self, path: Path | None, samples: list[Sample], **numbers: Any) -> None:
        """Write all numbers, if a file was named."""
        if path is not None:
            found = {"settings": {**vars(self._args), "json": None}, "counts": self.counts, **numbers}
            found |= {"kb_a_request": growth(samples), "samples": [asdict(sample) for sample in samples]}
            path.write_text(json.dumps(found, indent=1) + "\n")

    def summary(self, samples: list[Sample]) -> str:
        """Return what became of the requests, and of the server from the first to the last sample."""
        before, after = samples[0], samples[-1]
        return (
            f"{after.requests} requests in {after.seconds:.0f} s: {dict(sorted(self.counts.items()))}; descriptors "
            f"{before.descriptors} -> {after.descriptors}, threads {before.threads} -> {after.threads}, resident "
            f"{before.resident_bytes / 1e6:.1f} -> {after.resident_bytes / 1e6:.1f} MB ({growth(samples):+.3f} kB a "
            "request)"
        )

    def _wait(self, seconds: float) -> bool:
        """Wait until all clients have ended, at most so long. Return whether they have."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while time.monotonic() - self._began < self._args.seconds:
            with self._lock:
                number = next(self._numbers)
            dice = random.Random(f"{self._args.seed} {number}")
            try:
                result = self._act(number, dice)
            except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
                result = f"failed: {error!r}"
            if result.startswith("failed"):
                print(f"request {number}: {result}", file=sys.stderr, flush=True)
            with self._lock:
                self.counts[result] += 1
            if self._args.pause:
                time.sleep(dice.expovariate(1 / self._args.pause))


# --- requests ---

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '' if loop.first else '\n' }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endfor %}"
)
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
CITY |= {"additionalProperties": False}
FUNCTION = {"name": "weather", "parameters": CITY}
MODEL = {"model": "default_model"}
TEXTS = ["The sea", "Why is the sky blue?", "é🦊 " * 20, " ".join(map(str, range(100)))]


@dataclass(frozen=True)
class Case:
    """A request that has an answer.

    Attributes:
        path: of the API.
        body: the request.
        can_stream: it can be streamed, too.
    """

    path: str
    body: dict[str, Any]
    can_stream: bool = True


def make_cases(num_texts: int = len(TEXTS)) -> list[Case]:
    """Return the requests, of every dialect, with the last texts."""
    cases = []
    for text in TEXTS[-num_texts:]:
        messages = [{"role": "user", "content": text}]
        chat = {**MODEL, "messages": messages, "max_tokens": 12}
        sampled = {"temperature": 1.0, "seed": 7}
        ollama = {**MODEL, "options": {"num_predict": 12}}
        cases += [
            Case("/v1/chat/completions", chat),
            Case("/v1/chat/completions", {**chat, **sampled, "n": 3}),
            Case("/v1/completions", {**MODEL, "prompt": text, "max_tokens": 12, **sampled}),
            Case("/v1/completions", {**MODEL, "prompt": [[5, 6, 7], [8]], "max_tokens": 12, "n": 2}),
            Case("/v1/responses", {**MODEL, "input": text, "max_output_tokens": 12}),
            Case("/api/chat", {**ollama, "messages": messages}),
            Case("/api/generate", {**ollama, "prompt": text, "format": CITY}),
            Case("/v1/messages", {**chat, "system": "Be brief."}),
            Case("/v1/messages/count_tokens", {**MODEL, "messages": messages}, can_stream=False),
        ]
    tools = [{"type": "function", "function": FUNCTION}]
    forced = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 120}
    any_tool = {"tools": [{"name": "weather", "input_schema": CITY}], "tool_choice": {"type": "any"}, "max_tokens": 120}
    any_tool["tool_choice"] |= {"disable_parallel_tool_use": True}
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    hello = {**MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    return [
        *cases,
        Case("/v1/chat/completions", hello | forced),
        Case("/v1/chat/completions", hello | {"response_format": schema, "max_tokens": 60}),
        Case("/v1/messages", hello | any_tool),
    ]


WRONG: list[tuple[str, bytes]] = [
    ("/v1/chat/completions", b"{"),
    ("/v1/chat/completions", b'{"messages": []}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\ud800\\u0000"}], "max_tokens": "x"}'),
    ("/v1/chat/completions", b'{"model": "no such model", "messages": [{"role": "user", "content": "x"}]}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "n": 2000000000}'),
    ("/v1/completions", b'{"prompt": [999999999]}'),
    ("/v1/completions", b'{"prompt": "x", "logit_bias": {"999999": 1}}'),
    ("/v1/responses", b'{"input": [{"type": "image"}]}'),
    ("/v1/messages", b'{"model": "x"}'),
    ("/api/chat", b'{"model": "default_model", "messages": [{"role": "user"}], "options": {"top_k": "x"}}'),
    ("/api/push", b'{"model": "x"}'),
    ("/v1/embeddings", b"[" * 100_000),
]
"""Requests that get an error, with a status from 400 to 501."""


# --- clients that send no answerable request --------------------------------------------------------------------------


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


SLOW = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
"""A request whose bytes may come one by one."""


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


def crowd(port: int, number: int) -> dict[str, int]:
    """Open connections at once, each second one with a request. Return how many were answered, refused and closed."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, number + 500), limit))
    counts: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 60)) for _ in range(number)]
        for connection in found[::2]:
            with contextlib.suppress(OSError):
                connection.sendall(head(len(SLOW)) + SLOW)
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


# --- the visitors -----------------------------------------------------------------------------------------------------

Act = Callable[[random.Random], str]
"""A thing to do to a server. Returns its name, and "right" or "failed" where there is something to check."""

CHANCES = {"whole": 6, "streamed": 6, "leave": 3, "wrong": 3, "garbage": 2}

ONE_IN = 100
"""One request of so many has a body of a byte a second."""

BODY_SECONDS = 30
"""The time that the server gives to a body."""


class Visitors:
    """The things that clients do to a server, and the answers that they expect."""

    def __init__(self, port: int, num_texts: int) -> None:
        self._port = port
        cases = make_cases(num_texts)
        whole: list[Act] = []
        streamed: list[Act] = []
        for case in cases:
            alone = self._ask(case, is_streamed=False)
            if alone == "{}":
                raise SystemExit(f"no answer to {case}")
            whole.append(partial(self._compare, case, alone, False))
            if case.can_stream:
                streamed.append(partial(self._compare, case, alone, True))
        self._acts: dict[str, list[Act]] = {
            "whole": whole,
            "streamed": streamed,
            "leave": [partial(self._leave, case) for case in cases],
            "wrong": [partial(self._err, path, body) for path, body in WRONG],
            "garbage": [partial(self._send, pieces) for pieces in ACTS.values()],
        }

    def act(self, number: int, dice: random.Random) -> str:
        """Do one of all things."""
        if number % ONE_IN == ONE_IN // 2:
            return self._drip(is_in_time=number % (2 * ONE_IN) < ONE_IN)
        kind = dice.choices(list(CHANCES), list(CHANCES.values()))[0]
        return dice.choice(self._acts[kind])(dice)

    def warm_up(self) -> None:
        """Do every thing once.

        Raises:
            SystemExit: an answer is wrong.
        """
        dice = random.Random(0)
        for acts in self._acts.values():
            for act in acts:
                result = act(dice)
                if result.startswith("failed"):
                    raise SystemExit(result)

    def _compare(self, case: Case, alone: str, is_streamed: bool, dice: random.Random) -> str:
        answer = self._ask(case, is_streamed=is_streamed)
        name = f"{case.path} {'streamed' if is_streamed else 'whole'}"
        return f"right: {name}" if answer == alone else f"failed: {name} {case.body}: {answer}"

    def _err(self, path: str, body: bytes, dice: random.Random) -> str:
        status, _ = self._post(path, body)
        return "right: refused" if 400 <= status <= 501 else f"failed: {path} {body[:80]!r}: {status}"

    def _send(self, pieces: list[bytes], dice: random.Random) -> str:
        with contextlib.suppress(OSError):  # the server may close first
            send(self._port, pieces, dice)
        return "garbage"

    def _leave(self, case: Case, dice: random.Random) -> str:
        """Ask for a longer answer, and leave after some time."""
        body = json.dumps({**case.body, "stream": True} if case.can_stream else case.body).encode()
        head = f"POST {case.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", self._port), 30) as connection, contextlib.suppress(OSError):
            connection.sendall(head + body)
            connection.settimeout(dice.uniform(0.001, 0.3))
            connection.recv(1000)
        return "leave"

    def _drip(self, *, is_in_time: bool) -> str:
        """Send a body of a byte a second, either a request that is just in time, or one that the server must end."""
        if not is_in_time:
            return "right: ended" if is_ended(self._port) else "failed: a slow body was not ended"
        with socket.create_connection(("127.0.0.1", self._port), 60) as connection:
            connection.sendall(head(len(SLOW)) + SLOW[:15])
            for byte in SLOW[15:]:
                time.sleep(1)
                connection.sendall(bytes([byte]))
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            return "right: slow" if answer.status == 200 else f"failed: slow, status {answer.status}"

    def _ask(self, case: Case, *, is_streamed: bool) -> str:
        """Return an answer without numbers and times, in one form for whole and streamed ones."""
        streams = {"stream": is_streamed} if case.can_stream else {}
        status, data = self._post(case.path, json.dumps({**case.body, **streams}).encode())
        if status != 200:
            raise ValueError(f"{case.path} {case.body}: status {status}: {data[:300]!r}")
        parts = _events(data) if is_streamed else [json.loads(data)]
        return json.dumps(answer_in(parts, case.path), sort_keys=True)

    def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()


def _events(data: bytes) -> list[dict[str, Any]]:
    """Return the JSON objects of a stream."""
    lines = [line.removeprefix(b"data: ") for line in data.splitlines() if line[:1] == b"{" or line[:6] == b"data: "]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def answer_in(parts: list[dict[str, Any]], path: str) -> dict[str, Any]:
    """Return the texts and calls in the parts of an answer, by place, and what it ends with."""
    found: dict[str, Any] = {}

    def add(place: object, text: str | None) -> None:
        if text:
            found[str(place)] = found.get(str(place), "") + text

    for part in parts:
        if "error" in part and part["error"] is not None:
            raise ValueError(f"the stream of {path} ends with {part['error']}")
        for choice in part.get("choices", ()):
            message = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
            add(choice["index"], message.get("content"))
            for number, call in enumerate(message.get("tool_calls") or ()):
                place = f"{choice['index']} call {call.get('index', number)}"
                add(f"{place} name", call["function"].get("name"))
                add(place, call["function"]["arguments"])
            add(f"{choice['index']} end", choice.get("finish_reason"))
        if path.startswith("/api/"):
            add("text", part.get("response") or part.get("message", {}).get("content"))
            add("end", part.get("done_reason"))
        for number, block in enumerate(part.get("content", ()) if path == "/v1/messages" else ()):
            add("text", block.get("text"))
            add(f"call {number}", json.dumps(block["input"]) if "input" in block else None)
        delta = part.get("delta") or {}
        if path == "/v1/messages":
            add("text", delta.get("text"))
            add(f"call {part.get('index')}", delta.get("partial_json"))
            add("end", part.get("stop_reason") or delta.get("stop_reason"))
        add("tokens", str(part["input_tokens"]) if "input_tokens" in part else None)
        if path == "/v1/responses" and part.get("type", "response.completed").endswith(("completed", "incomplete")):
            for item in part.get("response", part).get("output", ()):
                add("text", "".join(content["text"] for content in item.get("content", ())))
    # A stream has the arguments as the model writes them, with its own blanks.
    return {name: _plain(text) if "call" in name.split() else text for name, text in found.items()}


def _plain(text: str) -> Any:
    """Return the object in a JSON text, or the text if it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@contextlib.contextmanager
def serving_tools(folder: Path, budget_gb: float, under: str = "") -> Iterator[Server]:
    """Run a server of a tiny model that calls tools."""
    model = make_model(folder / "model")
    settings = model / "tokenizer_config.json"
    tools = {"chat_template": TEMPLATE, "tool_parser_type": "json_tools"}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | tools))
    words = ["mlx_flash", "serve", "--model", model, "--ram-budget-gb", budget_gb, "--no-any-model-name"]
    limit = str(int(budget_gb * LIMIT_ROOM * 1e9))
    with serving(words, folder / "log", shlex.split(under.replace("{limit}", limit))) as server:
        yield server
    for line in server.log.read_text().splitlines()[-1:]:
        print(line)


def main(arguments: list[str] | None = None) -> int:
    """Return 1 when an answer was wrong, or something was left."""
    args = make_parser().parse_args(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as folder,
        serving_tools(Path(folder), args.budget_gb, args.under) as server,
    ):
        visitors = Visitors(server.port, args.texts)
        visitors.warm_up()
        clients = Clients(server, visitors.act, args.clients, args)
        samples = [clients.idle_sample()]
        if args.crowd:
            print(f"crowd: {crowd(server.port, args.crowd)}, {clients.sample()}", flush=True)
        if args.slow_readers:
            print(f"slow readers: {read_slowly(server.port, args.slow_readers)}, {clients.sample()}", flush=True)
        wait_for_no_client(server.process)
        samples += clients.run()
        is_right = samples[-1].failed == 0 and server.is_healthy()
        peak = server.peak_bytes
        status = server.end()
    share = peak / args.budget_gb / 1e7
    print(f"{clients.summary(samples)}, peak {share:.0f} % of the budget, exit status {status}")
    clients.write(args.json, samples, exit_status=status, peak_bytes=peak)
    before, after = samples[0], samples[-1]
    is_more = after.descriptors > before.descriptors or after.threads > before.threads
    return int(not is_right or is_more or peak > args.budget_gb * 1e9 or status != 0)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seconds", type=float, default=600, help="end after this time (default: %(default)s)")
    add("--pause", type=float, default=0.2, help="mean seconds between requests of a client (default: %(default)s)")
    add("--interval", type=float, default=60, help="seconds between two samples (default: 60)")
    add("--seed", type=int, default=0)
    add("--clients", type=int, default=6, help="clients at once (default: %(default)s)")
    numbers, most = range(1, len(TEXTS) + 1), len(TEXTS)
    add("--texts", type=int, choices=numbers, default=most, help="prompts (default: %(default)s)")
    add("--crowd", type=int, default=0, help="connections to open at once before the clients start")
    add("--slow-readers", type=int, default=0, help="streams to leave unread for a while before the clients start")
    add(
        "--budget-gb",
        type=float,
        default=0.5,
        help="budget of the server, which holds bodies too (default: %(default)s)",
    )
    add("--under", default="", metavar="COMMAND", help="runs the server; {limit} is the kernel limit")
    add("--json", type=Path, help="file for all numbers")
    return parser


if __name__ == "__main__":
    sys.exit(main())

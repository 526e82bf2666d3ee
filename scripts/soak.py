"""A server under mixed clients of all dialects for a long time, inside a kernel limit of its budget plus 5 %.

Clients ask whole and streamed, leave in between, and send wrong requests and garbage. Every answer is compared with
that of the same request alone. At the end the server must be healthy, have no more descriptors and threads than before,
have stayed in its budget, and end on SIGTERM with status 0.

Example:
    python scripts/soak.py --seconds 7200 --under 'scripts/small_machine --warm {limit}' --json soak.json
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import shlex
import socket
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
from hostile_clients import ACTS, ROOT, SHAPE, Sample, growth, is_healthy, send, wait_for_no_client

LIMIT_ROOM = 1.05
"""Size of the kernel limit, in budgets."""

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


def make_cases() -> list[Case]:
    """Return the requests, of every dialect."""
    cases = []
    for text in TEXTS:
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
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 2000000000}'),
    ("/v1/completions", b'{"prompt": [999999999]}'),
    ("/v1/completions", b'{"prompt": "x", "logit_bias": {"999999": 1}}'),
    ("/v1/responses", b'{"input": [{"type": "image"}]}'),
    ("/v1/messages", b'{"model": "x"}'),
    ("/api/chat", b'{"model": "default_model", "messages": [{"role": "user"}], "options": {"mirostat": 2}}'),
    ("/api/pull", b'{"model": "x"}'),
    ("/v1/embeddings", b"[" * 100_000),
]
"""Requests that get an error, with a status from 400 to 501."""


class Clients:
    """Clients of one server, each in a thread, and their record."""

    def __init__(self, port: int, args: argparse.Namespace) -> None:
        self.counts: Counter[str] = Counter()
        self.began = time.monotonic()
        self._port, self._args = port, args
        self._lock = threading.Lock()
        self._cases = make_cases()
        self._alone = [self._ask(case, is_streamed=False) for case in self._cases]
        if "{}" in self._alone:
            raise SystemExit(f"no answer to {self._cases[self._alone.index('{}')]}")
        self._threads = [threading.Thread(target=self._work, args=(i,)) for i in range(args.clients)]

    def start(self) -> None:
        """Begin to ask."""
        self.began = time.monotonic()
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait until all clients have ended, at most so long. Return whether they have."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def sample(self, process: psutil.Process) -> Sample:
        """Return the state of the server's process now."""
        with self._lock, process.oneshot():
            right, failed = (
                sum(count for act, count in self.counts.items() if act.startswith(word)) for word in ("right", "failed")
            )
            seconds, memory = time.monotonic() - self.began, process.memory_info().rss
            threads = process.num_threads()
            return Sample(seconds, self.counts.total(), right, failed, memory, process.num_fds(), threads)

    def _work(self, client: int) -> None:
        dice = random.Random(f"{self._args.seed} {client}")
        while time.monotonic() - self.began < self._args.seconds:
            try:
                result = self._act(dice)
            except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
                result = f"failed: {error!r}"
                print(result, file=sys.stderr, flush=True)
            with self._lock:
                self.counts[result] += 1
            time.sleep(dice.expovariate(1 / self._args.pause))

    def _act(self, dice: random.Random) -> str:
        """Do one thing to the server. Return its name, and "right" or "failed" where there is something to check."""
        act = dice.choices(("ask", "leave", "wrong", "garbage"), (12, 3, 3, 2))[0]
        if act == "ask":
            number = dice.randrange(len(self._cases))
            case = self._cases[number]
            is_streamed = case.can_stream and dice.random() < 0.5
            answer = self._ask(case, is_streamed=is_streamed)
            name = f"{case.path} {'streamed' if is_streamed else 'whole'}"
            return f"right: {name}" if answer == self._alone[number] else f"failed: {name} {case.body}: {answer}"
        if act == "leave":
            self._leave(dice.choice(self._cases), dice.uniform(0.001, 0.3))
        elif act == "wrong":
            path, body = dice.choice(WRONG)
            status, _ = self._post(path, body)
            return "right: refused" if 400 <= status <= 501 else f"failed: {path} {body[:80]!r}: {status}"
        else:
            with contextlib.suppress(OSError):  # the server may close first
                send(self._port, ACTS[dice.choice(list(ACTS))], dice)
        return act

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

    def _leave(self, case: Case, seconds: float) -> None:
        """Ask for a longer answer, and leave after some time."""
        body = json.dumps({**case.body, "stream": True} if case.can_stream else case.body).encode()
        head = f"POST {case.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", self._port), 30) as connection, contextlib.suppress(OSError):
            connection.sendall(head + body)
            connection.settimeout(seconds)
            connection.recv(1000)


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
            for call in message.get("tool_calls") or ():
                add(f"{choice['index']} call", json.dumps(call["function"], sort_keys=True))
            add(f"{choice['index']} end", choice.get("finish_reason"))
        if path.startswith("/api/"):
            add("text", part.get("response") or part.get("message", {}).get("content"))
            add("end", part.get("done_reason"))
        for block in part.get("content", ()) if path == "/v1/messages" else ():
            add("text", block.get("text"))
            add("call", json.dumps(block["input"]) if "input" in block else None)
        delta = part.get("delta") or {}
        if path == "/v1/messages":
            add("text", delta.get("text"))
            add("call", delta.get("partial_json"))
            add("end", part.get("stop_reason") or delta.get("stop_reason"))
        add("tokens", str(part["input_tokens"]) if "input_tokens" in part else None)
        if path == "/v1/responses" and part.get("type", "response.completed").endswith(("completed", "incomplete")):
            for item in part.get("response", part).get("output", ()):
                add("text", "".join(content["text"] for content in item.get("content", ())))
    return found


@contextlib.contextmanager
def serving(folder: Path, args: argparse.Namespace) -> Iterator[tuple[int, subprocess.Popen[bytes], psutil.Process]]:
    """Start a server of a tiny model. Give its port, the command, and its process."""
    make = [sys.executable, ROOT / "scripts" / "make_random_model.py", folder / "model", *SHAPE.split()]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    settings = folder / "model" / "tokenizer_config.json"
    tools = {"chat_template": TEMPLATE, "tool_parser_type": "json_tools"}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | tools))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "mlx_flash", "serve", "--model", str(folder / "model"), "--port", str(port)]
    words += ["--ram-budget-gb", str(args.budget_gb)]
    under = shlex.split(args.under.replace("{limit}", str(int(args.budget_gb * LIMIT_ROOM * 1e9))))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with (folder / "log").open("wb") as log:
        command = subprocess.Popen([*under, *words], stdout=log, stderr=log, env=env)
    try:
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            if command.poll() is not None:
                raise SystemExit((folder / "log").read_text())
            time.sleep(0.1)
        family = [psutil.Process(command.pid), *psutil.Process(command.pid).children(recursive=True)]
        yield port, command, next(each for each in reversed(family) if "mlx_flash" in each.cmdline())
    finally:
        for line in (folder / "log").read_text().splitlines()[-1:]:
            print(line)
        if command.poll() is None:
            command.kill()
        command.wait()


def main(arguments: list[str] | None = None) -> int:
    """Return 1 when an answer was wrong, or something was left."""
    args = make_parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, serving(Path(folder), args) as (port, command, process):
        clients = Clients(port, args)
        wait_for_no_client(process)
        samples = [clients.sample(process)]
        clients.start()
        while not clients.wait(args.interval):
            samples.append(clients.sample(process))
            print(samples[-1], flush=True)
        wait_for_no_client(process)
        samples.append(clients.sample(process))
        is_right = samples[-1].failed == 0 and is_healthy(port)
        peak = int(Path(f"/proc/{process.pid}/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
        process.terminate()
        status = command.wait(60)
    before, after = samples[0], samples[-1]
    print(
        f"{after.requests} requests in {after.seconds:.0f} s: {dict(sorted(clients.counts.items()))}; descriptors "
        f"{before.descriptors} -> {after.descriptors}, threads {before.threads} -> {after.threads}, resident "
        f"{before.resident_bytes / 1e6:.1f} -> {after.resident_bytes / 1e6:.1f} MB ({growth(samples):+.3f} kB a "
        f"request), peak {peak / args.budget_gb / 1e7:.0f} % of the budget, exit status {status}"
    )
    if args.json:
        numbers = {"settings": {**vars(args), "json": None}, "counts": clients.counts, "exit_status": status}
        numbers |= {"peak_bytes": peak, "kb_a_request": growth(samples), "samples": [asdict(each) for each in samples]}
        args.json.write_text(json.dumps(numbers, indent=1) + "\n")
    early = samples[: max(1, len(samples) // 2)]  # a pool of threads grows up to its limit
    is_more = after.descriptors > before.descriptors or after.threads > max(sample.threads for sample in early)
    return int(not is_right or is_more or peak > args.budget_gb * 1e9 or status != 0)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="time (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=6, help="clients at once (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=0.2, help="mean seconds between two requests of a client")
    parser.add_argument("--budget-gb", type=float, default=0.2, help="budget of the server (default: %(default)s)")
    parser.add_argument("--under", default="", metavar="COMMAND", help="runs the server; {limit} is the kernel limit")
    parser.add_argument("--interval", type=float, default=60, help="seconds between two samples (default: 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for all numbers")
    return parser


if __name__ == "__main__":
    sys.exit(main())

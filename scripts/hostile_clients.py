"""A server under clients that stream, leave, send garbage, huge and slow bodies, while others ask properly.

Every proper answer is compared with the answer to the same request alone. At the end the server must be healthy, have
no more descriptors than before, and end on SIGTERM with status 0.

Example:
    python scripts/hostile_clients.py --requests 10000
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
SHAPE = "--layers=2 --hidden-size=64 --intermediate-size=128 --heads=4 --kv-heads=2 --vocab-size=300 --dtype=float32"
CLIENTS = 8
PROMPTS = ["The sea", "Why is the sky blue?", "Count to ten, slowly: one", "x"]


def main(arguments: list[str] | None = None) -> int:
    """Return 1 when an answer was wrong, or something was left."""
    parser = argparse.ArgumentParser(description="Attack a server while others use it.")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder, serving(Path(folder)) as (port, server):
        process = psutil.Process(server.pid)
        expected = {prompt: ask(port, prompt) for prompt in PROMPTS}
        before = process.num_fds(), process.memory_info().rss

        def client(number: int) -> str:
            dice = random.Random(f"{args.seed} {number}")
            prompt = dice.choice(PROMPTS)
            act = dice.choice(("ask", "ask", *ACTS))
            if act == "ask":
                return "right" if ask(port, prompt) == expected[prompt] else "wrong"
            with contextlib.suppress(OSError):  # the server may close first
                send(port, ACTS[act], dice)
            return act

        began = time.monotonic()
        with ThreadPoolExecutor(CLIENTS) as pool:
            counts = Counter(pool.map(client, range(args.requests)))
        seconds = time.monotonic() - began
        deadline = time.monotonic() + 60
        while process.num_fds() > before[0] and time.monotonic() < deadline:
            time.sleep(0.1)
        after = process.num_fds(), process.memory_info().rss
        is_right = counts["wrong"] == 0 and ask(port, PROMPTS[0]) == expected[PROMPTS[0]]
        server.terminate()
        status = server.wait(60)
        print(
            f"{args.requests} requests in {seconds:.0f} s: {dict(sorted(counts.items()))}; descriptors {before[0]} -> "
            f"{after[0]}, resident {before[1] / 1e6:.1f} -> {after[1] / 1e6:.1f} MB, exit status {status}"
        )
        return int(not is_right or after[0] > before[0] or status != 0)


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


def ask(port: int, prompt: str) -> str:
    """Return an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": prompt, "max_tokens": 12}))
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return str(answer["choices"][0]["text"])


def head(length: object) -> bytes:
    """Return the head of a request for a completion."""
    return f"POST /v1/completions HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode()


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
        connection.recv(1000)


if __name__ == "__main__":
    sys.exit(main())

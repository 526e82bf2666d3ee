"""Time to the first token and tokens a second of ``mlx-flash serve`` and ``mlx_lm.server``, with several clients.

Both servers run all the time, and rounds alternate between them. In a round each client sends one streamed request at
once; prompts differ, so that no prompt cache helps. With a budget below the model's size, mlx_lm.server has no such
budget: it is the reference of a machine with enough memory.

Example:
    python benchmarks/server_clients.py MODEL --budget 4 --clients 1 4 16 --json result.json
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import statistics
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from harness import describe, describe_cold, describe_model, write_json
from servers import Server, serving


@dataclass(frozen=True)
class Timed:
    """A request: seconds until the first token, seconds until the end, and its tokens."""

    first: float
    seconds: float
    tokens: int


@dataclass(frozen=True)
class Round:
    """All clients once.

    Attributes:
        first, longest_first: seconds to the first token: median and longest.
        tokens_per_second: of all together.
        cpu_seconds: of the server, for each token. Less than times does it depend on other programs of the machine.
    """

    first: float
    longest_first: float
    tokens_per_second: float
    cpu_seconds: float


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="model directory")
    parser.add_argument("--budget", type=float, required=True, metavar="GB", help="budget of mlx-flash")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16], help="clients at once")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each server (default: %(default)s)")
    parser.add_argument("--words", type=int, default=20, help="words of a prompt (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--batching", nargs="+", default=[], help="also mlx-flash with these settings of --batching")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    return parser


def main() -> None:
    """Measure, and print a line for each number of clients."""
    args = make_parser().parse_args()
    model = str(args.model)
    commands = {
        "mlx-flash": ["mlx_flash", "serve", "--model", model, "--ram-budget-gb", str(args.budget)],
        "mlx_lm": ["mlx_lm", "server", "--model", model],
    }
    commands |= {f"mlx-flash, {way}": [*commands["mlx-flash"], "--batching", way] for way in args.batching}
    found: dict[int, dict[str, list[Round]]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(serving(words, Path(folder) / f"{name}.log")) for name, words in commands.items()
        }
        for number in args.clients:
            rounds: dict[str, list[Round]] = {name: [] for name in commands}
            for i in range(-1, args.rounds):  # the first one, which compiles kernels, does not count
                for name in sorted(commands, reverse=bool(i % 2)):
                    made = run_round(servers[name], number, i, args)
                    rounds[name] += [made] if i >= 0 else []
            found[number] = rounds
            print(f"{number} clients: {', '.join(_words(name, rounds[name]) for name in commands)}", flush=True)
    described = describe(args.model, describe_cold(None, limited=False)) | {"model": describe_model(args.model)}
    settings = {"budget_gb": args.budget, "words": args.words, "max_tokens": args.max_tokens}
    results = [
        {
            "clients": number,
            "server": name,
            "medians": asdict(median(rounds)),
            "rounds": [asdict(each) for each in rounds],
        }
        for number, by_server in found.items()
        for name, rounds in by_server.items()
    ]
    write_json(args.json, described | settings | {"load": os.getloadavg(), "results": results})


def median(rounds: list[Round]) -> Round:
    """Return the medians of some rounds."""
    return Round(*(statistics.median(getattr(each, field.name) for each in rounds) for field in fields(Round)))


def _words(name: str, rounds: list[Round]) -> str:
    found = median(rounds)
    return (
        f"{name} {found.first * 1e3:.0f} ms to the first token, {found.tokens_per_second:.1f} tokens/s, "
        f"{found.cpu_seconds * 1e3:.1f} ms of processor a token"
    )


def run_round(server: Server, number: int, seed: int, args: argparse.Namespace) -> Round:
    """Return the times of one round."""
    timed: list[Timed] = []
    threads = [
        threading.Thread(target=lambda i=i: timed.append(ask(server.port, f"{seed} {i}", args))) for i in range(number)
    ]
    began, cpu = time.perf_counter(), server.process.cpu_times()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, cpu_after = time.perf_counter() - began, server.process.cpu_times()
    if len(timed) < number:
        raise SystemExit(f"{number - len(timed)} of {number} requests failed")
    firsts, tokens = [each.first for each in timed], sum(each.tokens for each in timed)
    cpu_seconds = cpu_after.user + cpu_after.system - cpu.user - cpu.system
    return Round(statistics.median(firsts), max(firsts), tokens / seconds, cpu_seconds / tokens)


def ask(port: int, name: str, args: argparse.Namespace) -> Timed:
    """Send a streamed request. Greedy answers of random weights have no end token, nearly always.

    A connection that is reset before it is answered is tried again: mlx_lm.server lets 5 clients wait for a connection.
    """
    prompt = f"{name}: " + " ".join(f"word {i}" for i in range(args.words // 2))
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": args.max_tokens, "stream": True, "temperature": 0.0}
    body["stream_options"] = {"include_usage": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=3600)
    first, tokens, began = 0.0, 0, time.perf_counter()
    try:
        while True:
            try:
                connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
                response = connection.getresponse()
                break
            except ConnectionError:
                connection.close()
                time.sleep(0.05)
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            part = json.loads(line[6:])
            first = first or (time.perf_counter() - began if part.get("choices") else 0.0)
            tokens = (part.get("usage") or {}).get("completion_tokens", tokens)
    finally:
        connection.close()
    return Timed(first, time.perf_counter() - began, tokens)


if __name__ == "__main__":
    main()

"""A soak test of ``mlx-flash serve``: clients with prompts of mixed lengths, at several budgets, for a given time.

Every answer is compared with the answer to the same request alone, from a server in the same settings that gets one
request at a time. A refused request must have been refused before work began, with the numbers. With ``--limit`` the
server runs in a kernel memory limit of its budget plus 5 %.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import SMALL_MACHINE, describe, describe_cold, describe_model, write_json
from servers import LIMIT_ROOM, Server, serving

REFUSED = 413


@dataclass(frozen=True)
class Case:
    """A request: a prompt of so many words, and the most tokens of its answer."""

    words: int
    max_tokens: int

    def body(self) -> bytes:
        """Return the request in JSON."""
        text = f"{self.words} words: " + "word " * self.words
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": self.max_tokens, "seed": 0}
        return json.dumps(body).encode()  # with a seed an answer does not depend on others


@dataclass(frozen=True)
class Outcome:
    """An HTTP status, the answer or error, and seconds until it came; status 0 is a lost connection."""

    status: int
    text: str
    seconds: float


def ask(server: Server, case: Case) -> Outcome:
    """Send a request and wait for its answer."""
    began = time.perf_counter()
    url, head = f"http://127.0.0.1:{server.port}/v1/chat/completions", {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, case.body(), head), timeout=3600) as response:
            choice = json.load(response)["choices"][0]
            return Outcome(200, json.dumps(choice, sort_keys=True), time.perf_counter() - began)
    except urllib.error.HTTPError as error:
        return Outcome(error.code, error.read().decode(), time.perf_counter() - began)
    except OSError as error:
        return Outcome(0, str(error), time.perf_counter() - began)


def soak(args: argparse.Namespace, cases: list[Case], budget_gb: float, folder: Path) -> dict[str, Any]:
    """Return the numbers of one budget."""
    given = ["--model", args.model, "--ram-budget-gb", budget_gb, *args.flags]
    words = ["mlx_flash", "serve", *given]
    with serving(words, folder / "alone.log") as server:
        alone = {case: ask(server, case) for case in cases}
    limit = [str(SMALL_MACHINE), "--warm", str(int(budget_gb * LIMIT_ROOM * 1e9))] if args.limit else []
    with serving(words, folder / "soak.log", limit) as server:
        outcomes = _ask_for(server, args, cases)
        peak = server.peak_bytes
        status = server.end(600)
    counts = Counter(_verdict(outcome, alone[case]) for case, outcome in outcomes)
    seconds = sorted(outcome.seconds for _, outcome in outcomes if outcome.status == 200)
    refused = [outcome.seconds for _, outcome in outcomes if outcome.status == REFUSED]
    return {
        "budget_bytes": round(budget_gb * 1e9),
        "requests": len(outcomes),
        **{name: counts[name] for name in ("equal", "different", "refused", "failed")},
        "killed": int("kills=0" not in server.log.read_text()) if args.limit else 0,
        "exit_status": status,
        "peak_bytes": peak,
        "peak_of_budget": peak / (budget_gb * 1e9),
        "median_seconds": seconds[len(seconds) // 2] if seconds else None,
        "longest_refusal_seconds": max(refused, default=None),
        "failures": [outcome.text for case, outcome in outcomes if _verdict(outcome, alone[case]) == "failed"][:5],
    }


def _verdict(outcome: Outcome, alone: Outcome) -> str:
    if outcome.status == REFUSED:
        return "refused" if "MB" in outcome.text else "failed"
    if outcome.status != 200:
        return "failed"
    return "equal" if outcome.text == alone.text else "different"


def _ask_for(server: Server, args: argparse.Namespace, cases: list[Case]) -> list[tuple[Case, Outcome]]:
    """Ask with several clients until the time is over."""
    outcomes: list[tuple[Case, Outcome]] = []
    end = time.monotonic() + args.seconds

    def work(number: int) -> None:
        choose = random.Random(number)
        while time.monotonic() < end and server.command.poll() is None:
            case = choose.choice(cases)
            outcomes.append((case, ask(server, case)))

    clients = [threading.Thread(target=work, args=(number,)) for number in range(args.clients)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return outcomes


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="model directory")
    parser.add_argument("--budgets", type=float, nargs="+", required=True, metavar="GB", help="budgets of the server")
    parser.add_argument("--seconds", type=float, default=600, help="time for each budget (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=4, help="clients at once (default: %(default)s)")
    parser.add_argument("--words", type=int, nargs="+", default=[4, 60, 200, 500, 2500], help="words of the prompts")
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[8, 48], help="longest answers, in tokens")
    parser.add_argument("--limit", action="store_true", help="run the server in a kernel limit of its budget plus 5 %%")
    parser.add_argument(
        "--flags", nargs=argparse.REMAINDER, default=[], help="more flags of mlx-flash serve, at the end"
    )
    parser.add_argument("--json", type=Path, help="file for all numbers")
    return parser


def main() -> None:
    """Run the soak test and print one line for each budget."""
    args = make_parser().parse_args()
    cases = [Case(words, tokens) for words in args.words for tokens in args.max_tokens]
    results = []
    for budget in args.budgets:
        with tempfile.TemporaryDirectory() as folder:
            result = soak(args, cases, budget, Path(folder))
        results.append(result)
        shown = ", ".join(f"{result[name]} {name}" for name in ("requests", "equal", "different", "refused", "failed"))
        print(f"{budget:g} GB: {shown}, {result['killed']} killed, peak {result['peak_of_budget']:.1%} of the budget")
    described = describe(args.model, describe_cold(None, limited=False)) | {"model": describe_model(args.model)}
    settings = {"clients": args.clients, "seconds": args.seconds, "limit": args.limit}
    write_json(args.json, described | settings | {"results": results})
    wrong = sum(result["failed"] + result["killed"] for result in results)
    if wrong or any(result["peak_of_budget"] > 1 for result in results):
        raise SystemExit("a request failed, a server was killed, or a peak was above the budget")


if __name__ == "__main__":
    main()

"""Comparison of eviction policies for an expert pool, on recorded routing.

    python benchmarks/eviction.py trace.jsonl --pools 0.1 0.25 0.5 0.75 --json out.json

A trace has one JSON value a line. The first describes the model:

    {"format": 1, "model": str, "top_k": int, "layers": [{"name": str, "num_experts": int, "expert_bytes": int}, ...]}

Each other line is a call of a layer of experts, in the order of calls, with the tokens that chose each expert:

    [pass, tokens, layer, [[expert, count], ...]]

All layers share one pool, whose slots are a share of all experts. A call of few tokens needs all its experts at once:
those in the pool are hits, the others are inserted, and none evicts another of the same call. Hit rates are of these
calls. A call of a prompt, or of more experts than the pool has slots, reads its experts elsewhere. After it the experts
that most tokens chose are inserted, as many as one layer's part of the pool holds, and nothing is counted.

*optimum* knows the future: it evicts the expert that is needed last, and no policy does better. The time is that of the
whole replay, with its own bookkeeping, for each hit, insertion and eviction.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import describe, describe_cold, write_json
from policies import OPTIMUM, POLICIES, Key, Optimum, Policy, Step
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

PROMPT_TOKENS = 16
"""A call of this many tokens or more is one of a prompt."""


class TraceError(Exception):
    """A trace that cannot be replayed."""


# --- traces ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call of a layer; its experts in the trace's order."""

    num_tokens: int
    layer: int
    counts: dict[int, int]


@dataclass(frozen=True)
class Trace:
    name: str
    model: str
    layers: list[int]
    calls: list[Call]

    @property
    def num_experts(self) -> int:
        return sum(self.layers)


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        TraceError: the file is not a trace; names the line.
    """
    calls: list[Call] = []
    header: dict[str, Any] = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                value = json.loads(line)
                if number == 1:
                    header = _read_header(value)
                else:
                    calls.append(_read_call(value, header["layers"]))
            except ValueError as error:
                raise TraceError(f"{path}, line {number}: {error}. It begins {line[:60].rstrip()!r}") from None
    if not calls:
        raise TraceError(f"{path} has no calls: a line that describes the model, then one a call, were expected")
    return Trace(path.stem, header["model"], header["layers"], calls)


def _read_header(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or value.get("format") != 1:
        raise ValueError('an object with "format": 1 was expected')
    layers = value.get("layers")
    if not isinstance(layers, list) or not layers or not isinstance(value.get("model"), str):
        raise ValueError('"model" must be a string, "layers" a list that is not empty')
    sizes = [layer.get("num_experts") if isinstance(layer, dict) else None for layer in layers]
    if not all(_is_count(size, 1) for size in sizes):
        raise ValueError('every layer needs a positive "num_experts"')
    return {"model": value["model"], "layers": sizes}


def _read_call(value: Any, layers: Sequence[int]) -> Call:
    if not isinstance(value, list) or len(value) != 4 or not all(_is_count(v, 0) for v in value[:3]):
        raise ValueError("[pass, tokens, layer, [[expert, count], ...]] was expected")
    _, num_tokens, layer, chosen = value
    if layer >= len(layers):
        raise ValueError(f"layer {layer} of {len(layers)}")
    if not isinstance(chosen, list) or not chosen or not all(_is_choice(pair) for pair in chosen):
        raise ValueError("[[expert, count], ...] was expected in the fourth place, with counts from 1")
    counts = dict(chosen)
    if len(counts) != len(chosen):
        raise ValueError("an expert is listed twice")
    if max(counts) >= layers[layer]:
        raise ValueError(f"expert {max(counts)} of a layer with {layers[layer]}")
    return Call(num_tokens, layer, counts)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_choice(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and _is_count(pair[0], 0) and _is_count(pair[1], 1)


def make_steps(trace: Trace, slots: int) -> list[Step]:
    """Return the experts that each call needs in a pool of this many slots."""
    quota = max(1, slots // len(trace.layers))
    steps = []
    for call in trace.calls:
        is_counted = call.num_tokens < PROMPT_TOKENS and len(call.counts) <= slots
        hottest = sorted(call.counts, key=lambda expert: (-call.counts[expert], expert))
        experts = hottest if is_counted else hottest[:quota]
        steps.append(Step(call.layer, [(call.layer, expert) for expert in experts], is_counted))
    return steps


# --- replay ----------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """The counts of one policy on one trace.

    Attributes:
        num_routed: experts that counted calls needed.
        num_hits: those that were in the pool.
        num_evicted: by all calls.
        num_operations: hits, insertions and evictions by all calls.
        seconds: of the replay.
    """

    num_routed: int = 0
    num_hits: int = 0
    num_evicted: int = 0
    num_operations: int = 0
    seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        return self.num_hits / self.num_routed if self.num_routed else 0.0


def replay(steps: Sequence[Step], policy: Policy) -> Outcome:
    """Replay calls with a policy and its number of slots."""
    outcome, resident = Outcome(), set[Key]()
    began = time.perf_counter()
    for step in steps:
        policy.begin(step.layer)
        pinned = set(step.keys)
        missing = []
        for key in step.keys:
            if key in resident:
                policy.hit(key)
            else:
                missing.append(key)
        for key in missing:
            if len(resident) == policy.slots:
                resident.remove(policy.victim(pinned))
                outcome.num_evicted += 1
            policy.insert(key)
            resident.add(key)
        outcome.num_operations += len(step.keys)
        if step.is_counted:
            outcome.num_routed += len(step.keys)
            outcome.num_hits += len(step.keys) - len(missing)
    outcome.seconds = time.perf_counter() - began
    outcome.num_operations += outcome.num_evicted
    return outcome


def compare(trace: Trace, share: float) -> list[dict[str, Any]]:
    """Replay a trace under all policies, with a share of its experts as slots."""
    slots = max(1, round(share * trace.num_experts))
    steps = make_steps(trace, slots)
    num_layers = len(trace.layers)
    best = replay(steps, Optimum(slots, num_layers, steps))
    outcomes = {name: replay(steps, make(slots, num_layers)) for name, make in POLICIES.items()} | {OPTIMUM: best}
    return [
        {
            "trace": trace.name,
            "pool": share,
            "slots": slots,
            "policy": name,
            **asdict(outcome),
            "hit_rate": outcome.hit_rate,
            "of_optimum": outcome.num_hits / best.num_hits if best.num_hits else None,
            "microseconds": 1e6 * outcome.seconds / max(1, outcome.num_operations),
        }
        for name, outcome in outcomes.items()
    ]


# --- tables -------------------------------------------------------------------------------------------------


def describe_trace(trace: Trace) -> dict[str, Any]:
    counted = [call for call in trace.calls if call.num_tokens < PROMPT_TOKENS]
    return {
        "name": trace.name,
        "model": trace.model,
        "num_layers": len(trace.layers),
        "num_experts": trace.num_experts,
        "num_calls": len(trace.calls),
        "num_calls_of_few_tokens": len(counted),
    }


def print_tables(console: Console, result: dict[str, Any]) -> None:
    for trace in result["traces"]:
        rows = [row for row in result["results"] if row["trace"] == trace["name"]]
        pools = sorted({row["pool"] for row in rows})
        title = f"{trace['name']}: hit rate (share of the optimum's hits) by pool; {trace['num_experts']} experts"
        table = Table("policy", title=title, box=SIMPLE_HEAD, title_justify="left")
        for pool in pools:
            table.add_column(f"{pool:g}", justify="right", no_wrap=True)
        table.add_column("us/op", justify="right")
        for name in dict.fromkeys(row["policy"] for row in rows):
            found = {row["pool"]: row for row in rows if row["policy"] == name}
            worst = max(row["microseconds"] for row in found.values())
            table.add_row(name, *(_cell(found[pool]) for pool in pools), f"{worst:.2f}")
        console.print(table)


def _cell(row: dict[str, Any]) -> str:
    of_optimum = "" if row["of_optimum"] is None else f" ({row['of_optimum']:.3f})"
    return f"{row['hit_rate']:.3f}{of_optimum}"


# --- the command -----------------------------------------------------------------------------------------------------


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="file with a trace")
    parser.add_argument(
        "--pools", type=float, nargs="+", default=[0.1, 0.25, 0.5, 0.75], help="shares of all experts that have a slot"
    )
    parser.add_argument("--json", type=Path, help="file for all the numbers")
    options = parser.parse_args(arguments)
    if not all(0 < pool <= 1 for pool in options.pools):
        parser.error("--pools must be above 0 and at most 1")
    if len({path.stem for path in options.traces}) < len(options.traces):
        parser.error("two traces have the same name: the tables tell them apart by it")
    return options


def run_bench(options: argparse.Namespace) -> dict[str, Any]:
    traces = [read_trace(path) for path in options.traces]
    return {
        **describe(options.traces[0], describe_cold(None)),
        "traces": [describe_trace(trace) for trace in traces],
        "results": [row for trace in traces for share in options.pools for row in compare(trace, share)],
    }


def main() -> None:
    options = parse_arguments(sys.argv[1:])
    try:
        result = run_bench(options)
    except (TraceError, OSError) as error:
        raise SystemExit(str(error)) from None
    write_json(options.json, result)
    print_tables(Console(width=max(110, Console().width)), result)


if __name__ == "__main__":
    main()

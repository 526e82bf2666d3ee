"""Hits of an expert pool of other sizes, on recorded routing: the engine's policy, least recently used, the optimum.

    python benchmarks/routing.py DIR trace.jsonl --ram-budget-gb 4
    python benchmarks/eviction.py trace.jsonl --pools 0.1 0.25 0.5 0.75 --json out.json

All layers share one pool, whose slots are a share of all experts. A call of few tokens needs all its experts at once:
those in the pool are hits, the others are inserted, and none evicts another of the same call. Hit rates are of these
calls. A call of a prompt, or of more experts than the pool has slots, reads its experts elsewhere. After it the experts
that most tokens chose are inserted, as many as one layer's part of the pool holds, and nothing is counted.

*least used* is ``mlx_flash/experts/pool.py``. *optimum* knows the future: it evicts the expert that is needed last,
and no policy does better.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import describe, describe_cold, write_json
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from routing import FORMAT

from mlx_flash.experts.pool import Uses

PROMPT_TOKENS = 16
"""A call of this many tokens or more is one of a prompt."""

Key = tuple[int, int]
"""Number of the layer, number of the expert in it."""


class TraceError(Exception):
    """A file that is not a routing trace."""


@dataclass(frozen=True)
class Call:
    """One call of a layer, with the tokens that chose each expert."""

    num_tokens: int
    layer: int
    counts: dict[int, int]


@dataclass(frozen=True)
class Trace:
    """The calls of a model, and the number of experts of each layer."""

    name: str
    layers: list[int]
    calls: list[Call]


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        TraceError: the file is not a trace; names the line.
    """
    layers: list[int] = []
    calls: list[Call] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                value = json.loads(line)
                if number == 1:
                    layers = [layer["num_experts"] for layer in value["layers"]]
                    is_right = value["format"] == FORMAT
                else:
                    _, num_tokens, layer, pairs = value
                    calls.append(Call(num_tokens, layer, dict(pairs)))
                    is_right = layer < len(layers) and bool(pairs) and max(calls[-1].counts) < layers[layer]
            except (ValueError, TypeError, LookupError):
                is_right = False
            if not is_right:
                wanted = "[pass, tokens, layer, [[expert, count], ...]]" if number > 1 else "a description of the model"
                raise TraceError(f"{path}, line {number}: {wanted} was expected. It begins {line[:60].rstrip()!r}")
    if not calls:
        raise TraceError(f"{path} has no calls. Hint: write it with benchmarks/routing.py.")
    return Trace(path.stem, layers, calls)


# --- policies --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A call, and the experts that are in the pool after it; ``is_counted`` if it computes with the pool."""

    call: Call
    keys: list[Key]
    is_counted: bool


def make_steps(trace: Trace, num_slots: int) -> list[Step]:
    """Return the experts that each call needs in a pool of this many slots."""
    quota = max(1, num_slots // len(trace.layers))
    steps = []
    for call in trace.calls:
        is_counted = call.num_tokens < PROMPT_TOKENS and len(call.counts) <= num_slots
        hottest = sorted(call.counts, key=lambda expert: (-call.counts[expert], expert))
        experts = hottest if is_counted else hottest[:quota]
        steps.append(Step(call, [(call.layer, expert) for expert in experts], is_counted))
    return steps


class LeastRecentlyUsed:
    """The expert in the pool whose last use is longest ago gives way. ``self.pool`` has the experts in the pool."""

    def __init__(self, trace: Trace, steps: Sequence[Step]) -> None:
        self.pool: dict[Key, float] = {}
        self._steps = steps

    def use(self, number: int) -> None:
        """Note that a step begins."""
        for key in self._steps[number].keys:
            if key in self.pool:
                self.enter(key, number)

    def enter(self, key: Key, number: int) -> None:
        """Put an expert into the pool, or note that it is used."""
        self.pool[key] = number

    def evict(self, pinned: Sequence[Key]) -> None:
        """Let an expert that is not pinned leave the pool."""
        del self.pool[min((key for key in self.pool if key not in pinned), key=lambda key: self.pool[key])]


class Optimum(LeastRecentlyUsed):
    """Belady's optimum: the expert whose next use is last. Uses by calls that are not counted do not matter."""

    def __init__(self, trace: Trace, steps: Sequence[Step]) -> None:
        super().__init__(trace, steps)
        self._next: list[dict[Key, float]] = []
        following: dict[Key, float] = {}
        for number, step in reversed(list(enumerate(steps))):
            self._next.append({key: following.get(key, math.inf) for key in step.keys})
            following.update(dict.fromkeys(step.keys, number if step.is_counted else math.inf))
        self._next.reverse()

    def enter(self, key: Key, number: int) -> None:
        """Put an expert into the pool, or note that it is used."""
        self.pool[key] = -self._next[number][key]


class LeastUsed(LeastRecentlyUsed):
    """The engine's policy, with a slot number for each expert."""

    def __init__(self, trace: Trace, steps: Sequence[Step]) -> None:
        super().__init__(trace, steps)
        self._first = np.cumsum([0, *trace.layers])
        self._uses = Uses(trace.layers, int(self._first[-1]))

    def use(self, number: int) -> None:
        """Note that a step begins."""
        call = self._steps[number].call
        experts, counts = np.array([*call.counts]), np.array([*call.counts.values()])
        slots = [self._slot((call.layer, n)) if (call.layer, n) in self.pool else -1 for n in call.counts]
        self._uses.add(call.layer, experts, counts, call.num_tokens, np.array(slots))

    def enter(self, key: Key, number: int) -> None:
        """Put an expert into the pool."""
        self.pool[key] = number
        self._uses.enter(self._slot(key), key)

    def evict(self, pinned: Sequence[Key]) -> None:
        """Let an expert that is not pinned leave the pool."""
        (key,) = self._uses.least([self._slot(key) for key in pinned], 1)
        assert key is not None
        self._uses.leave(self._slot(key))
        del self.pool[key]

    def _slot(self, key: Key) -> int:
        return int(self._first[key[0]]) + key[1]


POLICIES = {"least used": LeastUsed, "least recently used": LeastRecentlyUsed, "optimum": Optimum}


def replay(trace: Trace, num_slots: int, policy: str) -> tuple[int, int]:
    """Replay a trace. Return the experts that counted calls needed, and those of them that were in the pool."""
    steps = make_steps(trace, num_slots)
    state = POLICIES[policy](trace, steps)
    num_routed = num_hits = 0
    for number, step in enumerate(steps):
        missing = [key for key in step.keys if key not in state.pool]
        state.use(number)
        for key in missing:
            if len(state.pool) == num_slots:
                state.evict(step.keys)
            state.enter(key, number)
        if step.is_counted:
            num_routed += len(step.keys)
            num_hits += len(step.keys) - len(missing)
    return num_routed, num_hits


# --- the command -----------------------------------------------------------------------------------------------------


def compare(trace: Trace, share: float) -> list[dict[str, Any]]:
    """Replay a trace under all policies, with a share of its experts as slots."""
    num_slots = max(1, round(share * sum(trace.layers)))
    rows = []
    for policy in POLICIES:
        num_routed, num_hits = replay(trace, num_slots, policy)
        row = {"trace": trace.name, "pool": share, "num_slots": num_slots, "policy": policy}
        rows.append(row | {"num_routed": num_routed, "num_hits": num_hits, "hit_rate": num_hits / max(1, num_routed)})
    return rows


def print_table(rows: Sequence[dict[str, Any]], pools: Sequence[float]) -> None:
    """Print the hit rates of all traces."""
    table = Table("trace", "policy", *(f"{pool:g}" for pool in pools), title="hit rate by pool", box=SIMPLE_HEAD)
    for trace, policy in dict.fromkeys((row["trace"], row["policy"]) for row in rows):
        found = {row["pool"]: row["hit_rate"] for row in rows if (row["trace"], row["policy"]) == (trace, policy)}
        table.add_row(trace, policy, *(f"{found[pool]:.3f}" for pool in pools))
    Console().print(table)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="file with a trace")
    parser.add_argument("--pools", type=float, nargs="+", default=[0.1, 0.25, 0.5, 0.75], help="shares of all experts")
    parser.add_argument("--json", type=Path, help="file for all the numbers")
    options = parser.parse_args()
    if not all(0 < pool <= 1 for pool in options.pools):
        parser.error("--pools must be above 0 and at most 1")
    try:
        rows = [row for path in options.traces for share in options.pools for row in compare(read_trace(path), share)]
    except (TraceError, OSError) as error:
        sys.exit(str(error))
    write_json(options.json, {**describe(options.traces[0], describe_cold(None)), "results": rows})
    print_table(rows, options.pools)


if __name__ == "__main__":
    main()

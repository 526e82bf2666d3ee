"""Which experts a pool should keep: recorded routing, replayed under several policies of eviction.

    python benchmarks/eviction.py trace.jsonl --pools 0.1 0.25 0.5 0.75 --json out.json

A trace has one JSON value a line. The first describes the model:

    {"format": 1, "model": str, "top_k": int, "layers": [{"name": str, "num_experts": int, "expert_bytes": int}, ...]}

Each other line is a call of a layer of experts, in the order of calls, with the tokens that chose each expert:

    [pass, tokens, layer, [[expert, count], ...]]

All layers share one pool, whose slots are a share of all experts. A call of few tokens needs all its experts at once:
those in the pool are hits, the others are inserted, and none gives way to another of the same call. Hit rates are of
these calls. A call of a prompt, or of more experts than the pool has slots, reads what it needs elsewhere: after it the
experts that most tokens chose are inserted, as many as are one layer's part of the pool, and nothing is counted.

*optimum* knows the future: it evicts what is needed last, which no policy can better. The time is that of the whole
replay, its own bookkeeping included, for each hit, insertion and eviction.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import shlex
import sys
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from streaming import describe_machine, describe_versions

Key = tuple[int, int]
"""Number of the layer, number of the expert in it."""

Rank = tuple[float, ...]
"""What has the smallest goes first."""

PROMPT_TOKENS = 16
"""A call of so many tokens is one of a prompt."""


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
    """Reads a trace.

    Raises:
        TraceError: it is not one; says in which line.
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


@dataclass(frozen=True)
class Step:
    """What a call asks of the pool.

    Attributes:
        layer: that is called.
        keys: experts that are in the pool after it.
        is_counted: whether the call computes with the pool.
    """

    layer: int
    keys: list[Key]
    is_counted: bool


def make_steps(trace: Trace, slots: int) -> list[Step]:
    """What each call asks of a pool of so many slots."""
    quota = max(1, slots // len(trace.layers))
    steps = []
    for call in trace.calls:
        is_counted = call.num_tokens < PROMPT_TOKENS and len(call.counts) <= slots
        hottest = sorted(call.counts, key=lambda expert: (-call.counts[expert], expert))
        experts = hottest if is_counted else hottest[:quota]
        steps.append(Step(call.layer, [(call.layer, expert) for expert in experts], is_counted))
    return steps


# --- policies --------------------------------------------------------------------------------------------------------


class Policy:
    """Chooses what leaves a full pool. It is told of every use of what is in the pool.

    Args:
        slots: of the pool.
        num_layers: that share it.
    """

    def __init__(self, slots: int, num_layers: int) -> None:
        self.slots = slots
        self.num_layers = num_layers

    def begin(self, layer: int) -> None:
        """A call of a layer begins."""

    def hit(self, key: Key) -> None:
        """An expert in the pool is used."""
        raise NotImplementedError

    def insert(self, key: Key) -> None:
        """An expert enters the pool and is used."""
        raise NotImplementedError

    def victim(self, pinned: Collection[Key]) -> Key:
        """Takes an expert out of the pool that is not pinned; there is one."""
        raise NotImplementedError


class LRU(Policy):
    """Evicts what was not used for longest. O(1)."""

    def __init__(self, slots: int, num_layers: int) -> None:
        super().__init__(slots, num_layers)
        self._order: OrderedDict[Key, None] = OrderedDict()

    def hit(self, key: Key) -> None:
        self._order.move_to_end(key)

    def insert(self, key: Key) -> None:
        self._order[key] = None

    def victim(self, pinned: Collection[Key]) -> Key:
        key = next(key for key in self._order if key not in pinned)
        del self._order[key]
        return key


class Ranked(Policy):
    """Evicts what has the smallest rank. O(log n) an eviction, O(1) a hit that raises the rank."""

    def __init__(self, slots: int, num_layers: int) -> None:
        super().__init__(slots, num_layers)
        self._ranks: dict[Key, Rank] = {}
        self._heap: list[tuple[Rank, Key]] = []
        self.clock = 0

    def rank(self, key: Key) -> Rank:
        """Rank of an expert that is used now."""
        raise NotImplementedError

    def hit(self, key: Key) -> None:
        self.clock += 1
        before, self._ranks[key] = self._ranks[key], self.rank(key)
        if self._ranks[key] < before:  # a rank that rose is put right when it comes up
            heapq.heappush(self._heap, (self._ranks[key], key))

    def insert(self, key: Key) -> None:
        self.clock += 1
        self._ranks[key] = self.rank(key)
        heapq.heappush(self._heap, (self._ranks[key], key))
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def victim(self, pinned: Collection[Key]) -> Key:
        skipped = []
        while True:
            noted, key = heapq.heappop(self._heap)
            rank = self._ranks.get(key)
            if rank is None or rank < noted:  # it left, or is noted again further up
                continue
            if rank == noted and key not in pinned:
                break
            if rank == noted:
                skipped.append(key)
            else:
                heapq.heappush(self._heap, (rank, key))
        for other in skipped:
            heapq.heappush(self._heap, (self._ranks[other], other))
        self.left(key, self._ranks.pop(key))
        return key

    def left(self, key: Key, rank: Rank) -> None:
        """An expert of this rank was evicted."""


class LFU(Ranked):
    """Evicts what was used least often since the start, in the pool or not."""

    def __init__(self, slots: int, num_layers: int) -> None:
        super().__init__(slots, num_layers)
        self._counts: defaultdict[Key, int] = defaultdict(int)

    def rank(self, key: Key) -> Rank:
        self._counts[key] += 1
        return self._counts[key], self.clock


class AgingLFU(LFU):
    """LFU with dynamic aging: uses since it entered, on top of the rank of what left last."""

    def __init__(self, slots: int, num_layers: int) -> None:
        super().__init__(slots, num_layers)
        self._age = 0.0

    def rank(self, key: Key) -> Rank:
        count, clock = super().rank(key)
        return self._age + count, clock

    def left(self, key: Key, rank: Rank) -> None:
        self._age = rank[0]
        del self._counts[key]


class RecentPass(LFU):
    """LRU in calls of an expert's layer, so that all that a pass used is equally recent; then LFU."""

    def __init__(self, slots: int, num_layers: int) -> None:
        super().__init__(slots, num_layers)
        self._calls = [0] * num_layers

    def begin(self, layer: int) -> None:
        self._calls[layer] += 1

    def rank(self, key: Key) -> Rank:
        return self._calls[key[0]], *super().rank(key)


class Decayed(Ranked):
    """LRFU: a use counts half as much after so many calls of the expert's layer; what left keeps its sum.

    Sums are kept as logarithms of what they would be worth at the start, so that they need no upkeep.
    """

    def __init__(self, slots: int, num_layers: int, half_life: float) -> None:
        super().__init__(slots, num_layers)
        self._half_life = half_life
        self._calls = [0] * num_layers
        self._sums: dict[Key, float] = {}

    def begin(self, layer: int) -> None:
        self._calls[layer] += 1

    def rank(self, key: Key) -> Rank:
        now = self._calls[key[0]] / self._half_life
        before = self._sums.get(key)
        self._sums[key] = now if before is None else now + math.log2(1 + 2 ** (before - now))
        return self._sums[key], self.clock


class S3FIFO(Policy):
    """A short queue that most leave soon, a long one for what is used again, and a memory. O(1)."""

    def __init__(self, slots: int, num_layers: int) -> None:
        super().__init__(slots, num_layers)
        self._short: OrderedDict[Key, int] = OrderedDict()
        self._long: OrderedDict[Key, int] = OrderedDict()
        self._left: OrderedDict[Key, None] = OrderedDict()

    def hit(self, key: Key) -> None:
        queue = self._short if key in self._short else self._long
        queue[key] = min(3, queue[key] + 1)

    def insert(self, key: Key) -> None:
        if key in self._left:
            del self._left[key]
            self._long[key] = 0
        else:
            self._short[key] = 0

    def victim(self, pinned: Collection[Key]) -> Key:
        while True:
            short, long = (any(key not in pinned for key in queue) for queue in (self._short, self._long))
            if short and (10 * len(self._short) >= self.slots or not long):
                key = self._leave_short(pinned)
            else:
                key = self._leave_long(pinned)
            if key is not None:
                return key

    def _leave_short(self, pinned: Collection[Key]) -> Key | None:
        key, uses = self._short.popitem(last=False)
        if key in pinned:
            self._short[key] = uses
        elif uses > 1:
            self._long[key] = 0
        else:
            self._left[key] = None
            if 10 * len(self._left) > 9 * self.slots:
                self._left.popitem(last=False)
            return key
        return None

    def _leave_long(self, pinned: Collection[Key]) -> Key | None:
        key, uses = self._long.popitem(last=False)
        if key not in pinned and uses == 0:
            return key
        self._long[key] = uses if key in pinned else uses - 1
        return None


class PerLayer(Policy):
    """Another policy in each layer, which has a fixed part of the pool once this is full. O(layers) an eviction."""

    def __init__(self, slots: int, num_layers: int, inner: Callable[[int, int], Policy]) -> None:
        super().__init__(slots, num_layers)
        self._parts = [slots // num_layers + (layer < slots % num_layers) for layer in range(num_layers)]
        self._held: list[set[Key]] = [set() for _ in range(num_layers)]
        self._inner = [inner(part, num_layers) for part in self._parts]

    def begin(self, layer: int) -> None:
        self._inner[layer].begin(layer)

    def hit(self, key: Key) -> None:
        self._inner[key[0]].hit(key)

    def insert(self, key: Key) -> None:
        self._held[key[0]].add(key)
        self._inner[key[0]].insert(key)

    def victim(self, pinned: Collection[Key]) -> Key:
        own = next(iter(pinned))[0]  # all are of the layer that is called
        held = self._held[own]
        others = {i: len(keys) - self._parts[i] for i, keys in enumerate(self._held) if keys and i != own}
        can_give = len(held) > sum(key in held for key in pinned)
        is_full = len(held) >= self._parts[own] or not others
        layer = own if can_give and is_full else max(others, key=lambda i: others[i])
        key = self._inner[layer].victim(pinned)
        self._held[layer].remove(key)
        return key


class Optimum(Ranked):
    """Knows the future. What is next used in a call that is not counted may go: it would be inserted anyhow."""

    def __init__(self, slots: int, num_layers: int, steps: Sequence[Step]) -> None:
        super().__init__(slots, num_layers)
        self._now = -1
        self._next: list[dict[Key, float]] = []
        following: dict[Key, float] = {}
        for number in range(len(steps) - 1, -1, -1):
            step = steps[number]
            self._next.append({key: following.get(key, math.inf) for key in step.keys})
            following.update(dict.fromkeys(step.keys, number if step.is_counted else math.inf))
        self._next.reverse()

    def begin(self, layer: int) -> None:
        self._now += 1

    def rank(self, key: Key) -> Rank:
        return (-self._next[self._now][key],)


POLICIES: dict[str, Callable[[int, int], Policy]] = {
    "LRU": LRU,
    "LRU by passes, then LFU": RecentPass,
    "LFU": LFU,
    "LFU, aging": AgingLFU,
    "LFU, half-life 8": partial(Decayed, half_life=8),
    "LFU, half-life 32": partial(Decayed, half_life=32),
    "LFU, half-life 128": partial(Decayed, half_life=128),
    "S3-FIFO": S3FIFO,
    "LRU, parts by layer": partial(PerLayer, inner=LRU),
    "LFU, half-life 32, parts": partial(PerLayer, inner=partial(Decayed, half_life=32)),
}
OPTIMUM = "optimum"


# --- replay ----------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What one policy made of one trace.

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
    """Replays calls with a policy and its number of slots."""
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
    """Replays a trace under all policies, with a share of its experts as slots."""
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


# --- what people see -------------------------------------------------------------------------------------------------


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
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "machine": describe_machine(options.traces[0]),
        "versions": describe_versions(),
        "traces": [describe_trace(trace) for trace in traces],
        "results": [row for trace in traces for share in options.pools for row in compare(trace, share)],
    }


def main() -> None:
    options = parse_arguments(sys.argv[1:])
    try:
        result = run_bench(options)
    except (TraceError, OSError) as error:
        raise SystemExit(str(error)) from None
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print_tables(Console(width=max(110, Console().width)), result)


if __name__ == "__main__":
    main()

"""Which experts a pool should keep: recorded routing, replayed under several policies of eviction.

    python benchmarks/eviction.py trace.jsonl --pools 0.1 0.25 0.5 0.75 --json out.json

A trace has one JSON value a line. The first describes the model:

    {"format": 1, "model": str, "top_k": int, "layers": [{"name": str, "num_experts": int, "expert_bytes": int}, ...]}

Each other line is a call of a layer of experts, in the order of calls: ``[pass, tokens, layer, [[expert, count], ...]]``
with the tokens that chose each expert; passes count from 0.

All layers share one pool, whose slots are a share of all experts. A call of few tokens needs all its experts at once:
those in the pool are hits, the others are inserted, and none gives way to another of the same call. These calls are what
the hit rates count. A call of a prompt, or of more experts than the pool has slots, reads what it needs elsewhere: after
it the experts that most tokens chose are inserted, as many as are one layer's part of the pool, and nothing is counted.

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
        return max(self._age + 1, self._ranks.get(key, (self._age,))[0] + 1) if count > 1 else self._age + 1, clock

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
    """A short queue that most leave soon, a long one for what was used again, and a memory of what left the short one."""

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
        parts = [slots // num_layers + (layer < slots % num_layers) for layer in range(num_layers)]
        self._free = parts
        self._layers = [inner(part, num_layers) for part in parts]

    def begin(self, layer: int) -> None:
        self._layers[layer].begin(layer)

    def hit(self, key: Key) -> None:
        self._layers[key[0]].hit(key)

    def insert(self, key: Key) -> None:
        self._free[key[0]] -= 1
        self._layers[key[0]].insert(key)

    def victim(self, pinned: Collection[Key]) -> Key:
        own = next(iter(pinned))[0]
        held = self._free_of_pinned(pinned)
        layer = own if self._free[own] <= 0 and held[own] else max(held, key=lambda i: (held[i] > 0, -self._free[i]))
        self._free[layer] += 1
        return self._layers[layer].victim(pinned)


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

"""Eviction policies of an expert pool, for replayed traces."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

Key = tuple[int, int]
"""Number of the layer, number of the expert in it."""

Rank = tuple[float, ...]
"""The smallest rank is evicted first."""


@dataclass(frozen=True)
class Step:
    """The experts that a call needs.

    Attributes:
        layer: number of the layer.
        keys: experts that are in the pool after the call.
        is_counted: whether the call computes with the pool.
    """

    layer: int
    keys: list[Key]
    is_counted: bool


class Policy:
    """Chooser of the expert that leaves a full pool; it hears of every use of the pool.

    Args:
        slots: number of experts that the pool holds.
        num_layers: number of layers that share it.
    """

    def __init__(self, slots: int, num_layers: int) -> None:
        self.slots = slots
        self.num_layers = num_layers

    def begin(self, layer: int) -> None:
        """Note that a call of a layer begins."""

    def hit(self, key: Key) -> None:
        """Note that an expert in the pool is used."""
        raise NotImplementedError

    def insert(self, key: Key) -> None:
        """Note that an expert enters the pool and is used."""
        raise NotImplementedError

    def victim(self, pinned: Collection[Key]) -> Key:
        """Remove and return an expert that is not pinned; there is one."""
        raise NotImplementedError


class LRU(Policy):
    """Least recently used. O(1)."""

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
    """Smallest rank first. O(log n) an eviction, O(1) a hit that raises the rank."""

    def __init__(self, slots: int, num_layers: int) -> None:
        super().__init__(slots, num_layers)
        self._ranks: dict[Key, Rank] = {}
        self._heap: list[tuple[Rank, Key]] = []
        self.clock = 0

    def rank(self, key: Key) -> Rank:
        """Return the rank of an expert that is used now."""
        raise NotImplementedError

    def hit(self, key: Key) -> None:
        self.clock += 1
        before, self._ranks[key] = self._ranks[key], self.rank(key)
        if self._ranks[key] < before:  # a rank that rose is corrected when it is popped
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
            if rank is None or rank < noted:  # it left, or has another entry further up
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
        """Note that an expert of this rank was evicted."""


class LFU(Ranked):
    """Least frequently used since the start, in the pool or not."""

    def __init__(self, slots: int, num_layers: int) -> None:
        super().__init__(slots, num_layers)
        self._counts: defaultdict[Key, int] = defaultdict(int)

    def rank(self, key: Key) -> Rank:
        self._counts[key] += 1
        return self._counts[key], self.clock


class AgingLFU(LFU):
    """LFU with dynamic aging: uses since the expert entered, plus the rank of the last evicted one."""

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
    """LRU by calls of an expert's layer, so that all experts of a pass are equally recent; then LFU."""

    def __init__(self, slots: int, num_layers: int) -> None:
        super().__init__(slots, num_layers)
        self._calls = [0] * num_layers

    def begin(self, layer: int) -> None:
        self._calls[layer] += 1

    def rank(self, key: Key) -> Rank:
        return self._calls[key[0]], *super().rank(key)


class Decayed(Ranked):
    """LRFU: a use counts half as much after ``half_life`` calls of the expert's layer. Evicted experts keep their sums.

    A sum is kept as the logarithm of its worth at the start, so that it needs no updates.
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
    """S3-FIFO: a short queue, a long one for experts that are used again, and a list of evicted experts. O(1)."""

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
    """Another policy in each layer, with a fixed part of a full pool for each. O(layers) an eviction."""

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
    """Belady's optimum: the expert whose next use is last. Uses by calls that are not counted do not matter."""

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

"""The layers of each rank, from what its machine can do. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_flash.errors import ConfigError

_BISECTIONS = 100


@dataclass(frozen=True, slots=True)
class RankSpeed:
    """The machine of a rank in numbers.

    Attributes:
        memory_bytes: weights that it can keep in memory.
        disk_bytes_per_second: how fast it reads the others.
        compute_bytes_per_second: how fast it computes with weights that it has just read.
        kept_bytes_per_second: how fast it computes with those in memory.
    """

    memory_bytes: float
    disk_bytes_per_second: float
    compute_bytes_per_second: float
    kept_bytes_per_second: float

    def bytes_within(self, seconds: float) -> float:
        """Return the weight bytes that it gets through in a pass of so many seconds of its own."""
        in_memory = seconds * self.kept_bytes_per_second
        if in_memory <= self.memory_bytes:
            return in_memory
        seconds_a_byte = 1 / self.disk_bytes_per_second + 1 / self.compute_bytes_per_second
        return self.memory_bytes + (seconds - self.memory_bytes / self.kept_bytes_per_second) / seconds_a_byte


def share_layers(layer_bytes: Sequence[int], ranks: Sequence[RankSpeed]) -> list[int]:
    """Return the rank of each layer.

    Every rank gets as many layers as it gets through in the same time. If all weights stay in memory, a rank has one
    run of layers, so that little is sent. If not, ranks take turns as often as they can: while one computes, the
    others read their next layers. In one run each, they would read one after another, since a rank can only read
    ahead what its slots hold.

    Args:
        layer_bytes: bytes of each layer.
        ranks: the machines. Neighbours exchange results, and so do the last and the first.

    Raises:
        ConfigError: there are fewer layers than ranks.
    """
    if len(layer_bytes) < len(ranks):
        raise ConfigError(
            f"{len(ranks)} ranks share a model of {len(layer_bytes)} layers, and each needs one. Hint: start fewer."
        )
    total = sum(layer_bytes)
    shares = _equal_times(total, ranks)
    fits = all(share <= rank.memory_bytes for share, rank in zip(shares, ranks, strict=True))
    counts = _whole_layers([share / total for share in shares], len(layer_bytes))
    return _take_turns(counts, 1 if fits else min(counts))


def follow_files(owners: Sequence[int], layer_bytes: Sequence[int], able: Sequence[Sequence[int]]) -> list[int]:
    """Return the rank of each layer: the given one, if it has the layer's files, and else the one with least to do.

    Args:
        owners: the rank of each layer, if all had all files.
        layer_bytes: bytes of each layer.
        able: for each layer the ranks that have its files, at least one.
    """
    found = list(owners)
    done: Counter[int] = Counter()
    for owner, nbytes, ranks in zip(owners, layer_bytes, able, strict=True):
        done[owner] += nbytes if owner in ranks else 0
    for number, nbytes in enumerate(layer_bytes):
        if owners[number] not in able[number]:
            found[number] = min(able[number], key=lambda rank: done[rank])
            done[found[number]] += nbytes
    return found


def _equal_times(total: int, ranks: Sequence[RankSpeed]) -> list[float]:
    """Return bytes for each rank, so that all of them take the same time."""
    slowest = min(min(r.compute_bytes_per_second, r.kept_bytes_per_second) for r in ranks)
    low, high = 0.0, total * (1 / min(r.disk_bytes_per_second for r in ranks) + 1 / slowest)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(rank.bytes_within(middle) for rank in ranks) >= total else (middle, high)
    return [rank.bytes_within(high) for rank in ranks]


def _whole_layers(shares: Sequence[float], num_layers: int) -> list[int]:
    """Return numbers of layers in proportion to shares, at least one each."""
    counts = [1] * len(shares)
    for _ in range(num_layers - len(shares)):
        most_missing = max(range(len(shares)), key=lambda rank: shares[rank] * num_layers - counts[rank])
        counts[most_missing] += 1
    return counts


def _take_turns(counts: Sequence[int], num_rounds: int) -> list[int]:
    """Return the rank of each layer, when every rank has a run of layers in each round."""
    owners: list[int] = []
    for number in range(num_rounds):
        for rank, count in enumerate(counts):
            owners += [rank] * (count * (number + 1) // num_rounds - count * number // num_rounds)
    return owners


def runs(owners: Sequence[int], rank: int) -> list[tuple[int, int]]:
    """Return the runs of layers of a rank: the first of each, and the one after its last."""
    borders = [i for i in range(1, len(owners)) if owners[i] != owners[i - 1]]
    return [(a, b) for a, b in zip([0, *borders], [*borders, len(owners)], strict=True) if owners[a] == rank]

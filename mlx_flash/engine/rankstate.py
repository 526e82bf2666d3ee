"""The speeds of all ranks that share a model. Each sends its own with the digest of the next call's tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mlx_flash.engine.status import PassCounters
from mlx_flash.ranks.chain import Chain
from mlx_flash.storage.readstats import ReadStats

Json = dict[str, Any]


class RankMeter:
    """The speeds of this rank from call to call, and those that the others sent.

    Args:
        chain: the ranks; gets the numbers of this one from here.
        counters: of the model's calls.
        read_stats: returns what the rank has read.
    """

    def __init__(self, chain: Chain, counters: PassCounters, read_stats: Callable[[], ReadStats]) -> None:
        self._chain = chain
        self._counters = counters
        self._read_stats = read_stats
        self._last = self._totals()
        chain.measure = self.measure

    def _totals(self) -> tuple[float, ...]:
        read, wait = self._read_stats().nbytes, self._chain.peers.wait_seconds
        return time.perf_counter(), self._counters.num_tokens_out, read, wait

    def measure(self) -> list[float]:
        """Return generated tokens and bytes read a second, and the share of time waited for other ranks, since then."""
        now, before = self._totals(), self._last
        self._last = now
        seconds, *growths = (a - b for a, b in zip(now, before, strict=True))
        return [growth / max(seconds, 1e-6) for growth in growths]

    def telemetry(self) -> Json:
        """Return the layers of all ranks, and their speeds from their last call but one to their last one."""
        names = ("tokens_per_second", "read_bytes_per_second", "waiting_share")
        speeds = self._chain.measured
        return {
            "rank": self._chain.peers.rank,
            "each": [
                {
                    "layers": self._chain.runs_of(rank),
                    **dict(zip(names, speeds[rank] if speeds else (), strict=False)),
                }
                for rank in range(self._chain.peers.size)
            ],
        }

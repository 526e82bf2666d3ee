"""Rates of an expert pool, from the growth of its published counters."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlx_flash.monitor.state import count
from mlx_flash.telemetry import Json

COUNTERS = ("num_routed", "num_hits", "num_predicted", "num_predicted_right", "read_bytes", "wait_seconds")

Counts = dict[str, float]
"""Counters of a pool, or their growth. NaN where a value is unknown."""


@dataclass(frozen=True, slots=True)
class ExpertRates:
    """Rates of a pool. None where they are unknown. Tokens include those of prompts.

    Attributes:
        hit_rate: share of the needed experts that were in the pool when the call came.
        predicted_right: share of the prefetched experts that the next call needed.
        read_per_token: experts read, prefetched ones included.
        reused_per_token: needed experts that were in the pool already.
        read_bytes_per_token: bytes of experts read.
        wait_share: share of the time that calls waited for experts.
    """

    hit_rate: float | None = None
    predicted_right: float | None = None
    read_per_token: float | None = None
    reused_per_token: float | None = None
    read_bytes_per_token: float | None = None
    wait_share: float | None = None


def expert_counts(state: Json) -> Counts:
    """Return the counters in a published state."""
    found = {name: count(state, "experts", name) for name in COUNTERS}
    return {name: math.nan if value is None else value for name, value in found.items()}


def growth(before: Counts, now: Counts) -> Counts:
    """Return the growth of each counter."""
    return {name: _difference(before[name], now[name]) for name in COUNTERS}


def expert_rates(calls: Counts, num_tokens: float, lately: Counts, seconds: float) -> ExpertRates:
    """Return rates from the growth of counters.

    Args:
        calls: growth over the last calls or, before the first one has ended, lately.
        num_tokens: tokens of these calls; 0 when unknown.
        lately: growth over the last seconds.
        seconds: number of these seconds.
    """
    reused = _difference(calls["num_predicted_right"], calls["num_hits"])
    read = _difference(calls["num_hits"], calls["num_routed"]) + calls["num_predicted"]
    return ExpertRates(
        hit_rate=_share(calls["num_hits"], calls["num_routed"], 1),
        predicted_right=_share(calls["num_predicted_right"], calls["num_predicted"], 1),
        read_per_token=_ratio(read, num_tokens),
        reused_per_token=_ratio(reused, num_tokens),
        read_bytes_per_token=_ratio(calls["read_bytes"], num_tokens),
        wait_share=_share(lately["wait_seconds"], seconds, 0),
    )


def _difference(before: float, now: float) -> float:
    """Return the growth of a counter; NaN when it went back."""
    return now - before if now >= before else math.nan


def _ratio(part: float, whole: float) -> float | None:
    return None if math.isnan(part) or not whole > 0 else part / whole


def _share(part: float, whole: float, least: float) -> float | None:
    """Return a share of at least ``least``, at most 1: a counter of parts may move later than that of the whole."""
    share = _ratio(part, whole) if whole >= least else None
    return None if share is None else min(1.0, share)

"""The limit of a running model's speed, and the predicted gain of more memory."""

from __future__ import annotations

from mlx_flash.monitor.history import History, Shares
from mlx_flash.monitor.state import count
from mlx_flash.monitor.words import DISK_LIMITS, rate, size

SHORT_SHARE = 0.05
"""Calls that took a smaller share of the time say little."""


def limit_words(history: History, shares: Shares) -> str:
    """Return what limits the speed now, in words; nothing while the engine is idle."""
    rates, state, in_calls = history.rates, history.latest.state, 1 - shares.between
    if rates.reading_share is None or in_calls < SHORT_SHARE:
        return ""
    limit = "disk" if shares.disk >= DISK_LIMITS * in_calls else "computing"
    words = f"{limit}; the disk is busy {rates.reading_share:.0%} of the time"
    more, times = count(state, "outlook", "more_bytes"), count(state, "outlook", "times")
    mean = rates.mean_tokens_per_second
    if more and times and mean:
        words += f"; +{size(more)}: {rate(mean)} -> {rate(mean * times)} tokens/s predicted"
    return words

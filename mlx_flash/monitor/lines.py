"""Lines about a running engine: its pass, its limit, its budget, what is cached, and its ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from mlx_flash.monitor.history import History, Shares
from mlx_flash.monitor.state import Unit, count, number, optional, printable
from mlx_flash.monitor.words import DISK_LIMITS, duration, layer_runs, percent, rate, size, tokens_rate
from mlx_flash.telemetry import Json

SHORT_SHARE = 0.05
"""Calls that took a smaller share of the time say little."""

MAX_RUNS = 2
MAX_RANKS = 8
MAX_LAYERS = 10_000


def pass_words(state: Json, clock: float, tokens_per_second: float | None, units: Sequence[Unit]) -> str:
    """Return what the pass under way computes, and how far it is; the number of passes if there is none."""
    passes, began = number(state, "passes", "num_passes"), optional(state, "passes", "began")
    if began is None:
        return f"{passes:.0f} done{_guesses(state)}"
    streamed = [unit.state for unit in units if unit.streamed_bytes]
    done = f"{streamed.count('done')} of {len(streamed)}"
    head = f"{passes + number(state, 'passes', 'num_failed') + 1:.0f}: {_kind(state)}, "
    batch, seconds = number(state, "passes", "batch_size"), number(state, "passes", "last_seconds")
    if batch > 1 and seconds:
        shared = f"{batch:.0f} sequences, 1 pass {duration(seconds)}, {rate(tokens_per_second)} tok/s"
        return f"{head}{shared}; {done} layers"
    new = number(state, "passes", "num_tokens")
    tokens = f"{new:.0f} {'token' if new == 1 else 'tokens'}, {duration(max(0.0, clock - began))}"
    return f"{head}{tokens}{_guesses(state)}; {done} streamed layers done"


def _guesses(state: Json) -> str:
    guessed, right = number(state, "passes", "num_guessed"), number(state, "passes", "num_right")
    return f", {right:.0f} of {guessed:.0f} guesses right" if guessed else ""


def _kind(state: Json) -> str:
    if number(state, "passes", "num_tokens") == number(state, "passes", "batch_size"):
        return "decode"
    return "mixed" if number(state, "passes", "num_decoding") else "prefill"


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


def budget_bytes(state: Json) -> float:
    """Return the budget in force."""
    return number(state, "budget", "bytes") or number(state, "plan", "budget_bytes")


def change_words(state: Json) -> list[str]:
    """Return words about the last change of the budget, if there was one."""
    section = state.get("budget")
    changes = section.get("changes") if isinstance(section, dict) else None
    if not isinstance(changes, list) or not changes or not isinstance(changes[-1], dict):
        return []
    last = {"change": changes[-1]}
    at, before, after = (number(last, "change", key) for key in ("at", "before", "after"))
    words = f"{size(before)} to {size(after)} {duration(max(0.0, time.time() - at))} ago"
    return [f"{words}: {printable(str(changes[-1].get('reason')))}"]


def cached_words(history: History) -> str:
    """Return the part of the files that is read through the page cache, and its part of the last reads; "" if none."""
    nbytes = count(history.latest.state, "read", "cached_file_bytes")
    if not nbytes:
        return ""
    return f"{size(nbytes)} of the files in free memory; {percent(history.rates.cached_share)} of reads now"


def rank_words(state: Json) -> Iterator[str]:
    """Yield a line for each rank: its layers, tokens/s, what it reads, and how much of its time it waits for others."""
    section = state.get("ranks")
    each = section.get("each") if isinstance(section, dict) else None
    ranks = [entry for entry in each if isinstance(entry, dict)] if isinstance(each, list) else []
    for rank, entry in enumerate(ranks[:MAX_RANKS]):
        fields = {"rank": entry}
        tokens, read, waiting = (
            count(fields, "rank", key) for key in ("tokens_per_second", "read_bytes_per_second", "waiting_share")
        )
        reads = "-" if read is None else f"{read / 1e9:.2f}"
        layers = _layers(entry.get("layers"))
        yield f"{rank}: layers {layers}; {tokens_rate(tokens)}, read {reads} GB/s, waits {percent(waiting)}"
    if len(ranks) > MAX_RANKS:
        yield f"and {len(ranks) - MAX_RANKS} more"


def _layers(runs: object) -> str:
    """Return the first runs of layers, as first and last one."""
    pairs = [run for run in runs if isinstance(run, list) and len(run) == 2] if isinstance(runs, list) else []
    found = [(a, b) for a, b in pairs if _is_layer(a) and _is_layer(b)]
    words, total = layer_runs(found[:MAX_RUNS]), sum(b - a for a, b in found)
    return f"{words}, ... ({total})" if len(found) > MAX_RUNS else words or "-"


def _is_layer(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < MAX_LAYERS

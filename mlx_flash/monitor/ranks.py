"""The ranks that share a model, in words."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_flash.monitor.state import count
from mlx_flash.monitor.words import percent, rate
from mlx_flash.telemetry import Json

MAX_RUNS = 2
MAX_RANKS = 8
MAX_LAYERS = 10_000


def rank_words(state: Json) -> Iterator[str]:
    """Yield a line for each rank: its layers, tokens/s, what it reads, and how much of its time it waits for others."""
    section = state.get("ranks")
    each = section.get("each") if isinstance(section, dict) else None
    ranks = [entry for entry in each if isinstance(entry, dict)] if isinstance(each, list) else []
    for number, entry in enumerate(ranks[:MAX_RANKS]):
        fields = {"rank": entry}
        tokens, read, waiting = (
            count(fields, "rank", key) for key in ("tokens_per_second", "read_bytes_per_second", "waiting_share")
        )
        speed = rate(tokens)
        speed = speed if speed.endswith("token") else f"{speed} tokens/s"
        reads = "-" if read is None else f"{read / 1e9:.2f}"
        layers = _layers(entry.get("layers"))
        yield f"{number}: layers {layers}; {speed}, read {reads} GB/s, waits {percent(waiting)}"
    if len(ranks) > MAX_RANKS:
        yield f"and {len(ranks) - MAX_RANKS} more"


def _layers(runs: object) -> str:
    """Return the first runs of layers, as first and last one."""
    pairs = [run for run in runs if isinstance(run, list) and len(run) == 2] if isinstance(runs, list) else []
    found = [(a, b) for a, b in pairs if _is_layer(a) and _is_layer(b)]
    words = [str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in found[:MAX_RUNS]]
    total = sum(b - a for a, b in found)
    return f"{', '.join(words)}, ... ({total})" if len(found) > MAX_RUNS else ", ".join(words) or "-"


def _is_layer(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < MAX_LAYERS

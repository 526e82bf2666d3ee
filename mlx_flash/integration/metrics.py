"""The published state of this process's engines in the text format of Prometheus."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from mlx_flash.telemetry import Published, find

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

METRICS = (
    ("budget_bytes", "gauge", "RAM budget of the process", ("budget", "bytes")),
    ("memory_bytes", "gauge", "Memory of the process, as the budget counts it", ("memory", "footprint")),
    ("memory_peak_bytes", "gauge", "Largest memory of the process so far", ("memory", "peak_footprint")),
    ("model_bytes", "gauge", "Weights of the model", ("model", "bytes")),
    ("read_bytes_per_pass", "gauge", "Weights that a pass reads by the plan", ("plan", "read_bytes_per_pass")),
    ("passes_total", "counter", "Forward passes that ended well", ("passes", "num_passes")),
    ("failed_passes_total", "counter", "Forward passes that failed", ("passes", "num_failed")),
    ("input_tokens_total", "counter", "Tokens given to the model", ("passes", "num_tokens_in")),
    ("generated_tokens_total", "counter", "Tokens generated", ("passes", "num_tokens_out")),
    ("pass_seconds_total", "counter", "Time in forward passes", ("passes", "pass_seconds")),
    ("guessed_tokens_total", "counter", "Tokens guessed", ("passes", "num_guessed")),
    ("right_guesses_total", "counter", "Guessed tokens that were right", ("passes", "num_right")),
    ("disk_read_bytes_total", "counter", "Weights read from the disk", ("read", "nbytes")),
    ("disk_wait_seconds_total", "counter", "Time that passes waited for the disk", ("stream", "wait_seconds")),
    ("routed_experts_total", "counter", "Experts that routers chose", ("experts", "num_routed")),
    ("expert_hits_total", "counter", "Chosen experts that were in memory", ("experts", "num_hits")),
    ("kv_disk_bytes", "gauge", "Keys and values on the disk", ("kv", "disk_bytes")),
)
"""(name without its prefix, type, help, place in the state) of each metric."""


def metrics(num_requests: int) -> str:
    """Return the metrics of this process.

    Args:
        num_requests: requests that run or wait.
    """
    return "".join(_lines(num_requests, [engine for engine in find() if engine.pid == os.getpid()]))


def _lines(num_requests: int, engines: Iterable[Published]) -> Iterator[str]:
    yield from _head("requests", "gauge", "Requests that run or wait")
    yield f"mlx_flash_requests {num_requests}\n"
    for name, kind, help_text, place in METRICS:
        values = [(engine, _value(engine.state, *place)) for engine in engines]
        known = [(engine, value) for engine, value in values if value is not None]
        yield from _head(name, kind, help_text) if known else ()
        for engine, value in known:
            yield f'mlx_flash_{name}{{model="{_label(engine)}",number="{engine.number}"}} {value}\n'


def _head(name: str, kind: str, help_text: str) -> Iterator[str]:
    yield f"# HELP mlx_flash_{name} {help_text}.\n# TYPE mlx_flash_{name} {kind}\n"


def _value(state: Any, section: str, key: str) -> float | None:
    """Return a number of the state; None where its section is not there, as of a model without experts."""
    value = (state.get(section) or {}).get(key)
    return value if isinstance(value, int | float) else None


def _label(engine: Published) -> str:
    name = str(engine.state["model"]["name"])
    return name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

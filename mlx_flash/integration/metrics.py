"""The published state of this process's engines in the text format of Prometheus."""

from __future__ import annotations

import os
from collections.abc import Iterator

from mlx_flash.facts import FACTS
from mlx_flash.facts import metrics as metrics_of
from mlx_flash.telemetry import Published, find

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics(num_requests: int) -> str:
    """Return the metrics of this process, of which ``num_requests`` requests run or wait."""
    return "".join(_lines(num_requests))


def _lines(num_requests: int) -> Iterator[str]:
    yield "# HELP mlx_flash_requests Requests that run or wait.\n# TYPE mlx_flash_requests gauge\n"
    yield f"mlx_flash_requests {num_requests}\n"
    engines = [engine for engine in find() if engine.pid == os.getpid()]
    values = [(metric, engine) for engine in engines for metric in metrics_of(engine.state)]
    for fact in FACTS.values():
        own = [(metric, engine) for metric, engine in values if metric.name == fact.metric]
        if own:
            yield f"# HELP mlx_flash_{fact.metric} {fact.help}.\n# TYPE mlx_flash_{fact.metric} {fact.kind}\n"
        for metric, engine in own:
            yield f'mlx_flash_{metric.name}{{model="{_label(engine)}",number="{engine.number}"}} {metric.value}\n'


def _label(engine: Published) -> str:
    name = str(engine.state["model"]["name"])
    return name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

"""The published state of this process's engines in the text format of Prometheus."""

from __future__ import annotations

import os
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from mlx_flash.facts import metrics as metrics_of
from mlx_flash.telemetry import find

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class _Collector:
    """Reads the state when it is asked for.

    Args:
        num_requests: requests that run or wait.
    """

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that have a value."""
        yield GaugeMetricFamily("mlx_flash_requests", "Requests that run or wait", self._num_requests)
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for engine in find():
            for found in metrics_of(engine.state) if engine.pid == os.getpid() else ():
                kind = CounterMetricFamily if found.kind == "counter" else GaugeMetricFamily
                name = f"mlx_flash_{found.name}"
                family = families.setdefault(name, kind(name, found.help, labels=["model", "number"]))
                family.add_metric([str(engine.state["model"]["name"]), str(engine.number)], found.value)
        yield from families.values()


def metrics(num_requests: int) -> bytes:
    """Return the metrics of this process.

    Args:
        num_requests: requests that run or wait.
    """
    registry = CollectorRegistry()
    registry.register(_Collector(num_requests))
    return generate_latest(registry)

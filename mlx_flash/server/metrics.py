"""The published state of this process's engines in the text format of Prometheus."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

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
        ignored: requests by names of fields that had no effect.
    """

    def __init__(self, num_requests: int, ignored: Mapping[str, int]) -> None:
        self._num_requests, self._ignored = num_requests, ignored

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that have a value."""
        yield GaugeMetricFamily("mlx_flash_requests", "Requests that run or wait", self._num_requests)
        words = "Requests with a field that had no effect"
        ignored = CounterMetricFamily("mlx_flash_ignored_fields", words, labels=["field"])
        for name, number in self._ignored.items():
            ignored.add_metric([name], number)
        if self._ignored:
            yield ignored
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for engine in find():
            for found in metrics_of(engine.state) if engine.pid == os.getpid() else ():
                kind = CounterMetricFamily if found.kind == "counter" else GaugeMetricFamily
                name = f"mlx_flash_{found.name}"
                family = families.setdefault(name, kind(name, found.help, labels=["model", "number"]))
                family.add_metric([str(engine.state["model"]["name"]), str(engine.number)], found.value)
        yield from families.values()


def metrics(num_requests: int, ignored: Mapping[str, int]) -> bytes:
    """Return the metrics of this process.

    Args:
        num_requests: requests that run or wait.
        ignored: requests by names of fields that had no effect.
    """
    registry = CollectorRegistry()
    registry.register(_Collector(num_requests, ignored))
    return generate_latest(registry)

"""The limit of the speed, in reports and in the monitor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlx_flash.commands import report
from mlx_flash.commands.report import RUN
from mlx_flash.config import GB
from mlx_flash.monitor.rates import History
from mlx_flash.monitor.words import filled
from mlx_flash.telemetry import Facts, Sample
from monitored import published, state
from monitored import text_of as monitor_text


@pytest.mark.parametrize(
    ("waited", "cached", "limit"), [(1.0, 0, "disk"), (0.4, 0, "computing"), (1.0, 10, "page cache")]
)
def test_summary_shows_shares_and_limit(waited: float, cached: int, limit: str) -> None:
    first = Sample(1.0, Facts({"read.nbytes": 10.0}))
    numbers = {"read.nbytes": 20.0, "read.cached_bytes": cached * 2.0, "read.busy_seconds": 3.6}
    last = Sample(5.0, Facts({**numbers, "stream.wait_seconds": waited}))
    plan = SimpleNamespace(budget_bytes=GB, disk_bytes_per_second=1e9)
    start = Sample(0.0, Facts())
    run: Any = SimpleNamespace(start=start, first=first, last=last, sample=lambda: last, tokens=[1, 2], plan=plan)
    found = dict(filled(RUN, report._disk_numbers(run)))
    assert found["Time"].startswith(f"reading 90%, computing {1 - waited / 4:.0%}, waiting {waited / 4:.0%}")
    assert found["Time"].endswith(f"limited by: {limit}")


def test_reading_takes_no_less_time_than_waiting_for_it() -> None:
    """Keys and values have a reader of their own."""
    facts = {"stream.wait_seconds": 1.0, "experts.wait_seconds": 0.0, "kv.wait_seconds": 2.0, "read.busy_seconds": 1.5}
    before, now = Sample(0.0, Facts(dict.fromkeys(facts, 0.0))), Sample(4.0, Facts(facts))
    assert now.reading(before) == now.waited(before) == 3.0


def limit_of(**sections: Any) -> str:
    history = History(published(state(), 96.0))
    history.add(published(state(**sections), 100.0))
    return next((line for line in monitor_text(history) if line.startswith("limit")), "")


def test_monitor_says_what_limits() -> None:
    busy = {"passes": {"pass_seconds": 11.0}, "read": {"busy_seconds": 9.1}}
    told = limit_of(**busy, stream={"wait_seconds": 5.0, "held_seconds": 5.0})
    assert told == "limit      disk; the disk is busy 90% of the time"
    computing = limit_of(**busy, stream={"wait_seconds": 2.1, "held_seconds": 7.9})
    assert computing == "limit      computing; the disk is busy 90% of the time"
    assert limit_of(passes={"began": None}) == ""  # idle
    busy["read"] = {"busy_seconds": 9.1, "nbytes": 50 * GB, "cached_bytes": 50 * GB}
    cached = limit_of(**busy, stream={"wait_seconds": 5.0, "held_seconds": 5.0})
    assert cached == "limit      page cache; the page cache is busy 90% of the time"

"""The limit of the speed, in reports and in the monitor."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from mlx_flash.commands import report
from mlx_flash.commands.report import roofline
from mlx_flash.config import GB
from mlx_flash.facts import Facts, Sample
from mlx_flash.monitor.rates import History
from monitored import published, state
from monitored import text_of as monitor_text


def test_summary_shows_shares_and_limit() -> None:
    numbers = dict.fromkeys(f.name for f in fields(report.GenerationReport))
    measured = {"generation_wait_share": 0.25, "generation_read_share": 0.9, "generation_tokens_per_second": 2.0}
    lines = dict(roofline(report.GenerationReport(**{**numbers, **measured})))
    assert lines["Time:"].startswith("reading 90%, computing 75%, waiting for the disk 25%")
    assert lines["Time:"].endswith("limited by the disk")
    lines = dict(roofline(report.GenerationReport(**{**numbers, **measured, "generation_wait_share": 0.1})))
    assert lines["Time:"].endswith("limited by computing")
    cached = {**measured, "cached_read_share": 1.0}
    lines = dict(roofline(report.GenerationReport(**{**numbers, **cached})))
    assert lines["Time:"].endswith("waiting for the page cache 25% of the generation: limited by the page cache")


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

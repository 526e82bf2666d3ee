"""The forecast of a larger budget: from the plan's own model, at measured speeds."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machines import FIXED, MIB, everything, make_machine, make_model, minimum_of, with_budget
from mlx_flash.commands import report
from mlx_flash.commands.render import roofline
from mlx_flash.config import GB
from mlx_flash.engine.forecast import Forecast
from mlx_flash.facts import Facts, Sample
from mlx_flash.layout.cachesizes import CacheSizes
from mlx_flash.monitor.rates import History
from mlx_flash.residency import budgets
from mlx_flash.residency.budgets import outlook, round_number
from mlx_flash.residency.planner import make_plan
from mlx_flash.residency.speed import Speed
from mlx_flash.storage.probe import DiskProfile
from monitored import published, state
from monitored import text_of as monitor_text

SLOW_DISK = make_machine(disk=DiskProfile(5e8, 4 * MIB, 4, True), compute_bytes_per_second=2e10)
MODEL = make_model()


def plan_at(share: float, machine: Any = SLOW_DISK) -> Any:
    least, most = minimum_of(MODEL, FIXED, machine), everything(MODEL, FIXED, machine).peak_bytes
    return make_plan(MODEL, with_budget(FIXED, least + int(share * (most - least))), machine)


@given(st.integers(1, 10**15))
def test_round_numbers_are_near(number: int) -> None:
    found = round_number(number)
    assert found <= number < 2.5 * found
    assert str(found).rstrip("0") in {"1", "2", "5"}


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_gain_is_that_of_the_plan_for_the_larger_budget(share: float) -> None:
    plan = plan_at(share)
    found = outlook(MODEL, FIXED, SLOW_DISK, plan)
    assert found is not None and found.more_bytes <= plan.budget_bytes // 4
    larger = make_plan(MODEL, with_budget(FIXED, plan.budget_bytes + found.more_bytes), SLOW_DISK)
    assert found.times == pytest.approx(plan.weights_seconds / larger.weights_seconds, rel=0.05)
    assert found.times > 1.02


@pytest.mark.parametrize("limit", [{"kv_ram_gb": 1.0}, {"kv_max_tokens": 600}])
def test_gain_with_a_limit_of_the_kv_cache(limit: dict[str, Any]) -> None:
    """The limit refuses mlx-lm's own caches, which a plan with nothing on disk would otherwise be compared with."""
    config = replace(FIXED, **limit)
    plan = make_plan(MODEL, with_budget(config, minimum_of(MODEL, config, SLOW_DISK) + MODEL.nbytes // 3), SLOW_DISK)
    found = outlook(MODEL, config, SLOW_DISK, plan)
    assert found is not None and found.times > 1.02


def test_no_gain_is_told_where_there_is_none() -> None:
    plan = plan_at(0.3)
    assert outlook(MODEL, FIXED, SLOW_DISK, plan_at(1.1)) is None  # everything is in memory
    assert outlook(MODEL, FIXED, replace(SLOW_DISK, total_memory=plan.budget_bytes), plan) is None
    processor = make_machine(compute_bytes_per_second=1e8)
    assert outlook(MODEL, FIXED, processor, plan_at(0.3, processor)) is None  # the disk is not what limits it


@pytest.mark.parametrize("limit", [{"kv_max_tokens": 512}, {"kv_ram_gb": 0.5}])
def test_limits_of_the_kv_cache_have_a_forecast_too(limit: dict[str, Any]) -> None:
    config = replace(FIXED, **limit)
    rows = CacheSizes(constant_bytes=0, token_bytes=24 * 1700, rows=(1700,) * 24)
    sizes = replace(MODEL, cache=rows)
    plan = make_plan(sizes, with_budget(config, minimum_of(sizes, config, SLOW_DISK) + 500_000_000), SLOW_DISK)
    found = outlook(sizes, config, SLOW_DISK, plan)
    assert found is not None and found.times > 1.02


class Meter:
    """A meter of a run that reached so many bytes a second; None for one that was too short."""

    def __init__(self, disk: float | None) -> None:
        self.disk = disk

    def speed(self, planned: Speed) -> Speed | None:
        return None if self.disk is None else replace(planned, disk_bytes_per_second=self.disk, is_measured=True)


def test_forecast_waits_for_a_measurement_and_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr("mlx_flash.engine.forecast.outlook", lambda *a: made.append(a) or budgets.outlook(*a))
    machine, meter = make_machine(compute_bytes_per_second=1e9), Meter(None)
    plan = plan_at(0.3, machine)
    forecast = Forecast(MODEL, FIXED, machine, plan, meter)  # type: ignore[arg-type]
    assert forecast.outlook() is None and forecast.telemetry() == {} and not made
    meter.disk = 1e8  # the probe promised 2e9: the disk would not have been the limit
    assert outlook(MODEL, FIXED, machine, plan) is None
    found = forecast.outlook()
    assert found is not None and forecast.telemetry() == {"more_bytes": found.more_bytes, "times": found.times}
    assert len(made) == 1


@pytest.mark.parametrize("found", [budgets.Outlook(2 * GB, 1.5), None])
def test_report_multiplies_the_measured_speed(found: budgets.Outlook | None) -> None:
    marks = {"first": SimpleNamespace(clock=1.0), "last": SimpleNamespace(clock=5.0)}
    run = SimpleNamespace(tokens=[0] * 9, forecast=SimpleNamespace(outlook=lambda: found), **marks)
    expected = {} if found is None else {"more_budget_bytes": 2 * GB, "more_tokens_per_second": 3.0}
    assert report._more(run) == expected  # type: ignore[arg-type]


def test_summary_shows_shares_limit_and_gain() -> None:
    numbers = dict.fromkeys(f.name for f in fields(report.GenerationReport))
    measured = {"generation_wait_share": 0.25, "generation_read_share": 0.9, "generation_tokens_per_second": 2.0}
    more = {"more_budget_bytes": 2 * GB, "more_tokens_per_second": 3.0}
    lines = dict(roofline(report.GenerationReport(**{**numbers, **measured, **more})))
    assert lines["Time:"].startswith("reading 90%, computing 75%, waiting for the disk 25%")
    assert lines["Time:"].endswith("limited by the disk")
    assert lines["More memory:"] == "+2.00 GB: 2.000 tokens-per-sec -> 3.000 tokens-per-sec predicted"
    lines = dict(roofline(report.GenerationReport(**{**numbers, **measured, "generation_wait_share": 0.1})))
    assert lines["Time:"].endswith("limited by computing") and "More memory:" not in lines
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


def test_monitor_says_what_limits_and_what_memory_would_give() -> None:
    busy = {"passes": {"pass_seconds": 11.0}, "read": {"busy_seconds": 9.1}}
    told = limit_of(
        **busy, stream={"wait_seconds": 5.0, "held_seconds": 5.0}, outlook={"more_bytes": 2 * GB, "times": 1.3}
    )
    assert told.startswith("limit      disk; the disk is busy 90% of the time; +2.00 GB: 2.00 -> 2.60")
    computing = limit_of(**busy, stream={"wait_seconds": 2.1, "held_seconds": 7.9}, outlook={})
    assert computing == "limit      computing; the disk is busy 90% of the time"
    assert limit_of(passes={"began": None}) == ""  # idle
    busy["read"] = {"busy_seconds": 9.1, "nbytes": 50 * GB, "cached_bytes": 50 * GB}
    cached = limit_of(**busy, stream={"wait_seconds": 5.0, "held_seconds": 5.0}, outlook={})
    assert cached == "limit      page cache; the page cache is busy 90% of the time"

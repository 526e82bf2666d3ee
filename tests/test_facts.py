"""The table of facts names what engines publish, and reads it from any state."""

from __future__ import annotations

import tempfile
import time
from types import SimpleNamespace
from typing import Any

import pytest

import monitored
from expert_pools import with_pool
from mlx_flash import FlashConfig, FlashLLM, load_model
from mlx_flash import telemetry as facts
from mlx_flash.commands import report
from mlx_flash.commands.report import RUN
from mlx_flash.config import GB
from mlx_flash.monitor.rates import History
from mlx_flash.monitor.words import filled
from mlx_flash.telemetry import Facts, Json, Sample, find
from models import LLAMA, make_random_model, run, save
from monitored import runtime as runtime  # a fixture: engines of other programs publish elsewhere

RARE = {"passes.began"}
"""Facts that are None until something is under way."""


def told_by(loaded: FlashLLM) -> Json:
    with loaded as model:
        run(model, [[1, 2, 3], [4]])
        deadline = time.monotonic() + 10
        while not (found := [each.state for each in find() if each.state["passes"]["num_passes"] == 2]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return found[0]


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[Json]:
    folder = tmp_path_factory.mktemp("facts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        dense = save(folder / "dense", LLAMA)
        options = ["--architecture=qwen3_moe", "--experts=8", "--experts-per-token=2", "--dtype=float32"]
        mixture = make_random_model(folder / "mixture", "--layers=2", "--hidden-size=64", *options)
        prefixes = FlashConfig(ram_budget_gb=1, context_length=512, kv_prefixes="exact", kv_directory=folder)
        return [
            told_by(load_model(dense, prefixes)[0]),
            told_by(with_pool(mixture, pool_slots=3, telemetry=True)),
        ]


def test_every_fact_is_published(states: list[Json]) -> None:
    found = set().union(*(facts.read(state) for state in states))
    assert facts.FACTS.keys() - found <= RARE
    assert not any(name.startswith("experts.") for name in facts.read(states[0]))


def test_every_published_number_is_a_fact(states: list[Json]) -> None:
    for state in states:
        sections = {name: fields for name, fields in state.items() if isinstance(fields, dict)}
        numbers = {f"{name}.{key}" for name, fields in sections.items() for key in fields if is_number(fields[key])}
        assert numbers <= facts.FACTS.keys()


def is_number(value: object) -> bool:
    return type(value) in (int, float)


def test_a_metric_has_the_published_value(states: list[Json]) -> None:
    found = {fact.metric: (fact, value) for fact, value in facts.metrics(states[1])}
    assert found["generated_tokens_total"] == (
        ("tokens", "counter", "Tokens generated", "generated_tokens_total"),
        1.0,
    )
    assert found["routed_experts_total"][1] == states[1]["experts"]["num_routed"] > 0
    assert "routed_experts_total" not in {fact.metric for fact, _ in facts.metrics(states[0])}
    for name, (fact, _) in found.items():
        assert fact.kind in ("gauge", "counter") and name.endswith("_total") == (fact.kind == "counter")


# The limit of the speed, in reports and in the monitor


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


def limit_of(**sections: Any) -> str:
    history = History(monitored.published(monitored.state(), 96.0))
    history.add(monitored.published(monitored.state(**sections), 100.0))
    return next((line for line in monitored.text_of(history) if line.startswith("limit")), "")


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

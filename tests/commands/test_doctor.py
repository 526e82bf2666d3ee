"""``mlx-flash doctor``, the table of budgets, and facts about disks."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from machines import FIXED, make_machine, make_model, minimum_of
from mlx_flash.commands.arguments import parse_arguments
from mlx_flash.commands.doctor import Findings, advice, doctor
from mlx_flash.config import GB
from mlx_flash.errors import BudgetError
from mlx_flash.memory import footprint
from mlx_flash.monitor.rates import SystemMemory
from mlx_flash.residency.planner import make_plan, table_of_budgets
from mlx_flash.storage import probe
from mlx_flash.storage.probe import Disk, DiskProfile, SelfTest
from models import LLAMA, save

DISK = Disk("/dev/disk3", "/", "apfs", 10**12, 4 * 10**11)
FOUND = Findings(
    device="Apple M4 (gpu)",
    memory=SystemMemory(16 * GB, 9 * GB, 0, 0, 0.0),
    wired_limit=None,
    disk=DISK,
    profile=DiskProfile(5e9, 2 << 20, 8, True),
    selftest=SelfTest("in place", {"buffered": 0, "in place": 0}),
    versions={"versions": {"python": "3.12.1", "mlx": "0.32.4", "mlx_lm": "0.32.2", "mlx_flash": "0.1.0"}},
)
OLD = {"versions": {**FOUND.versions["versions"], "mlx_lm": "0.31.9"}}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "SELF_TEST_ROUNDS", 2)
    monkeypatch.setattr(probe, "CASES", ((64 << 10, 4, True),))
    monkeypatch.setattr(probe, "NUM_FILE_BYTES", 1 << 20)
    monkeypatch.setattr(probe, "SAMPLE_BYTES", 1 << 20)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"disk": replace(DISK, free_bytes=10**10)}, "/ has 10.0 GB of 1000.0 GB free"),
        ({"profile": DiskProfile(4e8, 1, 1, True)}, "/ (/dev/disk3, apfs) reads only 0.40 GB/s"),
        ({"profile": DiskProfile(5e9, 1, 1, False)}, "no direct reads"),
        ({"memory": SystemMemory(16 * GB, 9 * GB, 8 * GB, 2 * GB, 0.0)}, "2.00 GB are swapped out"),
        ({"selftest": SelfTest("bounced", {"in place": 88})}, "lost 88 blocks, so they are bounced"),
        ({"wired_limit": 11 * GB}, "at most 11.0 GB wired"),
        ({"versions": OLD}, "tested with mlx-lm 0.32.1 to"),
    ],
)
def test_advice_is_given_where_it_is_due(changes: dict[str, Any], words: str) -> None:
    found = list(advice(replace(FOUND, **changes)))
    assert words in " ".join(found) and len(found) == bool(words)


def doctor_of(*flags: object) -> str:
    out = io.StringIO()
    assert doctor(parse_arguments(["doctor", "--no-telemetry", *map(str, flags)]), out) == 0
    return out.getvalue()


def test_a_model_is_measured_beside_its_plan(tmp_path: Path) -> None:
    directory = save(tmp_path / "model", LLAMA)
    text = doctor_of("--model", directory, "--ram-budget-gb", "min")
    for words in ("Generation:", "planned:", "limited by", "budget GB", "context"):
        assert words in text
    found = json.loads(doctor_of("--model", directory, "--ram-budget-gb", "min", "--json", "-m", 2))
    assert found["run"]["generation_tokens"] == 2 and found["selftest"]["lost"] == {"buffered": 0, "in place": 0}
    assert found["disk"]["total_bytes"] > 0 and found["wired_limit"] is None
    assert found["budgets"][0]["read_bytes"] > 0 == found["budgets"][-1]["read_bytes"]


def test_table_goes_from_the_least_budget_to_the_first_that_reads_nothing() -> None:
    sizes, config, machine = make_model(), replace(FIXED, context_length=None), make_machine()
    rows = list(table_of_budgets(sizes, config, machine))
    least = minimum_of(sizes, config, machine)
    assert 0 <= rows[0][0].budget_bytes - least < 1e6
    assert [plan.read_bytes == 0 for plan, _ in rows] == [False] * (len(rows) - 1) + [True]
    speeds = [plan.weights_seconds for plan, _ in rows]
    assert all(later <= earlier * 1.01 for earlier, later in pairwise(speeds))
    contexts = [context for _, context in rows]
    assert contexts == sorted(contexts)
    small = make_machine(total_memory=minimum_of(sizes, FIXED, machine) + 200_000_000)
    rows = list(table_of_budgets(sizes, FIXED, small))
    assert rows and all(plan.budget_bytes <= small.total_memory for plan, _ in rows)  # none is larger than the machine
    assert rows[-1][0].read_bytes > 0


def test_longest_context_fits_and_the_next_one_does_not() -> None:
    sizes, config, machine = make_model(), replace(FIXED, context_length=None), make_machine(kv_disk_bytes=10**9)
    plan, longest = list(table_of_budgets(sizes, config, machine))[1]
    gigabytes = plan.budget_bytes / GB
    make_plan(sizes, replace(config, ram_budget_gb=gigabytes, context_length=longest), machine)
    with pytest.raises(BudgetError):
        make_plan(sizes, replace(config, ram_budget_gb=gigabytes, context_length=2 * longest), machine)


# --- disks


def test_wired_limit_is_that_of_metal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert footprint.wired_limit() is None
    monkeypatch.setattr(footprint.sys, "platform", "darwin")
    monkeypatch.setattr(footprint.mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(footprint.mx, "device_info", lambda: {"max_recommended_working_set_size": 11 * GB})

    for megabytes, expected in ((0, 11 * GB), (12_000, 12_000 << 20)):
        monkeypatch.setattr(footprint, "sysctl", {"iogpu.wired_limit_mb": megabytes}.__getitem__)
        assert footprint.wired_limit() == expected
        monkeypatch.setattr(
            footprint.psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GB, available=20 * GB)
        )
        assert footprint.available_memory() == expected  # budget words take shares of it

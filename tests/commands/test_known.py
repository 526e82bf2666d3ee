"""``mlx-flash models``: the table of models that people run, with what this machine is expected to do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlx_flash import cli
from mlx_flash.commands import models as module
from mlx_flash.commands.models import reckon
from mlx_flash.layout.names import Known, known_models
from mlx_flash.residency.sizes import expected_hits
from mlx_flash.storage.probe import DiskProfile
from terminals import ROOT

ENDLESS = (3e9, 1e15, 1e15)
"""A disk of 3 GB/s beside a processor that never waits."""


def model(**numbers: Any) -> Known:
    return Known(repository="some/model", licence="mit", source="a page", **numbers)


def test_estimates_are_the_arithmetic_of_readme() -> None:
    dense = model(bytes=40_000_000_000, token=40_000_000_000)
    found = reckon(dense, 9_100_000_000, *ENDLESS)
    assert found["read_bytes"] == 32_100_000_000 and found["way"] == "streamed"
    assert found["tokens_per_second"] == pytest.approx(3 / 32.1)
    assert reckon(dense, 41_200_000_000, *ENDLESS)["way"] == "in memory"
    assert reckon(dense, 41_200_000_000, 3e9, 1e9, 2e9)["tokens_per_second"] == pytest.approx(1 / 20)


def test_a_mixture_keeps_its_trunk_and_then_experts() -> None:
    mixture = model(bytes=72_000_000_000, token=4_400_000_000, experts=70_400_000_000, chosen=(4, 128))
    trunk = mixture.token - mixture.chosen_bytes
    assert trunk == 2_200_000_000
    assert reckon(mixture, 2_200_000_000, *ENDLESS)["read_bytes"] == 3_400_000_000  # a part of the trunk, too
    half = reckon(mixture, 1_200_000_000 + trunk + 35_200_000_000, *ENDLESS)["read_bytes"]
    assert half == round(2_200_000_000 * (1 - expected_hits(0.5, 128)))
    assert reckon(mixture, 80_000_000_000, *ENDLESS)["read_bytes"] == 0


def test_models_here_are_planned_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    name, folder = known_models()["qwen3-30b-a3b"].repository, str(ROOT / "examples" / "pair" / "draft")
    monkeypatch.setattr(module, "downloaded", lambda: [module._model(name, folder, 1)])
    monkeypatch.setattr(module, "profile_for", lambda *_: DiskProfile(3e9, 1 << 20, 4, True))
    assert cli.main(["models", "--ram-budget-gb", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["budget_bytes"] == 2_000_000_000 and found["disk_bytes_per_second"] == 3e9
    rows = {row["name"]: row for row in found["models"]}
    assert rows.keys() == known_models().keys()
    speeds = [row["tokens_per_second"] for row in found["models"]]
    assert speeds == sorted(speeds, reverse=True)
    planned = rows["qwen3-30b-a3b"]
    assert planned["is_here"] and planned["way"] == "in memory"  # the stand-in is small
    assert not rows["llama-3.3-70b"]["is_here"]
    assert rows["llama-3.3-70b"]["read_bytes"] == known_models()["llama-3.3-70b"].token - 800_000_000
    assert cli.main(["models", "--ram-budget-gb", "2"]) == 0
    told = capsys.readouterr().out
    assert "* qwen3-30b-a3b" in told and "8 of 128" in told and "3.00 GB/s" in told
    assert all(len(line) <= 80 for line in told.splitlines())

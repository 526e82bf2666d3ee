"""The benchmark of loading: what it runs and adds up, but no speed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmark_modules import load_benchmark
from models import LLAMA, save

loading, runs_of_jobs = load_benchmark("loading"), load_benchmark("runs")


def test_programs_alternate_and_give_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_job(job: Any) -> Any:
        """Do a worker's job in this process, which has MLX already."""
        asked.append("mlx-lm" if job.budget is None else "mlx-flash")
        return runs_of_jobs.work(job)

    asked: list[str] = []
    path = save(tmp_path / "tiny", LLAMA)
    monkeypatch.setattr(loading, "run_job", run_job)
    monkeypatch.setattr(loading, "take_memory", lambda: asked.append("take"))  # gigabytes
    monkeypatch.setattr(loading, "ROOM_GB", 6.0)  # this process has other models, too
    runs = list(loading.rounds_of(path, argparse.Namespace(rounds=2, prompt_tokens=16, tokens=3)))
    assert asked[::2] == ["take"] * 8
    assert asked[1::2] == [*["mlx-flash"] * 2, *["mlx-lm"] * 4, *["mlx-flash"] * 2]
    rows = loading.summarize(runs)
    assert [(row["state"], row["program"]) for row in rows] == [
        ("cold", "mlx-flash"), ("warm", "mlx-flash"), ("cold", "mlx-lm"), ("warm", "mlx-lm")
    ]  # fmt: skip
    assert all(row["same"] and row["first_token_seconds"] > row["load_seconds"] > 0 for row in rows)
    assert all((row["of_raw"] is None) == (row["state"] == "warm") for row in rows)
    assert not any(row["same"] for row in loading.summarize([*runs, runs[0] | {"token_ids": [0]}])[:1])
    assert len(loading.table_of(rows).rows) == 4

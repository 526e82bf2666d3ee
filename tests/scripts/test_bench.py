"""The short table of ``make bench``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmark_modules import load_benchmark

bench = load_benchmark("bench")
TINY = "--layers 2 --hidden-size 64 --intermediate-size 128 --heads 4 --kv-heads 2 --vocab-size 1000"


def test_both_programs_run_and_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "SHAPES", {"dense": TINY})
    rows = [bench.Row("decode", "dense", 0.4, tokens=3), bench.Row("first", "dense", 0.4, "first_token_seconds", 2)]
    monkeypatch.setattr(bench, "ROWS", rows)
    file = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["bench.py", "--rounds", "1", "--folder", str(tmp_path), "--json", str(file)])
    bench.main()
    decode, first = json.loads(file.read_text())["rows"]
    assert decode["ratio"] == pytest.approx(decode["medians"]["mlx-flash"] / decode["medians"]["mlx-lm"])
    assert first["ratio"] == pytest.approx(first["medians"]["mlx-lm"] / first["medians"]["mlx-flash"])
    assert "tokens/s" in capsys.readouterr().out


def test_other_tokens_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_job(job: Any) -> dict[str, Any]:
        return {"token_ids": [1, 2 if job.budget is None else 3]}

    monkeypatch.setattr(bench, "run_job", run_job)
    monkeypatch.setattr(bench, "weight_files", lambda folder: [])
    with pytest.raises(SystemExit, match="the tokens differ"):
        bench.compare(bench.ROWS[0], tmp_path, 0)

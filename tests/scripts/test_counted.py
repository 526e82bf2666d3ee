"""Tests of the benchmarks of passes: what they count and compare, but no speed."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from children import ROOT
from models import make_random_model
from oracle import with_room
from streamed import streamed_whole

BENCHMARKS = ROOT / "benchmarks"
SHAPE = ("--hidden-size=64", "--intermediate-size=96", "--heads=2", "--kv-heads=1", "--vocab-size=300", "--layers=4")


def benchmark(name: str) -> Any:
    """Import a module of ``benchmarks/``, whose modules import each other by their plain names."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("counted") / "model", *SHAPE, "--dtype=float32")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("\n".join(f"line {i} of a text that goes on and on" for i in range(60)))
    return tmp_path / "text.txt"


def test_guesses_are_counted_and_tokens_compared(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speculation, out = benchmark("speculation"), tmp_path / "out.json"
    paths = [f"--model={model}", f"--draft={model}", f"--text={text}", f"--json={out}"]
    assert speculation.main([*paths, "--passages=1", "--tokens=5", "--free-rows", "--budget=min"]) == 0
    result = json.loads(out.read_text())
    assert "every token is stock mlx-lm's" in capsys.readouterr().out
    rows = {(row["task"], row["way"]): row for row in result["summary"]}
    assert len(rows) == 3 * 3
    for (_, way), row in rows.items():
        assert row["passes"] == row["tokens"] - row["right"]
        assert bool(row["guessed"]) >= (way == "draft")
        assert way != "plain" or not row["guessed"]
    drafted = rows["continue", "draft"]  # by the model itself
    assert drafted["right"] > 0


def test_differences_are_found() -> None:
    speculation = benchmark("speculation")
    task, answer = speculation.Task("rewrite", "prompt"), speculation.Answer
    found = speculation.differences([task], {"plain": [answer([1, 2])], "draft": [answer([1, 3])]}, [answer([1, 2])])
    assert found == ["draft, 'rewrite': 'prompt'"]


def test_rewriting_renames_the_commonest_long_word() -> None:
    assert (
        benchmark("speculation").renamed("value = values(value) + a + a + a") == "renamed = values(renamed) + a + a + a"
    )


def test_lockstep_compares_rows_and_passes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lockstep = benchmark("lockstep")
    ran: list[str] = []

    def run_job(job: Any, mb_per_second: float | None, in_limit: bool) -> Any:
        assert mb_per_second is None and not in_limit
        ran.append(job.way)
        return json.loads(json.dumps(lockstep.work(job)))

    monkeypatch.setattr(lockstep, "run_job", run_job)
    monkeypatch.setattr(
        lockstep, "load_model", lambda path, config: (with_room(streamed_whole(Path(path), speculation=False)), {})
    )
    out = tmp_path / "out.json"
    flags = [f"--model={model}", "--budget=min", "--prompts", "5", "40", "--batches", "1", "3", f"--json={out}"]
    assert lockstep.main([*flags, "--before", "5", "--tokens=3"]) == 0
    assert "resident" in capsys.readouterr().out
    assert ran == ["now", "before", "resident"]
    runs = json.loads(out.read_text())["runs"]
    assert [one["passes"] for one in runs["now"]["first"]] == [1, 1]
    assert [one["passes"] for one in runs["before"]["first"]] == [3]
    assert [(batch["passes"], len(batch["rows"])) for batch in runs["now"]["batches"]] == [(2, 1), (2, 3)]
    runs["resident"]["rows"][2][1][1] += 1e-7
    runs["before"]["first"][0]["token"][0] ^= 1
    assert lockstep.differences(runs) == ["before: first token after 5 tokens", "row 2 of a batch of 3"]

"""The matrix of experiments, run tiny, and its figures."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from children import ROOT
from mlx_flash.errors import FlashError
from models import LLAMA, save

_SPEC = importlib.util.spec_from_file_location("matrix", ROOT / "scripts" / "run_matrix_experiments.py")
assert _SPEC is not None and _SPEC.loader is not None
matrix: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(matrix)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Run the script; return its output and errors."""

    def run(*words: object) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["run_matrix_experiments.py", *map(str, words)])
        matrix.main()
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


def test_a_tiny_matrix_is_measured_once_and_resumed(
    start: Callable[..., tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(job: Any, limit: int | None) -> Any:
        """Run a job in this process, which has MLX already; errors are a worker's."""
        try:
            return sys.modules["runs"].work(job)
        except FlashError as error:
            raise SystemExit(f"{type(error).__name__}: {error}") from None

    monkeypatch.setattr(sys.modules["streaming"], "run_job", work)
    model, out = save(tmp_path / "tiny", LLAMA), tmp_path / "out"
    words = ["--models", model, "--budgets", 0.01, 3.0, "--batches", 2, "--slots", 2, "--tokens", 3, "--out", out]
    text, log = start(*words)
    found = json.loads((out / "matrix.json").read_text())
    resident, refused, streamed = found["cells"].values()
    assert refused["status"] == "refused" and "BudgetError" in refused["why"] and "0.01 GB: refused" in log
    assert resident["job"]["budget"] is None and streamed["job"]["settings"] == {"io": "direct", "num_slots": 2}
    assert streamed["token_ids"] == resident["token_ids"] and streamed["identical"]
    assert streamed["tokens_per_second"] == pytest.approx(2 / streamed["seconds_per_token"])
    (row,) = csv.DictReader((out / "matrix.csv").read_text().splitlines())
    assert (row["slots"], row["batch"], row["budget_gb"], row["within_budget"]) == ("2", "2", "3.0", "True")
    assert float(row["ratio"]) == pytest.approx(float(row["predicted"]) / float(row["tokens_per_second"]))
    assert text == f"mlx-flash generate --model {model} --num-slots=2 --io=direct --ram-budget-gb=3.000\n"
    monkeypatch.setattr(matrix.Bench, "run_round", lambda *_: pytest.fail("it was measured already"))
    assert start(*words)[0] == text


def rows(speeds: dict[float, float], **more: Any) -> list[dict[str, Any]]:
    axes = {"slots": None, "io": "auto", "queue_depth": None, "context": 16, "batch": 1, **more}
    numbers = {"predicted": 1.0, "peak_gb": 0.9, "efficiency": 0.5}
    return [{"model": "m", "budget_gb": gb, **axes, "tokens_per_second": tps, **numbers} for gb, tps in speeds.items()]


def test_the_cliff_is_the_smallest_budget_near_the_best() -> None:
    line = rows({4.0: 10.0, 1.0: 3.0, 2.0: 9.0, 3.0: 8.9})
    assert matrix.cliff_of(line)["budget_gb"] == 2.0
    deep = rows({1.0: 9.5, 2.0: 9.6}, queue_depth=4)
    assert matrix.cliff_of(line + deep) == deep[0]
    assert matrix.recommended(line + rows({0.5: 90.0}, batch=8)) == "mlx-flash generate --model m --ram-budget-gb=2.000"
    assert [len(found) for found in matrix.lines_of(line + deep).values()] == [4, 2]


def test_medians_over_rounds_leave_refused_runs_out() -> None:
    job = {"model": "m", "budget": 1.0, "queue_depth": None, "prompt_tokens": 4, "batch": 1, "settings": {"io": "auto"}}
    numbers = dict.fromkeys(("of_resident", "efficiency_median", "wait_share", "bytes_per_token", "budget_bytes"), 1.0)
    ok = {"status": "ok", "job": job, "identical": True, "plan": {"read_bytes": 1}, "peak_bytes": 1.0, **numbers}
    runs = [ok | {"tokens_per_second": speed, "predicted_tokens_per_second": 4.0} for speed in (1.0, 2.0, 9.0)]
    (row,) = matrix.table_of([*runs, {"status": "refused", "job": job}, ok | {"job": job | {"budget": None}}])
    assert (row["tokens_per_second"], row["ratio"], row["rounds"]) == (2.0, 2.0, 3)
    (row,) = matrix.table_of([*runs, runs[0] | {"identical": False, "peak_bytes": 2.0}])
    assert not row["identical"] and not row["within_budget"]


def test_the_picture_marks_the_cliff(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    matrix.draw(rows({1.0: 1.0, 2.0: 3.0, 3.0: 3.1}), "a title", tmp_path / "matrix.svg")
    drawn = (tmp_path / "matrix.svg").read_text()
    assert "cliff: 2.00 GB" in drawn and "a title" in drawn


def test_the_promise_preset_passes_flags_on(
    start: Callable[..., tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[Any]] = []
    monkeypatch.setattr(matrix.subprocess, "run", lambda c: commands.append(c) or SimpleNamespace(returncode=3))
    with pytest.raises(SystemExit, match="3"):
        start("--preset", "promise", "--out", tmp_path / "out", "--", "--lengths", 10)
    assert commands[0][-2:] == ["--lengths", "10"] and Path(commands[0][1]).is_file()
    assert commands[0][2:5] == [tmp_path / "out" / "models", "--json", tmp_path / "out" / "promise.json"]

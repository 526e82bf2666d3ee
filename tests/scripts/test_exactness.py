"""``benchmarks/exactness.py`` on a small trained model: it compares, resumes, and notices a wrong answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from children import ROOT
from mlx_flash import remove_flash_patch
from models import load_benchmark

exactness = load_benchmark("exactness")


@pytest.fixture(autouse=True)
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The jobs that ran, in this process and without a limit."""
    ran: list[Any] = []

    def in_process(job: Any, limit: int | None = None) -> Any:
        ran.append(job)
        try:
            return exactness.work(job)
        finally:
            remove_flash_patch()

    monkeypatch.setattr(exactness, "in_process", in_process)
    return ran


def report(state: Path) -> int:
    words = [str(ROOT / "examples" / "pair" / "target"), "--kinds", "text", "chat", "score", "--budgets", "1"]
    return int(exactness.main([*words, "--prompt-tokens", "40", "--tokens", "8", "--state", str(state)]))


def test_answers_are_compared_once_and_a_wrong_one_is_noticed(
    tmp_path: Path, jobs: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state.jsonl"
    assert report(state) == 0
    assert [(job.kind, job.budget, job.step is None) for job in jobs] == [
        (kind, *each) for kind in ("text", "chat", "score") for each in (("1", True), ("1", False), (None, False))
    ]
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(" | ")[-1] for row in rows] == ["1 of 1 |", "4 of 4 |", "1 of 1 |"]

    jobs.clear()
    assert report(state) == 0 and not jobs
    assert capsys.readouterr().out.splitlines()[2:] == rows

    lines = [json.loads(line) for line in state.read_text().splitlines()]
    of_chat = next(line for line in lines if line["key"].startswith("target chat None"))
    of_chat["run"]["answers"][2]["digest"] = "another"
    kept = [line for line in lines if not line["key"].startswith("target chat 1 ")]
    state.write_text("".join(json.dumps(line) + "\n" for line in kept))
    assert report(state) == 1
    assert [job.budget for job in jobs] == ["1", "1"]
    assert capsys.readouterr().out.splitlines()[-2].endswith("| 3 of 4 |")

"""The benchmark of loading: what it runs and adds up, but no speed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmark_modules import load_benchmark
from models import LLAMA, save

loading: Any = load_benchmark("loading")


def test_programs_alternate_and_give_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(script: str, words: list[Any], label: str) -> Any:
        """Do a worker's job in this process, which has MLX already."""
        asked.append(words[2])
        return loading.load_and_decode(words[2], words[0], words[4], words[6])

    asked: list[str] = []
    path = save(tmp_path / "tiny", LLAMA)
    monkeypatch.setattr(loading, "run_worker", work)
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
    assert not any(row["same"] for row in loading.summarize([*runs, runs[0] | {"tokens": [0]}])[:1])
    assert len(loading.table_of(rows).rows) == 4


def test_a_worker_prints_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "load_and_decode", lambda *asked: [str(each) for each in asked])
    monkeypatch.setattr(
        sys, "argv", ["loading.py", "folder", "--work", "mlx-lm", "--prompt-tokens", "5", "--tokens", "7"]
    )
    loading.main()
    assert capsys.readouterr().out == '["mlx-lm", "folder", "5", "7"]\n'

"""The picture of a token: what is recorded and added up, but no speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmark_modules import ROOT, load_benchmark
from models import LLAMA, save

timeline = load_benchmark("timeline")


def test_a_token_has_reads_waits_and_units(tmp_path: Path) -> None:
    model = save(tmp_path / "tiny", LLAMA)
    command = [sys.executable, ROOT / "benchmarks" / "timeline.py", model, "--work", "--budget", "min", "--tokens", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    token = json.loads(done.stdout.splitlines()[-1])
    assert token["read_bytes"] > 0 and token["spans"]["units"]
    for spans in token["spans"].values():
        assert all(0 <= low < high <= token["token_seconds"] for low, high in spans)
    assert 0 < token["disk_busy"] <= 1 and 0 <= token["disk_busy_while_waiting"] <= 1.000001


def test_spans_are_joined_cut_and_compared() -> None:
    assert timeline.merged([(3, 4), (0, 2), (1, 2.5), (9, 12)], (0.5, 10)) == [(0.5, 2.5), (3, 4), (9, 10)]
    assert timeline.merged([(0, 2), (1, 3)], (0, 9), joins=False) == [(0, 2), (1, 3)]
    reads, waits = [(0, 2), (4, 6)], [(1, 5)]
    assert timeline.both(reads, waits) == [(1, 2), (4, 5)]
    assert timeline.seconds(timeline.both(reads, waits)) == pytest.approx(2)

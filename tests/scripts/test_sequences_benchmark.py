"""``benchmarks/sequences.py`` on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark_modules import load_benchmark
from models import make_random_model


def test_each_way_gives_the_same_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = "--layers 2 --hidden-size 64 --intermediate-size 128 --heads 4 --kv-heads 2 --vocab-size 300"
    model, found = make_random_model(tmp_path / "model", *shape.split(), "--dtype", "float32"), tmp_path / "found.json"
    arguments = ["--model", model, "--budget", 1, "--sequences", 1, 3, "--tokens", 6, "--rounds", 2]
    load_benchmark("sequences").main([*map(str, arguments), "--json", str(found)])
    one, three = json.loads(found.read_text())["results"]
    ways = {"mlx-lm", "server", "batch_generate", "mlx-lm batch_generate"}
    for number, result in ((1, one), (3, three)):
        assert result.pop("sequences") == number and result.keys() == ways
        assert all(way["same_tokens"] and way["ratio"] > 0 and len(way["rounds"]) == 2 for way in result.values())
    assert "3 sequences" in capsys.readouterr().out

"""The benchmark runs and says what it should; how fast it finds anything to be is not tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from models import LLAMA, save

ROOT = Path(__file__).resolve().parent.parent
TOKENS = 3


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "streaming.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("benchmark") / "tiny-llama", LLAMA, num_shards=2)


def bench(model: Path, out: Path, *arguments: object) -> tuple[dict[str, Any], str]:
    done = run("--model", model, "--tokens", TOKENS, "--rounds", 1, "--json", out, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


def test_rounds_and_summary(model: Path, tmp_path: Path) -> None:
    result, shown = bench(model, tmp_path / "out.json", "--budgets", "min", 1)
    (first,) = result["rounds"]
    assert len(first["resident"]["token_ids"]) == TOKENS
    assert len(first["probes"]) == 3
    assert [run["budget"] for run in first["streamed"]] == ["min", 1.0]
    smallest, whole = first["streamed"]
    for run_ in first["streamed"]:
        assert run_["identical"] is True
        assert run_["token_ids"] == first["resident"]["token_ids"]
        assert run_["efficiency_best"] > 0
        assert run_["efficiency_median"] >= run_["efficiency_best"]
        assert run_["of_resident"] > 0
        assert run_["probe_best"] >= run_["probe_median"] > 0
        assert 0 < run_["peak_bytes"]
        assert 0 <= run_["wait_share"] <= 1
        assert run_["load_seconds"] > 0
    assert smallest["budget_bytes"] == smallest["plan"]["minimum_bytes"]
    assert smallest["bytes_per_token"] >= smallest["plan"]["read_bytes"] * 0.9
    assert whole["plan"]["num_slots"] == 0
    assert whole["bytes_per_token"] == 0
    assert whole["read_bytes_per_second"] is None

    summary = result["summary"]
    assert summary["resident"]["tokens_per_second"] == first["resident"]["tokens_per_second"]
    assert [entry["identical"] for entry in summary["streamed"]] == [True, True]
    assert all(entry["best"] >= entry["median"] > 0 for entry in summary["probe"])
    assert "decoding, medians over the rounds" in shown
    assert "tiny-llama" in shown


def test_what_was_measured_where(model: Path, tmp_path: Path) -> None:
    result, shown = bench(model, tmp_path / "out.json", "--no-resident", "--compute-seconds", 0.5)
    assert set(result) == {
        "date",
        "command",
        "machine",
        "versions",
        "model",
        "tokens",
        "prompt_tokens",
        "compute_seconds",
        "cold",
        "notes",
        "summary",
        "rounds",
    }
    assert set(result["machine"]) == {
        "cpu",
        "cores",
        "threads",
        "memory_bytes",
        "usable_memory_bytes",
        "os",
        "device",
        "device_info",
        "disk",
    }
    assert set(result["machine"]["disk"]) == {"device", "file_system", "model"}
    assert {"python", "mlx", "mlx-lm", "mlx-flash"} <= set(result["versions"])
    assert result["model"]["name"] == "tiny-llama"
    assert result["model"]["nbytes"] == sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert "--compute-seconds 0.5" in result["command"]
    assert result["cold"]

    (first,) = result["rounds"]
    assert first["resident"] is None
    assert result["summary"]["resident"] is None
    (run_,) = first["streamed"]
    assert run_["of_resident"] == pytest.approx(0.5 / run_["seconds_per_token"])
    assert "note: 'same' compares with the first streamed run" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "MODEL", "--tokens", "1"], "--tokens must be at least 2"),
        (["--model", "MODEL", "--budgets", "0.001"], "ram_budget_gb is 0.001, but this model needs at least"),
        (["--model", "MODEL/nowhere"], "nowhere"),
    ],
)
def test_refusals(model: Path, arguments: list[str], words: str) -> None:
    done = run(*(argument.replace("MODEL", str(model)) for argument in arguments), "--no-resident")
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr

"""Tests of the benchmarks: what they run and what they report, but no speed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from children import ROOT
from models import LLAMA, load_benchmark, make_random_model
from saved_models import model_fixture

SMALL_MACHINE = ROOT / "scripts" / "small_machine"
TOKENS = 3


streaming, harness = load_benchmark("streaming"), load_benchmark("harness")

model = model_fixture(LLAMA, num_shards=2, name="tiny-llama")


@pytest.fixture
def bench(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[dict[str, Any], str]]:
    """Run the streaming benchmark; return its JSON and its output."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: object) -> tuple[dict[str, Any], str]:
        out = tmp_path / "out.json"
        options = ["--model", model, "--tokens", TOKENS, "--rounds", 1, "--json", out, *arguments]
        monkeypatch.setattr(sys, "argv", ["streaming.py", *map(str, options)])
        streaming.main()
        return json.loads(out.read_text()), capsys.readouterr().out

    return run


Bench = Callable[..., tuple[dict[str, Any], str]]


def test_rounds_and_summary(bench: Bench, model: Path) -> None:
    result, shown = bench("--budgets", "min", 1)
    (first,) = result["rounds"]
    (resident,) = first["resident"]
    assert len(resident["token_ids"]) == TOKENS and len(first["probes"]) == 3
    assert [run["budget"] for run in first["streamed"]] == ["min", 1.0]
    smallest, whole = first["streamed"]
    for run_ in first["streamed"]:
        assert run_["identical"] is True and run_["token_ids"] == resident["token_ids"]
        assert run_["efficiency_median"] >= run_["efficiency_best"] > 0 and run_["of_resident"] > 0
        assert run_["probe_best"] >= run_["probe_median"] > 0 and run_["load_seconds"] > 0
        assert 0 < run_["peak_bytes"] and 0 <= run_["wait_share"] <= 1
    assert smallest["budget_bytes"] == smallest["plan"]["minimum_bytes"]
    assert smallest["bytes_per_token"] >= smallest["plan"]["read_bytes"] * 0.9
    assert whole["plan"]["num_slots"] == whole["bytes_per_token"] == 0 and whole["read_bytes_per_second"] is None
    summary = result["summary"]
    assert summary["resident"][0]["tokens_per_second"] == resident["tokens_per_second"]
    assert [entry["identical"] for entry in summary["streamed"]] == [True, True]
    assert all(entry["best"] >= entry["median"] > 0 for entry in summary["probe"])
    assert "decoding, medians over the rounds" in shown and "tiny-llama" in shown
    assert {"date", "command", "cold", "notes", "tokens", "disk_mb_per_second"} < set(result)
    assert {"cpu", "threads", "memory_bytes", "os", "device", "device_info", "disk"} < set(result["machine"])
    assert {"python", "mlx", "mlx-lm", "mlx-flash"} <= set(result["versions"])
    assert result["model"]["nbytes"] == sum(path.stat().st_size for path in model.glob("*.safetensors"))


# --- in a kernel memory limit, beside other programs -----------------------------------------------------------------


@pytest.fixture
def _small_machine() -> None:
    """Skip the test where no memory cgroup can be made."""
    if subprocess.run([SMALL_MACHINE, "--warm", "100M", "true"], capture_output=True).returncode == 77:
        pytest.skip("no memory cgroup can be made here")


@pytest.mark.usefixtures("_small_machine")
def test_a_run_beyond_the_limit_is_reported_as_killed() -> None:
    with pytest.raises(harness.KilledError, match="big was killed: it needs more than the limit of 50000000 bytes"):
        harness.run_command([sys.executable, "-c", "bytearray(300 << 20)"], label="big", limit_bytes=50_000_000)


def test_a_run_that_failed_or_was_killed_once_counts_as_such() -> None:
    with pytest.raises(SystemExit, match="the second run failed: no such thing"):
        harness.run_command([sys.executable, "-c", "raise SystemExit('no such thing')"], label="the second run")
    fast, slow = ({"killed": False, "tokens_per_second": speed} for speed in (4.0, 2.0))
    for second, expected in ((slow, {**fast, "tokens_per_second": 3.0}), ({"killed": True}, {"killed": True})):
        rounds = [{"budget": 1.0, "limit_bytes": 1, "stock": stock, "llama_cpp": None} for stock in (fast, second)]
        assert streaming._limit_summary(rounds)["stock"] == expected


# --- the other programs ----------------------------------------------------------------------------------------------

PROGRAMS = {
    "bench": "--rounds 1 --folder FOLDER",
    "context": "--model MODEL --tokens 600 --generate 2 --ram-budget-gb 0.6 --stock-budget-gb 1",
    "loading": "MODEL --rounds 1 --tokens 3",
    "prefixes": "--model MODEL --ram-budget-gb 0.6 --prompt-tokens 600 --prefill-step-size 256 --tokens 2 --repeats 1",
    "sequences": "--model MODEL --budget 1 --sequences 1 2 --tokens 4 --rounds 1",
    "server_clients": "MODEL --budget 1 --clients 1 --rounds 1 --words 4 --max-tokens 4",
}
"""Arguments by program. Each compares tokens with mlx-lm's, where there are some, and fails if they differ."""

SHAPE = "--layers 2 --hidden-size 64 --intermediate-size 128 --heads 4 --kv-heads 2 --vocab-size 1000"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_and_describes_what_it_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_random_model(tmp_path / "model", *SHAPE.split(), "--dtype", "float32")
    program, file = load_benchmark(name), tmp_path / "out.json"
    monkeypatch.setattr(program, "take_memory", lambda: None, raising=False)  # gigabytes
    monkeypatch.setattr(program, "SHAPES", {"dense": SHAPE}, raising=False)
    if name == "bench":
        rows = [
            program.Row("decode", "dense", 0.6, tokens=3),
            program.Row("first", "dense", 0.6, "first_token_seconds", 2),
        ]
        monkeypatch.setattr(program, "ROWS", rows)
    words = PROGRAMS[name].replace("MODEL", str(model)).replace("FOLDER", str(tmp_path)).split()
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words, "--json", str(file)])
    assert not program.main()
    assert {"date", "command", "machine", "versions", "cold"} <= json.loads(file.read_text()).keys()

"""Tests of the benchmarks: what they run and what they report, but no speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from children import ROOT
from models import load_benchmark, make_random_model

SMALL_MACHINE = ROOT / "scripts" / "small_machine"
streaming, harness = load_benchmark("streaming"), load_benchmark("harness")

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
    "streaming": "--model MODEL --tokens 3 --rounds 1 --budgets min 1",
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
    monkeypatch.setattr(program, "take_memory", lambda *_: None, raising=False)  # gigabytes
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
    text = file.read_text()
    assert {"date", "command", "machine", "versions", "cold"} <= json.loads(text).keys()
    assert '"identical": false' not in text

"""Tests of the helper scripts: the random-weight model writer and the smaller machine."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.utils import load_model

import children
import mlx_flash
from children import ROOT
from mlx_flash import FlashConfig
from models import random_model_script, script
from zoo import configuration

SCRIPTS = ROOT / "scripts"
MACHINE = SCRIPTS / "small_machine"
TINY = ["--layers=2", "--hidden-size=64", "--intermediate-size=128", "--heads=4", "--kv-heads=2", "--vocab-size=300"]


def run_make(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script in this process, which has imported mlx-lm already."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        status = random_model_script().main([str(out), *arguments])
    return subprocess.CompletedProcess([str(out), *arguments], status, stdout.getvalue(), stderr.getvalue())


@pytest.mark.parametrize(
    "words",
    ["--dtype=bfloat16 --layers=24 --tie-word-embeddings", "--quantize-bits=8", "--shard-size-gb=0.00005",
     "deepseek_v3", "gpt_oss", "qwen3_next"],
)  # fmt: skip
def test_a_random_model_of_any_architecture_loads_strictly(tmp_path: Path, words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({} if words[0] == "-" else configuration(words)))
    of_config = [f"--config={tmp_path / 'config.json'}", "--dtype=float32", "--routing-skew=1"]
    made = run_make(tmp_path / "m", *([*TINY, *words.split()] if words[0] == "-" else of_config))
    assert made.returncode == 0 and str(tmp_path / "m") in made.stdout, made.stderr
    assert len([*(tmp_path / "m").glob("*.safetensors")]) > ("shard" in words)
    logits = load_model(tmp_path / "m", strict=True)[0](mx.array([[7, 8, 100]])).astype(mx.float32)
    assert mx.isfinite(logits).all() and mx.std(logits[0, -1]) > 0.1


def test_an_ambiguous_router_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(configuration("longcat_flash")))
    made = run_make(tmp_path / "m", f"--config={tmp_path / 'config.json'}", "--routing-skew=1")
    assert made.returncode == 2 and "cannot tell what chooses among the 6 experts of model.layers." in made.stderr


def test_the_models_of_the_demonstration_write_the_same_words(tmp_path: Path) -> None:
    """The one that is built has more and wider layers, of the same function."""
    small, tokenizer = mlx_lm.load(str(ROOT / "examples" / "pair" / "target"))[:2]
    script("demo").build(tmp_path / "demo", 0.2)
    with mlx_flash.load(tmp_path / "demo", FlashConfig(ram_budget_gb="min"))[0] as model:
        assert len(model.layers) > len(small.layers)
        texts = [
            make(each, tokenizer, "The default value is", max_tokens=8)
            for make, each in ((mlx_flash.generate, model), (mlx_lm.generate, small))
        ]
    assert texts[0] == texts[1] != ""


# The smaller machine


def run_machine(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    result = subprocess.run([str(MACHINE), *arguments], capture_output=True, text=True, input=text)
    if result.returncode == 77:
        pytest.skip(result.stderr.strip())
    return result


def report_of(stderr: str) -> dict[str, str]:
    line = stderr.strip().splitlines()[-1]
    assert line.startswith("small_machine: ")
    return dict(field.split("=") for field in line.split()[1:])


def test_machine_runs_a_command_and_reports() -> None:
    code = "import sys; x = bytearray(50 << 20); print(sys.argv[1:], sys.stdin.read()); sys.exit(5)"
    code = "import time; " + code.replace("sys.exit", "time.sleep(0.3); sys.exit")
    result = run_machine("--warm", "200M", sys.executable, "-c", code, "a  b", "$x\"'*", text="in")
    assert result.returncode == 5
    assert result.stdout.strip() == repr(["a  b", "$x\"'*"]) + " in"
    report = report_of(result.stderr)
    assert (report["limit_MB"], report["status"], report["kills"]) == ("209.7", "5", "0")
    assert 50 < float(report["anonymous_peak_MB"]) <= float(report["peak_MB"]) < 210
    assert float(report["seconds"]) >= 0.3


def run_script(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    done = children.run(SCRIPTS / name, *arguments)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def test_killed_writers_leave_nothing_wrong() -> None:
    done = run_script("kill_writers.py", "--times", "2", "DerivedCopy", "Prefixes", "KVFiles")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed 2 times") == 3


@pytest.mark.parametrize("kind", ["disk-kv", "cycles"])
def test_long_runs_are_summed_up(kind: str) -> None:
    done = run_script("long_run.py", kind, "--tokens", "40", "--cycles", "4", "--here")
    count = 4 if kind == "cycles" else 40
    number = r"[-+]?[\d.]+"
    pattern = (
        rf"{kind}: {count} steps, resident {number} -> {number} MB \({number} kB a step\), descriptors (\d+) -> (\d+), "
    )
    found = re.match(pattern, done.stdout)
    assert found and int(found[2]) <= int(found[1]), done.stdout + done.stderr


def test_a_server_answers_mixed_clients_as_it_answers_each_alone(tmp_path: Path) -> None:
    """With two of the four prompts: letters of several bytes, and many tokens."""
    limits = ["--seconds", "1.5", "--pause", "0.1", "--interval", "0.4", "--json", tmp_path / "numbers.json"]
    done = run_script("soak.py", "--texts", "2", "--crowd", "20", *limits)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"crowd: \{'200': 10, 'silent, closed': 10\}", done.stdout), done.stdout
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    samples = numbers["samples"]
    assert len(samples) > 2
    assert samples[-1]["requests"] == sum(numbers["counts"].values()) > samples[-1]["right"] > 0
    assert samples[-1]["failed"] == 0 < numbers["peak_bytes"]

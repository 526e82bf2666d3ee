"""Tests of the helper scripts: the random-weight model writer and the smaller machine."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import children
from children import ROOT
from models import random_model_script
from zoo import configuration

SCRIPTS = ROOT / "scripts"
MACHINE = SCRIPTS / "small_machine"
TINY = ["--layers=2", "--hidden-size=64", "--intermediate-size=128", "--heads=4", "--kv-heads=2", "--vocab-size=300"]
SKEWED = ["--architecture=qwen3_moe", "--routing-skew=1"]


def run_make(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script in this process, which has imported mlx-lm already."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        status = random_model_script().main([str(out), *arguments])
    return subprocess.CompletedProcess([str(out), *arguments], status, stdout.getvalue(), stderr.getvalue())


def make(out: Path, *arguments: str) -> Path:
    result = run_make(out, *TINY, *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n") == 1
    assert str(out) in result.stdout
    return out


def refused(out: Path, *arguments: str) -> str:
    result = run_make(out, *arguments)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1
    return result.stderr


def read_headers(folder: Path) -> dict[str, dict[str, Any]]:
    headers = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            assert size % 8 == 0
            headers[path.name] = json.loads(file.read(size))
    return headers


def read_tensors(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    tensors = {}
    for name, header in read_headers(folder).items():
        raw = (folder / name).read_bytes()
        data = raw[8 + int.from_bytes(raw[:8], "little") :]
        for tensor, entry in header.items():
            if tensor != "__metadata__":
                start, end = entry["data_offsets"]
                tensors[tensor] = (entry["dtype"], entry["shape"], data[start:end])
    return tensors


def stored_order(header: dict[str, Any]) -> list[str]:
    names = [name for name in header if name != "__metadata__"]
    return sorted(names, key=lambda name: header[name]["data_offsets"])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a tiny model that tests only read, once for each set of arguments."""
    folder = tmp_path_factory.mktemp("models")

    @functools.cache
    def model(*arguments: str) -> Path:
        return make(folder / (" ".join(arguments) or "tiny"), *arguments)

    return model


@pytest.fixture(scope="module")
def tiny(made: Callable[..., Path]) -> Path:
    return made()


def generate(folder: Path, count: int = 5) -> list[int]:
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    model, _ = load_model(folder, strict=True)
    tokens, cache, num_cached = [7, 8, 100], make_prompt_cache(model), 0
    for _ in range(count):
        logits = model(mx.array([tokens[num_cached:]]), cache=cache)[0, -1].astype(mx.float32)
        num_cached = len(tokens)
        assert bool(mx.isfinite(logits).all())
        assert float(mx.std(logits)) > 0.1
        tokens.append(int(mx.argmax(logits)))
    return tokens[3:]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--dtype=float32"],
        ["--dtype=bfloat16", "--layers=24", "--tie-word-embeddings"],
        ["--quantize-bits=8", "--tie-word-embeddings"],
    ],
    ids=" ".join,
)
def test_model_loads_strictly_and_generates(made: Callable[..., Path], arguments: list[str]) -> None:
    assert all(0 <= token < 300 for token in generate(made(*arguments)))


@pytest.mark.parametrize("skewed", [[], [*SKEWED, "--dtype=float32"]], ids=["even", "skewed"])
def test_sharding_changes_the_files_but_no_value(made: Callable[..., Path], skewed: list[str]) -> None:
    one, other = made(*skewed), made("--shard-size-gb=0.00005", *skewed)
    headers = read_headers(other)
    assert len(headers) > 2
    assert all(re.fullmatch(rf"model-\d{{5}}-of-{len(headers):05d}\.safetensors", name) for name in headers)
    assert read_tensors(other) == read_tensors(one)
    index = json.loads((other / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {k: f for f, h in headers.items() for k in h if k != "__metadata__"}
    assert index["metadata"]["total_size"] == sum(len(raw) for _, _, raw in read_tensors(other).values())
    assert generate(other) == generate(one)
    (header,) = read_headers(one).values()
    assert stored_order(header) != sorted(stored_order(header))  # in no order, as MLX writes them
    assert header["__metadata__"] == {"format": "mlx"}


GEMMA = {
    "model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128,
    "num_attention_heads": 2, "head_dim": 32, "num_key_value_heads": 1, "vocab_size": 280, "sliding_window_pattern": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "qwen3_next", "gemma3", "longcat_flash"])
def test_any_architecture_from_a_config_and_its_routers(tmp_path: Path, name: str) -> None:
    gemma = {"model_type": "gemma3", "vocab_size": 280, "text_config": GEMMA}
    (tmp_path / "config.json").write_text(json.dumps(gemma if name == "gemma3" else configuration(name)))
    skew = [] if name == "gemma3" else ["--routing-skew=1"]
    arguments = [f"--config={tmp_path / 'config.json'}", "--dtype=float32", *skew]
    if name == "longcat_flash":  # whose router is ambiguous
        words = "cannot tell what chooses among the 6 experts of model.layers."
        assert words in refused(tmp_path / "m", *arguments)
    else:
        result = run_make(tmp_path / "m", *arguments)
        assert result.returncode == 0, result.stderr
        assert len(generate(tmp_path / "m")) == 5


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

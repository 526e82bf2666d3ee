"""Forked children of a process that runs a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from models import LLAMA, save

ROOT = Path(__file__).parents[1]

PROGRAM = """
import os, signal, sys
from pathlib import Path
import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_flash import FlashConfig, load_model
from mlx_flash.kv.options import KVOptions
from mlx_flash.telemetry import find

def published(pid=os.getpid()):
    return [engine.path for engine in find() if engine.pid == pid]

folder, kv_folder, child = sys.argv[1:]
KVOptions.under_way_bytes = lambda *_: 4096  # the buffers of reads and writes are larger than this model's caches
settings = {"context_length": 512, "prefill_step_size": 16, "kv_step": 16, "kv_directory": kv_folder}
config = FlashConfig(ram_budget_gb=1, kv_ram_gb=0.0023, **settings)
model = load_model(Path(folder), config)[0]
alone = load_model(Path(folder), config)[0]
caches = make_prompt_cache(model), make_prompt_cache(alone)
tokens = mx.array([[i % 300 for i in range(400)]])
mx.eval(model(tokens, cache=caches[0]), alone(tokens, cache=caches[1]))
files = sorted(Path(kv_folder).rglob("*"))
assert files and model.kv.usage.written_bytes
while len(published()) < 2:
    pass
pid = os.fork()
if pid == 0:
    signal.alarm(5)
    exec(child)
    sys.exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
assert sorted(Path(kv_folder).rglob("*")) == files
assert len(published()) == 2
logits = [m(mx.array([[7]]), cache=c) for m, c in zip((model, alone), caches)]
assert mx.array_equal(*logits)
print(status)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"), LLAMA)


def status_of(child: str, model: Path, kv_folder: Path) -> tuple[int, str]:
    """Return the exit status of a forked child that runs some code, and what it wrote to stderr."""
    command = [sys.executable, "-c", PROGRAM, str(model), str(kv_folder), child]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1]), done.stderr


@pytest.mark.parametrize(
    ("child", "status"),
    [
        ("sys.exit(0)", 0),
        ("os._exit(4)", 4),
        ("raise ValueError", 1),
        ("del model, alone, caches; import gc; gc.collect()", 0),
    ],
    ids=["exit", "immediate exit", "exception", "collection"],
)
def test_a_child_that_ends_leaves_the_parents_files(model: Path, tmp_path: Path, child: str, status: int) -> None:
    assert status_of(child, model, tmp_path)[0] == status


@pytest.mark.parametrize("call", ["model(mx.array([[7]]))", "model(mx.array([[7]]), cache=caches[0])", "model.start()"])
def test_a_child_that_calls_the_model_gets_an_error(model: Path, tmp_path: Path, call: str) -> None:
    status, text = status_of(f"with model: {call}", model, tmp_path)
    assert status == 1 and "ClosedError: the model was loaded in process" in text


def test_a_child_can_close_the_model(model: Path, tmp_path: Path) -> None:
    assert status_of("with model: sys.exit(5)", model, tmp_path)[0] == 5

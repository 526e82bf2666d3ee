"""Forked children of a process that runs a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from children import ROOT
from models import LLAMA, save

PROGRAM = """
import json, os, signal, sys
from pathlib import Path
import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_flash import FlashConfig, load_model
from mlx_flash.kv.kvledger import KVOptions
from mlx_flash.telemetry import find

def published(pid=os.getpid()):
    return [engine.path for engine in find() if engine.pid == pid]

folder, kv_folder, *children = sys.argv[1:]
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
for child in children:
    pid = os.fork()
    if pid == 0:
        signal.alarm(5)  # a child that hangs
        os.dup2(os.open(f"{kv_folder}.stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        exec(child)
        sys.exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert sorted(Path(kv_folder).rglob("*")) == files
    assert len(published()) == 2
    logits = [m(mx.array([[7]]), cache=c) for m, c in zip((model, alone), caches)]
    assert mx.array_equal(*logits)
    print(json.dumps([child, [status, Path(f"{kv_folder}.stderr").read_text()]]), flush=True)
"""

ENDS = {
    "exit": ("sys.exit(0)", 0),
    "immediate exit": ("os._exit(4)", 4),
    "exception": ("raise ValueError", 1),
    "collection": ("del model, alone, caches; import gc; gc.collect()", 0),
    "close": ("with model: sys.exit(5)", 5),
}
CALLS = ["model(mx.array([[7]]))", "model(mx.array([[7]]), cache=caches[0])", "model.start()"]


def test_a_child_leaves_the_files_of_its_parent_and_gets_an_error_of_its_model(tmp_path: Path) -> None:
    """Children of one process, one after another, each with code of its own."""
    model = save(tmp_path / "model", LLAMA | {"num_key_value_heads": 4})
    calls = [f"with model: {call}" for call in CALLS]
    code = [child for child, _ in ENDS.values()] + calls
    command = [sys.executable, "-c", PROGRAM, str(model), str(tmp_path / "pages"), *code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr
    ended = dict(map(json.loads, done.stdout.splitlines()))
    assert {child: ended[child][0] for child, _ in ENDS.values()} == dict(ENDS.values())
    for call in calls:
        status, text = ended[call]
        assert status == 1 and "ClosedError: the model was loaded in process" in text

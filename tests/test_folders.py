"""Homes that do not exist are not made."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from models import LLAMA, save

PROGRAM = """
import os, sys
os.environ.pop("XDG_CACHE_HOME"), os.environ.pop("XDG_CONFIG_HOME", None)
import mlx.core as mx
from mlx_flash import FlashConfig, load_model
from mlx_flash.folders import cache_directory
model = load_model(sys.argv[1], FlashConfig.resolve(ram_budget_gb=2.0, kv_cache="disk"))[0]
model(mx.array([[1, 2]]))
model.close()
print(cache_directory(), flush=True)
if (child := os.fork()) == 0:
    sys.exit(0)
os.waitpid(child, 0)
print(cache_directory().is_dir())
"""


@pytest.mark.parametrize("home", ["/dev/null", "gone/deep"])
def test_a_home_that_does_not_exist_is_not_made(home: str, tmp_path: Path) -> None:
    directory = save(tmp_path / "model", LLAMA | {"num_hidden_layers": 1})
    (tmp_path / "temporary").mkdir()
    compiled = Path(tempfile.gettempdir()) / "mlx"  # which MLX would compile again
    if compiled.is_dir():
        (tmp_path / "temporary" / "mlx").symlink_to(compiled)
    env = {"HOME": str(tmp_path / home), "TMPDIR": str(tmp_path / "temporary")}
    command = [sys.executable, "-c", PROGRAM, str(directory)]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr
    folder, is_there = done.stdout.decode().split()
    assert Path(folder).is_relative_to(tmp_path / "temporary") and is_there == "True"
    assert b"is no folder: " in done.stderr and done.stderr.count(b"Hint: set HOME") == 1
    left = {path.name for path in (tmp_path / "temporary").iterdir()}
    assert not Path(folder).exists() and left <= {"mlx"}  # where MLX compiles
    assert not (tmp_path / "gone").exists()

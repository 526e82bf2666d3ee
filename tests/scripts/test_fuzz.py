"""A few cases of each target of ``scripts/fuzz.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fuzzing
from children import HELPERS, ROOT
from mlx_flash.errors import ReadError
from mlx_flash.prefixes.store import read_page

SCRIPT = ROOT / "scripts" / "fuzz.py"


@pytest.mark.parametrize("name", fuzzing.TARGETS)
def test_damaged_input_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    fuzzing.run(name, tmp_path, 0, range(400 if name == "modelfile" else 60))


def test_the_script_reports_what_fails(tmp_path: Path) -> None:
    broken = "from mlx_flash.storage import safetensors\nsafetensors.read_shard = lambda path: 1 / 0\n"
    (tmp_path / "sitecustomize.py").write_text(broken)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, SCRIPT.parents[1], HELPERS)))}
    command = [sys.executable, str(SCRIPT), "header", "--cases", "20"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=100)
    assert done.returncode == 1 and "1 batches failed" in done.stdout
    assert "ZeroDivisionError" in done.stderr and "of header with seed 0" in done.stderr


@pytest.mark.parametrize("nbytes", ["101", "1e2", f"{2**63}", f"{10**30}", "[" * 100_000])
def test_pages_whose_arrays_have_other_sizes_are_damaged(tmp_path: Path, nbytes: str) -> None:
    """The system takes no offset of more than 63 bits: a blob behind a huge one raised OverflowError."""
    name = "ab" * 32
    text = f'{{"page": "{name}", "tokens": 16, "model": "m", "title": "", "arrays": [["k", "uint8", [1], {nbytes}]]}}'
    (tmp_path / f"{name}.page").write_bytes(fuzzing._with_description(text.encode(), bytes(100)))
    with pytest.raises(ReadError, match="is damaged"):
        read_page(tmp_path, name)

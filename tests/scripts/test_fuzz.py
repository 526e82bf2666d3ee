"""A few cases of each target of ``scripts/fuzz.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fuzzing
from children import HELPERS, ROOT
from mlx_flash.errors import CheckpointError, HeaderError, ReadError
from mlx_flash.kv.diskcache import load_saved
from mlx_flash.prefixes.store import read_page
from mlx_flash.storage.safetensors import read_shard

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


@pytest.mark.parametrize("text", ['{"k.99999999999": "x"}', '{"0.0": "x", "1.123456": "y"}'])
def test_saved_caches_with_endless_lists_are_refused(tmp_path: Path, text: str) -> None:
    """MLX would make a list of so many entries."""
    path = tmp_path / "cache.safetensors"
    header = f'{{"__metadata__": {text}}}'.encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="number that is too large"):
        load_saved(path)


def test_saved_caches_with_other_shapes_than_bytes_are_refused(tmp_path: Path) -> None:
    """MLX would allocate memory for the shape."""
    path = tmp_path / "cache.safetensors"
    header = b'{"0.0": {"dtype": "F32", "shape": [1000000000000], "data_offsets": [0, 4]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    for read in (load_saved, read_shard):
        with pytest.raises(HeaderError, match="takes 4000000000000 bytes"):
            read(path)


def test_saved_caches_of_another_form_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    path.write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match=r"is not a saved prompt cache .*Hint"):
        load_saved(path)


@pytest.mark.parametrize("nbytes", ["101", "1e2", f"{2**63}", f"{10**30}", "[" * 100_000])
def test_pages_whose_arrays_have_other_sizes_are_damaged(tmp_path: Path, nbytes: str) -> None:
    """The system takes no offset of more than 63 bits: a blob behind a huge one raised OverflowError."""
    name = "ab" * 32
    text = f'{{"page": "{name}", "tokens": 16, "model": "m", "title": "", "arrays": [["k", "uint8", [1], {nbytes}]]}}'
    (tmp_path / f"{name}.page").write_bytes(fuzzing._with_description(text.encode(), bytes(100)))
    with pytest.raises(ReadError, match="is damaged"):
        read_page(tmp_path, name)

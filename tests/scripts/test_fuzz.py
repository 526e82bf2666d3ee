"""A few cases of each target of ``scripts/fuzz.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

import fuzzing
from mlx_flash.errors import ReadError
from mlx_flash.prefixes.store import read_page


@pytest.mark.parametrize("name", fuzzing.TARGETS)
def test_damaged_input_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    fuzzing.run(name, tmp_path, 0, range(400 if name == "modelfile" else 60))


@pytest.mark.parametrize("nbytes", ["101", "1e2", f"{2**63}", f"{10**30}", "[" * 100_000])
def test_pages_whose_arrays_have_other_sizes_are_damaged(tmp_path: Path, nbytes: str) -> None:
    """The system takes no offset of more than 63 bits: a blob behind a huge one raised OverflowError."""
    name = "ab" * 32
    text = f'{{"page": "{name}", "tokens": 16, "model": "m", "title": "", "arrays": [["k", "uint8", [1], {nbytes}]]}}'
    (tmp_path / f"{name}.page").write_bytes(fuzzing._with_description(text.encode(), bytes(100)))
    with pytest.raises(ReadError, match="is damaged"):
        read_page(tmp_path, name)

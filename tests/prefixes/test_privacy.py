"""Files are for their user alone, and clearing the cache leaves none."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_flash import cli
from mlx_flash.files import PrivateFolder, make_private
from mlx_flash.kv.disk import sessions_directory
from writers import WRITERS, Pack, Writer, make_source, tiny_models


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "caches"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder / "mlx-flash"


@pytest.fixture(autouse=True)
def _no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


CHOSEN = (Pack,)
"""Writers of files that the user names."""


MEASUREMENTS = [
    name
    for file in Path(cli.__file__).parent.rglob("*.py")
    for name in re.findall(r' = Measurements\("([^"]+)"', file.read_text(encoding="utf-8"))
]
"""Every file that measurements are kept in."""


def write_everything(cache: Path, source: Path) -> list[Writer]:
    """Write what all others write."""
    writers = [kind(cache / kind.__name__.lower(), source) for kind in WRITERS if kind not in CHOSEN]
    for writer in writers:
        make_private(writer.folder)
        writer.write()
    return writers


def test_no_file_can_be_used_by_others(cache: Path, tmp_path: Path) -> None:
    with tiny_models():
        writers = write_everything(cache, make_source(tmp_path / "model"))
        session = PrivateFolder(sessions_directory())
    assert session.path.is_dir() and len(writers) == len(WRITERS) - len(CHOSEN)
    found = [cache, *cache.rglob("*")]
    assert len(found) >= 20
    folders = {path for path in found if path.is_dir()}
    shared = {path for path in found if path.stat().st_mode & 0o077}
    assert not shared & folders
    # Packed copies are weights, as in the model's own folder; theirs keeps others out.
    assert {path.parent.parent.name for path in shared} <= {"derived"}
    session.close()


def test_clearing_the_cache_leaves_nothing_but_a_lock(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tiny_models():
        writers = write_everything(cache, make_source(tmp_path / "model"))
        for writer in writers:
            writer.let_go()
    session = sessions_directory() / "mlx-flash-session-killed"
    session.mkdir(parents=True)
    (session / "layer-0.kv").write_bytes(b"keys and values")
    killed = cache / "verify" / "mlx-flash-session-killed"
    killed.mkdir(parents=True)
    (killed / "model.safetensors").write_bytes(b"an uncompressed copy")
    for name in MEASUREMENTS:
        (cache / name).touch()
        (cache / f"{name}.partial").touch()
    (cache / "derived" / "0.lock").touch()
    assert len(MEASUREMENTS) >= 4
    assert cli.main(["cache", "clear"]) == 0
    assert {path.name for path in cache.rglob("*") if path.is_file()} == {"lock"}
    assert not list(sessions_directory().iterdir())
    assert "removed 1 packed copy" in capsys.readouterr().out

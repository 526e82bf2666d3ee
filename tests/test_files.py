"""Regular files, atomic replacement, and locks between processes."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from interrupt_points import Operation, interrupted_in, total_points
from mlx_flash.errors import WriteError
from mlx_flash.files import (
    PARTIAL_SUFFIX,
    HeldLock,
    PrivateFolder,
    atomic_file,
    read_regular,
    remove_unheld,
    write_atomically,
)
from mlx_flash.forks import wait_for_finalizers
from mlx_flash.storage.probe import temporary_file
from models import LLAMA, save


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_write_replaces_the_file_or_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("old and longer")
    with pytest.raises(KeyError), atomic_file(path) as file:
        file.write(b"half")
        raise KeyError
    assert path.read_text() == "old and longer" and names(tmp_path) == ["data"]
    write_atomically(path, "naïve", durable=True)
    assert path.read_bytes() == "naïve".encode() and path.stat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == ["data"]


def test_writes_that_take_only_a_part_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, data = os.pwrite, os.urandom(100)
    monkeypatch.setattr(os, "pwrite", lambda fd, part, offset: pwrite(fd, part[:7], offset))
    with atomic_file(tmp_path / "file") as file:
        file.write(data[:33])
        file.write(data[33:])
    assert (tmp_path / "file").read_bytes() == data


KILLED = """
import os, sys
from pathlib import Path
from mlx_flash.files import atomic_file
with atomic_file(Path(sys.argv[1])) as file:
    file.write(b"half of a long text")
    os.kill(os.getpid(), 9)
"""


def test_killed_writer_leaves_one_partial_file_that_the_next_write_uses(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("old")
    for _ in range(2):
        subprocess.run([sys.executable, "-c", KILLED, path], check=False)
        assert path.read_text() == "old"
        assert names(tmp_path) == ["data", f"data{PARTIAL_SUFFIX}"]
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert names(tmp_path) == ["data"]


def test_link_in_place_of_the_partial_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f"data{PARTIAL_SUFFIX}").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        write_atomically(tmp_path / "data", "new")
    assert victim.read_text() == "precious"


def test_exclusive_lock_keeps_others_out(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with pytest.raises(FileNotFoundError):
        HeldLock(path)
    with HeldLock(path, create=0o600), pytest.raises(BlockingIOError):
        HeldLock(path, shared=True, wait=False)
    with HeldLock(path, shared=True), HeldLock(path, shared=True, wait=False), pytest.raises(BlockingIOError):
        HeldLock(path, wait=False)
    HeldLock(path, wait=False).release()


def test_file_removed_during_the_wait_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    held, found = HeldLock(path, create=0o600), list[bool]()

    def wait() -> None:
        with HeldLock(path, create=0o600) as fd:
            found.append(os.path.samestat(os.fstat(fd), path.stat()))

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.1)
    path.unlink()
    with HeldLock(path, create=0o600) as fd:  # a new file: the old one is locked still
        assert os.fstat(fd).st_ino == path.stat().st_ino
    held.release()
    waiting.join(10)
    assert found == [True]


def test_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(fd: int, kind: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(OSError, match="not supported"):
        HeldLock(tmp_path)
    HeldLock(tmp_path, required=False).release()
    write_atomically(tmp_path / "data", "new")
    assert (tmp_path / "data").read_text() == "new"


def test_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    with pytest.raises(OSError, match="it has 5 bytes, at most 4 are allowed"):
        read_regular(path, 4)
    if (path := Path("/proc/self/maps")).exists():  # which reports no size
        with pytest.raises(OSError, match="it has 11 bytes, at most 10 are allowed"):
            read_regular(path, 10)


def test_private_folders_spare_what_others_have_in_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the user's choice may be ``/tmp``."""
    (tmp_path / "session-of-another-program").mkdir()
    os.mkfifo(tmp_path / "mlx-flash-session-fifo")
    (tmp_path / "mlx-flash-session-killed").mkdir()
    theirs = tmp_path / "mlx-flash-session-theirs"
    theirs.mkdir()
    real = os.open

    def refuse(path: str | Path, *rest: Any, **more: Any) -> int:
        if Path(path) == theirs:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    PrivateFolder(tmp_path).close()
    assert names(tmp_path) == ["mlx-flash-session-theirs", "session-of-another-program"]


def test_temporary_files_end_with_their_block(tmp_path: Path) -> None:
    with temporary_file(tmp_path, "a test", [b"ab", b"c"]) as path:
        assert path.read_bytes() == b"abc"
    assert not names(tmp_path)
    (tmp_path / "file").touch()
    with (
        pytest.raises(WriteError, match=r"cannot make a folder for a test in .*file: .*Hint: "),
        temporary_file(tmp_path / "file", "a test", []),
    ):
        pass


def test_interrupts_leave_no_lock_held(tmp_path: Path) -> None:
    path = tmp_path / "lock"

    def program(run: Callable[[Operation], bool]) -> None:
        held = list[HeldLock]()

        def hold() -> None:
            with HeldLock(path, create=0o600):
                pass

        run(lambda: held.append(HeldLock(path, create=0o600)))
        for lock in held:
            run(lock.release)
            del lock
        held.clear()
        run(hold)
        gc.collect()
        wait_for_finalizers()
        HeldLock(path, wait=False).release()

    total = total_points(program, ["files.py"])
    assert sum(interrupted_in(program, number, ["files.py"]) is not None for number in range(total)) > 20


def test_what_nobody_holds_is_removed_and_faults_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").touch()
    with HeldLock(folder):
        assert not remove_unheld(folder)
    rmdir = os.rmdir

    def refuse(path: Any, **more: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "rmdir", refuse)
    with pytest.raises(PermissionError):
        remove_unheld(folder)
    assert not names(folder), "as much as can be is removed"
    monkeypatch.setattr(os, "rmdir", rmdir)
    assert remove_unheld(folder) and remove_unheld(folder)


# --- folders of the user ----------------------------------------------------------------------------------------------


PROGRAM = """
import os, sys
os.environ.pop("XDG_CACHE_HOME"), os.environ.pop("XDG_CONFIG_HOME", None)
import mlx.core as mx
from mlx_flash import FlashConfig, load_model
from mlx_flash.files import cache_directory
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

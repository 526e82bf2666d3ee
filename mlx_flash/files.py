"""The cache folder, and folders of files that go with their process, however it ends."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlx_flash.errors import WriteError

_PREFIX = "session-"


def cache_directory() -> Path:
    """Where mlx-flash keeps what it can always find out again."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "mlx-flash"
    home = Path.home()
    return (home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache") / "mlx-flash"


class PrivateFolder:
    """A new folder, locked while this object lives. Folders whose processes ended without removing them are removed.

    Args:
        base: where it is made, and others are looked for.

    Attributes:
        path: the folder.

    Raises:
        WriteError: it cannot be made.
    """

    def __init__(self, base: Path) -> None:
        try:
            base.mkdir(parents=True, exist_ok=True)
            with _one_at_a_time(base):
                remove_orphans(base)
                self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
                fd = _open_locked(self.path)
        except OSError as error:
            raise WriteError(
                f"cannot make a folder for the KV cache in {base}: {error.strerror}. Hint: set another directory."
            ) from error
        self.close = weakref.finalize(self, _remove, self.path, fd)


def remove_orphans(base: Path) -> None:
    """Removes the folders that no process holds."""
    for path in base.glob(f"{_PREFIX}*"):
        fd = _open_locked(path)
        if fd is not None:
            _remove(path, fd)


def free_bytes(path: Path) -> int:
    """Bytes that are free on the disk of a directory, which need not exist yet."""
    found = path.absolute()
    while not found.exists():
        found = found.parent
    return shutil.disk_usage(found).free


@contextmanager
def _one_at_a_time(base: Path) -> Iterator[None]:
    """So that a folder is not taken for an orphan before its maker has locked it."""
    fd = os.open(base, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _open_locked(path: Path) -> int | None:
    """A descriptor that holds the folder until it is closed; None when somebody else holds it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _remove(path: Path, fd: int | None) -> None:
    shutil.rmtree(path, ignore_errors=True)  # what cannot be removed now is an orphan later
    if fd is not None:
        os.close(fd)

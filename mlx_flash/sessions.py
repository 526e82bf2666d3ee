"""Folders that end with their process."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mlx_flash.files import close_all, locked, make_private, open_locked, write_errors
from mlx_flash.forks import finalize

_PREFIX = "mlx-flash-session-"
SESSIONS = f"{_PREFIX}*"
"""Matches names that only this program gives: a folder of the user's choice may hold others."""

_folders: weakref.WeakSet[PrivateFolder] = weakref.WeakSet()


def _unlock_in_child() -> None:
    """Close a child's copies of the locks of its parent, which would hold them after the parent's end."""
    for folder in list(_folders):
        close_all(folder.descriptors)


os.register_at_fork(after_in_child=_unlock_in_child)


class PrivateFolder:
    """A new folder, locked while this object lives. Making one removes the folders of processes that were killed.

    Args:
        base: the folder to make it in.
        purpose: what it is for, in errors.

    Attributes:
        path: the folder.
        descriptors: that of its lock, until the end.

    Raises:
        WriteError: it cannot be made.
    """

    def __init__(self, base: Path, purpose: str = "the KV cache") -> None:
        base = base.absolute()  # a program may change its folder
        made, self.descriptors = list[Path](), list[int]()
        self._end = finalize(
            self, _remove_made, made, self.descriptors
        )  # first, in case an interrupt ends what follows
        with write_errors(f"cannot make a folder for {purpose} in {base}", "or set another directory"):
            make_private(base)
            with locked(base):  # or another process might remove the folder before it is locked
                remove_unheld(base.glob(SESSIONS))
                made.append(Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base)))
                self.descriptors.append(open_locked(made[0]))
        self.path, self._owner = made[0], os.getpid()
        _folders.add(self)

    def close(self) -> None:
        """Remove the folder. Further calls do nothing, unless an interrupt ended the first."""
        if self._owner == os.getpid():
            shutil.rmtree(self.path, ignore_errors=True)  # first: a finalizer runs once
        self._end()


def _remove_made(made: list[Path], descriptors: list[int]) -> None:
    for path in made:
        shutil.rmtree(path, ignore_errors=True)
    close_all(descriptors)


def remove_orphans(base: Path) -> None:
    """Remove the folders that killed processes made with :class:`PrivateFolder`. ``base`` need not exist."""
    if base.is_dir():
        with locked(base):
            remove_unheld(base.glob(SESSIONS))


def is_held(path: Path) -> bool:
    """Return False for a file or folder that no process has locked."""
    try:
        os.close(open_locked(path, wait=False))
    except OSError:
        return True  # in use, removed, or another user's
    return False


def remove_unheld(paths: Iterable[Path]) -> None:
    """Remove files and folders that no process has locked."""
    for path in paths:
        with suppress(FileNotFoundError, BlockingIOError, PermissionError):  # removed, in use, or another user's
            fd = open_locked(path, wait=False)
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)  # the next process removes as an orphan whatever is left
            else:
                path.unlink(missing_ok=True)
            os.close(fd)

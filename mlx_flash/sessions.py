"""Folders that end with their process."""

from __future__ import annotations

import os
import secrets
import shutil
import weakref
from contextlib import suppress
from pathlib import Path

from mlx_flash.files import HeldLock, make_private, remove_unheld, write_errors
from mlx_flash.forks import finalize, wait_for_finalizers

_PREFIX = "mlx-flash-session-"
SESSIONS = f"{_PREFIX}*"
"""Matches names that only this program gives: a folder of the user's choice may hold others."""

_folders: weakref.WeakSet[PrivateFolder] = weakref.WeakSet()


def _unlock_in_child() -> None:
    """Close a child's copies of the locks of its parent, which would hold them after the parent's end."""
    for folder in list(_folders):
        folder.lock.release()


os.register_at_fork(after_in_child=_unlock_in_child)


class PrivateFolder:
    """A new folder, locked while this object lives. Making one removes the folders of processes that were killed."""

    def __init__(self, base: Path, purpose: str = "the KV cache") -> None:
        base = base.absolute()  # a program may change its folder
        made = list[Path]()
        finalize(self, _remove_all, made)  # first, in case an interrupt ends what follows
        with write_errors(f"cannot make a folder for {purpose} in {base}", "or set another directory"):
            make_private(base)
            with HeldLock(base):  # or another process might remove the folder before it is locked
                _remove_unheld(base)
                made.append(base / f"{_PREFIX}{secrets.token_hex(8)}")
                made[0].mkdir(mode=0o700)
                self.lock = HeldLock(made[0])
        self.path, self._owner = made[0], os.getpid()
        _folders.add(self)

    def close(self) -> None:
        """Remove the folder. Another call does nothing, unless an interrupt ended the first."""
        if self._owner == os.getpid():
            shutil.rmtree(self.path, ignore_errors=True)
        self.lock.release()


def _remove_all(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_unheld(base: Path) -> None:
    for path in base.glob(SESSIONS):
        with suppress(OSError):  # another user's; the next process removes whatever is left
            remove_unheld(path)


def remove_orphans(base: Path) -> None:
    """Remove the folders that killed processes made with :class:`PrivateFolder`. ``base`` need not exist."""
    if base.is_dir():
        with HeldLock(base):
            _remove_unheld(base)


def is_held(path: Path, *, required: bool = True) -> bool:
    """Return False for what no process has locked; if locks are not ``required``, also where there are none."""
    wait_for_finalizers()  # as to remove it
    try:
        HeldLock(path, wait=False, required=required).release()
    except OSError:
        return True  # in use, removed, or another user's
    return False

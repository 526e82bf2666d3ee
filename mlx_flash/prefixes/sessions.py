"""Who uses a store now: one locked file a session, whose lock the system gives up when the process ends, however."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Session:
    """A use of a store by this process, until it is closed or the process ends.

    Args:
        folder: of the sessions' files; made when it is not there.

    Attributes:
        name: of the session; no other one has or had it.

    Raises:
        OSError: the folder cannot be written, or its file system has no locks.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            self.name = f"{os.getpid()}-{secrets.token_hex(8)}"
            self._path = folder / self.name
            fd = _lock(self._path, os.O_CREAT | os.O_EXCL)
            if fd is not None:  # else somebody took it for a dead one's before it was locked
                self._fd: int | None = fd
                return

    def close(self) -> None:
        """Ends the session. Again does nothing."""
        if self._fd is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = None


def living(folder: Path, own: str) -> set[str]:
    """Names of the sessions that have not ended, among them ``own``; files of the others are removed.

    Raises:
        OSError: the folder cannot be read or written.
    """
    names = {own}
    for path in folder.iterdir():
        if path.name == own:
            continue
        try:
            fd = _lock(path, 0)
        except BlockingIOError:
            names.add(path.name)
            continue
        if fd is not None:
            path.unlink(missing_ok=True)
            os.close(fd)
    return names


def _lock(path: Path, flags: int) -> int | None:
    """Locks a file; None when it is not there any more.

    Raises:
        BlockingIOError: somebody else has it locked.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
    except BaseException as error:
        os.close(fd)
        if flags and isinstance(error, BlockingIOError):
            return None  # it is being looked at, and removed
        raise
    os.close(fd)
    return None


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Lets one process after another into the block.

    Args:
        path: a file to lock; made with its folder, and left there.

    Raises:
        OSError: it cannot be written, or its file system has no locks.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)

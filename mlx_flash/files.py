"""Files: regular files only, atomic replacement, locks, folders that end with their process, and the user's folders."""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

from mlx_flash.errors import FlashError, WriteError
from mlx_flash.forks import finalize, wait_for_finalizers
from mlx_flash.logs import log

PARTIAL_SUFFIX = ".partial"
"""Ends the names of files and folders that are not complete."""

FREE_SHARE = 1 / 10
"""Share of a disk that copies and caches leave free, unless the user sets a limit."""

_RETRY_SECONDS = 0.002
_UNSUPPORTED = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK)
"""Errors of file systems without locks."""


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone. Those that exist stay as they are."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def free_floor(path: Path) -> int:
    """Return the bytes that stay free on the disk of a directory, which need not exist yet."""
    return int(shutil.disk_usage(nearest(path)).total * FREE_SHARE)


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of a directory, which need not exist yet."""
    return shutil.disk_usage(nearest(path)).free


def nearest(path: Path) -> Path:
    """Return a path, or the innermost folder on the way to it that exists."""
    path = path.absolute()
    return next(found for found in (path, *path.parents) if found.exists())


def open_regular(path: Path, flags: int = 0) -> int:
    """Return a descriptor of a regular file for reading, with further flags of ``os.open``. FIFOs are not waited for.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    try:
        _check(path, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_regular(path: Path, limit: int) -> bytes:
    """Read a file that passes :func:`check_regular`."""
    with open(open_regular(path), "rb") as file:
        data = file.read(limit + 1)  # files of /proc report no size
        if (nbytes := max(len(data), os.fstat(file.fileno()).st_size)) > limit:
            raise OSError(errno.EFBIG, f"it has {nbytes} bytes, at most {limit} are allowed", str(path))
    return data


def read_json_object(path: Path, limit: int) -> dict[str, Any]:
    """Return the JSON object in a regular file; an empty one if none can be read: the file is only a convenience."""
    try:
        found = json.loads(read_regular(path, limit))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def check_regular(path: Path) -> None:
    """Raise an OSError for what is not a regular file, before another library reads it."""
    _check(path, path.stat())


def _check(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        kind = "FIFO" if stat.S_ISFIFO(status.st_mode) else "device or socket"
        raise OSError(errno.ENXIO, f"it is a {kind}, not a regular file", str(path))


@contextmanager
def write_errors(what: str, otherwise: str) -> Iterator[None]:
    """Turn the system's errors into a WriteError that begins with ``what``; ``otherwise`` ends its hint."""
    try:
        yield
    except FlashError:
        raise
    except OSError as error:
        hint = "make room on the disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check who may write there"
        raise WriteError(f"{what}: {error.strerror or error}. Hint: {hint}, {otherwise}.") from error


class NewFile:
    """A file that is written from its beginning: its descriptor, and the bytes written so far."""

    def __init__(self, fd: int) -> None:
        self.fd, self.nbytes = fd, 0

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        write_at(self.fd, data, self.nbytes)
        self.nbytes += len(data)


@contextmanager
def atomic_file(path: Path, *, mode: int = 0o600, durable: bool = False) -> Iterator[NewFile]:
    """Replace a file by one that a block writes, unless the block raises.

    The bytes go to ``<name>.partial`` in the same folder, which the writer locks. The next writer uses the partial file
    of a killed one again. If ``durable``, bytes and name reach the disk before the block ends.
    """
    partial = path.with_name(f"{path.name}{PARTIAL_SUFFIX}")
    with HeldLock(partial, create=mode, required=False) as fd:
        try:
            os.ftruncate(fd, 0)
            yield NewFile(fd)
            if durable:
                os.fsync(fd)
            partial.replace(path)  # before the lock is released, or the next writer would empty this file
        except BaseException:
            with suppress(OSError):  # the next writer uses it again
                if _is_at(partial, fd):
                    partial.unlink()
            raise
    if durable:
        flush_folder(path.parent)


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all bytes at an offset of a file."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, memoryview(data)[done:], offset + done)


def write_atomically(path: Path, data: bytes | str, *, mode: int = 0o600, durable: bool = False) -> None:
    """Replace a file, as :func:`atomic_file`. Readers see the old bytes or all of the new ones, also after a kill."""
    with atomic_file(path, mode=mode, durable=durable) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def rename_durably(source: Path, target: Path) -> None:
    """Rename a file or folder, and wait until the disk has the new name."""
    source.replace(target)
    flush_folder(target.parent)


def flush_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, *_UNSUPPORTED):
            raise  # some network file systems flush files only
    finally:
        os.close(fd)


class HeldLock:
    """A lock of a file or folder against other processes and other descriptors of this one.

    It is held until it is released, or dropped: an interrupt may hide it from its user. A file that was removed or
    replaced during the wait is opened again, so that the path names the locked file. As a context manager it yields the
    descriptor, and is released at the end of the block.

    Args:
        create: permissions, less the umask, of a file to make or write to. None opens what exists for reading.
        wait: for other holders, at most so many seconds.
        required: fail on file systems without locks. Otherwise the file is open without a lock.

    Raises:
        BlockingIOError: another holder has it, and ``wait`` is False or the seconds have passed.
        OSError: it cannot be opened or locked.
    """

    def __init__(
        self,
        path: Path,
        *,
        create: int | None = None,
        shared: bool = False,
        wait: bool | float = True,
        required: bool = True,
    ) -> None:
        self._descriptors: list[int] = []
        finalize(self, close_all, self._descriptors)
        access = os.O_RDONLY if create is None else os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        flags = access | os.O_CLOEXEC | os.O_NONBLOCK  # another user's FIFO must not block
        while not self.is_held:
            try:
                # one step: no signal handler runs in map and extend, between the opening and the noting
                self._descriptors.extend(map(os.open, [path], [flags], [create or 0]))
                lock(self.fd, shared=shared, wait=wait, required=required)
                if not _is_at(path, self.fd):
                    self.release()
            except BaseException:
                self.release()
                raise

    @property
    def is_held(self) -> bool:
        """False after :meth:`release`."""
        return bool(self._descriptors)

    @property
    def fd(self) -> int:
        """The descriptor, while it is held."""
        return self._descriptors[0]

    def release(self) -> None:
        """Unlock the file. Does nothing when called again."""
        close_all(self._descriptors)

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *_: object) -> None:
        self.release()


def close_all(descriptors: list[int]) -> None:
    """Close and forget some descriptors. An interrupt leaves none that is closed and not forgotten, or the reverse."""
    any(map(os.close, map(descriptors.pop, [-1] * len(descriptors))))  # one step, as above


def remove_unheld(path: Path) -> bool:
    """Remove a file or folder, unless a process has locked it. Return True if it is gone.

    Where the file system has no locks, it counts as not locked.
    """
    wait_for_finalizers()  # which let go of what this process does not use any more
    try:
        with HeldLock(path, wait=False, required=False):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)  # as much as can be
            if path.is_dir():
                path.rmdir()  # raises what is in the way
            else:
                path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    except FileNotFoundError:  # another process removes it, too
        return not path.exists()
    return True


def lock(fd: int, *, shared: bool, wait: bool | float, required: bool) -> None:
    """Lock an open file. Arguments and errors are those of :class:`HeldLock`."""
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait is True else fcntl.LOCK_NB)
    deadline = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(fd, kind)
            return
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise BlockingIOError(error.errno, "another process holds the lock") from None
            time.sleep(_RETRY_SECONDS)
        except OSError as error:
            if required or error.errno not in _UNSUPPORTED:
                raise
            return


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


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
            remove_orphans(base)
            with HeldLock(base):  # or another process might remove the folder before it is locked
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


def remove_orphans(base: Path) -> None:
    """Remove the folders that killed processes made with :class:`PrivateFolder`. ``base`` need not exist."""
    with HeldLock(base) if base.is_dir() else nullcontext():
        for path in base.glob(SESSIONS):
            with suppress(OSError):  # another user's; the next process removes whatever is left
                remove_unheld(path)


def is_held(path: Path, *, required: bool = True) -> bool:
    """Return False for what no process has locked; if locks are not ``required``, also where there are none."""
    wait_for_finalizers()  # as to remove it
    try:
        HeldLock(path, wait=False, required=required).release()
    except OSError:
        return True  # in use, removed, or another user's
    return False


# The user's folders for settings and for data that can be computed again. A home that does not exist is never made.


def home_directory() -> Path:
    """Return the user's home. Where there is none, as for many services, a folder that ends with this process."""
    try:
        home = Path.home()
    except RuntimeError:  # neither HOME nor an account
        home = Path(os.environ.get("HOME", "~"))
    return home if home.is_dir() else _temporary_home(home)


def cache_directory() -> Path:
    """Return the folder of data that mlx-flash can always compute again. It need not exist."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "mlx-flash"
    home = home_directory()
    return (home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache") / "mlx-flash"


def settings_file() -> Path:
    """Return the path of the user's settings file."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else home_directory() / ".config") / "mlx-flash" / "config.toml"


@cache
def _temporary_home(missing: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="mlx-flash-home-"))
    atexit.register(_remove, folder, os.getpid())
    log.warning(
        "the home %s is no folder: measured speeds and cached data go to %s, which is removed when this process ends. "
        "Hint: set HOME, or XDG_CACHE_HOME.",
        missing,
        folder,
    )
    return folder


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)

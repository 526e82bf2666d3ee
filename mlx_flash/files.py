"""Files: the cache folder, regular files only, atomic replacement, locks, and folders that end with their process."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from mlx_flash.errors import WriteError
from mlx_flash.forks import finalize

PARTIAL_SUFFIX = ".partial"
"""Ends the names of files and folders that are not complete."""

_PREFIX = "session-"
_RETRY_SECONDS = 0.002
_UNSUPPORTED = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK)
"""Errors of file systems without locks."""


def cache_directory() -> Path:
    """Return the folder of data that mlx-flash can always compute again. It need not exist."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "mlx-flash"
    home = Path.home()
    return (home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache") / "mlx-flash"


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of a directory, which need not exist yet."""
    found = path.absolute()
    while not found.exists():
        found = found.parent
    return shutil.disk_usage(found).free


# --- regular files ---------------------------------------------------------------------------------------------------


def open_regular(path: Path, flags: int = 0) -> int:
    """Open a regular file for reading. Never waits for a writer, as opening a FIFO does.

    Args:
        path: the file; links are followed.
        flags: further flags of ``os.open``.

    Returns:
        The descriptor. The caller closes it.

    Raises:
        OSError: it cannot be opened, or it is a folder, a device, a FIFO or a socket.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    try:
        _check_regular(path, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_regular(path: Path, limit: int) -> bytes:
    """Read a regular file of at most ``limit`` bytes.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger.
    """
    with open(open_regular(path), "rb") as file:
        _check_size(path, os.fstat(file.fileno()).st_size, limit)
        data = file.read(limit + 1)
    _check_size(path, len(data), limit)
    return data


def check_regular(path: Path, limit: int | None = None) -> None:
    """Check a file that another library will read.

    Args:
        path: the file; links are followed.
        limit: its largest size in bytes; None for any.

    Raises:
        OSError: it does not exist, is not a regular file, or is larger.
    """
    status = path.stat()
    _check_regular(path, status)
    if limit is not None:
        _check_size(path, status.st_size, limit)


def _check_regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        kind = "FIFO" if stat.S_ISFIFO(status.st_mode) else "device or socket"
        raise OSError(errno.ENXIO, f"it is a {kind}, not a regular file", str(path))


def _check_size(path: Path, nbytes: int, limit: int) -> None:
    if nbytes > limit:
        raise OSError(errno.EFBIG, f"it has {nbytes} bytes, at most {limit} are allowed", str(path))


# --- atomic replacement ----------------------------------------------------------------------------------------------


class AtomicFile:
    """A new version of a file, which replaces the old one when it is complete.

    The bytes go to ``<name>.partial`` in the same folder. The writer holds a lock on that file. A killed writer leaves
    the partial file behind, and the next writer of the same path uses it again. As a context manager it commits at the
    end of the block, or aborts if the block raised.

    Args:
        path: the file to replace. Its folder must exist.
        mode: permissions of the new file, less the umask.
        durable: whether bytes and name reach the disk before :meth:`commit` returns.

    Attributes:
        fd: descriptor of the partial file.
        partial: path of the partial file.
        nbytes: bytes written so far.
        is_open: False after :meth:`commit` or :meth:`abort`.

    Raises:
        OSError: the partial file cannot be opened.
    """

    def __init__(self, path: Path, *, mode: int = 0o600, durable: bool = False) -> None:
        self.partial = path.with_name(f"{path.name}{PARTIAL_SUFFIX}")
        self._path = path
        self._durable = durable
        self.is_open = True
        self.nbytes = 0
        self.fd = open_locked(self.partial, create=mode, required=False)
        try:
            os.ftruncate(self.fd, 0)
        except BaseException:
            self.abort()
            raise

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        left = memoryview(data)
        while left:
            count = os.pwrite(self.fd, left, self.nbytes)
            self.nbytes += count
            left = left[count:]

    def commit(self) -> None:
        """Replace the old file by the new one."""
        if self._durable:
            os.fsync(self.fd)
        self.partial.replace(self._path)  # before the lock is released, or the next writer would empty this file
        self._close()
        if self._durable:
            flush_folder(self._path.parent)

    def abort(self) -> None:
        """Remove the partial file. Does nothing after :meth:`commit` or another call."""
        if self.is_open:
            self.partial.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        self.is_open = False
        os.close(self.fd)

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.abort()


def write_atomically(path: Path, data: bytes | str, *, mode: int = 0o600, durable: bool = False) -> None:
    """Replace a file. Readers see the old bytes or all of the new ones, also after the process is killed.

    Args:
        path: the file. Its folder must exist.
        data: the new content; text is encoded as UTF-8.
        mode: permissions of the new file, less the umask.
        durable: whether to wait until the disk has the new content.

    Raises:
        OSError: the file cannot be written. The old one is unchanged.
    """
    with AtomicFile(path, mode=mode, durable=durable) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def rename_durably(source: Path, target: Path) -> None:
    """Rename a file or folder, and wait until the disk has the new name.

    Raises:
        OSError: it cannot be renamed.
    """
    source.replace(target)
    flush_folder(target.parent)


def flush_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder.

    Raises:
        OSError: they cannot be written.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, *_UNSUPPORTED):
            raise  # some network file systems flush files only
    finally:
        os.close(fd)


# --- locks -----------------------------------------------------------------------------------------------------------


def open_locked(
    path: Path, *, create: int | None = None, shared: bool = False, wait: bool | float = True, required: bool = True
) -> int:
    """Open a file or folder and lock it against other processes and other descriptors of this one.

    The lock ends when the descriptor is closed or the process ends. The path still names the locked file when this
    function returns: a file that was removed or replaced during the wait is opened again.

    Args:
        path: the file or folder.
        create: permissions, less the umask, of a file that is made if it is missing and opened for writing. None opens
            an existing file or folder for reading.
        shared: whether other shared locks are allowed beside this one.
        wait: whether to wait for other holders; a number waits so many seconds at most.
        required: whether to fail on file systems without locks. Otherwise the descriptor is returned without a lock.

    Returns:
        The descriptor. The caller closes it.

    Raises:
        FileNotFoundError: the file does not exist and ``create`` is None.
        BlockingIOError: another holder has it, and ``wait`` is False or the seconds have passed.
        OSError: it cannot be opened or locked.
    """
    access = os.O_RDONLY if create is None else os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    while True:
        fd = os.open(path, access | os.O_CLOEXEC, create or 0)
        try:
            _lock(fd, shared, wait, required)
            if _is_at(path, fd):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


@contextmanager
def locked(
    path: Path, *, create: int | None = None, shared: bool = False, wait: bool | float = True, required: bool = True
) -> Iterator[int]:
    """Hold a lock during a block. Arguments, value and errors are those of :func:`open_locked`."""
    fd = open_locked(path, create=create, shared=shared, wait=wait, required=required)
    try:
        yield fd
    finally:
        os.close(fd)


def _lock(fd: int, shared: bool, wait: bool | float, required: bool) -> None:
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


# --- folders that are removed with their process ---------------------------------------------------------------------


class PrivateFolder:
    """A new folder, locked while this object lives. Making one removes the folders of processes that were killed.

    Args:
        base: the folder in which it is made.

    Attributes:
        path: the folder.

    Raises:
        WriteError: it cannot be made.
    """

    def __init__(self, base: Path) -> None:
        try:
            base.mkdir(parents=True, exist_ok=True)
            with locked(base):  # or another process might remove the folder before it is locked
                remove_orphans(base)
                self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
                fd = open_locked(self.path)
        except OSError as error:
            raise WriteError(
                f"cannot make a folder for the KV cache in {base}: {error.strerror}. Hint: set another directory."
            ) from error
        self.close = finalize(self, _remove, self.path, fd)


def remove_orphans(base: Path) -> None:
    """Remove the folders that no process holds."""
    for path in base.glob(f"{_PREFIX}*"):
        try:
            fd = open_locked(path, wait=False)
        except (FileNotFoundError, BlockingIOError):
            continue
        _remove(path, fd)


def _remove(path: Path, fd: int) -> None:
    shutil.rmtree(path, ignore_errors=True)  # the next process removes as an orphan whatever is left
    os.close(fd)

"""One shard file, kept open, and whether it is still the file the model was loaded from."""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from mlx_flash.errors import CheckpointError, CheckpointNotFoundError, FileChangedError, TruncatedFileError
from mlx_flash.memory.pagecache import open_buffered, open_direct

SAMPLES = 32
SAMPLE_BYTES = 4096
HEAD_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What ``os.stat`` says of a file; equal identities mean the same bytes, for all that a reader can know.

    The time of the last change of its entry is one that nobody can set back, unlike the time of its last write.
    """

    device: int
    inode: int
    nbytes: int
    modified_ns: int
    changed_ns: int


def identity_of(path: Path | str) -> FileIdentity:
    """Raises: OSError."""
    status = os.stat(path)  # noqa: PTH116
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class _Opened:
    """An open file: which one it is, what it holds, and its descriptors."""

    identity: FileIdentity
    digest: bytes
    buffered_fd: int
    direct_fd: int | None

    def close(self) -> None:
        os.close(self.buffered_fd)
        if self.direct_fd is not None:
            os.close(self.direct_fd)


class SourceFile:
    """A file that is read while the model runs.

    A changed identity (another inode, size or time) is not yet another content: the file may have been moved away and
    put back. So a digest of its head and of samples spread over it is taken when it is opened, and compared then.

    Args:
        path: the file.
        direct: whether to open it for direct reads too.

    Attributes:
        identity: the file whose bytes are known to be right; None from a change until it was followed.

    Raises:
        CheckpointError: the file cannot be opened.
    """

    def __init__(self, path: Path, direct: bool) -> None:
        self.path = path
        self._name = str(path)  # asked for often
        self._want_direct = direct
        try:
            self._opened = _open(path, direct)
        except FileNotFoundError:
            raise CheckpointNotFoundError(f"cannot open {path}: there is no such file") from None
        except OSError as error:
            raise CheckpointError(
                f"cannot open {path} for reading: {error.strerror}. Hint: check who may read it."
            ) from error
        self._to_close = [self._opened]
        self.identity: FileIdentity | None = self._opened.identity

    @property
    def buffered_fd(self) -> int:
        """Reads through the page cache."""
        return self._opened.buffered_fd

    @property
    def direct_fd(self) -> int | None:
        """Reads past the page cache; None where that is not wanted or cannot be."""
        return self._opened.direct_fd

    def is_unchanged(self) -> bool:
        """Whether the path still leads to the file that is open. Costs one ``stat``."""
        try:
            return identity_of(self._name) == self.identity
        except OSError:
            return False  # `reopen` says why

    def reopen(self, tensor: str) -> None:
        """Follows the path to the file that is there now, if it holds the same bytes.

        Descriptors that reads may still use stay open until :meth:`close`, and stay in use when this raises.

        Args:
            tensor: the tensor that was wanted, for the error.

        Raises:
            TruncatedFileError: the file has become shorter.
            FileChangedError: the file is gone, or holds other bytes.
        """
        self.identity = None
        where = f"'{tensor}' from {self.path}"
        try:
            found = _open(self.path, self._want_direct)
        except OSError as error:
            raise FileChangedError(
                f"cannot go on reading {where}: {error.strerror}. "
                "Hint: put the file back; the next call reads it again."
            ) from error
        expected, nbytes = self._opened.identity.nbytes, found.identity.nbytes
        if nbytes < expected:
            found.close()
            raise TruncatedFileError(
                f"cannot go on reading {where}: the file was truncated while the model was running, from {expected} to "
                f"{nbytes} bytes. Hint: put the file back; the next call reads it again."
            )
        if nbytes != expected or found.digest != self._opened.digest:
            found.close()
            raise FileChangedError(
                f"cannot go on reading {where}: the file was replaced by another one while the model was running. "
                "Hint: put the file back, or load the model again."
            )
        self._follow(found)

    def _follow(self, found: _Opened) -> None:
        old = self._opened
        if (found.identity.device, found.identity.inode) == (old.identity.device, old.identity.inode):
            found.close()  # the open descriptors lead to it
            self._opened = replace(old, identity=found.identity)
        else:
            self._to_close.append(found)
            self._opened = found
        self.identity = found.identity

    def close(self) -> None:
        """Closes every descriptor. Harmless when repeated."""
        while self._to_close:
            self._to_close.pop().close()


def _open(path: Path, direct: bool) -> _Opened:
    with ExitStack() as on_error:
        identity = identity_of(path)
        buffered_fd = open_buffered(path)
        on_error.callback(os.close, buffered_fd)
        direct_fd = open_direct(path) if direct else None
        if direct_fd is not None:
            on_error.callback(os.close, direct_fd)
        digest = _sample(buffered_fd, identity.nbytes)
        on_error.pop_all()
    return _Opened(identity, digest, buffered_fd, direct_fd)


def _sample(fd: int, nbytes: int) -> bytes:
    digest = hashlib.sha256(os.pread(fd, HEAD_BYTES, 0))
    last = max(0, nbytes - SAMPLE_BYTES)
    for i in range(SAMPLES):
        digest.update(os.pread(fd, SAMPLE_BYTES, last * i // (SAMPLES - 1)))
    return digest.digest()

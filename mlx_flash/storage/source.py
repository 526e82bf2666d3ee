"""One shard file, kept open, and whether it is still the file the model was loaded from."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from mlx_flash.errors import CheckpointError, CheckpointNotFoundError, FileChangedError, TruncatedFileError
from mlx_flash.storage.pagecache import open_buffered, open_direct

SAMPLES = 32
SAMPLE_BYTES = 4096
HEAD_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What ``os.stat`` says of a file; equal identities mean the same bytes, for all that a reader can know."""

    device: int
    inode: int
    nbytes: int
    modified_ns: int


def identity_of(path: Path) -> FileIdentity:
    """Raises: FileNotFoundError."""
    status = path.stat()
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class SourceFile:
    """A file that is read while the model runs.

    A changed identity (another inode, size or time) is not yet another content: the file may have been moved away and
    put back. So a digest of its head and of samples spread over it is taken when it is opened, and compared then.

    Args:
        path: the file.
        direct: whether to open it for direct reads too.

    Raises:
        CheckpointError: the file cannot be opened.
    """

    def __init__(self, path: Path, direct: bool) -> None:
        self.path = path
        self._want_direct = direct
        self._retired: list[int] = []
        try:
            self._open()
        except FileNotFoundError:
            raise CheckpointNotFoundError(f"cannot open {path}: there is no such file") from None
        except OSError as error:
            raise CheckpointError(
                f"cannot open {path} for reading: {error.strerror}. Hint: check who may read it."
            ) from error
        self._digest = self._sample()

    def _open(self) -> None:
        self.identity = identity_of(self.path)
        self.buffered_fd = open_buffered(self.path)
        self.direct_fd = open_direct(self.path) if self._want_direct else None

    def _sample(self) -> bytes:
        digest = hashlib.sha256(os.pread(self.buffered_fd, HEAD_BYTES, 0))
        for i in range(SAMPLES):
            digest.update(os.pread(self.buffered_fd, SAMPLE_BYTES, self.identity.nbytes * i // SAMPLES))
        return digest.digest()

    def is_unchanged(self) -> bool:
        """Whether the path still leads to the file that is open. Costs one ``stat``."""
        try:
            return identity_of(self.path) == self.identity
        except FileNotFoundError:
            return False

    def reopen(self, tensor: str) -> None:
        """Follows the path to the file that is there now, if it holds the same bytes.

        Descriptors that reads may still use stay open until :meth:`close`.

        Args:
            tensor: the tensor that was wanted, for the error.

        Raises:
            TruncatedFileError: the file has become shorter.
            FileChangedError: the file is gone, or holds other bytes.
        """
        expected = self.identity.nbytes
        where = f"'{tensor}' from {self.path}"
        self._retire()
        try:
            self._open()
        except OSError as error:
            self.identity = FileIdentity(0, 0, expected, 0)
            raise FileChangedError(
                f"cannot go on reading {where}: {error.strerror}. Hint: put it back; the next call reads it again."
            ) from error
        found, self.identity = self.identity, FileIdentity(0, 0, expected, 0)
        if found.nbytes < expected:
            raise TruncatedFileError(
                f"cannot go on reading {where}: the file was truncated while the model was running, from {expected} to "
                f"{found.nbytes} bytes. Hint: put the file back; the next call reads it again."
            )
        self.identity = found
        if found.nbytes != expected or self._sample() != self._digest:
            self.identity = FileIdentity(0, 0, expected, 0)
            raise FileChangedError(
                f"cannot go on reading {where}: the file was replaced by another one while the model was running. "
                "Hint: put the file back, or load the model again."
            )

    def _retire(self) -> None:
        self._retired += [fd for fd in (self.buffered_fd, self.direct_fd) if fd is not None and fd >= 0]
        self.buffered_fd = self.direct_fd = -1

    def close(self) -> None:
        """Closes every descriptor. Harmless when repeated."""
        self._retire()
        for fd in self._retired:
            os.close(fd)
        self._retired.clear()

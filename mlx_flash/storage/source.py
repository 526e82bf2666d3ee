"""Open shard files, and the check that they are still the files that the model was loaded from."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from mlx_flash.errors import CheckpointError, CheckpointNotFoundError, FileChangedError, TruncatedFileError
from mlx_flash.memory.pagecache import open_buffered, open_direct
from mlx_flash.storage.blocks import BlockTable

_WORDS = {
    "device": "device",
    "inode": "inode",
    "nbytes": "size",
    "modified_ns": "modification time",
    "changed_ns": "change time",
}


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """The result of ``os.stat`` for a file. Equal identities mean the same bytes.

    Every write, and every change of name, owner or permissions, sets the change time. No program can set it back.
    """

    device: int
    inode: int
    nbytes: int
    modified_ns: int
    changed_ns: int

    def differences(self, other: FileIdentity) -> str:
        """Return the names of the values that differ, for an error."""
        theirs = asdict(other)
        return ", ".join(_WORDS[name] for name, value in asdict(self).items() if theirs[name] != value)


def identity_of(path: Path | str | int) -> FileIdentity:
    """Return the identity of a file or descriptor.

    Raises:
        OSError: the file cannot be found.
    """
    status = os.stat(path)  # noqa: PTH116
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class SourceFile:
    """A file that is read while the model runs.

    Args:
        path: the file.
        direct: whether to open it for direct reads too.
        table: the places of its blocks, if its tensors are compressed.
        identity: the file as it was when the model was loaded; None takes it as it is opened.

    Attributes:
        hint: what to do if bytes of it are missing.
        path: the file.
        table: as given.
        buffered_fd: descriptor for reads through the page cache.
        direct_fd: descriptor for reads past the page cache; None where that is not wanted or not possible.
        identity: the file as it was then.

    Raises:
        CheckpointError: the file cannot be opened.
    """

    hint: ClassVar[str] = "put the file back or download it again, and load the model again"

    def __init__(
        self, path: Path, direct: bool, table: BlockTable | None = None, identity: FileIdentity | None = None
    ) -> None:
        self.path, self.table = path, table
        self._name = str(path)  # computing it costs more than the stat
        self._is_open = True
        try:
            self.buffered_fd = open_buffered(path)
            try:
                self.identity = identity or identity_of(self.buffered_fd)
                self.direct_fd = open_direct(path) if direct else None
            except BaseException:
                os.close(self.buffered_fd)
                raise
        except FileNotFoundError:
            raise CheckpointNotFoundError(f"cannot open {path}: no such file. Hint: {self.hint}.") from None
        except OSError as error:
            hint = "check who may read it" if isinstance(error, PermissionError) else "check the disk, and load again"
            raise CheckpointError(f"cannot open {path} for reading: {error.strerror}. Hint: {hint}.") from error

    def check_unchanged(self, tensor: str) -> None:
        """Check that the path still leads to the same file, and that nobody has written to it. Costs one ``stat``.

        Args:
            tensor: name of a tensor that was read, for the error.

        Raises:
            TruncatedFileError: the file has become shorter.
            FileChangedError: the file is gone, or its identity is another one.
        """
        try:
            found = identity_of(self._name)
        except OSError as error:
            raise FileChangedError(
                f"cannot go on reading '{tensor}' from {self.path}: {error.strerror}. Hint: {self.hint}."
            ) from error
        if not self._is_same(found):
            self._refuse(tensor, found)

    def _is_same(self, found: FileIdentity) -> bool:
        return found == self.identity

    def _refuse(self, tensor: str, found: FileIdentity) -> None:
        expected = self.identity.nbytes
        if found.nbytes < expected:
            raise TruncatedFileError(
                f"cannot go on reading '{tensor}' from {self.path}: the file was truncated since the model was "
                f"loaded, from {expected} to {found.nbytes} bytes. Hint: {self.hint}."
            )
        raise FileChangedError(
            f"cannot go on reading '{tensor}' from {self.path}: the file was changed or replaced by another one since "
            f"the model was loaded (other {self.identity.differences(found)}). Hint: load the model again."
        )

    def stored(self, start: int, stop: int) -> tuple[int, int]:
        """Return offset and length of the bytes of the file that the range ``[start, stop)`` of its tensors needs."""
        if self.table is not None:
            return self.table.span(start, stop)
        return start, min(stop, self.identity.nbytes) - start

    def cuts(self, start: int, stop: int, step: int) -> Iterable[int]:
        """Return the starts of ranges of at most ``step`` bytes. Blocks stay whole."""
        return range(start, stop, step) if self.table is None else self.table.cuts(start, stop, step)

    def close(self) -> None:
        """Close the descriptors. Another call does nothing."""
        if self._is_open:
            self._is_open = False
            os.close(self.buffered_fd)
            if self.direct_fd is not None:
                os.close(self.direct_fd)

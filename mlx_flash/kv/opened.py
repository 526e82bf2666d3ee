"""The open files that pages are read from: those that this process writes, and those of the prefix cache.

A file of the prefix cache is locked while a layer refers to it, so it is not evicted. If it is removed all the same,
open descriptors keep its bytes.
"""

from __future__ import annotations

import fcntl
import resource
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet, WeakValueDictionary

from mlx_flash.errors import CheckpointError
from mlx_flash.forks import finalize
from mlx_flash.kv.layout import Component
from mlx_flash.kv.pages import File, InFile, Page
from mlx_flash.storage.prefetcher import BackgroundPrefetcher
from mlx_flash.storage.source import FileIdentity, SourceFile, identity_of

OTHER_FILES = 128
"""Descriptors that are left to everything else."""

MOST_DESCRIPTORS = 4096


def most_files(limit: int) -> int:
    """Return how many files of the prefix cache may be open, with two descriptors each.

    Args:
        limit: the most descriptors of the process: 256 on macOS, 1024 on Linux if nothing else is set.
    """
    return max(16, min(limit - OTHER_FILES if limit > 0 else MOST_DESCRIPTORS, MOST_DESCRIPTORS) // 2)


MOST_FILES = most_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""Most files of the prefix cache that are open at once."""


class GrowingFile(SourceFile):
    """A file that this process still writes to: a new size or time does not make it another file."""

    def _is_same(self, found: FileIdentity) -> bool:
        return (found.device, found.inode) == (self.identity.device, self.identity.inode)


class DraftSource(SourceFile):
    """A draft, which gets another path when the prefix cache takes it. It is locked, so that none evicts it."""

    def __init__(self, path: Path, direct: bool) -> None:
        super().__init__(path, direct)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self.buffered_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def check_unchanged(self, tensor: str) -> None:
        """Do nothing: others do not know its path, and reads notice that it was truncated."""


class _KeptFile(SourceFile):
    """A file that is read after it was removed, too."""

    def check_unchanged(self, tensor: str) -> None:
        found = identity_of(self.buffered_fd)
        if found.nbytes != self.identity.nbytes:
            self._refuse(tensor, found)


class PageReader(BackgroundPrefetcher):
    """A reader of files that are created, grow, and are removed while it is open."""

    def keep(self, file: SourceFile) -> None:
        """Take an open file, which :meth:`remove` closes."""
        self._files[file.path] = file

    def remove(self, path: Path) -> None:
        """Close a file that will not be read any more."""
        if (file := self._files.pop(path, None)) is not None:
            file.close()


class StoredRows(NamedTuple):
    """Rows in a file of the prefix cache that may be closed, replaced or gone.

    Attributes:
        path, inode: the file.
        components, offsets, strides: as in :class:`InFile`.
    """

    path: Path
    inode: int
    components: tuple[Component, ...]
    offsets: tuple[int, ...]
    strides: tuple[int, ...]


Stored = Callable[[], StoredRows | None]
"""Returns rows of the prefix cache once they are written; None if they are not stored."""


class OpenFile:
    """A file of the prefix cache that is open and locked while this object lives."""

    def __init__(self, source: SourceFile, reader: PageReader) -> None:
        self.path = source.path
        self.inode = source.identity.inode
        finalize(self, reader.remove, source.path)
        reader.keep(source)

    def flush(self) -> None:
        """Do nothing: it is written."""


class StoredFiles:
    """The files of the prefix cache that a pool's layers refer to.

    Args:
        reader: the reader of the pool.
        direct: whether reads bypass the page cache.

    Attributes:
        drafts: files that may become files of the prefix cache.
    """

    def __init__(self, reader: PageReader, direct: bool) -> None:
        self._reader = reader
        self._direct = direct
        self._open: WeakValueDictionary[Path, OpenFile] = WeakValueDictionary()
        self.drafts: WeakSet[File] = WeakSet()

    def open(self, page: Page[Stored], components: Sequence[Component]) -> Page[InFile] | None:
        """Return a page whose file is kept open.

        Args:
            page: the page in the prefix cache.
            components: the arrays that it must have.

        Returns:
            None if it has others, or if its file is gone, replaced, being evicted, or one too many.
        """
        rows = page.where()
        if rows is None or rows.components != components:
            return None
        file = self._open.get(rows.path)
        if file is None and self.has_room:
            with suppress(OSError, CheckpointError):
                file = self._open[rows.path] = self._opened(rows.path)
        if file is None or file.inode != rows.inode:
            return None
        return Page(InFile(file, rows.components, rows.offsets, rows.strides), page.length)

    @property
    def has_room(self) -> bool:
        """False when as many files are open as may be."""
        return len(self._open) + len(self.drafts) < MOST_FILES

    def _opened(self, path: Path) -> OpenFile:
        source = _KeptFile(path, self._direct)
        try:
            fcntl.flock(source.buffered_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if identity_of(path).inode != source.identity.inode:
                raise FileNotFoundError(path)
            return OpenFile(source, self._reader)
        except BaseException:
            source.close()
            raise

"""The open files that pages are read from: those that this process writes, and those of the prefix cache.

A file of the prefix cache is locked while a layer refers to it, so it is not evicted. If it is removed all the same,
open descriptors keep its bytes.
"""

from __future__ import annotations

import fcntl
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

from mlx_flash.errors import CheckpointError
from mlx_flash.forks import finalize
from mlx_flash.kv.pages import InFile, Page
from mlx_flash.storage.prefetcher import BackgroundPrefetcher
from mlx_flash.storage.source import FileIdentity, SourceFile, identity_of

MOST_FILES = 64
"""Most files of the prefix cache that are open at once, with two descriptors each; macOS gives a process 256."""


class _GrowingFile(SourceFile):
    """A file that this process still writes to: a new size or time does not make it another file."""

    def _is_same(self, found: FileIdentity) -> bool:
        return (found.device, found.inode) == (self.identity.device, self.identity.inode)


class _KeptFile(SourceFile):
    """A file that is read after it was removed, too."""

    def check_unchanged(self, tensor: str) -> None:
        found = identity_of(self.buffered_fd)
        if found.nbytes != self.identity.nbytes:
            self._refuse(tensor, found)


class PageReader(BackgroundPrefetcher):
    """A reader of files that are created, grow, and are removed while it is open."""

    def add(self, path: Path, direct: bool) -> None:
        """Open a file that this process writes to. Raises: CheckpointError."""
        self.keep(_GrowingFile(path, direct))

    def keep(self, file: SourceFile) -> None:
        """Take an open file, which :meth:`remove` closes."""
        self._files[file.path] = file

    def remove(self, path: Path) -> None:
        """Close a file that will not be read any more."""
        if (file := self._files.pop(path, None)) is not None:
            file.close()


class StoredFile(NamedTuple):
    """A file of the prefix cache that may be closed, replaced or gone."""

    path: Path
    inode: int


class OpenFile:
    """A file of the prefix cache that is open and locked while this object lives."""

    def __init__(self, source: SourceFile, reader: PageReader) -> None:
        self.path = source.path
        self.inode = source.identity.inode
        finalize(self, reader.remove, source.path)
        reader.keep(source)


class StoredFiles:
    """The files of the prefix cache that a pool's layers refer to.

    Args:
        reader: the reader of the pool.
        direct: whether reads bypass the page cache.
    """

    def __init__(self, reader: PageReader, direct: bool) -> None:
        self._reader = reader
        self._direct = direct
        self._open: WeakValueDictionary[Path, OpenFile] = WeakValueDictionary()

    def open(self, page: Page[InFile]) -> Page[InFile] | None:
        """Return a page whose file is kept open; None if that is gone, replaced, being evicted, or one too many.

        Args:
            page: a page in a :class:`StoredFile`.
        """
        stored = page.where.file
        assert isinstance(stored, StoredFile)
        file = self._open.get(stored.path)
        if file is None and len(self._open) < MOST_FILES:
            with suppress(OSError, CheckpointError):
                file = self._open[stored.path] = self._opened(stored.path)
        if file is None or file.inode != stored.inode:
            return None
        return replace(page, where=replace(page.where, file=file))

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

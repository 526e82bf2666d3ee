"""Rows in files of the prefix cache, which layers on disk begin with. They are read where they are, without a copy.

A file is locked while a layer refers to it, so the prefix cache does not evict it. If it is removed all the same, open
descriptors keep its bytes.
"""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakValueDictionary

from mlx_flash.errors import CheckpointError
from mlx_flash.forks import finalize
from mlx_flash.kv.layout import Component
from mlx_flash.kv.pages import PageReader
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, round_up
from mlx_flash.storage.placement import Piece, Segment
from mlx_flash.storage.source import SourceFile, identity_of

MOST_FILES = 64
"""Open at once, with two descriptors each; macOS gives a process 256."""


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The first tokens of one layer in a file.

    Attributes:
        path, inode: the file.
        components: the arrays.
        offsets: of each array in the file, where it is ``(heads, capacity, width)``.
        capacity: tokens in the file.
        length: tokens that count.
    """

    path: Path
    inode: int
    components: tuple[Component, ...]
    offsets: tuple[int, ...]
    capacity: int
    length: int

    def segment(self, start: int, slot_offsets: Sequence[int], capacity: int, at: int) -> Segment:
        """Return the read that puts tokens from ``start`` on at token ``at`` of each head in a slot."""
        pieces = []
        for component, begin, target in zip(self.components, self.offsets, slot_offsets, strict=True):
            width = component.width_bytes
            for head in range(component.heads):
                source, place = begin + (head * self.capacity + start) * width, target + (head * capacity + at) * width
                pieces.append(Piece("KV cache, stored tokens", source, (self.length - start) * width, place))
        offset = pieces[0].offset // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
        nbytes = round_up(pieces[-1].end - offset, DIRECT_ALIGNMENT)
        numbers = (number for piece in pieces for number in (piece.offset, piece.nbytes, piece.buffer_offset))
        is_scattered = nbytes == sum(p.nbytes for p in pieces) and not any(n % DIRECT_ALIGNMENT for n in numbers)
        return Segment(self.path, offset, nbytes, None, tuple(pieces), is_scattered)


def cut_stored(stored: Sequence[StoredRows], length: int) -> tuple[StoredRows, ...]:
    """Return the first tokens of some rows."""
    kept: list[StoredRows] = []
    for rows in stored:
        if length > 0:
            kept.append(replace(rows, length=min(rows.length, length)))
        length -= rows.length
    return tuple(kept)


class _KeptFile(SourceFile):
    """A file that is read after it was removed, too."""

    def check_unchanged(self, tensor: str) -> None:
        found = identity_of(self.buffered_fd)
        if found.nbytes != self.identity.nbytes:
            self._refuse(tensor, found)


class OpenFile:
    """A file that is open and locked while this object lives."""

    def __init__(self, source: SourceFile, reader: PageReader) -> None:
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

    def open(self, rows: StoredRows) -> OpenFile | None:
        """Return the file of some rows; None if it is gone, replaced, being evicted, or one too many."""
        file = self._open.get(rows.path)
        if file is None and len(self._open) < MOST_FILES:
            with suppress(OSError, CheckpointError):
                file = self._open[rows.path] = self._opened(rows.path)
        return file if file is not None and file.inode == rows.inode else None

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

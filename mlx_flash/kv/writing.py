"""The files that layers on disk write their pages to: each page once, in the background.

A layer has a file of its own. Pages that the prefix cache wants go to a draft: it has the pages of all layers with some
tokens, and becomes a file of the prefix cache when it gets a name. Copies of a cache share pages. While one has a page,
it is never written again.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple, Protocol
from weakref import WeakSet

import numpy as np

from mlx_flash.errors import WriteError
from mlx_flash.files import close_all
from mlx_flash.forks import finalize
from mlx_flash.kv.layout import Component, RowBytes, RowLayout
from mlx_flash.kv.opened import DraftSource, GrowingFile, PageReader
from mlx_flash.kv.options import WRITE_BEHIND_BYTES
from mlx_flash.kv.pages import InFile, Page, joined
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, round_up
from mlx_flash.storage.source import SourceFile
from mlx_flash.workers import InOrder, Job


class PageUser(Protocol):
    """A layer that has pages in a file."""

    @property
    def pages(self) -> Sequence[Page[InFile]]:
        """The pages."""


Blocks = Sequence[tuple[int, memoryview]]
"""Blocks of bytes, each with its offset in a file."""


class Write(Job):
    """Blocks that are written behind.

    Args:
        file: the file; the job keeps it open.
        blocks: the blocks, with their offsets.
        count: called from the thread with the number of bytes written.
        is_checked: whether to compute checksums.

    Attributes:
        checksums: CRC-32 of the blocks, once they are written.
    """

    def __init__(
        self,
        file: WrittenFile,
        blocks: Blocks,
        count: Callable[[int], None],
        is_checked: bool,
    ) -> None:
        self.nbytes = sum(len(block) for _, block in blocks)
        self.checksums: list[int] = []
        super().__init__(_write_blocks, file, blocks, count, self.checksums if is_checked else None)


class WriteBehind:
    """A thread that writes blocks in order.

    Args:
        count: called from the thread with the number of bytes written.

    Attributes:
        nbytes: bytes written, or queued for it.
        limit_bytes: the most bytes queued; adding more blocks.
    """

    def __init__(self, count: Callable[[int], None] = lambda _: None) -> None:
        self.nbytes = 0
        self.limit_bytes = WRITE_BEHIND_BYTES
        self._count = count
        self._thread = InOrder("mlx-flash-kv-writer")
        self._waiting: deque[Write] = deque()

    def submit(self, file: WrittenFile, blocks: Blocks, *, is_checked: bool = False) -> Write:
        """Queue blocks for writing at their offsets in a file. Wait while too many bytes are queued."""
        write = Write(file, blocks, self._count, is_checked)
        self.nbytes += write.nbytes
        limit = min(self.limit_bytes, WRITE_BEHIND_BYTES)
        while self._waiting and sum(other.nbytes for other in self._waiting) + write.nbytes > limit:
            self._waiting[0].error()  # raised where its file is used next
            self._waiting.popleft()
        self._thread.submit(write)
        self._waiting.append(write)
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        return write

    def close(self) -> None:
        """End the thread, and drop the blocks that it has not begun to write."""
        self._thread.close()


def _write_blocks(
    file: WrittenFile,
    blocks: Blocks,
    count: Callable[[int], None],
    checksums: list[int] | None,
) -> None:
    for offset, block in blocks:
        done = 0
        while done < len(block):
            try:
                done += os.pwrite(file.fd, block[done:], offset + done)
            except OSError as error:
                raise WriteError(
                    f"cannot write {len(block)} bytes of the KV cache at offset {offset} of {file.path}: "
                    f"{error.strerror} after {done} bytes. Hint: make room on that disk, or set max_tokens."
                ) from error
    count(sum(len(block) for _, block in blocks))
    if checksums is not None:
        checksums += [zlib.crc32(block) for _, block in blocks]


class WrittenFile:
    """A file of pages that this process writes. It is removed with the object.

    Args:
        path: the file, which must not exist.
        reader: the reader that reads it.
        writer: the thread that writes it.
        source: opens it for the reader.

    Raises:
        WriteError: the file cannot be created.
    """

    def __init__(
        self, path: Path, reader: PageReader, writer: WriteBehind, source: Callable[[Path], SourceFile]
    ) -> None:
        self.path = path
        self.reader = reader
        self._descriptors = [_create(path)]
        self._close = finalize(self, _remove_file, path, self._descriptors, reader)
        reader.keep(source(path))
        self._writer = writer
        self._pending: deque[Write] = deque()

    @property
    def fd(self) -> int:
        """The descriptor for writing."""
        return self._descriptors[0]

    def submit(self, blocks: Blocks, *, is_checked: bool = False) -> Write:
        """Write blocks at their offsets. Their memory must not change any more.

        Raises:
            WriteError: an earlier write failed.
        """
        while self._pending and self._pending[0].done():
            self._finish_first()
        write = self._writer.submit(self, blocks, is_checked=is_checked)
        self._pending.append(write)
        return write

    def flush(self) -> None:
        """Wait until all pages can be read.

        Raises:
            WriteError: a write failed.
        """
        while self._pending:
            self._finish_first()

    def _finish_first(self) -> None:
        """Wait for the first write. One that failed stays, and fails again.

        The error is a new one each time: the traceback of one that is kept would keep the caller's caches.
        """
        error = self._pending[0].error()
        if isinstance(error, CancelledError):
            raise WriteError("the KV caches were closed")
        if error is not None:
            raise WriteError(str(error)) from error.__cause__
        self._pending.popleft()


class LayerFile(WrittenFile):
    """A file of pages of one layer, whose size is a multiple of chunks.

    Args:
        path, reader, writer: as for :class:`WrittenFile`.
        layout: layout of its rows.
        direct: whether reads bypass the page cache.

    Attributes:
        users: the layers that have pages in it.
    """

    def __init__(self, path: Path, layout: RowLayout, reader: PageReader, writer: WriteBehind, direct: bool) -> None:
        super().__init__(path, reader, writer, lambda path: GrowingFile(path, direct))
        self.layout = layout
        self.users: WeakSet[PageUser] = WeakSet()

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that are in use."""
        return len(self._used) * self.layout.step * self.layout.token_bytes

    @property
    def _used(self) -> set[int]:
        """Offsets of the pages in use."""
        return {page.where.offsets[0] for user in self.users for page in user.pages if page.where.file is self}

    def allocate(self, num_pages: int) -> list[Page[InFile]]:
        """Return the first free pages of the file. They are free until a layer has them."""
        used, layout = self._used, self.layout
        free = (offsets for offsets in map(layout.file_offsets, count()) if offsets[0] not in used)
        places = (InFile(self, layout.components, offsets, layout.strides) for offsets in islice(free, num_pages))
        return [Page(where, layout.step) for where in places]

    def write(self, pages: Sequence[Page[InFile]], rows: RowBytes) -> None:
        """Write rows ``(heads, tokens, bytes)`` that fill pages. Arguments and errors are as for :meth:`submit`."""
        begin = 0
        for run in joined(pages):
            blocks, end = [], begin + run.length
            for part, offset, stride in zip(rows, run.where.offsets, run.where.strides, strict=True):
                for head in range(len(part)):
                    blocks.append((offset + head * stride, np.ascontiguousarray(part[head, begin:end]).data.cast("B")))
            self.submit(blocks)
            begin = end


class DraftBlob(NamedTuple):
    """One array of one layer's page in a draft. The checksum is known once it is written."""

    component: Component
    length: int
    offset: int
    write: Write
    number: int

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.component.heads * self.length * self.component.width_bytes

    @property
    def checksum(self) -> int:
        """CRC-32 of the array."""
        return self.write.checksums[self.number]


class Draft(WrittenFile):
    """A file for the pages of all layers with some tokens, laid out as the prefix cache wants it.

    Args:
        path, reader, writer: as for :class:`WrittenFile`.
        room: bytes to leave free at the beginning.
        direct: whether reads bypass the page cache.

    Attributes:
        room: as given.
        is_taken: whether the prefix cache has it, and nothing more may be written to it. Set by the caller.
        is_named: whether it became a file of the prefix cache, which has another path.
    """

    def __init__(self, path: Path, room: int, reader: PageReader, writer: WriteBehind, direct: bool) -> None:
        super().__init__(path, reader, writer, lambda path: DraftSource(path, direct))
        self.room = room
        self.is_taken = False
        self.is_named = False
        self._end = room
        self._blobs: dict[tuple[int, int], DraftBlob] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the file, without the room at its beginning."""
        return self._end - self.room

    def add(self, layer: int, components: Sequence[Component], rows: RowBytes) -> Page[InFile]:
        """Write the page of a layer, ``(heads, tokens, bytes)`` for each array. Errors are as for :meth:`submit`."""
        offsets, blocks, end, length = list[int](), [], self._end, rows[0].shape[1]
        for part in rows:
            offsets.append(end)
            blocks.append((end, np.ascontiguousarray(part).data.cast("B")))
            end += round_up(part.nbytes, DIRECT_ALIGNMENT)
        self._end = end
        write = self.submit(blocks, is_checked=True)
        for index, (component, offset) in enumerate(zip(components, offsets, strict=True)):
            self._blobs[layer, index] = DraftBlob(component, length, offset, write, index)
        strides = tuple(length * component.width_bytes for component in components)
        return Page(InFile(self, tuple(components), tuple(offsets), strides), length)

    def name(self) -> None:
        """Note that it became a file of the prefix cache, to which nothing is written."""
        self.is_named = True
        close_all(self._descriptors)

    def finished(self) -> dict[tuple[int, int], DraftBlob] | None:
        """Wait until it is written. Any thread may.

        Returns:
            All arrays by layer and number, as they follow one another; None if something else is between them, or a
            write failed.
        """
        end = self.room
        for blob in (blobs := dict(self._blobs)).values():
            if blob.offset != end or blob.write.error() is not None:
                return None
            end += round_up(blob.nbytes, DIRECT_ALIGNMENT)
        return blobs if end == self._end else None


def _create(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise WriteError(f"cannot make {path} for the KV cache: {error.strerror}. Hint: check the disk.") from error


def _remove_file(path: Path, descriptors: list[int], reader: PageReader) -> None:
    reader.remove(path)
    close_all(descriptors)
    with suppress(OSError):  # it goes with its folder
        path.unlink()

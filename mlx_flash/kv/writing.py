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
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from mlx_flash.errors import WriteError
from mlx_flash.files import close_all, lock, write_at
from mlx_flash.forks import finalize
from mlx_flash.kv.options import WRITE_BEHIND_BYTES
from mlx_flash.kv.pages import Component, InFile, Page, RowBytes, RowLayout, dtype_name, joined
from mlx_flash.memory.pagecache import aligned_offsets
from mlx_flash.storage.prefetcher import BackgroundPrefetcher
from mlx_flash.storage.source import SourceFile, identity_of

T = TypeVar("T")

Blocks = Sequence[tuple[int, memoryview]]
"""Blocks of bytes, each with its offset in a file."""


class LockedFile(SourceFile):
    """A locked file that may grow, and is read on after it was moved or removed.

    Raises: OSError: another process is about to remove it.
    """

    hint = "start again with a fresh prompt cache"  # nobody else has keys and values that a file has lost

    def __init__(self, path: Path, direct: bool) -> None:
        super().__init__(path, direct)
        try:
            lock(self.buffered_fd, shared=True, wait=False, required=False)
        except BaseException:
            self.close()
            raise

    def check_unchanged(self, tensor: str) -> None:
        found = identity_of(self.buffered_fd)
        if found.nbytes < self.identity.nbytes:
            self._refuse(tensor, found)


class PageReader(BackgroundPrefetcher):
    """A reader of files that are created, grow, and are removed while it is open."""

    def __init__(self, *, direct: bool = True, **options: Any) -> None:
        super().__init__((), **options)
        self._direct = direct

    def open(self, path: Path) -> SourceFile:
        """Open and lock a file, which is read until :meth:`remove`. Raises: OSError, CheckpointError."""
        file = self._files[path] = LockedFile(path, self._direct)
        return file

    def remove(self, path: Path) -> None:
        """Close a file that will not be read any more."""
        if (file := self._files.pop(path, None)) is not None:
            file.close()


def _failure(write: Future[Any]) -> BaseException | None:
    """Wait for the end of a write. Return why it failed, a CancelledError if it did not begin; None if it did not."""
    try:
        return write.exception()
    except CancelledError as error:
        return error


class WriteBehind:
    """A thread that writes in order, and the queue before it. It calls ``count`` with the bytes of each write."""

    def __init__(
        self,
        limit_bytes: int = WRITE_BEHIND_BYTES,  # the most bytes queued, but for one write alone; may be changed
        name: str = "mlx-flash-kv-writer",
        count: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.nbytes = 0  # written, or queued for it
        self.limit_bytes = limit_bytes
        self._count = count
        self._thread = ThreadPoolExecutor(1, name)
        self._waiting: deque[tuple[Future[Any], int]] = deque()

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be written. Any thread may ask."""
        return sum(nbytes for write, nbytes in [*self._waiting] if not write.done())

    def make_room(self, nbytes: int) -> None:
        """Wait while more bytes would be queued than may be."""
        while self._waiting and (self._waiting[0][0].done() or self.queued_bytes + nbytes > self.limit_bytes):
            wait([self._waiting.popleft()[0]])

    def submit(self, nbytes: int, write: Callable[[], T]) -> Future[T]:
        """Queue a write of so many bytes, once there is room for them."""
        self.make_room(nbytes)
        self.nbytes += nbytes
        written = self._thread.submit(self._write, nbytes, write)
        self._waiting.append((written, nbytes))
        return written

    def _write(self, nbytes: int, write: Callable[[], T]) -> T:
        result = write()
        self._count(nbytes)
        return result

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything is written, at most so many seconds. Return whether it is."""
        return not wait([write for write, _ in self._waiting], timeout).not_done

    def close(self) -> None:
        """End the thread, and drop what it has not begun to write."""
        self._thread.shutdown(cancel_futures=True)


class WrittenFile:
    """A new file of pages that this process writes. It is removed with the object. Raises: WriteError."""

    def __init__(self, path: Path, reader: PageReader, writer: WriteBehind) -> None:
        self.path = path
        self.reader = reader
        self._descriptors = [_create(path)]
        finalize(self, _remove_file, path, self._descriptors, reader)
        reader.open(path)
        self._writer = writer
        self._pending: deque[Future[list[int]]] = deque()

    @property
    def fd(self) -> int:
        """The descriptor for writing."""
        return self._descriptors[0]

    def submit(self, blocks: Blocks, *, is_checked: bool = False) -> Future[list[int]]:
        """Write blocks, whose memory must not change any more. The result is the CRC-32 of each if they are checked.

        Raises: WriteError: an earlier write failed.
        """
        while self._pending and self._pending[0].done():
            self._finish_first()
        nbytes = sum(len(block) for _, block in blocks)
        write = self._writer.submit(nbytes, partial(self._write, blocks, is_checked))  # which keeps the file open
        self._pending.append(write)
        return write

    def _write(self, blocks: Blocks, is_checked: bool) -> list[int]:
        for offset, block in blocks:
            try:
                write_at(self.fd, block, offset)
            except OSError as error:
                raise WriteError(
                    f"cannot write {len(block)} bytes of the KV cache at offset {offset} of {self.path}: "
                    f"{error.strerror}. Hint: make room on that disk, or set kv_max_tokens."
                ) from error
        return [zlib.crc32(block) for _, block in blocks] if is_checked else []

    def flush(self) -> None:
        """Wait until all pages can be read. Raises: WriteError: a write failed."""
        while self._pending:
            self._finish_first()

    def _finish_first(self) -> None:
        """Wait for the first write. One that failed stays, and fails again.

        The error is a new one each time: the traceback of one that is kept would keep the caller's caches.
        """
        error = _failure(self._pending[0])
        if isinstance(error, CancelledError):
            raise WriteError("the KV caches were closed")
        if error is not None:
            raise WriteError(str(error)) from error.__cause__
        self._pending.popleft()


class LayerFile(WrittenFile):
    """A file of pages of one layer, whose size is a multiple of chunks."""

    def __init__(self, path: Path, layout: RowLayout, reader: PageReader, writer: WriteBehind) -> None:
        super().__init__(path, reader, writer)
        self.layout = layout
        self._used: WeakValueDictionary[int, InFile] = WeakValueDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that are in use."""
        return len(list(self._used.values())) * self.layout.step * self.layout.token_bytes

    def allocate(self, num_pages: int) -> list[Page[InFile]]:
        """Return the first free pages of the file. Each is free again when nothing refers to it."""
        layout, found = self.layout, list[Page[InFile]]()
        free = (offsets for offsets in map(layout.file_offsets, count()) if offsets[0] not in self._used)
        for offsets in islice(free, num_pages):
            where = self._used[offsets[0]] = InFile(self, layout.components, offsets, layout.strides)
            found.append(Page(where, layout.step))
        return found

    def write(self, pages: Sequence[Page[InFile]], rows: RowBytes) -> None:
        """Write rows ``(heads, tokens, bytes)`` that fill pages. Raises: WriteError: an earlier write failed."""
        begin = 0
        for run in joined(pages):
            blocks, end = [], begin + run.length
            for part, offset, stride in zip(rows, run.where.offsets, run.where.strides, strict=True):
                for head in range(len(part)):
                    blocks.append((offset + head * stride, np.ascontiguousarray(part[head, begin:end]).data.cast("B")))
            self.submit(blocks)
            begin = end


FILE_ALIGNMENT = 4096
"""Alignment of arrays in a file of the prefix cache, on every machine: pages of memory may be larger."""


class BlobInfo(NamedTuple):
    """An array in a file of the prefix cache. The file describes it in this order, without the offset."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    checksum: int  # CRC-32
    offset: int


class Draft(WrittenFile):
    """A file for the pages of all layers with some tokens, laid out as the prefix cache wants it.

    ``room`` bytes are left free at its beginning.
    """

    def __init__(self, path: Path, room: int, reader: PageReader, writer: WriteBehind) -> None:
        super().__init__(path, reader, writer)
        self.room = room
        self._end = room
        self._pages: dict[int, tuple[list[BlobInfo], Future[list[int]]]] = {}  # by layer, with no checksums yet

    @property
    def nbytes(self) -> int:
        """Bytes of the file, without the room at its beginning."""
        return self._end - self.room

    def add(self, layer: int, components: Sequence[Component], rows: RowBytes) -> Page[InFile]:
        """Write the page of a layer, ``(heads, tokens, bytes)`` for each array. Errors are as for :meth:`submit`."""
        *offsets, self._end = aligned_offsets([part.nbytes for part in rows], FILE_ALIGNMENT, self._end)
        data, length = [np.ascontiguousarray(part).data.cast("B") for part in rows], rows[0].shape[1]
        blobs = [
            BlobInfo(f"{layer}.{i}", dtype_name(c.dtype), (*c.shape, length, c.width), len(part), 0, offset)
            for i, (c, part, offset) in enumerate(zip(components, data, offsets, strict=True))
        ]
        self._pages[layer] = blobs, self.submit([*zip(offsets, data, strict=True)], is_checked=True)
        return Page(InFile.packed(self, components, offsets, length), length)

    @property
    def is_named(self) -> bool:
        """True once it is a file of the prefix cache, to which nothing is written."""
        return not self._descriptors

    def name(self) -> None:
        """Note that it became a file of the prefix cache, which has another path."""
        close_all(self._descriptors)

    def finished(self) -> list[BlobInfo] | None:
        """Wait until it is written, in any thread. Return its arrays as they follow one another.

        Return None if something else is between them, or a write failed.
        """
        found = list[BlobInfo]()
        for blobs, write in list(self._pages.values()):
            if _failure(write) is not None:
                return None
            found += [blob._replace(checksum=each) for blob, each in zip(blobs, write.result(), strict=True)]
        places = aligned_offsets([blob.nbytes for blob in found], FILE_ALIGNMENT, self.room)
        return found if places == [*(blob.offset for blob in found), self._end] else None


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

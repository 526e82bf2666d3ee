"""Files of pages: written once, in the background, and read into slots.

A page holds the rows of ``step`` tokens of one layer. Copies of a cache share pages. While one has a
page, it is never written again.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

import numpy as np

from mlx_flash.errors import WriteError
from mlx_flash.forks import finalize
from mlx_flash.kv.layout import RowBytes, RowLayout, Run
from mlx_flash.kv.options import WRITE_BEHIND_BYTES
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, round_up
from mlx_flash.storage.placement import Piece, Segment
from mlx_flash.storage.prefetcher import BackgroundPrefetcher
from mlx_flash.storage.source import FileIdentity, SourceFile
from mlx_flash.workers import Workers


class _GrowingFile(SourceFile):
    """A file that this process still writes to: a new size or time does not make it another file."""

    def _is_same(self, found: FileIdentity) -> bool:
        return (found.device, found.inode) == (self.identity.device, self.identity.inode)


class PageReader(BackgroundPrefetcher):
    """A reader of files that are created, grow, and are removed while it is open."""

    def add(self, path: Path, direct: bool) -> None:
        """Open a file. Raises: CheckpointError."""
        self.keep(_GrowingFile(path, direct))

    def keep(self, file: SourceFile) -> None:
        """Take an open file, which :meth:`remove` closes."""
        self._files[file.path] = file

    def remove(self, path: Path) -> None:
        """Close a file that will not be read any more."""
        if (file := self._files.pop(path, None)) is not None:
            file.close()


class Write:
    """Blocks that are written behind. A lock, and no future: an interrupt may leave the lock of a future held.

    Args:
        file: the file; the object keeps it open.
        blocks: the blocks, with their offsets.
    """

    def __init__(self, file: LayerFile, blocks: Sequence[tuple[int, memoryview]]) -> None:
        self.nbytes = sum(len(block) for _, block in blocks)
        self.is_done = False
        self._error: BaseException | None = None
        self._content: tuple[LayerFile, Sequence[tuple[int, memoryview]]] | None = (file, blocks)
        self._under_way = threading.Lock()
        self._under_way.acquire()

    def run(self, count: Callable[[int], None]) -> None:
        """Write the blocks, in the thread that does."""
        assert self._content is not None
        try:
            _write_blocks(*self._content, count)
        except BaseException as error:
            self._error = error  # raised where the file is used next
            raise
        finally:
            self._content = None
            self.is_done = True
            self._under_way.release()

    def error(self) -> BaseException | None:
        """Wait for the end. Return the error that it ended with."""
        if not self.is_done:
            with self._under_way:
                pass
        return self._error


class WriteBehind:
    """A thread that writes blocks in order.

    An executor whose start of a thread was interrupted may have two threads, or a task less. So the order is that of a
    queue of our own, and each task writes all that is in it.

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
        self._pool = Workers(1, "mlx-flash-kv-writer")
        self._waiting: deque[Write] = deque()
        self._queue: deque[Write] = deque()
        self._one_writes = threading.Lock()

    def submit(self, file: LayerFile, blocks: Sequence[tuple[int, memoryview]]) -> Write:
        """Queue blocks for writing at their offsets in a file. Wait while too many bytes are queued."""
        write = Write(file, blocks)
        self.nbytes += write.nbytes
        limit = min(self.limit_bytes, WRITE_BEHIND_BYTES)
        while self._waiting and sum(other.nbytes for other in self._waiting) + write.nbytes > limit:
            self._waiting[0].error()  # raised where its file is used next
            self._waiting.popleft()
        self._queue.append(write)
        self._pool.submit(self._write_queued)
        self._waiting.append(write)
        while self._waiting and self._waiting[0].is_done:
            self._waiting.popleft()
        return write

    def close(self) -> None:
        """End the thread, and drop the blocks that it has not begun to write."""
        self._queue.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _write_queued(self) -> None:
        with self._one_writes:
            while self._queue:
                try:
                    write = self._queue.popleft()
                except IndexError:
                    return  # dropped by close
                write.run(self._count)  # after an error another task goes on
                del write


def _write_blocks(file: LayerFile, blocks: Sequence[tuple[int, memoryview]], count: Callable[[int], None]) -> None:
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


class PageUser(Protocol):
    """A layer that has pages in a file."""

    @property
    def pages(self) -> Sequence[int]:
        """The pages."""


class LayerFile:
    """A file of pages. It is removed with the object.

    Args:
        path: the file, which must not exist.
        layout: layout of its rows.
        reader: the reader that reads it.
        writer: the thread that writes it.
        direct: whether reads bypass the page cache.

    Attributes:
        users: the layers that have pages in it.

    Raises:
        WriteError: the file cannot be created.
    """

    def __init__(self, path: Path, layout: RowLayout, reader: PageReader, writer: WriteBehind, direct: bool) -> None:
        self.path = path
        self.layout = layout
        self.reader = reader
        self.fd = _create(path)
        self._close = finalize(self, _remove_file, path, self.fd, reader)
        reader.add(path, direct)
        self._writer = writer
        self._pending: deque[Write] = deque()
        self.users: WeakSet[PageUser] = WeakSet()

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that are in use."""
        return len(self._used) * self.layout.step * self.layout.token_bytes

    @property
    def _used(self) -> set[int]:
        return {page for rows in self.users for page in rows.pages}

    def allocate(self, num_pages: int) -> list[int]:
        """Return the first free pages of the file. They are free until a layer has them."""
        used = self._used
        return list(islice((page for page in count() if page not in used), num_pages))

    def write(self, pages: Sequence[int], rows: RowBytes) -> None:
        """Write rows ``(heads, tokens, bytes)`` that fill pages. Their memory must not change any more.

        Raises:
            WriteError: an earlier write failed.
        """
        self._check()
        step = self.layout.step
        for run in self.layout.runs(pages):
            blocks = []
            for index, head, offset in self.layout.file_offsets(run.page):
                block = rows[index][head, run.number * step : (run.number + run.count) * step]
                blocks.append((offset, np.ascontiguousarray(block).data.cast("B")))
            self._pending.append(self._writer.submit(self, blocks))

    def _check(self) -> None:
        while self._pending and self._pending[0].is_done:
            self._finish_first()

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
        if error is not None:
            raise WriteError(str(error)) from error.__cause__
        self._pending.popleft()

    def segments(self, pages: Sequence[int], first: int, capacity: int, at: int = 0) -> list[Segment]:
        """Return the reads that put pages of a sequence, from number ``first`` on, in their places in a slot.

        Args:
            pages: the pages.
            first: number of the first one to read.
            capacity: tokens that the slot has room for.
            at: place of the page of number 0 in it, in tokens.
        """
        offsets = self.layout.slot_offsets(capacity)
        return [s for run in self.layout.runs(pages, first) for s in self._segments_of(run, offsets, capacity, at)]

    def _segments_of(self, run: Run, offsets: Sequence[int], capacity: int, at: int) -> Iterator[Segment]:
        step = self.layout.step
        for index, head, offset in self.layout.file_offsets(run.page):
            width, token = self.layout.components[index].width_bytes, at + run.number * step
            place, nbytes = offsets[index] + (head * capacity + token) * width, run.count * step * width
            piece = Piece(f"KV cache, tokens from {token} on", offset, nbytes, place)
            yield _segment(self.path, piece)


def _segment(path: Path, piece: Piece) -> Segment:
    """Return a read in place, if it covers whole pages of memory, or through a bounce buffer."""
    in_place = not any(number % DIRECT_ALIGNMENT for number in (piece.offset, piece.nbytes, piece.buffer_offset))
    start = piece.offset // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
    nbytes = round_up(piece.end - start, DIRECT_ALIGNMENT)
    return Segment(path, start, nbytes, piece.buffer_offset if in_place else None, (piece,))


def _create(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise WriteError(f"cannot make {path} for the KV cache: {error.strerror}. Hint: check the disk.") from error


def _remove_file(path: Path, fd: int, reader: PageReader) -> None:
    reader.remove(path)
    os.close(fd)
    with suppress(OSError):  # it goes with its folder
        path.unlink()

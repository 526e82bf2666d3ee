"""The files that layers on disk write their pages to: each page once, in the background.

Copies of a cache share pages. While one has a page, it is never written again.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

import numpy as np

from mlx_flash.errors import WriteError
from mlx_flash.forks import finalize
from mlx_flash.kv.layout import RowBytes, RowLayout
from mlx_flash.kv.opened import PageReader
from mlx_flash.kv.options import WRITE_BEHIND_BYTES
from mlx_flash.kv.pages import InFile, Page, joined
from mlx_flash.workers import Workers


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
    def pages(self) -> Sequence[Page[InFile]]:
        """The pages."""


class LayerFile:
    """A file of pages of one layer. It is removed with the object.

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
        """Offsets of the pages in use."""
        return {page.where.offsets[0] for user in self.users for page in user.pages if page.where.file is self}

    def allocate(self, num_pages: int) -> list[Page[InFile]]:
        """Return the first free pages of the file. They are free until a layer has them."""
        used, layout = self._used, self.layout
        free = (offsets for offsets in map(layout.file_offsets, count()) if offsets[0] not in used)
        places = (InFile(self, layout.components, offsets, layout.strides) for offsets in islice(free, num_pages))
        return [Page(where, layout.step) for where in places]

    def write(self, pages: Sequence[Page[InFile]], rows: RowBytes) -> None:
        """Write rows ``(heads, tokens, bytes)`` that fill pages. Their memory must not change any more.

        Raises:
            WriteError: an earlier write failed.
        """
        self._check()
        begin = 0
        for run in joined(pages):
            blocks, end = [], begin + run.length
            for part, offset, stride in zip(rows, run.where.offsets, run.where.strides, strict=True):
                for head in range(len(part)):
                    blocks.append((offset + head * stride, np.ascontiguousarray(part[head, begin:end]).data.cast("B")))
            self._pending.append(self._writer.submit(self, blocks))
            begin = end

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

"""The files that layers on disk write their pages to: each page once, in the background.

A layer has a file of its own. Copies of a cache share pages. While one has a page, it is never written again.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from mlx_flash.errors import WriteError
from mlx_flash.files import close_all, lock, write_at
from mlx_flash.forks import finalize
from mlx_flash.kv.options import WRITE_BEHIND_BYTES
from mlx_flash.kv.pages import InFile, Page, RowBytes, RowLayout, joined
from mlx_flash.storage.prefetcher import BackgroundPrefetcher
from mlx_flash.storage.ranges import SourceFile
from mlx_flash.storage.safetensors import identity_of
from mlx_flash.storage.workers import Work, Workers


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
        file = LockedFile(path, self._direct)
        with self._lock:
            self._files[path] = file
        return file

    def remove(self, file: SourceFile) -> None:
        """Close a file that will not be read any more. Its path may lead to another one meanwhile."""
        with self._lock:
            if self._files.get(file.path) is file:
                del self._files[file.path]
            file.close()


class Write(Work[None]):
    """A write of some bytes that is queued."""

    def __init__(self, nbytes: int, write: Callable[[], None]) -> None:
        super().__init__(write)
        self.nbytes = nbytes


class WriteBehind:
    """A thread that writes in order, and the queue before it. It calls ``count`` with the bytes of each write."""

    def __init__(
        self,
        limit_bytes: int = WRITE_BEHIND_BYTES,  # the most bytes queued, but for one write alone; may be changed
        name: str = "kv-writer",
        count: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.nbytes = 0  # written, or queued for it
        self.limit_bytes = limit_bytes
        self._count = count
        self._is_closed = False
        self._thread: Workers[Write] = Workers(name, 1, self._run)
        self._waiting: deque[Write] = deque()

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be written. Any thread may ask."""
        return sum(write.nbytes for write in [*self._waiting] if not write.is_done)

    def make_room(self, nbytes: int) -> None:
        """Wait while more bytes would be queued than may be."""
        while self._waiting and (self._waiting[0].is_done or self.queued_bytes + nbytes > self.limit_bytes):
            self._waiting.popleft().wait()

    def submit(self, nbytes: int, work: Callable[[], None]) -> Write:
        """Queue a write of so many bytes, once there is room for them."""
        if self._is_closed:
            raise _closed()
        self.make_room(nbytes)
        self.nbytes += nbytes
        write = Write(nbytes, partial(self._counted, nbytes, work))
        self._thread.start()
        self._thread.queue.put(write)
        self._waiting.append(write)
        return write

    def _run(self, write: Write) -> None:
        write.run(_closed() if self._is_closed else None)

    def _counted(self, nbytes: int, work: Callable[[], None]) -> None:
        work()
        self._count(nbytes)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything is written, at most so many seconds. Return whether it is."""
        end = None if timeout is None else time.monotonic() + timeout
        left = (None if end is None else max(0.0, end - time.monotonic()) for _ in count())
        return all(map(Write.wait, [*self._waiting], left))

    def close(self) -> None:
        """End the thread, and drop what it has not begun to write."""
        self._is_closed = True
        self._thread.end()


def _closed() -> WriteError:
    return WriteError("the KV caches were closed")


class LayerFile:
    """A new file for pages of one layer, whose size is a multiple of chunks. It is removed with the object.

    Raises: WriteError: it cannot be made.
    """

    def __init__(self, path: Path, layout: RowLayout, reader: PageReader, writer: WriteBehind) -> None:
        self.path, self.layout, self.reader, self._writer = path, layout, reader, writer
        self._descriptors, read = list[int](), list[SourceFile]()
        finalize(self, _remove_file, path, self._descriptors, reader, read)
        _create_into(self._descriptors, path)
        read.append(reader.open(path))
        self._pending: deque[Write] = deque()
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
            while self._pending and self._pending[0].is_done:
                self._finish_first()
            nbytes = sum(len(block) for _, block in blocks)
            self._pending.append(self._writer.submit(nbytes, partial(self._write, blocks)))  # which keeps the file open
            begin = end

    def _write(self, blocks: Sequence[tuple[int, memoryview]]) -> None:
        for offset, block in blocks:
            try:
                write_at(self._descriptors[0], block, offset)
            except OSError as error:
                raise WriteError(
                    f"cannot write {len(block)} bytes of the KV cache at offset {offset} of {self.path}: "
                    f"{error.strerror}. Hint: make room on that disk, or set kv_max_tokens."
                ) from error

    def flush(self) -> None:
        """Wait until all pages can be read. Raises: WriteError: a write failed."""
        while self._pending:
            self._finish_first()

    def _finish_first(self) -> None:
        """Wait for the first write. One that failed stays, and fails again.

        The error is a new one each time: the traceback of one that is kept would keep the caller's caches.
        """
        if (error := self._pending[0].failure()) is not None:
            raise WriteError(str(error)) from error.__cause__
        self._pending.popleft()


def _create_into(descriptors: list[int], path: Path) -> None:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptors.extend(map(os.open, [path], [flags], [0o600]))  # one step, as in :mod:`mlx_flash.files`
    except OSError as error:
        raise WriteError(f"cannot make {path} for the KV cache: {error.strerror}. Hint: check the disk.") from error


def _remove_file(path: Path, descriptors: list[int], reader: PageReader, read: list[SourceFile]) -> None:
    for file in read:
        reader.remove(file)
    close_all(descriptors)
    with suppress(OSError):  # it goes with its folder
        path.unlink()

"""Blocks that a thread writes to files in order, behind the computation."""

from __future__ import annotations

import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from mlx_flash.errors import WriteError
from mlx_flash.kv.options import WRITE_BEHIND_BYTES
from mlx_flash.workers import Workers


class Target(Protocol):
    """An open file that blocks are written to."""

    path: Path

    @property
    def fd(self) -> int:
        """The descriptor for writing."""


class Write:
    """Blocks that are written behind. A lock, and no future: an interrupt may leave the lock of a future held.

    Args:
        file: the file; the object keeps it open.
        blocks: the blocks, with their offsets.
        is_checked: whether to compute checksums.

    Attributes:
        checksums: CRC-32 of the blocks, once they are written.
    """

    def __init__(self, file: Target, blocks: Sequence[tuple[int, memoryview]], is_checked: bool) -> None:
        self.nbytes = sum(len(block) for _, block in blocks)
        self.checksums: list[int] = []
        self._is_checked = is_checked
        self.is_done = False
        self._error: BaseException | None = None
        self._content: tuple[Target, Sequence[tuple[int, memoryview]]] | None = (file, blocks)
        self._under_way = threading.Lock()
        self._under_way.acquire()

    def run(self, count: Callable[[int], None]) -> None:
        """Write the blocks, in the thread that does."""
        assert self._content is not None
        try:
            _write_blocks(*self._content, count)
            if self._is_checked:
                self.checksums = [zlib.crc32(block) for _, block in self._content[1]]
        except BaseException as error:
            self._error = error  # raised where the file is used next
            raise
        finally:
            self._end()

    def drop(self) -> None:
        """Write nothing."""
        self._error = WriteError("the KV caches were closed")
        self._end()

    def _end(self) -> None:
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

    def submit(self, file: Target, blocks: Sequence[tuple[int, memoryview]], *, is_checked: bool = False) -> Write:
        """Queue blocks for writing at their offsets in a file. Wait while too many bytes are queued."""
        write = Write(file, blocks, is_checked)
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
        while self._queue:
            try:
                self._queue.popleft().drop()
            except IndexError:
                break  # the thread took it
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


def _write_blocks(file: Target, blocks: Sequence[tuple[int, memoryview]], count: Callable[[int], None]) -> None:
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

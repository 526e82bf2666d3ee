"""Layers on disk: pages of a file, and the last tokens in memory.

A layer may begin with rows of the prefix cache's files, which are read where they are.
"""

from __future__ import annotations

import mmap

import numpy as np

from mlx_flash.forks import finalize
from mlx_flash.kv.layout import RowBytes
from mlx_flash.kv.pages import LayerFile
from mlx_flash.kv.stored import OpenFile, StoredRows, cut_stored
from mlx_flash.storage.placement import Segment


class DiskRows:
    """The tokens of one layer on disk; the last ones, which do not fill a page, in memory.

    Args:
        file: the file of the pages.

    Attributes:
        head: the first tokens, in files of the prefix cache.
        head_tokens: number of tokens in it.
        pages: the pages in the order of their tokens, which follow those of the head.
        length: number of tokens.
    """

    def __init__(self, file: LayerFile) -> None:
        self.file = file
        self.layout = file.layout
        self.head: tuple[StoredRows, ...] = ()
        self.head_tokens = 0
        self.pages: list[int] = []
        self.length = 0
        self._tail = [np.empty((c.heads, self.layout.step, c.width_bytes), np.uint8) for c in self.layout.components]
        self._files: list[OpenFile] = []
        finalize(self, file.release_later, self.pages)

    @property
    def paged_tokens(self) -> int:
        """Number of tokens in files."""
        return self.head_tokens + len(self.pages) * self.layout.step

    def whole_tokens(self, length: int) -> int:
        """Return how many of some first tokens can be kept without copying the rest of a page."""
        length = min(length, self.paged_tokens)
        return length - max(0, length - self.head_tokens) % self.layout.step

    def refer(self, rows: StoredRows, file: OpenFile) -> None:
        """Add stored tokens behind those of the head; there are no others yet."""
        self.head += (rows,)
        self._files.append(file)
        self.head_tokens += rows.length
        self.length += rows.length

    @property
    def tail_bytes(self) -> int:
        """Bytes in memory."""
        return sum(part.nbytes for part in self._tail)

    @property
    def tail(self) -> RowBytes:
        """The rows of tokens that are in no page."""
        return [part[:, : self.length - self.paged_tokens] for part in self._tail]

    def append(self, rows: RowBytes) -> None:
        """Add tokens, ``(heads, tokens, bytes)`` for each array. Their bytes are copied.

        Raises:
            WriteError: the disk is full, or fails.
        """
        num_new = rows[0].shape[1]
        waiting = self.length - self.paged_tokens
        num_full = (waiting + num_new) // self.layout.step
        used = num_full * self.layout.step - waiting if num_full else 0
        if num_full:
            block = [np.concatenate([tail, new[:, :used]], axis=1) for tail, new in zip(self.tail, rows, strict=True)]
            pages = self.file.allocate(num_full)
            try:
                self.file.write(pages, block)
            except BaseException:
                self.file.release(pages)
                raise
            self.pages += pages
        start = 0 if num_full else waiting
        for part, new in zip(self._tail, rows, strict=True):
            part[:, start : start + num_new - used] = new[:, used:]
        self.length += num_new

    def truncate(self, length: int) -> None:
        """Remove the tokens from ``length`` on.

        Raises:
            ReadError: tokens that do not fill a page any more could not be read.
        """
        if length < self.head_tokens:
            self.head, self.head_tokens = cut_stored(self.head, length), length
        num_pages, rest = divmod(length - self.head_tokens, self.layout.step)
        if num_pages < len(self.pages):
            if rest:
                self._read_tail(num_pages)
            self.file.release(self.pages[num_pages:])
            del self.pages[num_pages:]
        self.length = length

    def _read_tail(self, number: int) -> None:
        """Read the rows of one page into memory."""
        start = self.head_tokens + number * self.layout.step
        for tail, page in zip(self._tail, self._read_files(start, start + self.layout.step), strict=True):
            tail[:] = page

    def read(self, start: int, stop: int) -> RowBytes:
        """Return copies of the rows of some tokens.

        Raises:
            ReadError: pages could not be read.
        """
        begin, end = self.whole_tokens(start), min(stop, self.paged_tokens)
        if end > self.head_tokens:
            end += (self.head_tokens - end) % self.layout.step  # to the end of a page
        found = self._read_files(begin, max(begin, end))
        rows = [np.concatenate([pages, tail], axis=1) for pages, tail in zip(found, self.tail, strict=True)]
        return [part[:, start - begin : stop - begin] for part in rows]

    def segments(self, start: int, stop: int, capacity: int, base: int = 0) -> list[Segment]:
        """Return the reads that put tokens of the files in a slot, from the page with ``start`` on.

        Args:
            start: the first token.
            stop: the token after the last one: in the head, or the end of a page.
            capacity: tokens that the slot has room for.
            base: the token at its beginning.
        """
        offsets, at, found = self.layout.slot_offsets(capacity), 0, list[Segment]()
        for rows in cut_stored(self.head, stop):
            skipped = max(0, start - at)
            if skipped < rows.length:
                found.append(rows.segment(skipped, offsets, capacity, at + skipped - base))
            at += rows.length
        pages = self.pages[: max(0, stop - self.head_tokens) // self.layout.step]
        number = max(0, start - self.head_tokens) // self.layout.step
        return found + self.file.segments(pages, number, capacity, self.head_tokens - base)

    def _read_files(self, start: int, stop: int) -> RowBytes:
        """Read tokens from the beginning of a page, or any of the head, to the end of one."""
        self.file.flush()
        capacity = stop - start
        buffer = memoryview(mmap.mmap(-1, max(self.layout.slot_bytes(capacity), 1)))
        if stop > start:
            self.file.reader.submit(self.segments(start, stop, capacity, start), buffer, urgent=True).wait()
        everything = np.frombuffer(buffer, np.uint8)
        return [
            everything[at : at + c.heads * capacity * c.width_bytes].reshape(c.heads, capacity, c.width_bytes)
            for at, c in zip(self.layout.slot_offsets(capacity), self.layout.components, strict=True)
        ]

    def drop(self, start: int, stop: int) -> None:
        """Remove whole pages; the tokens behind them move up."""
        first, last = start // self.layout.step, stop // self.layout.step
        self.file.release(self.pages[first:last])
        del self.pages[first:last]
        self.length -= stop - start

    def fork(self) -> DiskRows:
        """Return a copy that shares the files."""
        other = DiskRows(self.file)
        other.head, other.head_tokens, other._files = self.head, self.head_tokens, list(self._files)
        self.file.retain(self.pages)
        other.pages += self.pages
        other.length = self.length
        for mine, copy in zip(self._tail, other._tail, strict=True):
            copy[:] = mine
        return other

"""Layers on disk: pages in files, and the last tokens in memory.

Pages are in the layer's own file, or in files of the prefix cache, which are read where they are.
"""

from __future__ import annotations

import mmap

import numpy as np

from mlx_flash.kv.pages import FilePages, InFile, Page, RowBytes, cut, num_tokens, segments
from mlx_flash.kv.writing import LayerFile
from mlx_flash.layout.reachable import Opaque
from mlx_flash.memory.pagecache import round_up


class DiskRows(Opaque):
    """The tokens of one layer on disk; the last ones, which do not fill a page, in memory.

    Attributes:
        file: the layer's own.
        pages: in the order of their tokens.
        paged_tokens: number of tokens in them.
        length: number of all tokens.
        capacity: tokens that its buffers in memory would have room for; 0 if it had none.
        expected: tokens after the pass, if parts of a prompt share it, this one's or another's; else 0.
    """

    def __init__(self, file: LayerFile) -> None:
        self.file = file
        self.layout = file.layout
        self.expected = 0
        self.pages: FilePages = ()
        self.paged_tokens = self.length = self.capacity = 0
        components, step = self.layout.components, self.layout.step
        # room for a page; rows behind the last token mean nothing
        self._tail: RowBytes = [np.empty((c.heads, step, c.width_bytes), np.uint8) for c in components]

    def takes_more(self, num_new: int) -> bool:
        """Return whether so many new tokens may take more memory: they begin another page."""
        step = self.layout.step
        return round_up(self.length, step) != round_up(self.length + num_new, step)

    def first_pages(self, length: int) -> FilePages:
        """Return pages with some first tokens, or with fewer: a page of the layer's own file is not cut."""
        pages = cut(self.pages, length)
        is_cut = bool(pages) and pages[-1].where.file is self.file and pages[-1].length < self.layout.step
        return pages[:-1] if is_cut else pages

    def flush(self) -> None:
        """Wait until all pages can be read. Raises: WriteError: a write failed."""
        for file in {page.where.file for page in self.pages}:
            file.flush()

    def refer(self, *pages: Page[InFile]) -> None:
        """Add pages, which all tokens are in then."""
        self.pages += pages
        self.paged_tokens = self.length = self.paged_tokens + num_tokens(pages)

    @property
    def tail_bytes(self) -> int:
        """Bytes in memory."""
        return sum(part.nbytes for part in self._tail)

    @property
    def tail(self) -> RowBytes:
        """The rows of tokens that are in no page."""
        return [part[:, : self.length - self.paged_tokens] for part in self._tail]

    def append(self, rows: RowBytes) -> None:
        """Add tokens, ``(heads, tokens, bytes)`` for each array. Their bytes are copied; full pages go to the file.

        Raises: WriteError: an earlier write failed; nothing was added.
        """
        end = self.length + rows[0].shape[1]
        num_pages, used = (end - self.paged_tokens) // self.layout.step, 0
        if num_pages:
            used = self.paged_tokens + num_pages * self.layout.step - self.length
            block = [np.concatenate([old, new[:, :used]], axis=1) for old, new in zip(self.tail, rows, strict=True)]
            pages = self.file.allocate(num_pages)
            self.file.write(pages, block)
            self.refer(*pages)  # now, because the tail is about to be written over
        start = self.length - self.paged_tokens
        for part, new in zip(self._tail, rows, strict=True):
            part[:, start : start + new.shape[1] - used] = new[:, used:]
        self.length = end

    def truncate(self, length: int) -> None:
        """Remove the tokens from ``length`` on. Raises: ReadError: those that do not fill a page any more."""
        if length < self.paged_tokens:
            pages = self.first_pages(length)
            paged = num_tokens(pages)
            if paged < length:
                self._tail = _read_pages(self, paged, paged + self.layout.step)
            self.pages, self.paged_tokens = pages, paged
        self.length = length

    def read(self, start: int, stop: int) -> RowBytes:
        """Return copies of the rows of some tokens. Raises: ReadError."""
        paged = self.paged_tokens
        found = _read_pages(self, start, max(start, min(stop, paged)))
        tails = [tail[:, max(0, start - paged) : max(0, stop - paged)] for tail in self.tail]
        return [np.concatenate(pair, axis=1) for pair in zip(found, tails, strict=True)]

    def fork(self) -> DiskRows:
        """Return a copy that shares the pages."""
        other = DiskRows(self.file)
        for mine, copy in zip(self._tail, other._tail, strict=True):
            copy[:] = mine
        other.pages, other.paged_tokens = self.pages, self.paged_tokens
        other.length, other.capacity = self.length, self.capacity
        return other


def _read_pages(disk: DiskRows, start: int, stop: int) -> RowBytes:
    """Read tokens of pages."""
    disk.flush()
    capacity = stop - start
    buffer = memoryview(mmap.mmap(-1, max(disk.layout.slot_bytes(capacity), 1)))
    if stop > start:
        reads = segments(disk.pages, disk.layout, start, stop, capacity, start)
        disk.file.reader.submit(reads, buffer, urgent=True).wait()
    everything = np.frombuffer(buffer, np.uint8)
    return [
        everything[at : at + c.heads * capacity * c.width_bytes].reshape(c.heads, capacity, c.width_bytes)
        for at, c in zip(disk.layout.slot_offsets(capacity), disk.layout.components, strict=True)
    ]

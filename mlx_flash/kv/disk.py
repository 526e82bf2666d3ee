"""Layers on disk: pages in files, and the last tokens in memory.

Pages are in the layer's own file or in files of the prefix cache, which are read where they are.
"""

from __future__ import annotations

import mmap
from typing import NamedTuple

import numpy as np

from mlx_flash.kv.layout import RowBytes
from mlx_flash.kv.pages import FilePages, InFile, Page, cut, num_tokens, segments
from mlx_flash.kv.written import LayerFile
from mlx_flash.layout.arrays import Opaque
from mlx_flash.storage.placement import Segment


class _Held(NamedTuple):
    """Everything that a layer on disk holds. It is replaced as a whole, so an interrupt leaves the old or the new one.

    Attributes:
        tail: room for a page in memory. Rows behind the last token mean nothing.
        length: number of tokens.
        pages: the pages in the order of their tokens.
        paged_tokens: number of tokens in them.
    """

    tail: RowBytes
    length: int = 0
    pages: FilePages = ()
    paged_tokens: int = 0

    def with_pages(self, *pages: Page[InFile]) -> _Held:
        """Return this with more pages; tokens are in them."""
        paged = self.paged_tokens + num_tokens(pages)
        return self._replace(pages=(*self.pages, *pages), paged_tokens=paged, length=paged)


class DiskRows(Opaque):
    """The tokens of one layer on disk; the last ones, which do not fill a page, in memory.

    Args:
        file: the layer's own file. A page in it is free when no layer that uses the file has it.
        num_forgotten: number of tokens that were dropped from between them.
    """

    def __init__(self, file: LayerFile, num_forgotten: int = 0) -> None:
        self.file = file
        self.layout = file.layout
        self.num_forgotten = num_forgotten
        components, step = self.layout.components, self.layout.step
        self._held = _Held([np.empty((c.heads, step, c.width_bytes), np.uint8) for c in components])
        file.users.add(self)

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self._held.length

    @property
    def pages(self) -> FilePages:
        """The pages in the order of their tokens."""
        return self._held.pages

    @property
    def paged_tokens(self) -> int:
        """Number of tokens in pages."""
        return self._held.paged_tokens

    def first_pages(self, length: int) -> FilePages:
        """Return pages with some first tokens, or with fewer: a page of the layer's own file is not cut."""
        pages = cut(self.pages, length)
        is_cut = bool(pages) and pages[-1].where.file is self.file and pages[-1].length < self.layout.step
        return pages[:-1] if is_cut else pages

    def refer(self, page: Page[InFile]) -> None:
        """Add a page of the prefix cache. All tokens are in pages."""
        self._held = self._held.with_pages(page)

    @property
    def tail_bytes(self) -> int:
        """Bytes in memory."""
        return sum(part.nbytes for part in self._held.tail)

    @property
    def tail(self) -> RowBytes:
        """The rows of tokens that are in no page."""
        return [part[:, : self.length - self.paged_tokens] for part in self._held.tail]

    def append(self, rows: RowBytes) -> None:
        """Add tokens, ``(heads, tokens, bytes)`` for each array. Their bytes are copied.

        An interrupt may leave some of them added: those that fill pages.

        Raises:
            WriteError: the disk is full, or fails.
        """
        held, num_new, step = self._held, rows[0].shape[1], self.layout.step
        waiting = held.length - held.paged_tokens
        num_full = (waiting + num_new) // step
        used = num_full * step - waiting if num_full else 0
        if num_full:
            block = [np.concatenate([tail, new[:, :used]], axis=1) for tail, new in zip(self.tail, rows, strict=True)]
            pages = self.file.allocate(num_full)
            self.file.write(pages, block)
            self._held = held = held.with_pages(*pages)  # now, because the tail is about to be written over
        start = 0 if num_full else waiting
        for part, new in zip(held.tail, rows, strict=True):
            part[:, start : start + num_new - used] = new[:, used:]
        self._held = held._replace(length=held.length + num_new - used)

    def truncate(self, length: int) -> None:
        """Remove the tokens from ``length`` on.

        Raises:
            ReadError: tokens that do not fill a page any more could not be read.
        """
        held = self._held
        if length < held.paged_tokens:
            pages = self.first_pages(length)
            paged = num_tokens(pages)
            if paged < length:
                held = held._replace(tail=self._read_files(paged, paged + self.layout.step))
            held = held._replace(pages=pages, paged_tokens=paged)
        self._held = held._replace(length=length)

    def read(self, start: int, stop: int) -> RowBytes:
        """Return copies of the rows of some tokens.

        Raises:
            ReadError: pages could not be read.
        """
        paged = self.paged_tokens
        found = self._read_files(start, max(start, min(stop, paged)))
        tails = [tail[:, max(0, start - paged) : max(0, stop - paged)] for tail in self.tail]
        return [np.concatenate(pair, axis=1) for pair in zip(found, tails, strict=True)]

    def segments(self, start: int, stop: int, capacity: int, base: int = 0) -> list[Segment]:
        """Return the reads that put tokens of pages in a slot, see :func:`mlx_flash.kv.pages.segments`."""
        return segments(self.pages, self.layout, start, stop, capacity, base)

    def _read_files(self, start: int, stop: int) -> RowBytes:
        """Read tokens of pages."""
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

    def fork(self, start: int = 0, stop: int = 0) -> DiskRows:
        """Return a copy that shares the pages, without those of some tokens; the tokens behind them move up."""
        other, held = DiskRows(self.file, self.num_forgotten + stop - start), self._held
        for mine, copy in zip(held.tail, other._held.tail, strict=True):
            copy[:] = mine
        pages = (*cut(held.pages, start), *held.pages[len(cut(held.pages, stop)) :])
        num_dropped = stop - start
        other._held = _Held(other._held.tail, held.length - num_dropped, pages, held.paged_tokens - num_dropped)
        return other

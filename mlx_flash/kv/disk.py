"""Layers on disk: pages in files, and the last tokens in memory.

Pages are in the layer's own file, in drafts, or in files of the prefix cache, which are read where they are.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from mlx_flash.kv.kvledger import Layer
from mlx_flash.kv.pages import FilePages, InFile, Page, RowBytes, cut, num_tokens, segments
from mlx_flash.kv.writing import Draft, LayerFile
from mlx_flash.layout.reachable import Opaque
from mlx_flash.memory.pagecache import round_up


class Planned(NamedTuple):
    """A page that the prefix cache wants."""

    end: int  # the token after its last one
    layer: int  # its number in the draft
    draft: Callable[[], Draft | None]  # returns the file to write it to; None where there is none


NOTHING_PLANNED: Mapping[int, Planned] = MappingProxyType({})


class DiskRows(Opaque):
    """The tokens of one layer on disk; the last ones, which do not fill a page, in memory.

    Attributes:
        file: the layer's own.
        pages: in the order of their tokens.
        paged_tokens: number of tokens in them.
        length: number of all tokens.
        capacity: tokens that its buffers in memory would have room for; 0 if it had none.
        num_forgotten: tokens that were dropped from between the others.
        expected: tokens after the pass, if parts of a prompt share it, this one's or another's; else 0.
    """

    def __init__(self, file: LayerFile, num_forgotten: int = 0) -> None:
        self.file = file
        self.layout = file.layout
        self.num_forgotten = num_forgotten
        self.expected = 0
        self.pages: FilePages = ()
        self.paged_tokens = self.length = self.capacity = 0
        components, step = self.layout.components, self.layout.step
        # room for a page; rows behind the last token mean nothing
        self._tail: RowBytes = [np.empty((c.heads, step, c.width_bytes), np.uint8) for c in components]

    @property
    def in_numbers(self) -> Layer:
        """The layer as the ledger sees it."""
        return Layer(self.layout.token_bytes, self.length, is_on_disk=True)

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

    def append(self, rows: RowBytes, planned: Mapping[int, Planned] = NOTHING_PLANNED) -> None:
        """Add tokens, ``(heads, tokens, bytes)`` for each array. Their bytes are copied.

        Planned pages, by first token, go to drafts; others to the layer's own file. Raises: WriteError: some tokens may
        have been added, those that fill pages.
        """
        begin, length, end = self.paged_tokens, self.length, self.length + rows[0].shape[1]
        while (found := _next_pages(self, begin, end, planned)) is not None:
            stop, draft = found
            fresh = [new[:, max(0, begin - length) : stop - length] for new in rows]
            block = [np.concatenate(pair, axis=1) for pair in zip(self.tail, fresh, strict=True)]
            if draft is None:
                pages = self.file.allocate((stop - begin) // self.layout.step)
                self.file.write(pages, block)
            else:
                pages = [draft.add(planned[begin].layer, self.layout.components, block)]
            self.refer(*pages)  # now, because the tail is about to be written over
            begin = stop
        used, start = max(0, begin - length), max(0, length - begin)
        for part, new in zip(self._tail, rows, strict=True):
            part[:, start : start + end - length - used] = new[:, used:]
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

    def fork(self, start: int = 0, stop: int = 0) -> DiskRows:
        """Return a copy that shares the pages, without those of some tokens; the tokens behind them move up."""
        num_dropped = stop - start
        other = DiskRows(self.file, self.num_forgotten + num_dropped)
        for mine, copy in zip(self._tail, other._tail, strict=True):
            copy[:] = mine
        other.pages = (*cut(self.pages, start), *self.pages[len(cut(self.pages, stop)) :])
        other.paged_tokens, other.length = self.paged_tokens - num_dropped, self.length - num_dropped
        other.capacity = self.capacity
        return other


def draft_of(disk: DiskRows, start: int, stop: int) -> Draft | None:
    """Return the draft that has some tokens of a layer as a page; None if none has."""
    begin = disk.paged_tokens
    for page in reversed(disk.pages):
        begin -= page.length
        if begin <= start:
            file, is_page = page.where.file, begin == start and begin + page.length == stop
            return file if is_page and isinstance(file, Draft) else None
    return None


def _next_pages(
    disk: DiskRows, begin: int, end: int, planned: Mapping[int, Planned]
) -> tuple[int, Draft | None] | None:
    """Return the end of the next pages, and their draft; None if the tokens up to ``end`` fill no page."""
    page, step = planned.get(begin), disk.layout.step
    if page is not None and disk.length <= page.end <= end:
        draft = page.draft()
        if draft is not None:
            return page.end, draft
    upcoming = min([other for other in planned if other > begin and not (other - begin) % step], default=end)
    num_full = (min(upcoming, end) - begin) // step
    return (begin + num_full * step, None) if num_full else None


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

"""Layers on disk: pages of a file, and the last tokens in memory.

A layer may begin with rows of the prefix cache's files, which are read where they are.
"""

from __future__ import annotations

import mmap
from typing import NamedTuple

import numpy as np

from mlx_flash.kv.layout import RowBytes
from mlx_flash.kv.pages import LayerFile
from mlx_flash.kv.stored import OpenFile, StoredRows, cut_stored
from mlx_flash.layout.arrays import Opaque
from mlx_flash.storage.placement import Segment


class _Held(NamedTuple):
    """Everything that a layer on disk holds. It is replaced as a whole, so an interrupt leaves the old or the new one.

    Attributes:
        tail: room for a page in memory. Rows behind the last token mean nothing.
        length: number of tokens.
        pages: the pages in the order of their tokens, which follow those of the head.
        head: the first tokens, in files of the prefix cache.
        head_tokens: number of tokens in it.
        files: the open files of the head.
    """

    tail: RowBytes
    length: int = 0
    pages: tuple[int, ...] = ()
    head: tuple[StoredRows, ...] = ()
    head_tokens: int = 0
    files: tuple[OpenFile, ...] = ()


class DiskRows(Opaque):
    """The tokens of one layer on disk; the last ones, which do not fill a page, in memory.

    Args:
        file: the file of the pages. A page is free when no layer that uses the file has it.
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
    def head_tokens(self) -> int:
        """Number of first tokens in files of the prefix cache."""
        return self._held.head_tokens

    @property
    def pages(self) -> tuple[int, ...]:
        """The pages in the order of their tokens, which follow those of the prefix cache."""
        return self._held.pages

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
        held, length = self._held, self.length + rows.length
        self._held = held._replace(
            head=(*held.head, rows), files=(*held.files, file), head_tokens=length, length=length
        )

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
        held, num_new = self._held, rows[0].shape[1]
        waiting = self.length - self.paged_tokens
        num_full = (waiting + num_new) // self.layout.step
        used = num_full * self.layout.step - waiting if num_full else 0
        if num_full:
            block = [np.concatenate([tail, new[:, :used]], axis=1) for tail, new in zip(self.tail, rows, strict=True)]
            pages = self.file.allocate(num_full)
            self.file.write(pages, block)
            # now, because the tail is about to be written over
            self._held = held = held._replace(pages=(*held.pages, *pages), length=held.length + used)
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
        if length < held.head_tokens:
            held = held._replace(head=cut_stored(held.head, length), head_tokens=length)
        num_pages, rest = divmod(length - held.head_tokens, self.layout.step)
        if num_pages < len(held.pages):
            if rest:
                start = held.head_tokens + num_pages * self.layout.step
                held = held._replace(tail=self._read_files(start, start + self.layout.step))
            held = held._replace(pages=held.pages[:num_pages])
        self._held = held._replace(length=length)

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
        for rows in cut_stored(self._held.head, stop):
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

    def fork(self, start: int = 0, stop: int = 0) -> DiskRows:
        """Return a copy that shares the files, without some whole pages; the tokens behind them move up."""
        other, held = DiskRows(self.file, self.num_forgotten + stop - start), self._held
        for mine, copy in zip(held.tail, other._held.tail, strict=True):
            copy[:] = mine
        first, last = start // self.layout.step, stop // self.layout.step
        pages, length = (*held.pages[:first], *held.pages[last:]), held.length - (stop - start)
        other._held = held._replace(tail=other._held.tail, pages=pages, length=length)
        return other

"""Positional reads of ranges of files into memory that the caller owns.

``os.preadv`` releases the GIL and writes straight into the caller's memory.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mlx_flash.errors import ReadError, TruncatedFileError
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, drop_cached
from mlx_flash.storage.placement import Segment
from mlx_flash.storage.source import SourceFile

RETRIES = 3
"""Number of times that a read is repeated after an I/O error."""

RETRY_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Way:
    """A way of reading.

    Attributes:
        read_size: bytes of one read.
        direct: past the page cache, if the file system can.
    """

    read_size: int
    direct: bool = True


class RangeReader:
    """A reader of parts of segments, from any number of threads.

    Args:
        read_size: the longest range in bytes.
        in_place: read straight into the caller's memory where that is aligned; otherwise through bounce buffers.

    Attributes:
        way: of reading; its ``read_size`` is at most the one given.
        num_retries: reads that were repeated after an I/O error.
    """

    def __init__(self, read_size: int, in_place: bool) -> None:
        self.way = Way(read_size)
        self._read_size = read_size
        self.num_retries = 0
        self._in_place = in_place
        self._lock = threading.Lock()
        self._local = threading.local()

    def read(
        self, file: SourceFile, segment: Segment, start: int, stop: int, buffer: memoryview, keep_cached: bool
    ) -> None:
        """Read the pieces of ``[start, stop)`` of a segment.

        Args:
            file: the segment's file.
            segment: what to read.
            start: first byte of the file.
            stop: first byte of the file after the range.
            buffer: the buffer of the segment's offsets.
            keep_cached: read through the page cache and leave the pages there.

        Raises:
            ReadError: bytes could not be read.
        """
        fd = None if keep_cached or not self.way.direct else file.direct_fd
        if fd is None:
            self._read_buffered(file.buffered_fd, segment, start, stop, buffer, keep_cached)
        elif segment.buffer_offset is not None and self._in_place:
            at = segment.buffer_offset + start - segment.offset
            self._read_direct(fd, segment, start, buffer[at : at + stop - start])
        else:
            self._read_bounced(fd, segment, start, stop, buffer)

    def _read_direct(self, fd: int, segment: Segment, start: int, target: memoryview) -> None:
        self._fill(fd, segment, start, target, min(len(target), segment.wanted_end - start), DIRECT_ALIGNMENT)

    def _read_bounced(self, fd: int, segment: Segment, start: int, stop: int, buffer: memoryview) -> None:
        bounce = self._bounce_buffer()[: stop - start]
        self._read_direct(fd, segment, start, bounce)
        for offset, part in _parts(segment, start, stop, buffer):
            source = bounce[offset - start : offset - start + len(part)]
            np.copyto(np.frombuffer(part, np.uint8), np.frombuffer(source, np.uint8))  # releases the GIL

    def _read_buffered(
        self, fd: int, segment: Segment, start: int, stop: int, buffer: memoryview, keep_cached: bool
    ) -> None:
        for offset, part in _parts(segment, start, stop, buffer):
            self._fill(fd, segment, offset, part, len(part), 1)
        if not keep_cached:
            drop_cached(fd, start, min(stop, segment.wanted_end) - start)

    def _fill(self, fd: int, segment: Segment, offset: int, target: memoryview, needed: int, alignment: int) -> None:
        """Read until ``needed`` bytes are in ``target``. More may come, up to the whole target."""
        got = retries = 0
        while got < needed:
            try:
                count = os.preadv(fd, [target[got:]], offset + got)
                if 0 < count < min(alignment, needed - got) and offset + got + count < os.fstat(fd).st_size:
                    raise OSError(errno.EIO, "too few bytes came")  # a direct read cannot go on from there
            except OSError as error:
                if error.errno != errno.EIO or retries == RETRIES:
                    raise _read_error(segment, offset + got, error) from error
                retries += 1
                with self._lock:
                    self.num_retries += 1
                time.sleep(RETRY_SECONDS * retries)
                continue
            if count < min(alignment, needed - got):
                raise _truncated_error(segment, offset, got + count, needed)
            got = got + count if got + count >= needed else (got + count) // alignment * alignment

    def _bounce_buffer(self) -> memoryview:
        buffer: memoryview | None = getattr(self._local, "bounce", None)
        if buffer is None:
            buffer = self._local.bounce = memoryview(mmap.mmap(-1, self._read_size))
        return buffer


def _parts(segment: Segment, start: int, stop: int, buffer: memoryview) -> Iterable[tuple[int, memoryview]]:
    """Yield the file offset and the place in the buffer of each piece in ``[start, stop)``."""
    for piece in segment.pieces:
        low, high = max(start, piece.offset), min(stop, piece.end)
        if low < high:
            at = piece.buffer_offset + low - piece.offset
            yield low, buffer[at : at + high - low]


def _read_error(segment: Segment, offset: int, error: OSError) -> ReadError:
    piece = segment.piece_at(offset)
    return ReadError(
        f"cannot read '{piece.name}' ({piece.nbytes} bytes at offset {piece.offset}) in {segment.path}: "
        f"{error.strerror} at offset {offset}. Hint: check the disk; the next call reads it again."
    )


def _truncated_error(segment: Segment, offset: int, got: int, needed: int) -> TruncatedFileError:
    piece = segment.piece_at(offset + got)
    return TruncatedFileError(
        f"read {got} of {needed} bytes at offset {offset}, of '{piece.name}' ({piece.nbytes} bytes at offset "
        f"{piece.offset}) in {segment.path}: the file is truncated. Hint: put the file back or download it again, and "
        "load the model again."
    )

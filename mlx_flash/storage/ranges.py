"""Positional reads of ranges of files into memory that the caller owns.

``os.preadv`` releases the GIL and writes straight into the caller's memory, or into a bounce buffer that is copied.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from mlx_flash.errors import CheckpointError, CheckpointNotFoundError, FileChangedError, ReadError, TruncatedFileError
from mlx_flash.memory.driver import DriverCopies, DriverError
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, drop_cached, open_buffered, open_direct
from mlx_flash.storage.blocks import BlockReader, BlockTable
from mlx_flash.storage.placement import Piece, Place, Segment, read_pages
from mlx_flash.storage.safetensors import FileIdentity, Shard, TensorRecord, identity_of, is_coded, read_shard

RETRIES = 3
"""Number of times that a read is repeated after an I/O error."""

RETRY_SECONDS = 0.02

Arrival = Literal["in place", "copied by the driver", "bounced", "buffered"]
"""Ways of bytes to MLX's memory: the disk writes them there; all reads go to bounce buffers, and CUDA's driver copies
them; direct reads go to bounce buffers, and the processor copies them; there are no direct reads."""


class Buffer(Protocol):
    """Memory that reads write to: a memoryview, or one whose parts lie apart. No slice of it spans two parts."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: slice, /) -> memoryview: ...


class SourceFile:
    """A file that is read while the model runs, through the page cache and, if that is wanted and possible, past it.

    Without a shard, as it was when the model was loaded, the file counts as it is opened. Raises: CheckpointError.
    """

    hint: ClassVar[str] = "put the file back or download it again, and load the model again"

    def __init__(self, path: Path, direct: bool, shard: Shard | None = None) -> None:
        self.path, self.table = path, None if shard is None else shard.blocks
        self._name = str(path)  # computing it costs more than the stat
        self._is_open = True
        try:
            self.buffered_fd = open_buffered(path)
            try:
                self.identity = identity_of(self.buffered_fd) if shard is None else shard.identity
                self.direct_fd = open_direct(path) if direct else None
            except BaseException:
                os.close(self.buffered_fd)
                raise
        except FileNotFoundError:
            raise CheckpointNotFoundError(f"cannot open {path}: no such file. Hint: {self.hint}.") from None
        except OSError as error:
            hint = "check who may read it" if isinstance(error, PermissionError) else "check the disk, and load again"
            raise CheckpointError(f"cannot open {path} for reading: {error.strerror}. Hint: {hint}.") from error

    def check_unchanged(self, tensor: str) -> None:
        """Check that the path still leads to the same file, and that nobody has written to it. Costs one ``stat``."""
        try:
            found = identity_of(self._name)
        except OSError as error:
            raise FileChangedError(
                f"cannot go on reading '{tensor}' from {self.path}: {error.strerror}. Hint: {self.hint}."
            ) from error
        if found != self.identity:
            self._refuse(tensor, found)

    def _refuse(self, tensor: str, found: FileIdentity) -> None:
        expected = self.identity.nbytes
        if found.nbytes < expected:
            raise TruncatedFileError(
                f"cannot go on reading '{tensor}' from {self.path}: the file was truncated since the model was "
                f"loaded, from {expected} to {found.nbytes} bytes. Hint: {self.hint}."
            )
        raise FileChangedError(
            f"cannot go on reading '{tensor}' from {self.path}: the file was changed or replaced by another one since "
            f"the model was loaded (other {self.identity.differences(found)}). Hint: load the model again."
        )

    def stored(self, start: int, stop: int) -> tuple[int, int]:
        """Return offset and length of the bytes of the file that the range ``[start, stop)`` of its tensors needs."""
        if self.table is not None:
            return self.table.span(start, stop)
        return start, min(stop, self.identity.nbytes) - start

    def cuts(self, start: int, stop: int, step: int) -> Iterable[int]:
        """Return the starts of ranges of at most ``step`` bytes. Blocks stay whole."""
        return range(start, stop, step) if self.table is None else self.table.cuts(start, stop, step)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self.buffered_fd)
            if self.direct_fd is not None:
                os.close(self.direct_fd)


class Part(NamedTuple):
    """A part of a segment that is read at once.

    All that a read needs to know is here: while Python prepares one, other threads wait for its lock.
    """

    file: SourceFile  # that of the segment
    segment: Segment
    start: int  # first byte of the file
    stop: int  # first byte after the part
    places: tuple[Place, ...]  # of what is wanted of it
    nbytes: int  # of what is wanted
    needed: int  # bytes from the start to the end of what is wanted; pages may go on after that
    bounce_offset: int  # its place in a bounce buffer

    def pieces(self, buffer: Buffer) -> Iterator[tuple[int, memoryview]]:
        """Yield the file offset and the place in a buffer of each piece of what is wanted."""
        for offset, at, nbytes in self.places:
            yield offset, buffer[at : at + nbytes]

    def drop_cached(self) -> None:
        drop_cached(self.file.buffered_fd, self.start, self.needed)


class RangeReader:
    """A reader of parts of segments, each of at most ``read_size`` bytes, from any number of threads."""

    def __init__(self, read_size: int, arrival: Arrival) -> None:
        self._read_size = read_size
        self.num_retries = 0
        self.in_place = arrival == "in place"  # aligned bytes need no bounce buffer
        self.has_driver = arrival == "copied by the driver"
        self._driver = DriverCopies(read_size) if self.has_driver else None
        self._lock = threading.Lock()
        self._local = threading.local()

    def read(self, part: Part, buffer: Buffer, keep_cached: bool) -> None:
        """Read what is wanted of a part of a segment. It has arrived after :meth:`copy`. Raises: ReadError.

        ``keep_cached`` reads through the page cache and leaves the pages there.
        """
        file, segment, start, stop, *_ = part
        fd = None if keep_cached else file.direct_fd
        if file.table is not None:
            self._read_blocks(part, fd, buffer, keep_cached, file.table)
        elif self._driver is not None:
            bounce = self._driver.bounce_buffer[part.bounce_offset : part.bounce_offset + stop - start]
            if fd is None:  # whole pages would be more bytes than the plan counts
                first = part.places[0][0] - start
                self._fill(part, fd, start + first, bounce[first : part.needed], part.needed - first)
            else:
                self._read_direct(part, fd, bounce)
        elif fd is None:
            for offset, piece in part.pieces(buffer):
                self._fill(part, fd, offset, piece, len(piece))
        elif segment.buffer_offset is not None and self.in_place:
            at = segment.buffer_offset + start - segment.offset
            self._read_direct(part, fd, buffer[at : at + stop - start])
        elif segment.is_scattered and self.in_place:
            self._read_scattered(part, fd, buffer)
        else:
            self._read_bounced(part, fd, buffer)
        if fd is None and not keep_cached and file.table is None:
            part.drop_cached()

    def copy(self, parts: Sequence[Part], buffer: Buffer) -> None:
        """Have the driver copy parts that this thread has read, and wait for it. Raises: ReadError."""
        if self._driver is None:
            return
        try:
            self._driver.copy(
                (part.bounce_offset + offset - part.start, buffer[at : at + nbytes])
                for part in parts
                for offset, at, nbytes in part.places
            )
        except DriverError as error:
            raise _read_error(parts[0].segment, parts[0].start, f"{error} when it was copied to the GPU, at") from error

    def close(self) -> None:
        """Give the memory of bounce buffers back. No thread may read any more."""
        if self._driver is not None:
            self._driver.close()

    def _read_blocks(self, part: Part, fd: int | None, buffer: Buffer, keep_cached: bool, table: BlockTable) -> None:
        """Read compressed blocks, and decode them to the caller's memory, or to where the driver copies from."""
        reader: BlockReader | None = getattr(self._local, "blocks", None)
        if reader is None:
            reader = self._local.blocks = BlockReader(self._read_size)
        path, segment = part.file.path, part.segment

        def fetch(name: str, offset: int, nbytes: int, coded: memoryview) -> None:
            pages = read_pages(path, [Piece(name, offset, nbytes, 0)])
            stored = part._replace(segment=pages, start=offset, stop=offset + nbytes, places=(), needed=nbytes)
            if fd is not None:
                self._read_direct(stored, fd, coded[: pages.nbytes])
                return
            self._fill(stored, fd, offset, coded[:nbytes], nbytes)
            if not keep_cached:
                stored.drop_cached()

        for offset, piece in part.pieces(buffer):
            if self._driver is not None:
                at = part.bounce_offset + offset - part.start
                piece = self._driver.bounce_buffer[at : at + len(piece)]
            reader.read(path, table, segment.piece_at(offset).name, offset, piece, fetch)

    def _read_direct(self, part: Part, fd: int, target: memoryview) -> None:
        self._fill(part, fd, part.start, target, part.needed)

    def _read_scattered(self, part: Part, fd: int, buffer: Buffer) -> None:
        pieces = list(part.pieces(buffer))
        with suppress(OSError):
            if os.preadv(fd, [piece for _, piece in pieces], part.start) == part.stop - part.start:
                return
        for offset, piece in pieces:  # one by one, with retries
            self._fill(part, fd, offset, piece, len(piece))

    def _read_bounced(self, part: Part, fd: int, buffer: Buffer) -> None:
        bounce: memoryview | None = getattr(self._local, "bounce", None)
        if bounce is None:
            bounce = self._local.bounce = memoryview(mmap.mmap(-1, self._read_size))
        self._read_direct(part, fd, bounce[: part.stop - part.start])
        for offset, piece in part.pieces(buffer):
            source = bounce[offset - part.start :][: len(piece)]
            np.copyto(np.frombuffer(piece, np.uint8), np.frombuffer(source, np.uint8))  # releases the GIL

    def _fill(self, part: Part, fd: int | None, offset: int, target: memoryview, needed: int) -> None:
        """Read until ``needed`` bytes are in ``target``. More may come, up to the whole target."""
        fd, alignment = (part.file.buffered_fd, 1) if fd is None else (fd, DIRECT_ALIGNMENT)
        got = retries = 0
        while True:
            try:
                count = os.preadv(fd, [target[got:]], offset + got)
                if got + count >= needed:
                    return
                if 0 < count < min(alignment, needed - got) and offset + got + count < os.fstat(fd).st_size:
                    raise OSError(errno.EIO, "too few bytes came")  # a direct read cannot go on from there
            except OSError as error:
                if error.errno != errno.EIO or retries == RETRIES:
                    raise _read_error(part.segment, offset + got, f"{error.strerror} at") from error
                retries += 1
                with self._lock:
                    self.num_retries += 1
                time.sleep(RETRY_SECONDS * retries)
                continue
            if count < min(alignment, needed - got):
                raise _truncated_error(part, offset, got + count, needed)
            got = (got + count) // alignment * alignment


def _read_error(segment: Segment, offset: int, reason: str) -> ReadError:
    piece = segment.piece_at(offset)
    return ReadError(
        f"cannot read '{piece.name}' ({piece.nbytes} bytes at offset {piece.offset}) in {segment.path}: "
        f"{reason} offset {offset}. Hint: check the disk; the next call reads it again."
    )


def _truncated_error(part: Part, offset: int, got: int, needed: int) -> TruncatedFileError:
    piece = part.segment.piece_at(offset + got)
    return TruncatedFileError(
        f"read {got} of {needed} bytes at offset {offset}, of '{piece.name}' ({piece.nbytes} bytes at offset "
        f"{piece.offset}) in {part.file.path}: the file is truncated. Hint: {part.file.hint}."
    )


def read_pieces(record: TensorRecord, buffer: memoryview) -> Iterator[memoryview]:
    """Yield the bytes of a tensor piece by piece, each at the start of a buffer. The page cache keeps nothing of it."""
    path, offset, nbytes = record.path, record.offset, record.nbytes
    try:
        file = SourceFile(path, direct=False, shard=read_shard(path) if is_coded(path) else None)
    except CheckpointError as error:
        raise ReadError(
            f"cannot read {record.name!r} ({nbytes} bytes at offset {offset}) in {path}: {error}"
        ) from error
    with closing(file):
        reader = RangeReader(len(buffer), "buffered")
        for start in range(offset, offset + nbytes, len(buffer)):
            stop = min(start + len(buffer), offset + nbytes)
            piece = Piece(record.name, offset, nbytes, offset - start)
            segment = Segment(path, offset, nbytes, None, (piece,))
            part = Part(file, segment, start, stop, segment.places(start, stop), stop - start, stop - start, 0)
            reader.read(part, buffer, keep_cached=False)
            yield buffer[: stop - start]

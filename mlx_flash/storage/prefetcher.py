"""Reads of ranges of files into memory that the caller owns, by threads in the background.

``os.preadv`` releases the GIL and writes straight into the caller's memory, or into a bounce buffer that is copied. The
threads see file descriptors, numbers and memoryviews, never an MLX object: MLX's streams belong to threads.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np

from mlx_flash.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ClosedError,
    FileChangedError,
    ReadError,
    TruncatedFileError,
)
from mlx_flash.forks import THREAD_PREFIX, finalize
from mlx_flash.memory.driver import DriverCopies, DriverError
from mlx_flash.memory.pagecache import (
    DIRECT_ALIGNMENT,
    drop_cached,
    is_cached,
    open_buffered,
    open_direct,
    round_up,
)
from mlx_flash.storage.blocks import BLOCK_BYTES, BlockReader, BlockTable
from mlx_flash.storage.placement import Piece, Place, Segment, read_pages
from mlx_flash.storage.safetensors import (
    IDENTITY_FIELDS,
    FileIdentity,
    Shard,
    TensorRecord,
    identity_of,
    is_coded,
    read_shard,
)

T = TypeVar("T")

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
            found = IDENTITY_FIELDS(os.stat(self._name))  # noqa: PTH116 - runs for each unit, so without identity_of
        except OSError as error:
            raise FileChangedError(
                f"cannot go on reading '{tensor}' from {self.path}: {error.strerror}. Hint: {self.hint}."
            ) from error
        if found != self.identity:
            self._refuse(tensor, FileIdentity(*found))

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

    def drop_cached(self) -> None:
        drop_cached(self.file.buffered_fd, self.start, self.needed)


class RangeReader:
    """A reader of parts of segments, each of at most ``read_size`` bytes, from any number of threads."""

    def __init__(self, read_size: int, arrival: Arrival) -> None:
        self._read_size = read_size
        self.num_retries = 0
        self.in_place = arrival == "in place"  # aligned bytes need no bounce buffer
        self._driver = DriverCopies(read_size) if arrival == "copied by the driver" else None
        self.has_driver = self._driver is not None
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
            for offset, at, nbytes in part.places:
                self._fill(part, fd, offset, buffer[at : at + nbytes], nbytes)
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
        assert self._driver is not None
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

        for offset, at, nbytes in part.places:
            if self._driver is not None:
                at = part.bounce_offset + offset - part.start
            piece = (buffer if self._driver is None else self._driver.bounce_buffer)[at : at + nbytes]
            reader.read(path, table, segment.piece_at(offset).name, offset, piece, fetch)

    def _read_direct(self, part: Part, fd: int, target: memoryview) -> None:
        self._fill(part, fd, part.start, target, part.needed)

    def _read_scattered(self, part: Part, fd: int, buffer: Buffer) -> None:
        with suppress(OSError):
            pieces = [buffer[at : at + nbytes] for _, at, nbytes in part.places]
            if os.preadv(fd, pieces, part.start) == part.stop - part.start:
                return
        for offset, at, nbytes in part.places:  # one by one, with retries
            self._fill(part, fd, offset, buffer[at : at + nbytes], nbytes)

    def _read_bounced(self, part: Part, fd: int, buffer: Buffer) -> None:
        bounce: memoryview | None = getattr(self._local, "bounce", None)
        if bounce is None:
            bounce = self._local.bounce = memoryview(mmap.mmap(-1, self._read_size))
        self._read_direct(part, fd, bounce[: part.stop - part.start])
        for offset, at, nbytes in part.places:
            source = np.frombuffer(bounce, np.uint8, nbytes, offset - part.start)
            np.copyto(np.frombuffer(buffer[at : at + nbytes], np.uint8), source)  # releases the GIL

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


CACHED_BLOCK_BYTES = 4 << 20
"""Blocks are cached as a whole. They are chosen evenly over each file, so that no unit waits longer than others."""

REFRESH_SECONDS = 5.0
"""The machine is looked at so often, while something is read."""

GOLDEN = 0.6180339887498949
"""Fractions of its multiples fill the unit interval evenly, and a smaller share is part of a larger one."""

_STEP = 1 / 16
"""A share rises by whole steps only, and falls at once."""


class CachedShare:
    """The share of all blocks, 0 to 1, that is read through the page cache. It follows the free memory of the machine.

    Direct reads leave free memory of the machine idle. A fixed part of the files is read through the page cache
    instead, so that the next pass finds it there. It is part of no budget: the system takes these pages back whenever a
    program needs memory. The rest is read directly, or each pass would push out what the next one needs. ``room``
    returns the bytes of memory that nothing else needs now; cached blocks count as free.
    """

    def __init__(self, nbytes: int, room: Callable[[], int]) -> None:
        self.share = 0.0
        self._nbytes = max(nbytes, 1)
        self.room = room

    @property
    def file_bytes(self) -> int:
        """Bytes of the files that are read through the page cache now."""
        return int(self.share * self._nbytes)

    def leave_out(self, nbytes: int) -> None:
        """Divide the memory among fewer bytes of the files, since so many are not read again."""
        self._nbytes = max(self._nbytes - nbytes, 1)

    def refresh(self) -> None:
        found = min(1.0, max(0.0, self.room() / self._nbytes))
        if found < self.share or found == 1:
            self.share = found
        elif found >= self.share + _STEP:
            self.share = found // _STEP * _STEP

    def holds(self, path: Path, offset: int) -> bool:
        """Return whether the block at an offset of a file is read through the page cache."""
        if self.share in (0.0, 1.0):
            return self.share == 1.0
        start = zlib.crc32(path.name.encode()) / 2**32
        return (start + offset // CACHED_BLOCK_BYTES * GOLDEN) % 1.0 < self.share


DEFAULT_READ_SIZE = 4 << 20
DEFAULT_QUEUE_DEPTH = 4

LOAD_READ_SIZE = 16 << 20
"""Reads of what stays in memory, where it needs no bounce buffer: fewer reads take less of the processor."""


Caching = Literal["shared", "kept", "found", "none"]
"""Use of the page cache by reads: use it for the part of the files that free memory has room for; use it for all,
and leave the pages there; use it for what it holds already, for bytes that are read once; go past it."""

_CLOSED = "the reader was closed. Hint: load the model again."


@dataclass(slots=True)
class ReadStats:
    """Counters of a prefetcher."""

    nbytes: int = 0  # bytes of tensors that were read; the rest of their pages is not counted
    busy_seconds: float = 0.0  # time during which at least one read was in flight
    num_reads: int = 0  # ranges of at most ``read_size`` bytes of one segment whose reading ended, retries not counted
    num_retries: int = 0  # reads that were repeated after an I/O error
    # those of ``nbytes`` that came through the page cache, because memory has room for them or because they were there
    # when the model was loaded
    cached_bytes: int = 0


_Task = Sequence[Part]
"""Parts that one thread reads, one after another."""


@dataclass(frozen=True, slots=True)
class Reads:
    """Reads that fill one buffer. Made by :meth:`BackgroundPrefetcher.prepare`, and started any number of times."""

    segments: Sequence[Segment]  # what is read
    tasks: Sequence[_Task]  # its parts, as threads read them
    files: Sequence[tuple[SourceFile, str]]  # with the name of a tensor of each
    buffer_end: int  # first byte of the buffer after all that is written


class Ticket:
    """Reads that fill one buffer, in flight."""

    def __init__(
        self, reader: BackgroundPrefetcher, reads: Reads, buffer: Buffer, caching: Caching, is_urgent: bool
    ) -> None:
        self.is_urgent = is_urgent
        self._reader, self._reads, self._buffer, self._caching = reader, reads, buffer, caching
        self._waiting = deque(reads.tasks)  # what no thread has begun; changed with the reader's lock, as the next one
        self._num_left = len(reads.tasks)  # what has not ended
        self._error: BaseException | None = None
        self._failed = len(reads.tasks)  # number of the first task that failed: of several errors, its own is told
        self._began_at = self._ended_at = 0.0
        self._in_flight = threading.Lock()  # held until all has ended
        self.has_come = not reads.tasks  # every byte is there, of files that are as they were
        if reads.tasks:
            self._in_flight.acquire()

    def hurry(self) -> None:
        """Have the urgent threads do what has not begun."""
        reader = self._reader
        with reader._lock:
            if not self.is_urgent and not reader._closed:
                self.is_urgent = True
                reader._urgent.start()
                for _ in self._waiting:
                    reader._urgent.queue.put(self)

    def done(self) -> bool:
        """Return whether no read is in flight."""
        return not self._in_flight.locked()

    def done_by(self, moment: float) -> bool:
        """Wait until no read is in flight, up to a moment (``time.perf_counter()``). Return whether none is."""
        is_done = self._in_flight.acquire(timeout=min(max(0.0, moment - time.perf_counter()), threading.TIMEOUT_MAX))
        if is_done:
            self._in_flight.release()
        return is_done

    def wait(self) -> float:
        """Wait until every byte is there. Return the seconds with reads in flight. Raises: ReadError, ClosedError."""
        began = time.perf_counter()
        with self._in_flight:
            if self._error is not None:
                try:
                    raise self._error
                finally:
                    del self  # the traceback refers to this frame
        return max(0.0, self._ended_at - max(began, self._began_at))

    def cancel(self) -> None:
        """Drop what has not begun, and wait until nothing writes to the buffer."""
        with self._reader._lock:
            if self._waiting and self._num_left == len(self._waiting):
                self._in_flight.release()
            self._drop()
        with self._in_flight:
            pass

    def _drop(self) -> None:
        self._num_left -= len(self._waiting)
        self._waiting.clear()


class Workers(Generic[T]):
    """Threads that serve one queue. Work is in it once for each thread that may do it; None ends a thread.

    They do not keep their owner, whose method works and handles all errors, and end with it.
    """

    def __init__(self, name: str, number: int, work: Callable[[T], None]) -> None:
        self.queue: SimpleQueue[T | None] = SimpleQueue()
        self.are_started = False
        self._name, self._number, self._work = f"{THREAD_PREFIX}-{name}", number, weakref.WeakMethod(work)
        self._threads: list[threading.Thread] = []
        finalize(self, _end, self.queue, number)  # also of one that an interrupt has hidden

    def start(self) -> None:
        """Start the threads, once. They end with Python if nobody ends them before."""
        while len(self._threads) < self._number:
            thread = threading.Thread(target=_serve, args=(self.queue, self._work), name=self._name, daemon=True)
            thread.start()
            self._threads.append(thread)
        self.are_started = True

    def end(self) -> None:
        _end(self.queue, self._number)
        for thread in self._threads:
            thread.join()


def _end(queue: SimpleQueue[T | None], number: int) -> None:
    for _ in range(number):
        queue.put(None)


def _serve(queue: SimpleQueue[T | None], work_of: weakref.WeakMethod[Callable[[T], None]]) -> None:
    """Do the work in a queue until None comes, or nobody owns it."""
    while (what := queue.get()) is not None and (work := work_of()) is not None:
        work(what)
        del what, work  # the buffer belongs to others


class BackgroundPrefetcher:
    """Threads that read segments of files: some read ahead, others serve callers that already wait.

    ``room`` returns the bytes that the page cache may use for the files. Those that are no shards are read as they are.
    """

    def __init__(
        self,
        paths: Iterable[Path],
        *,
        direct: bool = True,
        read_size: int = DEFAULT_READ_SIZE,
        queue_depth: int = DEFAULT_QUEUE_DEPTH,
        arrival: Arrival = "in place",
        room: Callable[[], int] = lambda: 0,
        shards: Iterable[Shard] = (),
    ) -> None:
        known = {shard.path: shard for shard in shards}
        least = BLOCK_BYTES if any(shard.blocks is not None for shard in known.values()) else 0
        self.read_size = round_up(max(read_size, least), DIRECT_ALIGNMENT)
        self.queue_depth = queue_depth
        self._ranges = RangeReader(self.read_size, arrival)
        self._files: dict[Path, SourceFile] = {}
        self._closed = False
        self._lock = threading.Lock()
        self._stats = ReadStats()
        self._num_busy, self._busy_since = 0, 0.0
        try:
            self._files.update((path, SourceFile(path, direct, known.get(path))) for path in paths)
        except BaseException:
            self._release()
            raise
        self.cached = CachedShare(sum(file.identity.nbytes for file in self._files.values()), room)
        self._refresh_at = 0.0
        self._ahead = Workers("reader", queue_depth, self._work)
        self._urgent = Workers("reader-urgent", queue_depth, self._work)

    @property
    def stats(self) -> ReadStats:
        """The counters up to now. Reads in flight count as busy time."""
        busy_seconds = self.busy_seconds
        with self._lock:
            return replace(self._stats, busy_seconds=busy_seconds, num_retries=self._ranges.num_retries)

    @property
    def busy_seconds(self) -> float:
        with self._lock:
            since = time.perf_counter() - self._busy_since if self._num_busy else 0.0
            return self._stats.busy_seconds + since

    @property
    def is_direct(self) -> bool:
        return all(file.direct_fd is not None for file in [*self._files.values()])

    def prepare(self, segments: Sequence[Segment], caching: Caching = "shared") -> Reads:
        """Return reads that :meth:`start` starts.

        With ``"kept"`` a segment is one task, unless CUDA's driver copies: for small reads that come again, such as
        embedding rows.
        """
        tasks = tuple(self._tasks(segments, caching))
        files = {self._files[segment.path]: segment.pieces[0].name for segment in reversed(segments)}
        buffer_end = max([segment.buffer_end for segment in segments], default=0)
        return Reads(segments, tasks, tuple(files.items()), buffer_end)

    def start(
        self,
        reads: Reads,
        buffer: Buffer,
        *,
        caching: Caching = "shared",
        urgent: bool = False,
        num_threads: int | None = None,
    ) -> Ticket:
        """Start to read. The caller must not touch the buffer until it has waited for the ticket or cancelled it.

        Its address is a multiple of ``DIRECT_ALIGNMENT``. Urgent reads do not queue behind others. Raises: ClosedError.
        """
        if reads.buffer_end > len(buffer):
            name = max(reads.segments, key=lambda segment: segment.buffer_end).pieces[-1].name
            raise ValueError(f"'{name}' ends at byte {reads.buffer_end} of a buffer of {len(buffer)}")
        if (now := time.monotonic()) >= self._refresh_at:
            self._refresh_at = now + REFRESH_SECONDS
            self.cached.refresh()
        ticket = Ticket(self, reads, buffer, caching, urgent)
        threads = self._urgent if urgent else self._ahead
        with self._lock:
            if self._closed:
                raise ClosedError(_CLOSED)
            if not threads.are_started:
                threads.start()
            for _ in reads.tasks[:num_threads]:
                threads.queue.put(ticket)
        return ticket

    def submit(
        self,
        segments: Sequence[Segment],
        buffer: Buffer,
        *,
        caching: Caching = "shared",
        urgent: bool = False,
    ) -> Ticket:
        return self.start(self.prepare(segments, caching), buffer, caching=caching, urgent=urgent)

    def _tasks(self, segments: Sequence[Segment], caching: Caching) -> Iterator[_Task]:
        """Yield what each task reads. Small parts share one unless they are kept, since handing over costs time.

        A task has at most ``read_size`` bytes. It has few enough that all threads get work, unless a driver copies:
        that ends with a wait for each task, and threads then wait for Python's lock more than for bytes. Parts of what
        stays in memory are larger.
        """
        read_size, is_kept = self.read_size, caching == "kept"
        if is_kept and self._ranges.has_driver:  # what lies between rows of a table has no place in a bounce buffer
            pieces = [(segment.path, piece) for segment in segments for piece in segment.pieces]
            segments = [Segment(path, piece.offset, piece.nbytes, None, (piece,)) for path, piece in pieces]
            is_kept = False
        share = read_size
        if not self._ranges.has_driver:
            share = min(share, -(-sum([segment.nbytes for segment in segments]) // self.queue_depth))
        task: list[Part] = []
        at = 0
        for segment in segments:
            file = self._files[segment.path]
            step = read_size
            if is_kept:
                step = segment.nbytes
            elif caching == "found" and self._ranges.in_place and segment.buffer_offset is not None:
                step = max(read_size, LOAD_READ_SIZE)
            end, wanted_end = segment.offset + segment.nbytes, segment.wanted_end
            for start, stop in pairwise([*file.cuts(segment.offset, end, step), end]):
                places = segment.places(start, stop)
                if not places:  # a hole between tensors
                    continue
                if task and (is_kept or at >= share or at + stop - start > read_size):
                    yield task
                    task, at = [], 0
                nbytes = sum([place[2] for place in places])
                task.append(Part(file, segment, start, stop, places, nbytes, min(stop, wanted_end) - start, at))
                at += round_up(stop - start, DIRECT_ALIGNMENT)
        if task:
            yield task

    def _work(self, ticket: Ticket) -> None:
        while ticket._waiting:
            self._do_next(ticket)

    def _do_next(self, ticket: Ticket) -> None:
        with self._lock:
            if not ticket._waiting:
                return  # another thread was faster
            number = len(ticket._reads.tasks) - len(ticket._waiting)
            task, now = ticket._waiting.popleft(), time.perf_counter()
            ticket._began_at = ticket._began_at or now
            self._busy_since = self._busy_since if self._num_busy else now
            self._num_busy += 1
        error, read = None, ReadStats()
        try:
            self._read(task, ticket._buffer, ticket._caching, read)
        except BaseException as found:  # noqa: BLE001 the caller gets it
            error = found
        with self._lock:
            self._num_busy -= 1
            stats, now = self._stats, time.perf_counter()
            stats.busy_seconds += 0 if self._num_busy else now - self._busy_since
            stats.num_reads += read.num_reads
            stats.nbytes += read.nbytes
            stats.cached_bytes += read.cached_bytes
            if error is not None:  # nobody needs the others
                if number < ticket._failed:
                    ticket._failed, ticket._error = number, error
                ticket._drop()
            ticket._num_left -= 1
            has_ended = not ticket._num_left
        if has_ended:
            ticket._error = self._change_of(ticket._reads.files) or ticket._error
            ticket._ended_at, ticket.has_come = now, ticket._error is None
            ticket._in_flight.release()
        del ticket, error  # the traceback refers to this frame

    def _read(self, task: _Task, buffer: Buffer, caching: Caching, read: ReadStats) -> None:
        for part in task:
            if self._closed:
                raise ClosedError(_CLOSED)
            read.num_reads += 1
            if caching == "found" and part.file.direct_fd is not None:
                through_cache = is_cached(part.file.buffered_fd, *part.file.stored(part.start, part.stop))
            else:
                through_cache = caching != "none" and self.cached.holds(part.file.path, part.start)
            self._ranges.read(part, buffer, through_cache or caching == "kept")
            read.nbytes += part.nbytes
            read.cached_bytes += part.nbytes * through_cache
        if self._ranges.has_driver:
            self._ranges.copy(task, buffer)

    def _change_of(self, files: Sequence[tuple[SourceFile, str]]) -> Exception | None:
        """Return the error that one of some files is not as it was, which explains a failed read; None if all are."""
        try:
            for file, name in () if self._closed else files:
                file.check_unchanged(name)
        except (ReadError, OSError) as error:
            return error
        return None

    def close(self) -> None:
        """End the threads and close the files. Another call does nothing."""
        with self._lock:
            self._closed = True
        self._ahead.end()
        self._urgent.end()
        self._release()

    def _release(self) -> None:
        self._ranges.close()
        with self._lock:
            for file in self._files.values():
                file.close()

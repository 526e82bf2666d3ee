"""Parallel positional reads from shard files into memory that the caller owns.

Worker threads see file descriptors, numbers and memoryviews, never an MLX object: MLX's streams belong to threads.
``os.preadv`` releases the GIL and writes straight into the caller's memory.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mlx_flash.errors import ClosedError, ReadError, TruncatedFileError
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, drop_cached
from mlx_flash.storage.placement import Segment
from mlx_flash.storage.source import FileIdentity, SourceFile

RETRIES = 3
"""How often a read that failed with an I/O error is tried again."""

RETRY_SECONDS = 0.02

DEFAULT_READ_SIZE = 4 << 20
DEFAULT_QUEUE_DEPTH = 4


@dataclass(slots=True)
class ReadStats:
    """What was read so far.

    Attributes:
        nbytes: bytes of tensors that were read; the rest of the pages they lie on is not counted.
        busy_seconds: time during which at least one read was in flight.
        num_reads: ranges of at most ``read_size`` bytes of one segment whose reading ended, retries not counted.
        num_retries: reads tried again after an I/O error.
    """

    nbytes: int = 0
    busy_seconds: float = 0.0
    num_reads: int = 0
    num_retries: int = 0


_Range = tuple[Segment, int, int]
"""The part ``[start, stop)`` of a segment, in bytes of its file."""


class _Gate:
    """Counts the tasks that may write to a buffer, until it is shut. Many are made: it is light."""

    __slots__ = ("_empty", "_lock", "_num_inside")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._empty: threading.Event | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._empty is not None:
                raise CancelledError
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._empty is not None and not self._num_inside:
                self._empty.set()

    def shut(self) -> None:
        """Returns when nobody is inside; nobody comes in any more."""
        with self._lock:
            if self._empty is None:
                self._empty = threading.Event()
            if not self._num_inside:
                self._empty.set()
        self._empty.wait()


class Ticket:
    """Reads under way that fill one buffer. Made by :meth:`Reader.submit`."""

    def __init__(
        self,
        reader: Reader,
        pool: Executor,
        segments: Sequence[Segment],
        buffer: memoryview,
        keep_cached: bool,
        num_tasks: int,
    ) -> None:
        self._reader = reader
        self._pool = pool
        self._segments = segments
        self._buffer = buffer
        self._keep_cached = keep_cached
        self._num_tasks = num_tasks
        self._gate = _Gate()
        self._futures: list[Future[None]] = []
        try:
            self._start()
        except BaseException:
            self.cancel()
            raise

    def _start(self) -> None:
        self._gate = _Gate()  # an interrupt may hide a future from us, the gate knows its task all the same
        self._futures.clear()
        self._identities = self._reader._identities(self._segments)
        self._reader._check_open()
        self._tasks = list(self._reader._tasks(self._segments, self._keep_cached, self._num_tasks))
        for task in self._tasks:
            self._futures.append(self._submit(task))

    def _submit(self, task: Sequence[_Range]) -> Future[None]:
        return self._pool.submit(self._reader._read_all, task, self._buffer, self._keep_cached, self._gate)

    def hurry(self) -> None:
        """Somebody waits now: what has not begun does not queue behind what is read ahead any more."""
        if self._pool is self._reader._urgent_pool:
            return
        self._reader._check_open()
        self._pool = self._reader._urgent_pool
        for i, future in enumerate(self._futures):
            if future.cancel():
                self._futures[i] = self._submit(self._tasks[i])

    def done(self) -> bool:
        """Whether no read is left to wait for."""
        return all(future.done() for future in self._futures)

    def wait(self) -> None:
        """Returns when every byte is in the buffer.

        Raises:
            ReadError: bytes could not be read, or the file changed; it names the tensor, file and offset.
            ClosedError: the reader was closed meanwhile.
        """
        try:
            error = self._gather()
            while self._reader._reopen_changed(self._segments, self._identities):
                # What was read before the change was noticed may come from a file half written.
                self.cancel()
                self._start()
                error = self._gather()
            if error is not None:
                raise error
        except BaseException:
            self.cancel()
            raise

    def _gather(self) -> ReadError | None:
        try:
            for future in self._futures:
                future.result()
        except ReadError as error:
            return error
        except CancelledError:
            self._reader._check_open()
            raise
        return None

    def cancel(self) -> None:
        """Returns when no read writes to the buffer any more; those not yet begun never will."""
        for future in self._futures:
            future.cancel()
        self._gate.shut()


class Reader:
    """Reads segments of files with pools of threads: one that reads ahead, one for what somebody waits for.

    Args:
        paths: every file that will be read.
        direct: read past the page cache where the file system can.
        read_size: bytes of one read; rounded up to whole pages.
        queue_depth: reads in flight at once, urgent ones not counted: there may be as many of them besides.
        in_place: read straight into the caller's memory where that is aligned; if not, by way of bounce buffers.

    Raises:
        CheckpointError: a file cannot be opened.
    """

    def __init__(
        self,
        paths: Iterable[Path],
        *,
        direct: bool = True,
        read_size: int = DEFAULT_READ_SIZE,
        queue_depth: int = DEFAULT_QUEUE_DEPTH,
        in_place: bool = True,
    ) -> None:
        self.read_size = -(-read_size // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
        self.queue_depth = queue_depth
        self._in_place = in_place
        self._stats = ReadStats()
        self._lock = threading.Lock()
        self._reopening = threading.Lock()
        self._gate = _Gate()
        self._in_flight = 0
        self._busy_since = 0.0
        self._local = threading.local()
        self._files: dict[Path, SourceFile] = {}
        self._closed = False
        try:
            for path in paths:
                self._files[path] = SourceFile(path, direct)
        except BaseException:
            self._close_files()
            raise
        # an executor makes its threads when they are needed: one that is never used costs nothing
        self._pool = ThreadPoolExecutor(queue_depth, thread_name_prefix="mlx-flash-reader")
        self._urgent_pool = ThreadPoolExecutor(queue_depth, thread_name_prefix="mlx-flash-reader-urgent")

    @property
    def stats(self) -> ReadStats:
        """What was read up to now, reads in flight counted as busy time."""
        with self._lock:
            since = time.perf_counter() - self._busy_since if self._in_flight else 0.0
            return replace(self._stats, busy_seconds=self._stats.busy_seconds + since)

    @property
    def is_direct(self) -> bool:
        """Whether every file is read past the page cache."""
        return all(file.direct_fd is not None for file in self._files.values())

    def submit(
        self,
        segments: Sequence[Segment],
        buffer: memoryview,
        *,
        keep_cached: bool = False,
        urgent: bool = False,
        num_tasks: int | None = None,
    ) -> Ticket:
        """Starts reading.

        Args:
            segments: what to read.
            buffer: writable bytes whose address is a multiple of ``DIRECT_ALIGNMENT``; the caller keeps its hands off
                until the ticket was waited for or cancelled.
            keep_cached: read through the page cache and leave the pages there, one task a segment: for small reads
                that come again, such as embedding rows.
            urgent: somebody waits already: do not queue behind what is read ahead.
            num_tasks: how many threads should share the work; None for all. None gets more than ``read_size`` bytes
                at a time.

        Raises:
            ClosedError: the reader was closed.
            ValueError: the buffer is too small.
        """
        for segment in segments:
            if segment.buffer_end > len(buffer):
                raise ValueError(
                    f"'{segment.pieces[-1].name}' ends at byte {segment.buffer_end} of a buffer of {len(buffer)}"
                )
        pool = self._urgent_pool if urgent else self._pool
        return Ticket(self, pool, segments, buffer, keep_cached, num_tasks or self.queue_depth)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the reader was closed. Hint: load the model again.")

    def _tasks(self, segments: Sequence[Segment], keep_cached: bool, num_tasks: int) -> Iterator[list[_Range]]:
        """What each task reads: small ranges together, since handing a task over costs time.

        That is at most ``read_size`` bytes, and no more than leaves work for so many threads. Cached segments are not
        joined.
        """
        share = min(self.read_size, -(-sum(segment.nbytes for segment in segments) // num_tasks))
        task: list[_Range] = []
        nbytes = 0
        for segment in segments:
            step = segment.nbytes if keep_cached else self.read_size
            end = segment.offset + segment.nbytes
            for start in range(segment.offset, end, step):
                stop = min(start + step, end)
                if task and (keep_cached or nbytes >= share or nbytes + stop - start > self.read_size):
                    yield task
                    task, nbytes = [], 0
                task.append((segment, start, stop))
                nbytes += stop - start
        if task:
            yield task

    def _identities(self, segments: Sequence[Segment]) -> dict[Path, FileIdentity | None]:
        return {segment.path: self._files[segment.path].identity for segment in segments}

    def _reopen_changed(self, segments: Sequence[Segment], seen: Mapping[Path, FileIdentity | None]) -> bool:
        """Follows the files that changed. Returns whether one did since ``seen``, whoever noticed first."""
        with self._reopening:
            for path in seen:
                file = self._files[path]
                if not file.is_unchanged():
                    self._check_open()
                    file.reopen(next(segment.pieces[0].name for segment in segments if segment.path == path))
            return any(self._files[path].identity != identity for path, identity in seen.items())

    def _read_all(self, task: Sequence[_Range], buffer: memoryview, keep_cached: bool, gate: _Gate) -> None:
        with self._gate:
            self._begin()
            num_reads = nbytes = 0
            try:
                for segment, start, stop in task:
                    with gate:  # for each range anew: what is cancelled goes on with none
                        num_reads += 1
                        self._read(segment, start, stop, buffer, keep_cached)
                        nbytes += segment.wanted_bytes(start, stop)
            finally:
                self._end(num_reads, nbytes)

    def _read(self, segment: Segment, start: int, stop: int, buffer: memoryview, keep_cached: bool) -> None:
        file = self._files[segment.path]
        fd = None if keep_cached else file.direct_fd
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
        """Reads until ``needed`` bytes are in ``target``; more may come, up to the whole target."""
        got = retries = 0
        while got < needed:
            try:
                count = os.preadv(fd, [target[got:]], offset + got)
                if 0 < count < min(alignment, needed - got) and offset + got + count < os.fstat(fd).st_size:
                    raise OSError(errno.EIO, "too few bytes came")  # for a direct read to go on from
            except OSError as error:
                if error.errno != errno.EIO or retries == RETRIES:
                    raise _read_error(segment, offset + got, error) from error
                retries += 1
                with self._lock:
                    self._stats.num_retries += 1
                time.sleep(RETRY_SECONDS * retries)
                continue
            if count < min(alignment, needed - got):
                raise _truncated_error(segment, offset, got + count, needed)
            got = got + count if got + count >= needed else (got + count) // alignment * alignment

    def _bounce_buffer(self) -> memoryview:
        buffer: memoryview | None = getattr(self._local, "bounce", None)
        if buffer is None:
            buffer = self._local.bounce = memoryview(mmap.mmap(-1, self.read_size))
        return buffer

    def _begin(self) -> None:
        with self._lock:
            if self._in_flight == 0:
                self._busy_since = time.perf_counter()
            self._in_flight += 1

    def _end(self, num_reads: int, nbytes: int) -> None:
        with self._lock:
            self._in_flight -= 1
            if not self._in_flight:
                self._stats.busy_seconds += time.perf_counter() - self._busy_since
            self._stats.nbytes += nbytes
            self._stats.num_reads += num_reads

    def close(self) -> None:
        """Ends the threads and closes the files. Harmless when repeated."""
        self._closed = True
        self._gate.shut()  # joining the threads is not enough: CPython forgets one whose join was interrupted
        for pool in (self._pool, self._urgent_pool):
            pool.shutdown(wait=True, cancel_futures=True)
        with self._reopening:
            self._close_files()

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()


def _parts(segment: Segment, start: int, stop: int, buffer: memoryview) -> Iterable[tuple[int, memoryview]]:
    """The pieces of ``[start, stop)``: the file offset of each, and where its bytes go."""
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
        f"{piece.offset}) in {segment.path}: the file is truncated. Hint: put the file back or download it again; the "
        "next call reads it again."
    )

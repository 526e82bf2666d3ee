"""Background threads that read segments of files into memory that the caller owns.

Worker threads see file descriptors, numbers and memoryviews, never an MLX object: MLX's streams belong to threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor, wait
from itertools import pairwise
from pathlib import Path
from typing import Literal

from mlx_flash.errors import ClosedError, ReadError
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, is_cached, round_up
from mlx_flash.storage.blocks import BLOCK_BYTES, BlockTable
from mlx_flash.storage.cached import CachedShare
from mlx_flash.storage.placement import Segment
from mlx_flash.storage.ranges import Arrival, RangeReader
from mlx_flash.storage.readstats import ReadCounter, ReadStats
from mlx_flash.storage.source import FileIdentity, SourceFile

DEFAULT_READ_SIZE = 4 << 20
DEFAULT_QUEUE_DEPTH = 4

LOAD_READ_SIZE = 16 << 20
"""Reads of what stays in memory, where it needs no bounce buffer: fewer reads take less of the processor."""


Caching = Literal["shared", "kept", "found", "none"]
"""Use of the page cache by reads: use it for the part of the files that free memory has room for; use it for all,
and leave the pages there; use it for what it holds already, for bytes that are read once; go past it."""

_Part = tuple[Segment, int, int]
"""The part ``[start, stop)`` of a segment, in bytes of its file."""


class Ticket:
    """Reads that fill one buffer, in flight from :meth:`start` on. Made by :meth:`BackgroundPrefetcher.submit`."""

    def __init__(
        self,
        prefetcher: BackgroundPrefetcher,
        pool: Executor,
        segments: Sequence[Segment],
        buffer: memoryview,
        caching: Caching,
        num_tasks: int,
    ) -> None:
        self._prefetcher = prefetcher
        self._pool = pool
        self._segments = segments
        self._buffer = buffer
        self._caching = caching
        self._reads: list[Future[None]] = []
        self._tasks = list(prefetcher._tasks(segments, caching, num_tasks))

    def start(self) -> Ticket:
        """Start reading, once. Return the ticket.

        Raises:
            ClosedError: the prefetcher was closed.
        """
        try:
            self._prefetcher._check_open()
            self._reads += map(self._submit, self._tasks)
        except BaseException:
            self.cancel()
            raise
        return self

    def _submit(self, task: Sequence[_Part]) -> Future[None]:
        return self._pool.submit(self._prefetcher._read_all, task, self._buffer, self._caching)

    def hurry(self) -> None:
        """Move reads that have not started to the urgent queue."""
        if self._pool is self._prefetcher._urgent_pool:
            return
        self._prefetcher._check_open()
        self._pool = self._prefetcher._urgent_pool
        for i, read in enumerate(self._reads):
            if read.cancel():
                self._reads[i] = self._submit(self._tasks[i])

    def done(self) -> bool:
        """Return whether no read is in flight."""
        return all(read.done() for read in self._reads)

    def done_by(self, moment: float) -> bool:
        """Wait until no read is in flight, up to a moment (``time.perf_counter()``). Return whether none is."""
        seconds = min(max(0.0, moment - time.perf_counter()), threading.TIMEOUT_MAX)
        return not wait(self._reads, seconds).not_done

    def wait(self) -> float:
        """Wait until every byte is in the buffer. Return the seconds of it in which reads were in flight.

        The rest is waiting for a processor.

        Raises:
            ReadError: bytes could not be read, or the file changed; it names the tensor, file and offset.
            ClosedError: the prefetcher was closed meanwhile.
        """
        reading = self._prefetcher.busy_seconds
        try:
            error = self._gather()
            reading = self._prefetcher.busy_seconds - reading
            first = {segment.path: segment.pieces[0].name for segment in reversed(self._segments)}
            self._prefetcher.check_unchanged(first)  # before its errors: it explains a failed read
            if error is not None:
                raise error
        except BaseException:
            self.cancel()
            raise
        return reading

    def _gather(self) -> ReadError | None:
        try:
            for read in self._reads:
                read.result()
        except ReadError as error:
            return error
        except CancelledError:
            self._prefetcher._check_open()
            raise
        return None

    def cancel(self) -> None:
        """Cancel the reads that have not started, and wait until none of the others writes to the buffer."""
        for read in [read for read in self._reads if not read.cancel()]:
            read.exception()


class BackgroundPrefetcher:
    """Two pools of threads that read segments of files: one reads ahead, one serves callers that already wait.

    Args:
        paths: every file that will be read.
        direct: read past the page cache where the file system can.
        read_size: bytes of one read; rounded up to whole pages.
        queue_depth: reads in flight at once in each pool.
        arrival: how bytes get to the caller's memory. What is not aligned is never read in place.
        through_cache: read through the page cache, although reads could bypass it; the pages are dropped at once.
        room: returns the memory in bytes that the page cache may use for the files; None for none.
        tables: the places of the blocks in files of compressed tensors. Without its table, a file is read as it is.
        identities: the files as they were when the model was loaded. Without its own, a file counts as it is opened.

    Attributes:
        cached: the part of the files that is read through the page cache.

    Raises:
        CheckpointError: a file cannot be opened.
        DriverError: the driver is to copy and cannot.
    """

    def __init__(
        self,
        paths: Iterable[Path],
        *,
        direct: bool = True,
        read_size: int = DEFAULT_READ_SIZE,
        queue_depth: int = DEFAULT_QUEUE_DEPTH,
        arrival: Arrival = "in place",
        through_cache: bool = False,
        room: Callable[[], int] = lambda: 0,
        tables: Mapping[Path, BlockTable] | None = None,
        identities: Mapping[Path, FileIdentity] | None = None,
    ) -> None:
        tables, known = tables or {}, identities or {}
        self.read_size = round_up(max(read_size, BLOCK_BYTES) if tables else read_size, DIRECT_ALIGNMENT)
        self.queue_depth = queue_depth
        self._ranges = RangeReader(self.read_size, arrival, through_cache=through_cache)
        self._counter = ReadCounter()
        self._files: dict[Path, SourceFile] = {}
        self._closed = False
        try:
            self._files.update((path, SourceFile(path, direct, tables.get(path), known.get(path))) for path in paths)
        except BaseException:
            self._release()
            raise
        self.cached = CachedShare(sum(file.identity.nbytes for file in self._files.values()), room)
        self._pool = ThreadPoolExecutor(queue_depth, "mlx-flash-reader")
        self._urgent_pool = ThreadPoolExecutor(queue_depth, "mlx-flash-reader-urgent")

    @property
    def stats(self) -> ReadStats:
        """The counters up to now. Reads in flight count as busy time."""
        return self._counter.stats(self._ranges.num_retries)

    @property
    def busy_seconds(self) -> float:
        """The time with at least one read in flight, up to now."""
        return self._counter.busy_seconds

    @property
    def is_direct(self) -> bool:
        """True if every file is read past the page cache."""
        return all(file.direct_fd is not None for file in self._files.values())

    def submit(
        self,
        segments: Sequence[Segment],
        buffer: memoryview,
        *,
        caching: Caching = "shared",
        urgent: bool = False,
        num_tasks: int | None = None,
        starts: bool = True,
    ) -> Ticket:
        """Start reading.

        Args:
            segments: what to read.
            buffer: writable bytes whose address is a multiple of ``DIRECT_ALIGNMENT``. The caller must not touch them
                until it has waited for the ticket or cancelled it.
            caching: what reads do with the page cache. With ``"kept"`` a segment is one task: for small reads that come
                again, such as embedding rows.
            urgent: do not queue behind reads ahead, since the caller waits.
            num_tasks: number of threads that share the work; None for all. Each gets at most ``read_size`` bytes
                at a time.
            starts: False leaves the start to the caller, who keeps the ticket first. For buffers that are read into
                again: an exception before the ticket is kept would leave reads in flight that nobody waits for.

        Raises:
            ClosedError: the prefetcher was closed.
            ValueError: the buffer is too small.
        """
        for segment in segments:
            if segment.buffer_end > len(buffer):
                raise ValueError(
                    f"'{segment.pieces[-1].name}' ends at byte {segment.buffer_end} of a buffer of {len(buffer)}"
                )
        self.cached.refresh()
        pool = self._urgent_pool if urgent else self._pool
        ticket = Ticket(self, pool, segments, buffer, caching, num_tasks or self.queue_depth)
        return ticket.start() if starts else ticket

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the reader was closed. Hint: load the model again.")

    def _tasks(self, segments: Sequence[Segment], caching: Caching, num_tasks: int) -> Iterator[list[_Part]]:
        """Yield the ranges of each task. Small ranges share one unless they are kept, since handing over costs time.

        A task has at most ``read_size`` bytes, and few enough that all threads get work. Ranges of what stays in memory
        are larger.
        """
        read_size = self.read_size
        share = min(read_size, -(-sum(segment.nbytes for segment in segments) // num_tasks))
        task: list[_Part] = []
        nbytes = 0
        for segment in segments:
            step = segment.nbytes if caching == "kept" else read_size
            if caching == "found" and self._ranges.in_place and segment.buffer_offset is not None:
                step = max(read_size, LOAD_READ_SIZE)
            end = segment.offset + segment.nbytes
            starts = [*self._files[segment.path].cuts(segment.offset, end, step), end]
            for start, stop in pairwise(starts):
                if task and (caching == "kept" or nbytes >= share or nbytes + stop - start > read_size):
                    yield task
                    task, nbytes = [], 0
                task.append((segment, start, stop))
                nbytes += stop - start
        if task:
            yield task

    def check_unchanged(self, tensors: Mapping[Path, str]) -> None:
        """Check the files of some tensors. As :meth:`SourceFile.check_unchanged`."""
        for path, tensor in tensors.items():
            try:
                self._files[path].check_unchanged(tensor)
            except ReadError:
                self._check_open()
                raise

    def _read_all(self, task: Sequence[_Part], buffer: memoryview, caching: Caching) -> None:
        self._counter.begin()
        num_reads = nbytes = cached_bytes = 0
        try:
            self._ranges.begin()
            for segment, start, stop in task:
                self._check_open()
                num_reads += 1
                file = self._files[segment.path]
                through_cache = self._goes_through_cache(caching, file, start, stop)
                self._ranges.read(file, segment, start, stop, buffer, caching == "kept" or through_cache)
                wanted = segment.wanted_bytes(start, stop)
                nbytes += wanted
                cached_bytes += wanted * through_cache
            self._ranges.finish()
        finally:
            self._counter.end(num_reads, nbytes, cached_bytes)

    def _goes_through_cache(self, caching: Caching, file: SourceFile, start: int, stop: int) -> bool:
        if caching == "found" and file.direct_fd is not None:
            return is_cached(file.buffered_fd, *file.stored(start, stop))
        return caching != "none" and self.cached.holds(file.path, start)

    def close(self) -> None:
        """End the threads and close the files. Another call does nothing."""
        self._closed = True
        for pool in (self._pool, self._urgent_pool):
            pool.shutdown(cancel_futures=True)
        self._release()

    def _release(self) -> None:
        self._ranges.close()
        for file in self._files.values():
            file.close()

"""Probes of the disk: how fast the files of a checkpoint can be read, cold."""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT
from mlx_flash.storage.placement import Piece, Segment
from mlx_flash.storage.prefetcher import BackgroundPrefetcher, Ticket

PROBE_BUFFERS = 2
"""Each holds all bytes that are in flight at once."""


class DiskProbe:
    """Sequential reads of a checkpoint, again from the start after its end, into the same two buffers.

    Args:
        paths: files of the checkpoint.
        settings: (read size, queue depth) to try.
        nbytes: to read with each setting; at most the whole checkpoint.
    """

    def __init__(self, paths: Sequence[Path], settings: Sequence[tuple[int, int]], nbytes: int) -> None:
        self._paths = paths
        self._settings = deque(settings)
        self._nbytes = min(nbytes, sum(path.stat().st_size for path in paths))
        self._path, self._offset = 0, 0
        self.is_direct = True

    def measure(self) -> list[dict[str, Any]]:
        """Measure every setting once. The next call starts with another, since some disks are fastest after a pause."""
        found = [self._measure(read_size, queue_depth) for read_size, queue_depth in self._settings]
        self._settings.rotate(-1)
        return found

    def _measure(self, read_size: int, queue_depth: int) -> dict[str, Any]:
        reader = BackgroundPrefetcher(self._paths, direct=True, read_size=read_size, queue_depth=queue_depth)
        try:
            self.is_direct = reader.is_direct
            buffers = [_buffer(reader.read_size * queue_depth) for _ in range(PROBE_BUFFERS)]
            began = time.perf_counter()
            nbytes = self._read(reader, buffers)
            rate = nbytes / (time.perf_counter() - began)
        finally:
            reader.close()
        return {"read_size": read_size, "queue_depth": queue_depth, "nbytes": nbytes, "bytes_per_second": rate}

    def _read(self, reader: BackgroundPrefetcher, buffers: Sequence[memoryview]) -> int:
        """Read into one buffer while waiting for the other, so that the queue never runs empty."""
        done, in_flight = 0, deque[Ticket]()
        for buffer in cycle(buffers):
            if done >= self._nbytes:
                break
            if len(in_flight) == len(buffers):
                in_flight.popleft().wait()
            segment = self._next(len(buffer))
            in_flight.append(reader.submit([segment], buffer))
            done += segment.pieces[0].nbytes
        for ticket in in_flight:
            ticket.wait()
        return done

    def _next(self, most: int) -> Segment:
        """Return the next stretch of the files; the first file follows the last one."""
        path, start = self._paths[self._path], self._offset
        size = path.stat().st_size
        nbytes = min(most, size - start)
        self._offset += nbytes
        if self._offset == size:
            self._path, self._offset = (self._path + 1) % len(self._paths), 0
        whole = -(-nbytes // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
        return Segment(path, start, whole, 0, (Piece(path.name, start, nbytes, 0),))


def _buffer(nbytes: int) -> memoryview:
    """Return memory that a disk reads into fastest: in huge pages where the system has them, and touched."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    view[:: mmap.PAGESIZE] = bytes(len(view[:: mmap.PAGESIZE]))
    return view

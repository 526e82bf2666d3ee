"""Counters of the reads of some threads."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace


@dataclass(slots=True)
class ReadStats:
    """Counters of a prefetcher.

    Attributes:
        nbytes: bytes of tensors that were read; the rest of their pages is not counted.
        busy_seconds: time during which at least one read was in flight.
        num_reads: ranges of at most ``read_size`` bytes of one segment whose reading ended, retries not counted.
        num_retries: reads that were repeated after an I/O error.
        cached_bytes: those of ``nbytes`` that came through the page cache, because memory has room for them or because
            they were there when the model was loaded.
    """

    nbytes: int = 0
    busy_seconds: float = 0.0
    num_reads: int = 0
    num_retries: int = 0
    cached_bytes: int = 0


class ReadCounter:
    """The counters of tasks that read in several threads, and the time in which at least one does.

    Attributes:
        in_flight: tasks that read now.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._lock = threading.Lock()
        self._stats = ReadStats()
        self._busy_since = 0.0

    def begin(self) -> None:
        """Note that a task begins to read."""
        with self._lock:
            self._busy_since = self._busy_since if self.in_flight else time.perf_counter()
            self.in_flight += 1

    def end(self, num_reads: int, nbytes: int, cached_bytes: int) -> None:
        """Note that a task has ended, and what it has read."""
        with self._lock:
            self.in_flight -= 1
            self._stats.busy_seconds += 0 if self.in_flight else time.perf_counter() - self._busy_since
            self._stats.num_reads += num_reads
            self._stats.nbytes += nbytes
            self._stats.cached_bytes += cached_bytes

    @property
    def busy_seconds(self) -> float:
        """The time with reads in flight up to now. It is asked for before and after each wait."""
        with self._lock:
            since = time.perf_counter() - self._busy_since if self.in_flight else 0.0
            return self._stats.busy_seconds + since

    def stats(self, num_retries: int) -> ReadStats:
        """Return the counters up to now. Reads in flight count as busy time."""
        busy = self.busy_seconds
        with self._lock:
            return replace(self._stats, busy_seconds=busy, num_retries=num_retries)

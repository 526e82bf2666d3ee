"""The count and the daily cap of disk writes: in this session, today, and ever.

All processes count in one small file, ``writes.json``, which is replaced under a lock.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from mlx_flash.config import GB, FlashConfig
from mlx_flash.files import HeldLock, make_private, read_json_object, write_atomically
from mlx_flash.folders import cache_directory
from mlx_flash.logs import log

DEFAULT_GB_PER_DAY = 20.0
"""SSDs of laptops are rated for 150 TB (256 GB) to 600 TB (1 TB) of writes. Over five years the smallest takes 82 GB a
day. 20 GB are a quarter of that: 36 TB in five years if every day reached the cap, or 150 000 new tokens a day of a
model with 128 KiB for each (8B, 16 bits)."""

FILE_NAME = "writes.json"

_MOST_BYTES = 4096


class WriteGovernor:
    """The counter and the cap of disk writes, shared by threads and processes.

    A fault of the file costs a warning, never a run: this process then counts for itself. The cap is that of all
    processes together in a calendar day, in GB (10⁹ bytes); None for no cap. With 0, the zero-write mode,
    nothing at all is written, not even the count. ``clock`` returns seconds since 1970.
    """

    def __init__(
        self,
        directory: Path,
        *,
        gb_per_day: float | None = DEFAULT_GB_PER_DAY,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.zero_write = gb_per_day == 0
        self._path = directory / FILE_NAME
        self._cap = None if gb_per_day is None else int(gb_per_day * GB)
        self._clock = clock
        self._lock = threading.Lock()
        self._day, self._day_bytes, self._total_bytes = "", 0, 0  # as last read or written
        self._session_bytes = 0
        self._refused_bytes = 0
        self._warned = False

    def claim(self, nbytes: int) -> bool:
        """Count bytes that are about to be written, unless they exceed the cap. Return whether they may be written.

        Processes that claim at the same time never get the same part of the cap.
        """
        return self._count(nbytes, self._cap)

    def count(self, nbytes: int) -> None:
        """Count bytes that are written in any case. In zero-write mode they count for this session only."""
        self._count(nbytes, None)

    def telemetry(self) -> dict[str, int | bool | None]:
        """Return the bytes written in this session, today and ever, and the cap."""
        with self._lock:
            self._look()
            return {
                "session_bytes": self._session_bytes,
                "day_bytes": self._day_bytes,
                "total_bytes": self._total_bytes,
                "day_limit_bytes": self._cap,
                "refused_bytes": self._refused_bytes,
            }

    def _count(self, nbytes: int, cap: int | None) -> bool:
        """Count bytes as written, or as refused. Return which."""
        with self._lock, ExitStack() as stack:
            try:
                if not self.zero_write:
                    make_private(self._path.parent)
                    stack.enter_context(HeldLock(self._path, create=0o600))
            except OSError as error:
                self._warn(error)
            self._look()
            if cap is not None and self._day_bytes + nbytes > cap:
                self._refused_bytes += nbytes
                return False
            self._session_bytes += nbytes
            if not self.zero_write:
                self._day_bytes, self._total_bytes = self._day_bytes + nbytes, self._total_bytes + nbytes
                record = {"day": self._day, "day_bytes": self._day_bytes, "total_bytes": self._total_bytes}
                try:
                    write_atomically(self._path, json.dumps(record))
                except OSError as error:
                    self._warn(error)
            return True

    def _look(self) -> None:
        """Take over what other processes counted, unless this one knows more: a file may be missing or damaged."""
        today = time.strftime("%Y-%m-%d", time.localtime(self._clock()))
        if self._day != today:
            self._day, self._day_bytes = today, 0
        match read_json_object(self._path, _MOST_BYTES):
            case {"day": str(day), "day_bytes": int(day_bytes), "total_bytes": int(total_bytes)}:
                self._day_bytes = max(self._day_bytes, day_bytes if day == today else 0)
                self._total_bytes = max(self._total_bytes, total_bytes)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            reason = error.strerror or error
            log.warning("%s is not used: %s. Bytes written are counted from here on.", self._path, reason)


def open_governor(config: FlashConfig) -> WriteGovernor:
    """Return the counter of disk writes, with the cap of the settings."""
    cap = config.ssd_write_gb_per_day
    gb_per_day = DEFAULT_GB_PER_DAY if cap is None else cap
    return WriteGovernor(cache_directory(), gb_per_day=gb_per_day)

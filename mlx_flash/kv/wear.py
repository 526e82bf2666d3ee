"""The count and the daily cap of disk writes: in this session, today, and ever.

All processes count in one small file, ``writes.json``. It is changed in place under a lock, one record of fixed length
in one write, so a killed process leaves the old record or the new one.
"""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mlx_flash.config import GB, FlashConfig
from mlx_flash.files import HeldLock, make_private
from mlx_flash.folders import cache_directory
from mlx_flash.logs import log

DEFAULT_GB_PER_DAY = 20.0
"""SSDs of laptops are rated for 150 TB (256 GB) to 600 TB (1 TB) of writes. Over five years the smallest takes 82 GB a
day. 20 GB are a quarter of that: 36 TB in five years if every day reached the cap, or 150 000 new tokens a day of a
model with 128 KiB for each (8B, 16 bits)."""

FILE_NAME = "writes.json"

_RECORD_BYTES = 256


@dataclass(frozen=True, slots=True)
class _Record:
    """The content of the file: the day, as ``2026-11-21``, and the bytes written on it and ever."""

    day: str = ""
    day_bytes: int = 0
    total_bytes: int = 0

    def encode(self) -> bytes:
        """Return one line of a fixed length, so that no record is a mixture of two."""
        text = json.dumps({**asdict(self), "check": self._check()})
        return text.ljust(_RECORD_BYTES - 1).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> _Record:
        """Return the record in a file. Raises: ValueError: it is none, or damaged."""
        match json.loads(data):
            case {"day": str(day), "day_bytes": int(day_bytes), "total_bytes": int(total_bytes), "check": int(check)}:
                record = cls(day, day_bytes, total_bytes)
                if check == record._check():
                    return record
        raise ValueError("its checksum or a value is wrong")

    def _check(self) -> int:
        return zlib.crc32(f"{self.day} {self.day_bytes} {self.total_bytes}".encode())


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
        self._record = _Record()  # the last that is known
        self._session_bytes = 0
        self._refused_bytes = 0
        self._warned = False

    def claim(self, nbytes: int) -> bool:
        """Count bytes that are about to be written, unless they exceed the cap. Return whether they may be written.

        Processes that claim at the same time never get the same part of the cap.
        """
        return self._count(nbytes, is_capped=True)

    def count(self, nbytes: int) -> None:
        """Count bytes that are written in any case. In zero-write mode they count for this session only."""
        self._count(nbytes, is_capped=False)

    def telemetry(self) -> dict[str, int | bool | None]:
        """Return the bytes written in this session, today and ever, and the cap."""
        with self._lock, self._looking():
            return {
                "session_bytes": self._session_bytes,
                "day_bytes": self._record.day_bytes,
                "total_bytes": self._record.total_bytes,
                "day_limit_bytes": self._cap,
                "refused_bytes": self._refused_bytes,
            }

    def _count(self, nbytes: int, *, is_capped: bool) -> bool:
        """Count bytes as written, or as refused. Return which."""
        with self._lock, self._looking(writes=not self.zero_write) as fd:
            if is_capped and self._cap is not None and self._record.day_bytes + nbytes > self._cap:
                self._refused_bytes += nbytes
                return False
            self._session_bytes += nbytes
            if not self.zero_write:
                old = self._record
                self._record = replace(old, day_bytes=old.day_bytes + nbytes, total_bytes=old.total_bytes + nbytes)
            if fd is not None:
                try:
                    os.pwrite(fd, self._record.encode(), 0)
                except OSError as error:
                    self._warn(error)
            return True

    @contextmanager
    def _looking(self, *, writes: bool = False) -> Iterator[int | None]:
        """Take over what other processes counted. Yield the file, locked and open for writing; None where it is not.

        A damaged file says less than this process knows.
        """
        with ExitStack() as stack:
            fd: int | None = None
            try:
                if writes:
                    make_private(self._path.parent)
                fd = stack.enter_context(HeldLock(self._path, create=0o600 if writes else None, shared=not writes))
                if data := os.pread(fd, _RECORD_BYTES, 0):  # an empty one was made, and not written yet
                    self._record = _Record.decode(data)
            except FileNotFoundError:
                pass  # nothing was counted yet
            except OSError as error:
                fd = None
                self._warn(error)
            except (ValueError, RecursionError) as error:
                self._warn(error)
            day = time.strftime("%Y-%m-%d", time.localtime(self._clock()))
            if self._record.day != day:
                self._record = replace(self._record, day=day, day_bytes=0)
            yield fd if writes else None

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            reason = error.strerror or error if isinstance(error, OSError) else f"it is damaged ({error})"
            log.warning("%s is not used: %s. Bytes written are counted from here on.", self._path, reason)


def open_governor(config: FlashConfig) -> WriteGovernor:
    """Return the counter of disk writes, with the cap of the settings."""
    cap = config.ssd_write_gb_per_day
    gb_per_day = DEFAULT_GB_PER_DAY if cap is None else cap
    return WriteGovernor(cache_directory(), gb_per_day=gb_per_day)

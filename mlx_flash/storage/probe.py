"""A short measurement of a disk: its bandwidth, and the read size and queue depth that reach it.

Results are kept in the cache folder, as those of other measurements of this machine.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import platform
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from mlx_flash import enginethread
from mlx_flash.files import (
    PrivateFolder,
    cache_directory,
    make_private,
    nearest,
    read_json_object,
    write_atomically,
    write_errors,
)
from mlx_flash.memory.arena import use_huge_pages
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, drop_file
from mlx_flash.storage.placement import Piece, read_pages
from mlx_flash.storage.prefetcher import DEFAULT_QUEUE_DEPTH, DEFAULT_READ_SIZE, BackgroundPrefetcher

_MOST_BYTES = 16 << 20  # of a file; an entry has some hundred


class Measurements:
    """One of the files. A fault of it costs a new measurement, never a run."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def file(self) -> Path:
        """Path of the file. The environment decides on the folder."""
        return cache_directory() / self._name

    def load(self) -> dict[str, Any]:
        """Return all entries; none where the file is missing, unreadable, no regular file, or not JSON."""
        return read_json_object(self.file, _MOST_BYTES)

    def save(self, key: str, entry: dict[str, Any]) -> None:
        entries = {**self.load(), key: {**entry, "time": time.time()}}
        with suppress(OSError):  # such as a read-only home
            make_private(self.file.parent)
            write_atomically(self.file, json.dumps(entries, indent=1))


@contextmanager
def temporary_file(base: Path, purpose: str, pieces: Iterable[bytes | memoryview]) -> Iterator[Path]:
    """Yield a file with some bytes in a :class:`PrivateFolder`, which goes after the block. Raises: WriteError."""
    with closing(PrivateFolder(base, purpose)) as folder:
        path = folder.path / "file"
        with write_errors(f"cannot write the file for {purpose} in {base}", "then try again"), path.open("wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        yield path


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk."""

    device: str  # name of the device, as the system mounts it
    mount: str  # where it is mounted
    file_system: str  # kind of file system
    total_bytes: int
    free_bytes: int


def disk_of(path: Path) -> Disk:
    """Return the disk that holds a path, which need not exist yet."""
    found = nearest(path.expanduser()).resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if found.is_relative_to(part.mountpoint)]
    part = max(mounts, key=lambda part: len(Path(part.mountpoint).parts), default=None)
    device, mount, kind = ("?", "/", "?") if part is None else (part.device, part.mountpoint, part.fstype)
    usage = shutil.disk_usage(found)
    return Disk(device, mount, kind, usage.total, usage.free)


CANDIDATES = ((2 << 20, 4), (1 << 20, 8), (2 << 20, 8), (4 << 20, 4), (8 << 20, 2))
"""(read size in bytes, queue depth). Small reads and a depth of 1 are far from any SSD's bandwidth; 16 MiB in flight
are enough for the fastest."""

BUFFERED_CANDIDATES = ((4 << 20, 4), (1 << 20, 8))
"""The same for reads through the page cache, whose pages are dropped at once."""

WORTH_COPYING = 1.15
"""Such reads take half a core for each GB/s. They replace direct ones that are this much slower."""

SAMPLE_BYTES = 64 << 20
"""Bytes that are read for each candidate, at another place of the file each time."""

SMALL_READ_SIZE = 1 << 20
"""Read size for small files. Their models have small budgets, which the probe's buffers must not exceed."""

SMALL_QUEUE_DEPTH = 4
"""Reads in flight for budgets that have room for little."""

SMALL_READS_SHARE = 0.9
"""Speed of four reads of 1 MiB, as a part of that of the best reads: 0.93 on the virtual disk of an EPYC."""

ROUNDS = 2
"""Measurements of each candidate. The better one counts, since other programs may use the disk."""

MAX_AGE_SECONDS = 7 * 24 * 3600

PROFILES = Measurements("disks.json")

WORTH_IT = 1.05
"""A later candidate replaces an earlier one, which needs less memory, only when it is this much faster."""


@dataclass(frozen=True, slots=True)
class DiskProfile:
    """The best way to read a disk, and its bandwidth."""

    bytes_per_second: float  # bandwidth of cold reads
    read_size: int  # bytes of one read
    queue_depth: int  # reads in flight at once
    direct: bool  # whether reads bypass the page cache: the file system can, and they are not slower


def disk_profile(path: Path, direct: bool, may_buffer: bool = False) -> DiskProfile:
    """Return the profile of the disk that holds a file: the stored one if it is recent, or a new one.

    Profiles of small files are not stored. ``may_buffer`` tries reads through the page cache, too.
    """
    key = _key(path, direct, may_buffer)
    remembered = _remembered(key)
    if remembered is not None:
        return remembered
    profile = enginethread.run(partial(probe_disk, path, direct, may_buffer))  # no interrupt leaves a file open there
    if path.stat().st_size >= 2 * SAMPLE_BYTES:
        known = PROFILES.load().get(key)
        was_doubted = isinstance(known, dict) and "read_size" not in known  # not of a profile that has become old
        PROFILES.save(key, {**asdict(profile), "was_doubted": was_doubted})
    return profile


def folder_profile(folder: Path, direct: bool, may_buffer: bool = False) -> DiskProfile:
    """Return the profile of the disk that holds a folder, which need not exist yet, as :func:`disk_profile` does.

    A disk without a profile is probed with a temporary file in the folder. Raises: WriteError.
    """
    if remembered := _remembered(_key(nearest(folder), direct, may_buffer)):
        return remembered
    with sample_in(folder) as file:
        return disk_profile(file, direct, may_buffer)


def doubt_profile(path: Path) -> None:
    """Have the next load probe the disk that holds a file once more: a run read at half of its speed, or at twice.

    What that probe finds stays, whatever runs reach then.
    """
    for key, entry in PROFILES.load().items():
        if key.startswith(f"{_disk(path)}:") and isinstance(entry, dict) and not entry.get("was_doubted"):
            PROFILES.save(key, {"was_doubted": True})


def _key(path: Path, direct: bool, may_buffer: bool) -> str:
    way = "buffered" if not direct else "any" if may_buffer else "direct"
    return f"{_disk(path)}:{way}"


def _disk(path: Path) -> str:
    return f"{platform.node()}:{path.stat().st_dev}"


@contextmanager
def sample_in(folder: Path) -> Iterator[Path]:
    """Yield a temporary file in a folder, to probe its disk where there is no model yet. Raises: WriteError."""
    with temporary_file(folder, "the disk probe", (os.urandom(SAMPLE_BYTES) for _ in range(2))) as file:
        yield file


def probe_disk(path: Path, direct: bool, may_buffer: bool = False) -> DiskProfile:
    """Measure a disk, in about a second at 1 GB/s. A small file is read once, and gets the default settings."""
    nbytes = path.stat().st_size
    if nbytes < 2 * SAMPLE_BYTES:
        found = _measure(path, direct, SMALL_READ_SIZE, DEFAULT_QUEUE_DEPTH, 0, nbytes)
        return replace(found, read_size=DEFAULT_READ_SIZE)
    best = _best(path, direct, CANDIDATES)
    if not may_buffer or not best.direct:
        return best
    buffered = _best(path, False, BUFFERED_CANDIDATES)
    return buffered if buffered.bytes_per_second > best.bytes_per_second * WORTH_COPYING else best


def _best(path: Path, direct: bool, candidates: Sequence[tuple[int, int]]) -> DiskProfile:
    """Return the fastest of some read sizes and queue depths. Each is measured at other places of the file."""
    trials = [candidate for _ in range(ROUNDS) for candidate in candidates]
    nbytes = path.stat().st_size
    best: DiskProfile | None = None
    for i, (read_size, queue_depth) in enumerate(trials):
        enginethread.check()
        start = (nbytes - SAMPLE_BYTES) * i // len(trials) // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
        found = _measure(path, direct, read_size, queue_depth, start, SAMPLE_BYTES)
        if best is None or found.bytes_per_second > best.bytes_per_second * WORTH_IT:
            best = found
    assert best is not None
    return best


def _measure(path: Path, direct: bool, read_size: int, queue_depth: int, start: int, nbytes: int) -> DiskProfile:
    reader = BackgroundPrefetcher([path], direct=direct, read_size=read_size, queue_depth=queue_depth)
    try:
        if not reader.is_direct:
            drop_file(path, start, nbytes)  # a file that was just downloaded would be read at the speed of memory
        buffer = memoryview(mmap.mmap(-1, reader.read_size * queue_depth, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        use_huge_pages(buffer)  # as the memory of slots
        pieces = [
            Piece("(disk probe)", at, min(reader.read_size, start + nbytes - at), i % queue_depth * reader.read_size)
            for i, at in enumerate(range(start, start + nbytes, reader.read_size))
        ]  # nobody looks at the bytes: two reads may share a place
        reads = reader.prepare([read_pages(path, [piece], piece.buffer_offset) for piece in pieces])
        began = time.perf_counter()
        reader.start(reads, buffer).wait()
        seconds = time.perf_counter() - began
        rate = max(nbytes, 1) / max(seconds, 1e-9)
        return DiskProfile(rate, read_size, queue_depth, reader.is_direct)
    finally:
        reader.close()


def _remembered(key: str) -> DiskProfile | None:
    match PROFILES.load().get(key):
        case {
            "time": float(written),
            "bytes_per_second": float(speed),
            "read_size": int(read_size),
            "queue_depth": int(queue_depth),
            "direct": bool(is_direct),
        }:
            is_fresh = 0 <= time.time() - written <= MAX_AGE_SECONDS
            if is_fresh and 0 < speed < math.inf and read_size > 0 and queue_depth > 0:
                return DiskProfile(speed, read_size, queue_depth, is_direct)
    return None  # too old, or written by another version

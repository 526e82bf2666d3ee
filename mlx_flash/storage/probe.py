"""Short measurements of a disk, and a self-test of how bytes reach a GPU.

A disk has a bandwidth, and a read size and queue depth that reach it. The self-test runs once for each device and each
version of MLX. Results are kept in the cache folder.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
import psutil

from mlx_flash import enginethread
from mlx_flash.errors import SelfTestError, WriteError
from mlx_flash.files import (
    PrivateFolder,
    cache_directory,
    make_private,
    nearest,
    read_json_object,
    write_atomically,
    write_errors,
)
from mlx_flash.memory.arena import Arena, SlotArena, use_huge_pages
from mlx_flash.memory.driver import DriverError
from mlx_flash.memory.footprint import free_unused
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, drop_file
from mlx_flash.storage.placement import Piece, Segment, read_pages
from mlx_flash.storage.prefetcher import DEFAULT_QUEUE_DEPTH, DEFAULT_READ_SIZE, Arrival, BackgroundPrefetcher
from mlx_flash.version import VERSION

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


# --- the self-test of how bytes reach a GPU ---------------------------------------------------------------------------
#
# Threads write to memory that MLX computes from. Some devices lose a part of what a disk writes there past the
# processor, and wrong weights follow without an error. The test reads known bytes while the device computes from their
# neighbours, and compares them on both processors. A way of reading that loses bytes is not used.

SELF_TEST_ROUNDS = 20
NUM_FILE_BYTES = 24 << 20
SELF_TESTS = Measurements("selftest.json")

_FASTEST_FIRST: tuple[Arrival, ...] = ("in place", "copied by the driver", "bounced")

_CHUNK_BYTES = 1 << 20
_FACTOR = 2654435761
"""Word ``i`` of the test file is ``i`` times this odd number, so no two words of it are equal."""

_Words: TypeAlias = "np.ndarray[Any, np.dtype[np.uint32]]"


_Case = tuple[int, int, bool]
"""Bytes of a read, places for them, and whether these are slots of one array; otherwise each is one of its own."""

CASES: tuple[_Case, ...] = ((3 << 20, 8, True), (64 << 10, 16, True), (64 << 10, 16, False))
"""Large and small slots of one array, and small arrays: MLX puts those side by side."""


def _places(nbytes: int, number: int, is_shared: bool) -> tuple[list[memoryview], mx.array | list[mx.array], object]:
    """Return the memory of each place, MLX's views of them, and their owner: with it the memory would go."""
    if not is_shared:
        arenas = [Arena(nbytes) for _ in range(number)]
        return (
            [arena.memory for arena in arenas],
            [arena.view(0, (nbytes // 4,), mx.uint32) for arena in arenas],
            arenas,
        )
    slots = SlotArena(number, nbytes + DIRECT_ALIGNMENT)
    return [slots.memory(i) for i in range(number)], slots.view(0, (nbytes // 4,), mx.uint32), slots


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The result of a test."""

    way: Arrival  # how bytes are to reach MLX's memory
    # blocks that did not arrive, by way. A way ends with the first round that loses some. Slower ways than the chosen
    # one, and those that cannot be tested, are missing.
    lost: dict[str, int]


def needs_test() -> bool:
    """Return True for a GPU. The CPU back end computes from ordinary memory."""
    return bool(mx.default_device() == mx.gpu)


def way_of_reading() -> Arrival:
    """Return how bytes are to reach the memory of MLX's default device. The first call for a GPU may test it."""
    return _remembered_or_run(_device_key()).way if needs_test() else "in place"


def reads_directly(io: str) -> bool:
    """Return whether direct reads are to be tried, with ``FlashConfig(io=...)`` as given."""
    return io != "buffered" and way_of_reading() != "buffered"


def profile_for(path: Path, io: str) -> DiskProfile:
    """Return the profile of the disk that holds a file or folder, for reads with ``FlashConfig(io=...)`` as given."""
    profile = disk_profile if path.is_file() else folder_profile
    return profile(path, reads_directly(io), may_buffer=io == "auto")


def test_now() -> SelfTest:
    """Test the default device, whatever is remembered, and remember the result. Raises: SelfTestError."""
    result = enginethread.run(run_selftest)
    SELF_TESTS.save(_device_key(), asdict(result))
    return result


@cache
def _remembered_or_run(key: str) -> SelfTest:
    match SELF_TESTS.load().get(key):
        case {"way": "in place" | "copied by the driver" | "bounced" | "buffered" as way, "lost": dict(lost)}:
            return SelfTest(way, lost)
    return test_now()


def run_selftest() -> SelfTest:
    """Test the default device, and choose the fastest way that loses nothing. Raises: SelfTestError, WriteError."""
    with _file_of_words() as file:
        lost: dict[str, int] = {"buffered": _count_lost(file, "buffered") or 0}
        if lost["buffered"]:
            raise SelfTestError(
                f"the self-test of {_device()} with MLX {version('mlx')} lost bytes that threads wrote to MLX's "
                f"memory: {lost['buffered']} blocks through the page cache. A model would compute with wrong weights. "
                "Hint: update MLX, or compute on the processor with mx.set_default_device(mx.cpu)."
            )
        chosen: Arrival | None = None
        for way in _FASTEST_FIRST:
            found = _count_lost(file, way)
            if not found and way == "copied by the driver":
                found = _count_lost(file, way, direct=False)
            lost |= {} if found is None else {way: found}
            if found == 0:
                chosen = way
                break
    free_unused()
    # Bounced reads that were not tested, since the disk has no direct ones, are taken for good.
    return SelfTest(chosen or ("buffered" if lost.get("bounced") else "bounced"), lost)


def _count_lost(file: Path, way: Arrival, *, direct: bool | None = None) -> int | None:
    """Return the number of blocks that did not arrive; None where the disk or the driver has no such reads."""
    direct = way != "buffered" if direct is None else direct
    with suppress(DriverError), closing(BackgroundPrefetcher([file], direct=direct, arrival=way)) as reader:
        if not direct or reader.is_direct:
            return next((lost for case in CASES if (lost := _lost_in_case(case, reader, file))), 0)
    return None


def _lost_in_case(case: _Case, reader: BackgroundPrefetcher, file: Path) -> int:
    """Fill half of the places while the device computes from the other half, then the other way round, and so on.

    Return the number of places that are wrong after a round, and end with the first round that has some.
    """
    block_bytes, num_blocks, _ = case
    memories, views, _owner = _places(*case)
    starts = range(0, NUM_FILE_BYTES - block_bytes, block_bytes)
    first_words = _words(0, block_bytes)
    held: dict[int, int] = {}
    for number in range(SELF_TEST_ROUNDS):
        tickets = {}
        for place in range(number % 2, num_blocks, 2):
            held[place] = starts[(number * num_blocks + place) % len(starts)]
            piece = Piece("(self-test)", held[place], block_bytes, 0)
            segment = Segment(file, piece.offset, piece.nbytes, 0, (piece,))
            tickets[place] = reader.submit([segment], memories[place])
            mx.async_eval(_work(views[place ^ 1]))
        for place, ticket in tickets.items():
            while not ticket.done():
                mx.eval(_work(views[place ^ 1]))
            ticket.wait()
        if wrong := _wrong(memories, views, held, first_words):
            return len(wrong)
    return 0


def _work(neighbour: mx.array) -> mx.array:
    return (neighbour ^ 1).max()


def _wrong(
    memories: list[memoryview], views: mx.array | list[mx.array], held: dict[int, int], first_words: _Words
) -> set[int]:
    """Return the places that do not hold what was read to them, as the device or as the processor sees them."""
    # The device looks at all of them before the processor's look may move memory that they share.
    looks = {
        place: (views[place] != _words_on_device(start, first_words.nbytes)).any() for place, start in held.items()
    }
    mx.eval(list(looks.values()))
    wrong = {place for place, look in looks.items() if look.item()}
    for place, start in held.items():
        found = np.frombuffer(memories[place][: first_words.nbytes], np.uint32)
        if not np.array_equal(found, first_words + np.uint32(start // 4 * _FACTOR % 2**32)):
            wrong.add(place)
    return wrong


def _words(start: int, nbytes: int) -> _Words:
    return np.arange(start // 4, (start + nbytes) // 4, dtype=np.uint32) * np.uint32(_FACTOR)


def _words_on_device(start: int, nbytes: int) -> mx.array:
    return mx.arange(start // 4, (start + nbytes) // 4, dtype=mx.uint32) * mx.array(_FACTOR, mx.uint32)


def _device() -> str:
    known = mx.device_info()
    return ", ".join(str(known[name]) for name in ("device_name", "architecture") if name in known)


def _device_key() -> str:
    versions = f"mlx {version('mlx')}, mlx-flash {VERSION}"
    return f"{platform.node()}: {_device()}, {mx.default_device()}, {platform.platform()}, {versions}"


@contextmanager
def _file_of_words() -> Iterator[Path]:
    """Yield a file to read, on a disk like that of models if there is room, else in the system's folder."""

    def in_folder(folder: Path) -> AbstractContextManager[Path]:
        pieces = (_words(start, _CHUNK_BYTES).data for start in range(0, NUM_FILE_BYTES, _CHUNK_BYTES))
        return temporary_file(folder, "the self-test", pieces)

    with ExitStack() as stack:
        try:
            file = stack.enter_context(in_folder(cache_directory()))
        except WriteError:
            file = stack.enter_context(in_folder(Path(tempfile.gettempdir())))
        yield file

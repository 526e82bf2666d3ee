"""The bytes in the buffer are the file's, whatever the way they are read, and nobody writes there afterwards."""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakedriver import FakeDriver
from mlx_flash.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ClosedError,
    FileChangedError,
    ReadError,
    TruncatedFileError,
)
from mlx_flash.memory.pagecache import is_cached, open_direct
from mlx_flash.storage import prefetcher as prefetcher_module
from mlx_flash.storage.placement import Piece, Segment
from mlx_flash.storage.prefetcher import RETRIES, Arrival, BackgroundPrefetcher, Caching
from mlx_flash.storage.safetensors import TensorRecord
from reading import CACHING, PAGE, Load, descriptors, num_cached_pages, packed, reader_threads, write_file
from waiting import eventually

# --- helpers ---------------------------------------------------------------------------

ARRIVALS: dict[str, Arrival] = {
    "copied": "bounced",
    "driver": "copied by the driver",
    "driver, buffered": "copied by the driver",
}
MODES = ("direct", "buffered", *CACHING, *ARRIVALS)
IN_PLACE, BOUNCED = 2 * PAGE, 2 * PAGE + 3
"""Where the first tensor of a file starts; with an alignment of 16, the second cannot be read in place."""

Hook = Callable[[Callable[[], int], memoryview, int], int]
"""What takes the place of a read: gets the real one, its buffer and its offset, and returns the number of bytes."""


def small_load(path: Path, start: int = IN_PLACE, count: int = 3, nbytes: int = 4 * PAGE) -> Load:
    """A few tensors, the last of which ends where the file does, within a page."""
    sizes = [nbytes] * (count - 1) + [nbytes + 129]
    write_file(path, start + sum(sizes))
    return Load(packed(path, start, sizes))


def apart(path: Path, sizes: Sequence[int], start: int = IN_PLACE) -> Load:
    """Tensors that are a segment each."""
    load = Load(packed(path, start, sizes, gap=3 * PAGE))
    assert len(load.placement.segments) == len(sizes)
    return load


@contextlib.contextmanager
def reads(hook: Hook) -> Iterator[None]:
    """Let a function read in the block."""
    real = os.preadv

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return hook(lambda: real(fd, buffers, offset), buffers[0], offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefetcher_module.os, "preadv", preadv)
        yield


def counted(lengths: list[int]) -> contextlib.AbstractContextManager[None]:
    """Note how many bytes each read brings."""

    def hook(read: Callable[[], int], buffer: memoryview, offset: int) -> int:
        lengths.append(read())
        return lengths[-1]

    return reads(hook)


def slowly(seconds: float) -> contextlib.AbstractContextManager[None]:
    return reads(lambda read, buffer, offset: (time.sleep(seconds), read())[1])


def returning(count: Callable[[int], int]) -> contextlib.AbstractContextManager[None]:
    """Reads that stop after ``count(length)`` bytes, and leave what is behind them as it was."""

    def hook(read: Callable[[], int], buffer: memoryview, offset: int) -> int:
        before = bytes(buffer)
        got = read()
        wanted = min(got, count(got))
        buffer[wanted:] = before[wanted:]
        return wanted

    return reads(hook)


def check_quiet(load: Load, seconds: float = 0.25) -> None:
    """Nobody writes to the buffer any more."""
    load.soil()
    time.sleep(seconds)
    load.check_soiled()


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return tmp_path / "shard"


@pytest.fixture
def direct_shard(tmp_path: Path) -> Path:
    path = write_file(tmp_path / "shard", PAGE)
    fd = open_direct(path)
    if fd is None:
        pytest.skip("this file system has no direct reads")
    os.close(fd)
    return path


_readers: list[BackgroundPrefetcher] = []


@pytest.fixture(autouse=True)
def close_readers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A failed test leaves nothing behind that fails the next one."""
    driver = FakeDriver()
    monkeypatch.setattr("mlx_flash.memory.driver.load_driver", lambda: driver)
    yield
    while _readers:
        _readers.pop().close()
    assert not (driver.registered or driver.num_streams or driver.num_contexts)


def open_reader(
    paths: Path | list[Path], mode: str = "direct", read_size: int = PAGE, queue_depth: int = 4
) -> BackgroundPrefetcher:
    direct, arrival = not mode.endswith("buffered"), ARRIVALS.get(mode, "in place")
    paths = paths if isinstance(paths, list) else [paths]
    reader = BackgroundPrefetcher(paths, direct=direct, read_size=read_size, queue_depth=queue_depth, arrival=arrival)
    _readers.append(reader)
    return reader


# --- bytes -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("files")
    return [write_file(folder / "a", 600_001, 1), write_file(folder / "b", 37 * PAGE, 2)]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_tensors_in_any_mode(two_files: list[Path], data: st.DataObject) -> None:
    records = []
    for path in two_files:
        end = path.stat().st_size
        cuts = sorted(data.draw(st.lists(st.integers(0, end), max_size=8), label="cuts"))
        pairs = list(pairwise(cuts))[:: data.draw(st.integers(1, 2))]
        records += [TensorRecord(f"{low}", "U8", (high - low,), path, low, high - low) for low, high in pairs]
    mode = data.draw(st.sampled_from(MODES))
    load = Load(data.draw(st.permutations(records)), data.draw(st.sampled_from((1, 16))))
    read_size = data.draw(st.sampled_from((1, PAGE, 5 * PAGE - 1, 1 << 18, 6 << 20)))
    reader = open_reader(two_files, mode, read_size, data.draw(st.integers(1, 8)))
    try:
        load.check(reader, mode, data.draw(st.booleans(), label="urgent"))
        assert reader.stats.nbytes == load.nbytes and reader.stats.num_retries == 0
        assert reader.stats.num_reads >= -(-load.nbytes // reader.read_size) or mode in CACHING
    finally:
        reader.close()


def test_only_reads_that_are_kept_leave_pages_in_the_cache(direct_shard: Path) -> None:
    load = small_load(direct_shard, nbytes=100 * PAGE)
    for mode in ("buffered", "direct"):
        uncache(direct_shard)
        reader = open_reader(direct_shard, mode, read_size=1 << 20)
        load.check(reader, mode)
        assert reader.is_direct == (mode == "direct")
        assert num_cached_pages(direct_shard) < 10
    load.check(reader, "kept")
    assert num_cached_pages(direct_shard) >= 300


def test_loading_reads_through_the_page_cache_only_what_it_holds(direct_shard: Path) -> None:
    load = small_load(direct_shard, count=2, nbytes=100 * PAGE)
    uncache(direct_shard)
    reader = open_reader(direct_shard, read_size=50 * PAGE)
    load.check(reader, "found")
    assert num_cached_pages(direct_shard) < 10
    assert reader.stats.cached_bytes == 0 and reader.stats.num_reads == 1, "one long read"
    direct_shard.read_bytes()
    load.check(reader, "found")
    with direct_shard.open("rb") as file:
        if not is_cached(file.fileno(), 0, PAGE):
            pytest.skip("this system does not say what it caches")
        assert reader.stats.cached_bytes == load.nbytes
        os.posix_fadvise(file.fileno(), IN_PLACE + 60 * PAGE, 20 * PAGE, os.POSIX_FADV_DONTNEED)
        assert is_cached(file.fileno(), IN_PLACE, 50 * PAGE)
        assert not is_cached(file.fileno(), IN_PLACE, 80 * PAGE)
    load.check(reader, "found")
    assert reader.stats.cached_bytes == load.nbytes, "a range that lacks a page is read directly"


@pytest.mark.parametrize("mode", ["buffered", "driver, buffered"])
@pytest.mark.parametrize("start", [IN_PLACE, BOUNCED])
def test_buffered_reads_bring_what_is_wanted_alone(shard: Path, start: int, mode: str) -> None:
    write_file(shard, 100 * PAGE)
    load = apart(shard, [PAGE + 7, 300, 3 * PAGE + 1], start)
    found, reader = list[int](), open_reader(shard, mode, 16 * PAGE, 1)
    with counted(found):
        load.check(reader, mode)
    assert sum(found) == reader.stats.nbytes == 4 * PAGE + 308


@pytest.mark.parametrize("mode", MODES)
def test_a_hole_as_long_as_a_read(shard: Path, mode: str) -> None:
    write_file(shard, 40 * PAGE)
    load = Load(packed(shard, IN_PLACE, [2 * PAGE, 2 * PAGE], gap=PAGE))
    reader = open_reader(shard, mode, PAGE)
    assert len(load.placement.segments) == 1
    load.check(reader, mode)
    assert reader.stats.nbytes == 4 * PAGE


def uncache(path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux drops pages when asked")
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert num_cached_pages(path) == 0


@pytest.mark.parametrize("start", [IN_PLACE, BOUNCED])
def test_buffer_that_is_too_small_is_refused(shard: Path, start: int) -> None:
    load = small_load(shard, start)
    reader = open_reader(shard)
    last = load.placement.segments[-1].pieces[-1]
    with pytest.raises(ValueError, match=r"shard\.2.* of a buffer of"):
        reader.submit(load.placement.segments, load.buffer[: last.buffer_offset + last.nbytes - 1])


# --- tasks -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pages", "queue_depth", "caching", "at_least", "at_most"),
    [
        ([5, 1, 1] * 3, 1, "shared", 1, 1),
        ([5, 1, 1] * 3, 4, "shared", 2, 4),
        ([5, 1, 1] * 3, 100, "shared", 4, 9),
        ([5, 1, 1] * 3, 1, "kept", 9, 9),
        ([50] * 6, 1, "shared", 6, 6),
        ([25] * 6, 1, "shared", 3, 3),
        ([140], 1, "shared", 3, 3),
        ([140, 1, 1], 1, "shared", 3, 4),
    ],
)
def test_small_segments_share_a_task_of_at_most_the_read_size(
    shard: Path, pages: list[int], queue_depth: int, caching: Caching, at_least: int, at_most: int
) -> None:
    write_file(shard, 300 * PAGE)
    segments = apart(shard, [PAGE * count for count in pages]).placement.segments
    reader = open_reader(shard, read_size=60 * PAGE, queue_depth=queue_depth)
    tasks = reader.prepare(segments, caching).tasks
    assert at_least <= len(tasks) <= at_most
    assert all(sum(part.stop - part.start for part in task) <= reader.read_size for task in tasks)
    parts = [part.start for task in tasks for part in task]
    assert parts == sorted(parts) and len(parts) == sum(-(-count // 60) for count in pages)
    if caching == "shared":  # a driver's copies end with a wait for each task
        driver = open_reader(shard, "driver", read_size=60 * PAGE, queue_depth=queue_depth)
        alone = open_reader(shard, read_size=60 * PAGE, queue_depth=1)
        assert len(driver.prepare(segments, caching).tasks) == len(alone.prepare(segments, caching).tasks)


@pytest.mark.parametrize("mode", MODES)
def test_of_a_table_only_the_rows_are_read(shard: Path, mode: str) -> None:
    """Few rows of a prompt lie far apart in a table of gigabytes."""
    write_file(shard, 300 * PAGE)
    pieces = [Piece("table", row * 1000, 1000, i * 1000) for i, row in enumerate((3, 4, 600, 1200))]
    span = Segment(shard, pieces[0].offset, pieces[-1].end - pieces[0].offset, None, tuple(pieces))
    reader, buffer, lengths = open_reader(shard, mode), memoryview(bytearray(4000)), list[int]()
    with counted(lengths):
        reader.submit([span], buffer, caching="kept").wait()
    assert sum(lengths) == reader.stats.nbytes == 4000
    contents = shard.read_bytes()
    assert bytes(buffer) == b"".join(contents[piece.offset : piece.end] for piece in pieces)


@pytest.mark.parametrize("urgent", [False, True])
def test_reads_in_flight_are_as_many_as_the_queue_depth(shard: Path, urgent: bool) -> None:
    write_file(shard, 200 * PAGE)
    load = apart(shard, [PAGE] * 21)
    reader = open_reader(shard, read_size=100 * PAGE, queue_depth=3)
    lock, together, under_way, most = threading.Lock(), threading.Barrier(3, timeout=20), [0], [0]

    def hook(read: Callable[[], int], buffer: memoryview, offset: int) -> int:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        together.wait()
        with lock:
            under_way[0] -= 1
        return read()

    with reads(hook):
        load.check(reader, urgent=urgent)
    assert most == [3]


# --- urgent reads ----------------------------------------------------------------------


@pytest.mark.parametrize("is_hurried", [False, True])
def test_urgent_reads_do_not_queue_behind_others(shard: Path, is_hurried: bool) -> None:
    write_file(shard, 200 * PAGE)
    ahead, needed = apart(shard, [PAGE] * 40), apart(shard, [PAGE] * 5)
    reader = open_reader(shard, queue_depth=2)
    with slowly(0.05):
        tickets = [ahead.submit(reader), needed.submit(reader, urgent=not is_hurried)]
        for _ in range(2 * is_hurried):
            tickets[1].hurry()
        tickets[1].wait()
        assert needed.found() == needed.expected
        assert reader.stats.num_reads < 20 and not tickets[0].done()
        tickets[0].wait()
        tickets[0].hurry()
    assert ahead.found() == ahead.expected
    assert reader.stats.num_reads == 45


# --- short and failing reads -----------------------------------------------------------


@pytest.mark.parametrize("start", [IN_PLACE, BOUNCED])
@pytest.mark.parametrize("mode", MODES)
def test_short_reads(shard: Path, start: int, mode: str) -> None:
    load = small_load(shard, start, nbytes=20 * PAGE)
    reader = open_reader(shard, mode, read_size=16 * PAGE)
    chance = random.Random(1)
    smallest = PAGE if reader.is_direct and mode != "kept" else 1
    with returning(lambda got: chance.randint(smallest, max(got, smallest))):
        load.check(reader, mode)
    assert reader.stats.nbytes == load.nbytes
    assert reader.stats.num_retries == 0


def test_a_failed_read_keeps_nothing_of_the_buffer(shard: Path) -> None:
    """Its thread read some of it that the driver has not copied: a pool made again would be there twice."""
    write_file(shard, 40 * PAGE)
    load = apart(shard, [PAGE, PAGE])
    reader = open_reader(shard, "driver", read_size=16 * PAGE, queue_depth=1)

    def fail_second(read: Callable[[], int], buffer: memoryview, offset: int) -> int:
        if offset > IN_PLACE:
            raise OSError(errno.EACCES, "not now")
        return read()

    memory = mmap.mmap(-1, load.placement.nbytes)
    with reads(fail_second):
        ticket = reader.submit(load.placement.segments, memoryview(memory))
        with pytest.raises(ReadError, match="not now"):
            ticket.wait()
    del ticket
    gc.collect()
    memory.close()  # which is refused while anything refers to it


def test_a_copy_that_does_not_start_leaves_none_in_flight(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller uses its memory for something else after the error."""

    class Refusing(FakeDriver):
        def cuMemcpyHtoDAsync_v2(self, *copy: Any) -> int:  # noqa: N802
            return 700 if copy[2] == 3 * PAGE else super().cuMemcpyHtoDAsync_v2(*copy)

    driver = Refusing()
    monkeypatch.setattr("mlx_flash.memory.driver.load_driver", lambda: driver)
    write_file(shard, 40 * PAGE)
    load = apart(shard, [PAGE, 3 * PAGE, PAGE])
    with pytest.raises(ReadError, match=r"'shard\.0' .*CUDA error 700 when it was copied"):
        load.check(open_reader(shard, "driver", read_size=16 * PAGE, queue_depth=1))
    assert driver.num_copies == 1 and not driver.in_flight


def test_direct_reads_of_less_than_a_page_are_retried(direct_shard: Path) -> None:
    load = small_load(direct_shard, nbytes=20 * PAGE)
    reader = open_reader(direct_shard, read_size=1 << 20, queue_depth=1)
    lengths = iter([5 * PAGE + 512, 512, 100])
    with returning(lambda got: next(lengths, got)):
        load.check(reader)
    assert reader.stats.num_retries == 2
    with returning(lambda got: 512), pytest.raises(ReadError, match=r"too few bytes came") as caught:
        load.check(reader)
    assert not isinstance(caught.value, TruncatedFileError)  # the file is as long as ever


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("times", [1, RETRIES])
def test_transient_io_error(shard: Path, mode: str, times: int) -> None:
    load = small_load(shard)
    reader = open_reader(shard, mode, queue_depth=1)
    errors = iter([OSError(errno.EIO, "not now")] * times)

    def hook(read: Callable[[], int], buffer: memoryview, offset: int) -> int:
        for error in errors:
            raise error
        return read()

    with reads(hook):
        load.check(reader, mode)
    assert (reader.stats.num_retries, reader.stats.nbytes) == (times, load.nbytes)


@pytest.mark.parametrize("start", [IN_PLACE, BOUNCED])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("code", "num_tries"), [(errno.EIO, RETRIES + 1), (errno.ENXIO, 1), (errno.EINVAL, 1)])
def test_permanent_error_in_the_middle_of_a_task_names_its_tensor(
    shard: Path, start: int, mode: str, code: int, num_tries: int
) -> None:
    write_file(shard, 100 * PAGE)
    load = apart(shard, [PAGE] * 9, start)
    bad = load.records[4].offset + 5
    reader = open_reader(shard, mode, 100 * PAGE, 1)
    tries = []

    def hook(read: Callable[[], int], buffer: memoryview, offset: int) -> int:
        if offset <= bad < offset + len(buffer):
            tries.append(offset)
            raise OSError(code, os.strerror(code))
        return read()

    words = rf"'shard\.4'.*{shard}: {os.strerror(code)} at offset \d+\."
    with reads(hook), pytest.raises(ReadError, match=words) as caught:
        load.check(reader, mode)
    assert f"at offset {tries[0]}." in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert len(tries) == num_tries
    assert (reader.stats.num_retries, reader.stats.num_reads, reader.stats.nbytes) == (num_tries - 1, 5, 4 * PAGE)
    load.check(reader, mode)
    assert (reader.stats.num_reads, reader.stats.nbytes) == (14, 4 * PAGE + load.nbytes)


@pytest.mark.parametrize("start", [IN_PLACE, BOUNCED])
@pytest.mark.parametrize("mode", MODES)
def test_read_of_zero_bytes_is_a_truncation(shard: Path, start: int, mode: str) -> None:
    load = small_load(shard, start)
    reader = open_reader(shard, mode, read_size=1 << 20)
    with reads(lambda *_: 0), pytest.raises(TruncatedFileError, match=rf"'shard\.0'.*{shard}.*truncated"):
        load.check(reader, mode)
    load.check(reader, mode)


# --- interrupts, cancelling, closing ---------------------------------------------------


@pytest.mark.parametrize("end", ["cancel", "close", "close urgent", "fail"])
def test_no_read_is_in_flight_in_the_end(shard: Path, end: str) -> None:
    load, before = small_load(shard, count=90), descriptors()  # which take three seconds
    reader = open_reader(shard, queue_depth=3)

    def hook(read: Callable[[], int], buffer: memoryview, offset: int) -> int:
        if offset == IN_PLACE and end == "fail":
            raise OSError(errno.ENXIO, "gone")
        time.sleep(0.1)
        return read()

    with reads(hook):
        ticket, began = load.submit(reader, urgent="urgent" in end), time.perf_counter()
        if end == "fail":
            with pytest.raises(ReadError, match="gone"):
                ticket.wait()
        else:
            time.sleep(0.05)
            (ticket.cancel if end == "cancel" else reader.close)()
        assert time.perf_counter() - began < 1 and ticket.done() and reader.stats.num_reads < 90
        check_quiet(load)
    if "close" in end:
        with pytest.raises(ClosedError):
            ticket.wait()
        assert not reader_threads() and descriptors() == before
    else:
        ticket.cancel()
        load.check(reader)


@pytest.mark.parametrize("mode", MODES)
def test_close_ends_threads_and_closes_files(shard: Path, mode: str) -> None:
    load = small_load(shard)
    before = descriptors()
    assert not reader_threads()
    reader = open_reader(shard, mode)
    load.check(reader, mode)
    assert reader_threads() and not [name for name in reader_threads() if "urgent" in name]
    load.check(reader, mode, urgent=True)
    assert [name for name in reader_threads() if "urgent" in name]
    assert descriptors() > before
    for _ in range(2):
        reader.close()
        assert not reader_threads()
        assert descriptors() == before
    with pytest.raises(ClosedError):
        load.submit(reader)


def test_threads_end_with_their_reader(shard: Path) -> None:
    """Without a garbage collection, which may come late."""
    load, reader = small_load(shard), BackgroundPrefetcher([shard])
    load.check(reader)
    files = [*reader._files.values()]
    gc.disable()
    try:
        del reader
        eventually(lambda: not reader_threads())
    finally:
        gc.enable()
        for file in files:
            file.close()


def test_file_that_cannot_be_opened(shard: Path) -> None:
    write_file(shard, 10)
    before = descriptors()
    for path, error, words in (
        (shard.with_name("other"), CheckpointNotFoundError, "other"),
        (shard.parent, CheckpointError, "Is a directory"),
    ):
        with pytest.raises(error, match=words):
            BackgroundPrefetcher([shard, path])
        assert descriptors() == before and not reader_threads()


@pytest.mark.parametrize("function", ["fstat", "preadv", "posix_fadvise"])
def test_disk_error_while_opening_leaks_nothing(shard: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    write_file(shard, 10)
    before = descriptors()

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    if not hasattr(os, function):
        pytest.skip("not on this system")
    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail)
        try:
            reader = BackgroundPrefetcher([shard])
        except CheckpointError as error:
            assert "the disk is broken" in str(error)
        else:
            assert function == "preadv"  # where there are no direct reads, it is not called
            reader.close()
    assert descriptors() == before


# --- counting --------------------------------------------------------------------------


def test_busy_seconds_count_parallel_reads_once(shard: Path) -> None:
    load = small_load(shard, count=6, nbytes=PAGE)
    reader = open_reader(shard, queue_depth=3)
    waited = 0.0
    with slowly(0.05):
        for _ in range(2):
            began = time.perf_counter()
            load.check(reader)
            waited += time.perf_counter() - began
            time.sleep(0.2)
    assert reader.stats.num_reads == 2 * 7
    assert 2 * 3 * 0.05 <= reader.stats.busy_seconds <= waited


def test_waiting_for_a_processor_is_not_waiting_for_reads(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report said that 20 % of the time went to waiting for the disk, and 18 % to reading."""
    load = small_load(shard)
    reader = open_reader(shard, read_size=1 << 20)  # one read: between two of them no read is in flight
    change_of, is_late = reader._change_of, threading.Event()

    def late(files: Any) -> Exception | None:
        is_late.wait(0.05)  # before the system lets the caller go on
        return change_of(files)

    monkeypatch.setattr(reader, "_change_of", late)
    ticket = load.submit(reader)
    assert ticket.wait() <= reader.stats.busy_seconds
    assert ticket.wait() == 0


# --- files that change -----------------------------------------------------------------


def test_change_during_a_read_is_an_error(shard: Path) -> None:
    """A byte is written and written back while it is read, for each of two tickets."""
    load = small_load(shard)
    reader = open_reader(shard, read_size=1 << 20)
    load.check(reader)
    middle, byte = load.records[1].offset + 17 * 7, load.expected[1][17 * 7 :][:1]

    def write(data: bytes) -> None:
        with shard.open("r+b", buffering=0) as file:
            file.seek(middle)
            file.write(data)

    def hook(read: Callable[[], int], buffer: memoryview, offset: int) -> int:
        write(b"x")
        count = read()
        write(byte)
        return count

    with reads(hook):
        for ticket in [load.submit(reader) for _ in range(2)]:
            with pytest.raises(FileChangedError, match="replaced by another"):
                ticket.wait()

"""The bytes in the buffer are the file's, whatever the way they are read, and nobody writes there afterwards."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import signal
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
from mlx_flash.storage import ranges as ranges_module
from mlx_flash.storage.prefetcher import BackgroundPrefetcher
from mlx_flash.storage.ranges import RETRIES, Arrival
from mlx_flash.storage.safetensors import Extent, TensorRecord
from reading import CACHING, PAGE, Load, descriptors, num_cached_pages, packed, reader_threads, write_file

# --- helpers ---------------------------------------------------------------------------

ARRIVALS: dict[str, Arrival] = {
    "copied": "bounced",
    "driver": "copied by the driver",
    "driver, buffered": "copied by the driver",
}
MODES = ("direct", "buffered", *CACHING, *ARRIVALS)
IN_PLACE, BOUNCED = 2 * PAGE, 2 * PAGE + 3
"""Where the first tensor of a file starts; with an alignment of 16, the second cannot be read in place."""

Preadv = Callable[[int, Sequence[memoryview], int], int]


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


@pytest.fixture
def replace_preadv(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Preadv], Preadv]], None]:
    """Replaces ``os.preadv`` by what a function makes of the real one."""

    def replace(wrap: Callable[[Preadv], Preadv]) -> None:
        monkeypatch.setattr(ranges_module.os, "preadv", wrap(os.preadv))

    return replace


Replace = Callable[[Callable[[Preadv], Preadv]], None]


def slowly(seconds: float) -> Callable[[Preadv], Preadv]:
    def wrap(real: Preadv) -> Preadv:
        def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            time.sleep(seconds)
            return real(fd, buffers, offset)

        return preadv

    return wrap


def failing(code: int, times: int, calls: list[int] | None = None) -> Callable[[Preadv], Preadv]:
    """The first ``times`` reads fail."""
    lock = threading.Lock()
    seen = [] if calls is None else calls

    def wrap(real: Preadv) -> Preadv:
        def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            with lock:
                seen.append(offset)
                fails = len(seen) <= times
            if fails:
                raise OSError(code, os.strerror(code))
            return real(fd, buffers, offset)

        return preadv

    return wrap


def returning(count: Callable[[int], int]) -> Callable[[Preadv], Preadv]:
    """Reads that stop after ``count(length)`` bytes."""

    def wrap(real: Preadv) -> Preadv:
        def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            whole = memoryview(mmap.mmap(-1, -(-len(buffers[0]) // PAGE) * PAGE))[: len(buffers[0])]
            got = real(fd, [whole], offset)
            wanted = min(got, count(got))
            buffers[0][:wanted] = whole[:wanted]
            return wanted

        return preadv

    return wrap


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


def open_reader(path: Path, mode: str = "direct", read_size: int = PAGE, queue_depth: int = 4) -> BackgroundPrefetcher:
    direct, arrival = not mode.endswith("buffered"), ARRIVALS.get(mode, "in place")
    reader = BackgroundPrefetcher([path], direct=direct, read_size=read_size, queue_depth=queue_depth, arrival=arrival)
    _readers.append(reader)
    return _readers[-1]


# --- bytes -----------------------------------------------------------------------------


@pytest.mark.parametrize("start", [IN_PLACE, BOUNCED, 0, 1])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("read_size", "queue_depth"), [(PAGE, 1), (5 * PAGE - 1, 3), (1 << 20, 8), (6 << 20, 2)])
def test_bytes_and_counts(shard: Path, start: int, mode: str, read_size: int, queue_depth: int) -> None:
    sizes = [1, 700_001, 16, 400_000 if read_size > PAGE else 9, 123_457]
    write_file(shard, start + sum(sizes) + 7 * (len(sizes) - 1))
    load = Load(packed(shard, start, sizes, gap=7))
    reader = open_reader(shard, mode, read_size, queue_depth)
    load.check(reader, mode)
    assert reader.stats.nbytes == load.nbytes
    assert reader.stats.num_retries == 0
    assert reader.stats.num_reads >= -(-load.nbytes // reader.read_size) or mode == "kept"


@pytest.fixture(scope="module")
def two_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("files")
    return [write_file(folder / "a", 600_001, 1), write_file(folder / "b", 37 * PAGE, 2)]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_tensors_in_any_mode(two_files: list[Path], data: st.DataObject) -> None:
    records = []
    for path in two_files:
        end = path.stat().st_size
        cuts = sorted(data.draw(st.lists(st.integers(0, end), max_size=8), label="cuts"))
        pairs = list(pairwise(cuts))[:: data.draw(st.integers(1, 2))]
        records += [TensorRecord(f"{low}", "U8", (high - low,), Extent(path, low, high - low)) for low, high in pairs]
    mode = data.draw(st.sampled_from(MODES))
    load = Load(data.draw(st.permutations(records)), data.draw(st.sampled_from((1, 16))))
    reader = BackgroundPrefetcher(
        two_files,
        direct=mode != "buffered",
        read_size=data.draw(st.sampled_from((1, PAGE, 3 * PAGE, 1 << 18))),
        queue_depth=data.draw(st.integers(1, 8)),
    )
    try:
        load.check(reader, mode, data.draw(st.booleans(), label="urgent"))
        assert reader.stats.nbytes == load.nbytes
    finally:
        reader.close()


def test_direct_reads_are_direct(direct_shard: Path) -> None:
    """None of the file's pages come to the page cache by a direct read."""
    load = small_load(direct_shard, nbytes=100 * PAGE)
    uncache(direct_shard)
    reader = open_reader(direct_shard)
    load.check(reader)
    assert reader.is_direct
    assert num_cached_pages(direct_shard) < 100  # those of the samples
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


def test_buffered_reads_leave_no_pages_behind(direct_shard: Path) -> None:
    load = small_load(direct_shard, nbytes=100 * PAGE)
    uncache(direct_shard)
    reader = open_reader(direct_shard, "buffered", read_size=1 << 20)
    load.check(reader, "buffered")
    assert not reader.is_direct
    assert num_cached_pages(direct_shard) < 10


def uncache(path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux drops pages when asked")
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert num_cached_pages(path) == 0


def test_many_tickets_at_once(shard: Path) -> None:
    write_file(shard, 1_000_003)
    loads = [Load(packed(shard, start, [90_000, 5, 100_000])) for start in range(0, 800_000, 100_001)]
    reader = open_reader(shard, read_size=3 * PAGE)
    tickets = [load.submit(reader) for load in loads]
    for ticket, load in zip(reversed(tickets), reversed(loads), strict=True):
        ticket.wait()
        assert ticket.done()
        assert load.found() == load.expected
        ticket.wait()


def test_empty_ticket(shard: Path) -> None:
    write_file(shard, 10)
    reader = open_reader(shard)
    ticket = reader.submit([], memoryview(bytearray(0)))
    assert ticket.done()
    ticket.wait()
    ticket.cancel()


@pytest.mark.parametrize("start", [IN_PLACE, BOUNCED])
def test_buffer_that_is_too_small_is_refused(shard: Path, start: int) -> None:
    load = small_load(shard, start)
    reader = open_reader(shard)
    last = load.placement.segments[-1].pieces[-1]
    with pytest.raises(ValueError, match=r"shard\.2.* of a buffer of"):
        reader.submit(load.placement.segments, load.buffer[: last.buffer_offset + last.nbytes - 1])


# --- tasks -----------------------------------------------------------------------------


@pytest.fixture
def num_tasks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many tasks the threads did since the last time this was asked."""
    done_tasks: list[object] = []
    real = BackgroundPrefetcher._read

    def read(reader: BackgroundPrefetcher, *task: Any) -> None:
        done_tasks.append(task)
        real(reader, *task)

    def count() -> int:
        found = len(done_tasks)
        done_tasks.clear()
        return found

    monkeypatch.setattr(BackgroundPrefetcher, "_read", read)
    return count


@pytest.mark.parametrize("start", [IN_PLACE, BOUNCED])
@pytest.mark.parametrize("mode", MODES)
def test_small_segments_share_a_task(shard: Path, num_tasks: Callable[[], int], start: int, mode: str) -> None:
    write_file(shard, 100 * PAGE)
    load = apart(shard, [5 * PAGE, 100, 100] * 3, start)
    for queue_depth, at_most in ((1, 1), (2, 2), (3, 3), (4, 4), (100, 9)):
        reader = open_reader(shard, mode, 100 * PAGE, queue_depth)
        load.check(reader, mode)
        assert num_tasks() <= (9 if mode == "kept" else at_most)
        assert reader.stats.num_reads == 9
        assert reader.stats.nbytes == load.nbytes


@pytest.mark.parametrize(
    ("pages", "at_least", "at_most"), [([8] * 6, 6, 6), ([3] * 6, 3, 3), ([20], 3, 3), ([20, 1, 1], 3, 4)]
)
def test_task_reads_at_most_the_read_size(
    shard: Path, num_tasks: Callable[[], int], pages: list[int], at_least: int, at_most: int
) -> None:
    write_file(shard, 100 * PAGE)
    load = apart(shard, [PAGE * count for count in pages])
    load.check(open_reader(shard, read_size=8 * PAGE, queue_depth=1))
    assert at_least <= num_tasks() <= at_most


def test_each_cached_segment_is_one_task(shard: Path, num_tasks: Callable[[], int]) -> None:
    write_file(shard, 100 * PAGE)
    apart(shard, [100, 3 * PAGE, 100]).check(open_reader(shard, "kept", PAGE, 1), "kept")
    assert num_tasks() == 3


def test_segments_are_read_in_their_order(shard: Path, replace_preadv: Replace) -> None:
    write_file(shard, 100 * PAGE)
    load = apart(shard, [PAGE, 7 * PAGE, 100, 100, 2 * PAGE])
    reader = open_reader(shard, read_size=4 * PAGE, queue_depth=1)
    offsets: list[int] = []
    replace_preadv(failing(errno.EIO, 0, offsets))
    load.check(reader)
    assert offsets == sorted(offsets)
    assert len(offsets) == reader.stats.num_reads == 6


def test_ticket_of_small_segments_uses_all_threads(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(shard, 100 * PAGE)
    load = apart(shard, [PAGE] * 8)
    reader = open_reader(shard, read_size=100 * PAGE, queue_depth=4)
    together = threading.Barrier(4, timeout=20)
    real = os.preadv

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        together.wait()
        return real(fd, buffers, offset)

    monkeypatch.setattr(ranges_module.os, "preadv", preadv)
    load.check(reader)


@pytest.mark.parametrize("mode", MODES)
def test_error_in_the_middle_of_a_task_names_its_tensor(shard: Path, replace_preadv: Replace, mode: str) -> None:
    write_file(shard, 100 * PAGE)
    load = apart(shard, [PAGE] * 9)
    reader = open_reader(shard, mode, 100 * PAGE, 1)
    bad = load.records[4].extent.offset

    def wrap(real: Preadv) -> Preadv:
        def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if offset == bad:
                raise OSError(errno.ENXIO, "gone")
            return real(fd, buffers, offset)

        return preadv

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges_module.os, "preadv", wrap(os.preadv))
        with pytest.raises(ReadError, match=rf"'shard\.4'.*{shard}: gone at offset {bad}\."):
            load.check(reader, mode)
    load.check(reader, mode)


# --- urgent reads ----------------------------------------------------------------------


def test_urgent_reads_do_not_queue_behind_others(shard: Path, replace_preadv: Replace) -> None:
    write_file(shard, 200 * PAGE)
    ahead, needed = apart(shard, [PAGE] * 40), apart(shard, [PAGE] * 2)
    reader = open_reader(shard, queue_depth=2)
    replace_preadv(slowly(0.05))
    ticket = ahead.submit(reader)
    needed.check(reader, urgent=True)
    assert reader.stats.num_reads < 20
    assert not ticket.done()
    ticket.wait()
    assert ahead.found() == ahead.expected
    assert reader.stats.num_reads == 42


def test_hurried_reads_leave_the_queue(shard: Path, replace_preadv: Replace) -> None:
    write_file(shard, 200 * PAGE)
    ahead, needed = apart(shard, [PAGE] * 40), apart(shard, [PAGE] * 5)
    reader = open_reader(shard, queue_depth=2)
    replace_preadv(slowly(0.05))
    tickets = [ahead.submit(reader), needed.submit(reader)]
    tickets[1].hurry()
    tickets[1].hurry()
    tickets[1].wait()
    assert needed.found() == needed.expected
    assert not tickets[0].done()
    tickets[0].wait()
    tickets[0].hurry()
    assert ahead.found() == ahead.expected
    assert reader.stats.num_reads == 45


def test_urgent_reads_have_a_queue_depth(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(shard, 200 * PAGE)
    load = apart(shard, [PAGE] * 20)
    reader = open_reader(shard, queue_depth=3)
    real, lock, under_way, most = os.preadv, threading.Lock(), [0], [0]

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        time.sleep(0.005)
        with lock:
            under_way[0] -= 1
        return real(fd, buffers, offset)

    monkeypatch.setattr(ranges_module.os, "preadv", preadv)
    load.check(reader, urgent=True)
    assert most == [3]


def test_threads_for_urgent_reads_are_made_when_needed(shard: Path) -> None:
    load = small_load(shard)
    reader = open_reader(shard)
    load.check(reader)
    assert not [name for name in reader_threads() if "urgent" in name]
    load.check(reader, urgent=True)
    assert [name for name in reader_threads() if "urgent" in name]


# --- short and failing reads -----------------------------------------------------------


@pytest.mark.parametrize("start", [IN_PLACE, BOUNCED])
@pytest.mark.parametrize("mode", MODES)
def test_short_reads(shard: Path, replace_preadv: Replace, start: int, mode: str) -> None:
    load = small_load(shard, start, nbytes=20 * PAGE)
    reader = open_reader(shard, mode, read_size=16 * PAGE)
    chance = random.Random(1)
    smallest = PAGE if reader.is_direct and mode != "kept" else 1
    replace_preadv(returning(lambda got: chance.randint(smallest, max(got, smallest))))
    load.check(reader, mode)
    assert reader.stats.nbytes == load.nbytes
    assert reader.stats.num_retries == 0


def test_direct_read_of_less_than_a_page_is_retried(direct_shard: Path, replace_preadv: Replace) -> None:
    load = small_load(direct_shard, nbytes=20 * PAGE)
    reader = open_reader(direct_shard, read_size=1 << 20, queue_depth=1)
    lengths = iter([5 * PAGE + 512, 512, 100])
    replace_preadv(returning(lambda got: next(lengths, got)))
    load.check(reader)
    assert reader.stats.num_retries == 2


def test_direct_reads_that_always_return_less_than_a_page(direct_shard: Path, replace_preadv: Replace) -> None:
    """The file is as long as ever, so it is not called truncated."""
    load = small_load(direct_shard, nbytes=20 * PAGE)
    reader = open_reader(direct_shard, read_size=1 << 20, queue_depth=1)
    replace_preadv(returning(lambda got: 512))
    with pytest.raises(ReadError, match=r"too few bytes came") as caught:
        load.check(reader)
    assert not isinstance(caught.value, TruncatedFileError)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("times", [1, 2, RETRIES])
def test_transient_io_error(shard: Path, replace_preadv: Replace, mode: str, times: int) -> None:
    load = small_load(shard)
    reader = open_reader(shard, mode, queue_depth=1)
    replace_preadv(failing(errno.EIO, times))
    load.check(reader, mode)
    assert reader.stats.num_retries == times
    assert reader.stats.nbytes == load.nbytes


@pytest.mark.parametrize("start", [IN_PLACE, BOUNCED])
@pytest.mark.parametrize("mode", MODES)
def test_permanent_io_error(shard: Path, replace_preadv: Replace, start: int, mode: str) -> None:
    load = small_load(shard, start)
    bad = load.records[1].extent.offset + 5
    reader = open_reader(shard, mode)
    calls = []

    def wrap(real: Preadv) -> Preadv:
        def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if offset <= bad < offset + len(buffers[0]):
                calls.append(offset)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(fd, buffers, offset)

        return preadv

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges_module.os, "preadv", wrap(os.preadv))
        with pytest.raises(ReadError, match=os.strerror(errno.EIO)) as caught:
            load.check(reader, mode)
    assert str(shard) in str(caught.value)
    # the page before the tensor's own first one may hold another tensor's end
    assert f"'{load.records[1].name}'" in str(caught.value) or f"'{load.records[0].name}'" in str(caught.value)
    assert f"at offset {calls[0]}." in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert len(calls) == RETRIES + 1
    assert reader.stats.num_retries == RETRIES
    load.check(reader, mode)


@pytest.mark.parametrize("code", [errno.ENODEV, errno.ESTALE, errno.EBADF, errno.EINVAL, errno.ENXIO])
def test_other_errors_are_not_retried(shard: Path, replace_preadv: Replace, code: int) -> None:
    load = small_load(shard, count=1, nbytes=PAGE)
    reader = open_reader(shard, read_size=1 << 20)
    calls: list[int] = []
    replace_preadv(failing(code, 1, calls))
    with pytest.raises(ReadError, match=os.strerror(code)):
        load.check(reader)
    assert len(calls) == 1
    load.check(reader)


@pytest.mark.parametrize("start", [IN_PLACE, BOUNCED])
@pytest.mark.parametrize("mode", MODES)
def test_read_of_zero_bytes_is_a_truncation(shard: Path, replace_preadv: Replace, start: int, mode: str) -> None:
    load = small_load(shard, start)
    reader = open_reader(shard, mode, read_size=1 << 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges_module.os, "preadv", lambda fd, buffers, offset: 0)
        with pytest.raises(TruncatedFileError, match=r"'shard\.0'.*truncated") as caught:
            load.check(reader, mode)
    assert str(shard) in str(caught.value)
    load.check(reader, mode)


def test_failed_wait_leaves_no_read_in_flight(shard: Path, replace_preadv: Replace) -> None:
    load = small_load(shard, count=8)
    reader = open_reader(shard, queue_depth=3)

    def wrap(real: Preadv) -> Preadv:
        def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if offset == IN_PLACE:
                raise OSError(errno.ENXIO, "gone")
            time.sleep(0.1)
            return real(fd, buffers, offset)

        return preadv

    replace_preadv(wrap)
    with pytest.raises(ReadError, match="gone"):
        load.submit(reader).wait()
    load.soil()
    time.sleep(0.25)
    load.check_soiled()


# --- interrupts, cancelling, closing ---------------------------------------------------


def test_cancel_waits_for_writers(shard: Path, replace_preadv: Replace) -> None:
    load = small_load(shard, count=90)  # which take three seconds
    reader = open_reader(shard, queue_depth=3)
    replace_preadv(slowly(0.1))
    ticket = load.submit(reader)
    time.sleep(0.05)
    began = time.perf_counter()
    ticket.cancel()
    assert time.perf_counter() - began < 1
    load.soil()
    time.sleep(0.25)
    load.check_soiled()
    assert reader.stats.num_reads < 90
    assert ticket.done()
    ticket.cancel()


def test_cancelled_tensors_are_read_by_the_next_ticket(shard: Path, replace_preadv: Replace) -> None:
    load = small_load(shard, count=12)
    reader = open_reader(shard, queue_depth=3)
    replace_preadv(slowly(0.01))
    load.submit(reader).cancel()
    load.check(reader)


class Interrupt:
    """A thread that interrupts the main thread. Reads do not return before, so that it finds what waits for them."""

    def __init__(self, replace_preadv: Replace, seconds: float) -> None:
        self._is_reading, self._is_sent = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._send)

        def wait(*_: object) -> None:
            self._is_reading.set()
            self._is_sent.wait(20)

        replace_preadv(lambda real: slowly(seconds)(lambda *read: (wait(), real(*read))[1]))

    def _send(self) -> None:
        time.sleep(0.05)
        target = threading.main_thread().ident
        assert target is not None
        signal.pthread_kill(target, signal.SIGINT)
        self._is_sent.set()

    @contextlib.contextmanager
    def strikes(self) -> Iterator[None]:
        """The block is interrupted, while a read is in flight."""
        assert self._is_reading.wait(20)
        with pytest.raises(KeyboardInterrupt):
            self._thread.start()
            yield
        self._thread.join()


@pytest.mark.parametrize("urgent", [False, True])
def test_interrupt_while_waiting(shard: Path, replace_preadv: Replace, urgent: bool) -> None:
    load = small_load(shard, count=12)
    reader = open_reader(shard, queue_depth=3)
    with pytest.MonkeyPatch.context() as patch:
        interrupt = Interrupt(lambda wrap: patch.setattr(ranges_module.os, "preadv", wrap(os.preadv)), 0.15)
        ticket = load.submit(reader, urgent=urgent)
        with interrupt.strikes():
            ticket.wait()
        ticket.cancel()
        load.soil()
        time.sleep(0.35)
        load.check_soiled()
    load.check(reader)


@pytest.mark.parametrize("mode", MODES)
def test_close_ends_threads_and_closes_files(shard: Path, mode: str) -> None:
    load = small_load(shard)
    before = descriptors()
    assert not reader_threads()
    reader = open_reader(shard, mode)
    load.check(reader, mode)
    assert reader_threads()
    assert descriptors() > before
    reader.close()
    assert not reader_threads()
    assert descriptors() == before
    reader.close()
    assert descriptors() == before
    with pytest.raises(ClosedError):
        load.submit(reader)


@pytest.mark.parametrize("urgent", [False, True])
def test_close_with_reads_in_flight(shard: Path, replace_preadv: Replace, urgent: bool) -> None:
    load = small_load(shard, count=12)
    before = descriptors()
    reader = open_reader(shard, queue_depth=2)
    replace_preadv(slowly(0.1))
    ticket = load.submit(reader, urgent=urgent)
    reader.close()
    assert not reader_threads()
    load.soil()
    time.sleep(0.2)
    load.check_soiled()
    with pytest.raises(ClosedError):
        ticket.wait()
    assert descriptors() == before


def test_wait_after_close_opens_nothing(shard: Path) -> None:
    load = small_load(shard)
    before = descriptors()
    reader = open_reader(shard)
    ticket = load.submit(reader)
    while not ticket.done():
        time.sleep(0.001)
    reader.close()
    ticket.wait()
    assert load.found() == load.expected
    shard.touch()
    ticket.wait()
    assert descriptors() == before


@pytest.mark.parametrize("urgent", [False, True])
def test_interrupt_while_closing(shard: Path, replace_preadv: Replace, urgent: bool) -> None:
    load = small_load(shard, count=12)
    before = descriptors()
    reader = open_reader(shard, queue_depth=1)
    interrupt = Interrupt(replace_preadv, 0.2)
    ticket = load.submit(reader, urgent=urgent)
    with interrupt.strikes():
        reader.close()
    with pytest.raises(ClosedError):
        load.submit(reader)
    reader.close()
    assert ticket.done()
    assert descriptors() == before
    load.soil()
    time.sleep(0.25)
    load.check_soiled()
    assert not reader_threads()


def test_missing_file(shard: Path, tmp_path: Path) -> None:
    write_file(shard, 10)
    before = descriptors()
    with pytest.raises(CheckpointNotFoundError, match="missing"):
        BackgroundPrefetcher([shard, tmp_path / "missing"])
    assert descriptors() == before
    assert not reader_threads()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(shard: Path, tmp_path: Path) -> None:
    write_file(shard, 10)
    locked = write_file(tmp_path / "locked", 10)
    locked.chmod(0)
    before = descriptors()
    with pytest.raises(CheckpointError, match=r"locked.*Permission denied"):
        BackgroundPrefetcher([shard, locked])
    assert descriptors() == before


def test_folder_instead_of_a_file(shard: Path, tmp_path: Path) -> None:
    write_file(shard, 10)
    before = descriptors()
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        BackgroundPrefetcher([shard, tmp_path])
    assert descriptors() == before


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


def test_busy_seconds_count_parallel_reads_once(shard: Path, replace_preadv: Replace) -> None:
    load = small_load(shard, count=6, nbytes=PAGE)
    reader = open_reader(shard, queue_depth=3)
    replace_preadv(slowly(0.05))
    waited = 0.0
    for _ in range(2):
        began = time.perf_counter()
        load.check(reader)
        waited += time.perf_counter() - began
        time.sleep(0.2)
    assert reader.stats.num_reads == 2 * 7
    assert 2 * 3 * 0.05 <= reader.stats.busy_seconds <= waited


def test_failed_reads_count_no_bytes(shard: Path, replace_preadv: Replace) -> None:
    load = small_load(shard, count=1, nbytes=PAGE)
    reader = open_reader(shard, read_size=1 << 20)
    replace_preadv(failing(errno.ENXIO, 1))
    with pytest.raises(ReadError):
        load.check(reader)
    assert (reader.stats.nbytes, reader.stats.num_reads) == (0, 1)
    load.check(reader)
    assert (reader.stats.nbytes, reader.stats.num_reads) == (load.nbytes, 2)


# --- files that change between two tickets or under one --------------------------------


def test_change_under_several_tickets_is_an_error_of_each(shard: Path) -> None:
    """Both tickets read while the file is half written. Restoring the bytes helps neither."""
    load, other = small_load(shard), small_load(shard)
    whole = shard.read_bytes()
    reader = open_reader(shard)
    with shard.open("r+b") as file:
        file.seek(IN_PLACE)
        file.write(bytes(len(whole) - IN_PLACE))
    tickets = [load.submit(reader), other.submit(reader)]
    while not all(ticket.done() for ticket in tickets):
        time.sleep(0.001)
    assert load.found() != load.expected
    with shard.open("r+b") as file:
        file.write(whole)
    for ticket in tickets:
        with pytest.raises(FileChangedError, match="replaced by another"):
            ticket.wait()
    reader.close()


def test_change_during_a_read_is_an_error(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The byte is written and written back while it is read."""
    load = small_load(shard)
    whole = shard.read_bytes()
    reader = open_reader(shard, read_size=1 << 20)
    load.submit(reader).wait()
    real = os.preadv
    middle = load.records[1].extent.offset + 17 * 7

    def write(data: bytes) -> None:
        with shard.open("r+b", buffering=0) as file:
            file.seek(middle)
            file.write(data)

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        write(b"x")
        count = real(fd, buffers, offset)
        write(whole[middle : middle + 1])
        return count

    monkeypatch.setattr(ranges_module.os, "preadv", preadv)
    with pytest.raises(FileChangedError, match="replaced by another"):
        load.check(reader)
    reader.close()


def test_error_of_a_read_of_a_changed_file(shard: Path) -> None:
    load = small_load(shard)
    whole = shard.read_bytes()
    reader = open_reader(shard)
    shard.write_bytes(b"")
    with pytest.raises(TruncatedFileError, match=r"'shard\.0'.*truncated"):
        load.check(reader)
    back = shard.with_name("back")
    back.write_bytes(whole)
    back.replace(shard)
    with pytest.raises(FileChangedError, match=r"'shard\.0'.*replaced by another"):
        load.check(reader)
    shard.unlink()
    with pytest.raises(FileChangedError):
        load.check(reader)
    reader.close()


def test_waiting_for_a_processor_is_not_waiting_for_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report said that 20 % of the time went to waiting for the disk, and 18 % to reading."""
    load = Load(packed(write_file(tmp_path / "file", 1 << 20), 0, [1 << 20]))
    with contextlib.closing(BackgroundPrefetcher([tmp_path / "file"])) as reader:
        change_of, is_late = reader._change_of, threading.Event()

        def late(files: Any) -> Exception | None:
            is_late.wait(0.05)  # before the system lets the caller go on
            return change_of(files)

        monkeypatch.setattr(reader, "_change_of", late)
        ticket = load.submit(reader)
        assert ticket.wait() <= reader.stats.busy_seconds
        assert ticket.wait() == 0

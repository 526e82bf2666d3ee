"""Layers on disk: pages in files, the last tokens in memory, and the threads that write and read the files.

A page has the rows of consecutive tokens of one layer, and never changes. A layer writes to a file of its own, each
page once, in the background. Copies of a cache share pages, which Python's reference counts free; while one has a page,
it is never written again.

In a slot the tokens of each head are contiguous, with room for more behind them. The file of a layer has chunks of many
pages. In a chunk the tokens of each head are contiguous too, so that reads are large.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count, groupby, islice
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import mlx.core as mx
import numpy as np

from mlx_flash.compat.arrays import memory_of
from mlx_flash.config import GB
from mlx_flash.errors import WriteError
from mlx_flash.files import PrivateFolder, cache_directory, close_all, free_bytes, write_at
from mlx_flash.forks import finalize, wait_for_finalizers
from mlx_flash.kv.kvledger import QUEUE_DEPTH, READ_SIZE, WRITE_BEHIND_BYTES, KVOptions
from mlx_flash.layout.reachable import Opaque
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, aligned_offsets, round_up
from mlx_flash.storage.placement import Piece, Segment
from mlx_flash.storage.prefetcher import Arrival, BackgroundPrefetcher, SourceFile, Workers
from mlx_flash.storage.probe import way_of_reading

CHUNK_TOKENS = 8192
"""Tokens of a chunk: 2 MiB for each head of 128 numbers of 16 bits."""

RowBytes = Sequence["np.ndarray[Any, np.dtype[np.uint8]]"]
"""Rows of tokens as bytes, ``(heads, tokens, bytes)`` for each array of a layer."""


@dataclass(frozen=True, slots=True)
class Component:
    """One array of a layer's cache."""

    shape: tuple[int, int]  # (batch, heads)
    width: int  # items of a head's row
    dtype: mx.Dtype

    @property
    def heads(self) -> int:
        """Heads of all sequences."""
        return self.shape[0] * self.shape[1]

    @property
    def width_bytes(self) -> int:
        return self.width * int(self.dtype.size)


@dataclass(frozen=True)
class RowLayout:
    """Positions of rows: of the layer's arrays, in pages of ``step`` tokens."""

    components: tuple[Component, ...]
    step: int

    @classmethod
    def of(cls, arrays: Sequence[mx.array], step: int) -> RowLayout:
        """Return the layout of arrays ``(batch, heads, tokens, width)``."""
        parts = [Component((a.shape[0], a.shape[1]), a.shape[3], a.dtype) for a in arrays]
        return cls(tuple(parts), step)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of a token in all arrays."""
        return sum(self.widths)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Bytes of a token in each array."""
        return tuple([component.heads * component.width_bytes for component in self.components])

    @property
    def chunk_pages(self) -> int:
        return -(-CHUNK_TOKENS // self.step)

    @cached_property
    def chunk_bytes(self) -> int:
        return sum(c.heads * stride for c, stride in zip(self.components, self.strides, strict=True))

    def slot_offsets(self, capacity: int) -> list[int]:
        """Return the offset of each array in a slot for so many tokens."""
        return self._slot_places(capacity)[:-1]

    def slot_bytes(self, capacity: int) -> int:
        return self._slot_places(capacity)[-1]

    def _slot_places(self, capacity: int) -> list[int]:
        return aligned_offsets([capacity * width for width in self.widths], DIRECT_ALIGNMENT)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Bytes from a head of each array to the next one, in a file."""
        tokens = self.chunk_pages * self.step
        return tuple([round_up(tokens * component.width_bytes, DIRECT_ALIGNMENT) for component in self.components])

    def file_offsets(self, page: int) -> tuple[int, ...]:
        """Return the offsets of each array's first head in the page of this number of a file."""
        chunk, within = divmod(page, self.chunk_pages)
        at, found = chunk * self.chunk_bytes, list[int]()
        for component, stride in zip(self.components, self.strides, strict=True):
            found.append(at + within * self.step * component.width_bytes)
            at += component.heads * stride
        return tuple(found)

    def to_rows(self, arrays: Sequence[mx.array]) -> RowBytes:
        """Return the bytes of arrays ``(batch, heads, tokens, width)``, which are evaluated, with the heads of all."""
        plain = [mx.contiguous(a.astype(c.dtype)) for a, c in zip(arrays, self.components, strict=True)]
        mx.eval(plain)
        return [
            np.frombuffer(memory_of(array), np.uint8).reshape(c.heads, array.shape[2], c.width_bytes)
            for array, c in zip(plain, self.components, strict=True)
        ]

    def to_arrays(self, rows: RowBytes) -> list[mx.array]:
        """Return rows as arrays ``(batch, heads, tokens, width)``, copied."""
        return [
            mx.array(part).view(c.dtype).reshape(*c.shape, part.shape[1], c.width)
            if part.size
            else mx.zeros((*c.shape, 0, c.width), c.dtype)
            for part, c in zip(rows, self.components, strict=True)
        ]


class FilePage:
    """A page of a layer's file, which is free again when nothing refers to it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.write: Write | None = None  # until it is known that it can be read


def runs(pages: Iterable[FilePage], layout: RowLayout) -> Iterator[tuple[int, int, int]]:
    """Yield the pages that follow one another in a chunk: the index of the first, its number, and how many they are."""
    numbers = enumerate(page.number for page in pages)
    for _, group in groupby(numbers, lambda each: (each[1] - each[0], each[1] // layout.chunk_pages)):
        (index, first), *others = group
        yield index, first, 1 + len(others)


def segments(
    path: Path, pages: Sequence[FilePage], layout: RowLayout, start: int, stop: int, capacity: int, base: int = 0
) -> list[Segment]:
    """Return the reads that put the tokens ``[start, stop)`` of a sequence in a slot, which begins with ``base``."""
    found, step = list[Segment](), layout.step
    for index, page, number in runs(pages, layout):
        first, last = max(start, index * step), min(stop, (index + number) * step)
        if first < last:
            found += _segments(path, layout, page, first - index * step, last - first, capacity, first - base)
    return found


def _segments(
    path: Path, layout: RowLayout, page: int, skipped: int, length: int, capacity: int, token: int
) -> Iterator[Segment]:
    """Yield the reads of some tokens, to the place of ``token``. Heads that follow one another share a read."""
    name, group = f"KV cache, tokens from {token} on", list[Piece]()
    places = zip(
        layout.components, layout.file_offsets(page), layout.strides, layout.slot_offsets(capacity), strict=True
    )
    for component, offset, stride, target in places:
        width = component.width_bytes
        for head in range(component.heads):
            source, place = offset + head * stride + skipped * width, target + (head * capacity + token) * width
            piece = Piece(name, source, length * width, place)
            if group and (source - group[-1].end >= DIRECT_ALIGNMENT or piece.end - group[0].offset > READ_SIZE):
                yield _segment(path, group)
                group = []
            group.append(piece)
    yield _segment(path, group)


def _segment(path: Path, pieces: Sequence[Piece]) -> Segment:
    """Return a read to the places of its pieces, if they are whole pages of memory, or through a bounce buffer."""
    offset = pieces[0].offset // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
    nbytes = round_up(pieces[-1].end - offset, DIRECT_ALIGNMENT)
    numbers = (number for piece in pieces for number in (piece.offset, piece.nbytes, piece.buffer_offset))
    in_place = nbytes == sum([piece.nbytes for piece in pieces]) and not any(n % DIRECT_ALIGNMENT for n in numbers)
    is_scattered = in_place and len(pieces) > 1
    at = pieces[0].buffer_offset if in_place and not is_scattered else None
    return Segment(path, offset, nbytes, at, tuple(pieces), is_scattered)


class GrowingFile(SourceFile):
    """A file that grows while it is read."""

    hint = "start again with a fresh prompt cache"  # nobody else has keys and values that a file has lost

    def check_unchanged(self, tensor: str) -> None:
        pass


class PageReader(BackgroundPrefetcher):
    """A reader of files that are created, grow, and are removed while it is open."""

    def __init__(self, *, direct: bool = True, **options: Any) -> None:
        super().__init__((), **options)
        self._direct = direct

    def open(self, path: Path) -> SourceFile:
        """Open a file, which is read until :meth:`remove`. Raises: OSError, CheckpointError."""
        file = GrowingFile(path, self._direct)
        with self._lock:
            self._files[path] = file
        return file

    def remove(self, file: SourceFile) -> None:
        with self._lock:
            del self._files[file.path]
            file.close()


class Write:
    """A write of some bytes that is queued. An interrupt of those who wait leaves no lock held, as of a ``Future``."""

    def __init__(self, nbytes: int, write: Callable[[], None]) -> None:
        self.nbytes = nbytes
        self.is_done = False
        self._work: Callable[[], None] | None = write
        self._error: BaseException | None = None
        self._under_way = threading.Lock()  # held until it has ended
        self._under_way.acquire()

    def run(self, error: BaseException | None = None) -> None:
        """Do it, unless there is a reason not to. In the thread that works."""
        work, self._work, self._error = self._work, None, error
        assert work is not None
        try:
            if error is None:
                work()
        except BaseException as found:  # noqa: BLE001 those who wait get it
            self._error = found
        finally:
            self.is_done, under_way = True, self._under_way
            del self, work, error  # the traceback refers to this frame
            under_way.release()

    def wait(self) -> BaseException | None:
        """Wait for the end. Return the error of the work; None if there is none."""
        with self._under_way:
            return self._error


class WriteBehind:
    """A thread that writes in order, and the queue before it. It calls ``count`` with the bytes of each write."""

    def __init__(
        self,
        limit_bytes: int = WRITE_BEHIND_BYTES,  # the most bytes queued, but for one write alone; may be changed
        name: str = "kv-writer",
        count: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.nbytes = 0  # written, or queued for it
        self.limit_bytes = limit_bytes
        self._count = count
        self._is_closed = False
        self._thread: Workers[Write] = Workers(name, 1, self._run)
        self._waiting: deque[Write] = deque()

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be written. Any thread may ask."""
        return sum(write.nbytes for write in [*self._waiting] if not write.is_done)

    def make_room(self, nbytes: int) -> None:
        """Wait while more bytes would be queued than may be."""
        while self._waiting and (self._waiting[0].is_done or self.queued_bytes + nbytes > self.limit_bytes):
            self._waiting.popleft().wait()

    def submit(self, nbytes: int, work: Callable[[], None]) -> Write:
        """Queue a write of so many bytes, once there is room for them."""
        if self._is_closed:
            raise _closed()
        self.make_room(nbytes)
        self.nbytes += nbytes

        def counted() -> None:
            work()
            self._count(nbytes)

        write = Write(nbytes, counted)
        self._thread.start()
        self._thread.queue.put(write)
        self._waiting.append(write)
        return write

    def _run(self, write: Write) -> None:
        write.run(_closed() if self._is_closed else None)

    def flush(self) -> None:
        for write in [*self._waiting]:
            write.wait()

    def close(self) -> None:
        """End the thread, and drop what it has not begun to write."""
        self._is_closed = True
        self._thread.end()


def _closed() -> WriteError:
    return WriteError("the KV caches were closed")


DEFAULT_GB_PER_DAY = 20.0
"""SSDs of laptops are rated for 150 TB (256 GB) to 600 TB (1 TB) of writes. Over five years the smallest takes 82 GB a
day. 20 GB are a quarter of that: 36 TB in five years if every day reached the cap, or 150 000 new tokens a day of a
model with 128 KiB for each (8B, 16 bits)."""


class WriteGovernor:
    """The count of a model's disk writes, and the cap of those of all models of this process in a calendar day.

    The cap is in GB (10⁹ bytes); None for the default, 0 for the zero-write mode. ``clock`` returns seconds since 1970.
    """

    written: ClassVar[Counter[str]] = Counter()
    """Bytes that this process wrote, by day."""
    _lock = threading.RLock()

    def __init__(self, gb_per_day: float | None = None, clock: Callable[[], float] = time.time) -> None:
        self.zero_write = gb_per_day == 0
        self._cap = int((DEFAULT_GB_PER_DAY if gb_per_day is None else gb_per_day) * GB)
        self._clock = clock
        self._session_bytes = self._refused_bytes = 0

    def claim(self, nbytes: int) -> bool:
        """Count bytes that are about to be written, unless they exceed the cap. Return whether they may be written."""
        with self._lock:
            if self.written[self._today()] + nbytes > self._cap:
                self._refused_bytes += nbytes
                return False
            self.count(nbytes)
            return True

    def count(self, nbytes: int) -> None:
        with self._lock:
            self._session_bytes += nbytes
            self.written[self._today()] += nbytes

    def telemetry(self) -> dict[str, int]:
        """Return the bytes written for this model, and today for all models of the process, and the cap."""
        return {
            "session_bytes": self._session_bytes,
            "day_bytes": self.written[self._today()],
            "day_limit_bytes": self._cap,
            "refused_bytes": self._refused_bytes,
        }

    def _today(self) -> str:
        return time.strftime("%Y-%m-%d", time.localtime(self._clock()))


class LayerFile:
    """A new file for pages of one layer, whose size is a multiple of chunks. It is removed with the object.

    Raises: WriteError: it cannot be made.
    """

    def __init__(self, path: Path, layout: RowLayout, reader: PageReader, writer: WriteBehind) -> None:
        self.path, self.layout, self.reader, self._writer = path, layout, reader, writer
        self._descriptors, read = list[int](), list[SourceFile]()
        finalize(self, _remove_file, path, self._descriptors, reader, read)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._descriptors.extend(map(os.open, [path], [flags], [0o600]))  # one step, as in :mod:`mlx_flash.files`
        except OSError as error:
            raise WriteError(f"cannot make {path} for the KV cache: {error.strerror}. Hint: check the disk.") from error
        read.append(reader.open(path))
        self._used: WeakValueDictionary[int, FilePage] = WeakValueDictionary()

    @property
    def nbytes(self) -> int:
        return len(list(self._used.values())) * self.layout.step * self.layout.token_bytes

    def allocate(self, num_pages: int) -> list[FilePage]:
        """Return the first free pages of the file."""
        found = [FilePage(n) for n in islice((n for n in count() if n not in self._used), num_pages)]
        self._used.update({page.number: page for page in found})
        return found

    def write(self, pages: Sequence[FilePage], rows: RowBytes) -> None:
        """Write rows ``(heads, tokens, bytes)`` that fill pages."""
        layout = self.layout
        for index, page, number in runs(pages, layout):
            blocks, tokens = [], slice(index * layout.step, (index + number) * layout.step)
            for part, offset, stride in zip(rows, layout.file_offsets(page), layout.strides, strict=True):
                for head in range(len(part)):
                    blocks.append((offset + head * stride, np.ascontiguousarray(part[head, tokens]).data.cast("B")))
            nbytes = sum(len(block) for _, block in blocks)
            write = self._writer.submit(nbytes, partial(self._write, blocks))  # which keeps the file open
            for each in pages[index : index + number]:
                each.write = write

    def _write(self, blocks: Sequence[tuple[int, memoryview]]) -> None:
        for offset, block in blocks:
            try:
                write_at(self._descriptors[0], block, offset)
            except OSError as error:
                raise WriteError(
                    f"cannot write {len(block)} bytes of the KV cache at offset {offset} of {self.path}: "
                    f"{error.strerror}. Hint: make room on that disk, or set kv_max_tokens."
                ) from error


def _remove_file(path: Path, descriptors: list[int], reader: PageReader, read: list[SourceFile]) -> None:
    for file in read:
        reader.remove(file)
    close_all(descriptors)
    with suppress(OSError):  # it goes with its folder
        path.unlink()


class DiskRows(Opaque):
    """The tokens of one layer on disk; the last ones, which do not fill a page, in memory.

    Attributes:
        file: the layer's own, from :meth:`begin` on.
        layout: of the rows; without components before that.
        pages: in the order of their tokens.
        paged_tokens: number of tokens in them.
        length: number of all tokens.
        capacity: tokens that its buffers in memory would have room for; 0 if it had none.
        coming: tokens that the pass is yet to add.
    """

    file: LayerFile

    def __init__(self, new_file: Callable[[RowLayout], LayerFile]) -> None:
        self._new_file = new_file
        self.layout = RowLayout((), 1)
        self.coming = 0
        self.pages: tuple[FilePage, ...] = ()
        self.paged_tokens = self.length = self.capacity = 0
        self._tail: RowBytes = []  # room for a page; rows behind the last token mean nothing

    def begin(self, layout: RowLayout, file: LayerFile | None = None) -> None:
        """Make the file, or share another's. Raises: WriteError."""
        self.file = file or self._new_file(layout)
        self._tail = [np.empty((c.heads, layout.step, c.width_bytes), np.uint8) for c in layout.components]
        self.layout = layout

    @property
    def tail_bytes(self) -> int:
        return sum(part.nbytes for part in self._tail)

    @property
    def tail(self) -> RowBytes:
        """The rows of tokens that are in no page."""
        return [part[:, : self.length - self.paged_tokens] for part in self._tail]

    def append(self, rows: RowBytes) -> None:
        """Add tokens, ``(heads, tokens, bytes)`` for each array. Their bytes are copied; full pages go to the file.

        Raises: WriteError: an earlier write failed; nothing was added.
        """
        end = self.length + rows[0].shape[1]
        num_pages, used = (end - self.paged_tokens) // self.layout.step, 0
        if num_pages:
            self.settle(waits=False)
            used = self.paged_tokens + num_pages * self.layout.step - self.length
            block = [np.concatenate([old, new[:, :used]], axis=1) for old, new in zip(self.tail, rows, strict=True)]
            pages = self.file.allocate(num_pages)
            self.file.write(pages, block)
            paged = self.paged_tokens + num_pages * self.layout.step
            # now, because the tail is about to be written over, and in one step, which no interrupt cuts in two
            vars(self).update(pages=(*self.pages, *pages), paged_tokens=paged, length=paged)
        start = self.length - self.paged_tokens
        for part, new in zip(self._tail, rows, strict=True):
            part[:, start : start + new.shape[1] - used] = new[:, used:]
        self.length, self.coming = end, max(0, self.coming - rows[0].shape[1])

    def settle(self, start: int = 0, stop: int | None = None, *, waits: bool = True) -> None:
        """Wait until the pages of some tokens can be read, or look at those that are written.

        Raises: WriteError: one could not be written. It is a new error each time: the traceback of one that is kept
        would keep the caller's caches.
        """
        last = len(self.pages) if stop is None else -(-stop // self.layout.step)
        for page in self.pages[start // self.layout.step : last]:
            if page.write is not None and (waits or page.write.is_done):
                if (error := page.write.wait()) is not None:
                    raise WriteError(str(error)) from error.__cause__
                page.write = None

    def truncate(self, length: int) -> None:
        """Remove the tokens from ``length`` on. Raises: ReadError: those that do not fill a page any more."""
        held: dict[str, Any] = {"length": length}
        if length < self.paged_tokens:
            number, left = divmod(length, self.layout.step)
            paged = number * self.layout.step
            held |= {"pages": self.pages[:number], "paged_tokens": paged}
            if left:
                held["_tail"] = _read_pages(self, paged, paged + self.layout.step)
        vars(self).update(held)  # one step, which no interrupt cuts in two

    def read(self, start: int, stop: int) -> RowBytes:
        """Return copies of the rows of some tokens. Raises: ReadError."""
        paged = self.paged_tokens
        found = _read_pages(self, start, max(start, min(stop, paged)))
        tails = [tail[:, max(0, start - paged) : max(0, stop - paged)] for tail in self.tail]
        return [np.concatenate(pair, axis=1) for pair in zip(found, tails, strict=True)]

    def fork(self) -> DiskRows:
        """Return a copy that shares the pages."""
        other = DiskRows(self._new_file)
        if self.layout.components:
            other.begin(self.layout, self.file)
        for mine, copy in zip(self._tail, other._tail, strict=True):
            copy[:] = mine
        other.pages, other.paged_tokens = self.pages, self.paged_tokens
        other.length, other.capacity = self.length, self.capacity
        return other


def _read_pages(disk: DiskRows, start: int, stop: int) -> RowBytes:
    disk.settle(start, stop)
    capacity = stop - start
    buffer = memoryview(mmap.mmap(-1, max(disk.layout.slot_bytes(capacity), 1)))
    if stop > start:
        reads = segments(disk.file.path, disk.pages, disk.layout, start, stop, capacity, start)
        disk.file.reader.submit(reads, buffer, urgent=True).wait()
    everything = np.frombuffer(buffer, np.uint8)
    return [
        everything[at : at + c.heads * capacity * c.width_bytes].reshape(c.heads, capacity, c.width_bytes)
        for at, c in zip(disk.layout.slot_offsets(capacity), disk.layout.components, strict=True)
    ]


def sessions_directory() -> Path:
    """Return the folder of the KV caches of running processes, unless the settings name another one."""
    return cache_directory() / "kv-sessions"


class KVFiles:
    """The files of layers on disk, and the threads that read and write them. The first layer makes the folder.

    Attributes:
        num_layers: layers that went to disk.
    """

    def __init__(self, options: KVOptions, count_written: Callable[[int], None]) -> None:
        self._options = options
        self.writer = WriteBehind(count=count_written)
        self.num_layers = 0
        self._folder: PrivateFolder | None = None

    @cached_property
    def _reader(self) -> PageReader:
        way = way_of_reading()
        # Some pages are read to memory of the host, where the driver does not copy to.
        arrival: Arrival = "in place" if way == "in place" else "bounced"
        direct = self._options.direct and way != "buffered"
        return PageReader(direct=direct, read_size=READ_SIZE, queue_depth=QUEUE_DEPTH, arrival=arrival)

    @property
    def read_bytes(self) -> int:
        return self._reader.stats.nbytes if self._folder is not None else 0

    def new_file(self, layout: RowLayout) -> LayerFile:
        """Make the file of a layer. Raises: WriteError."""
        if self._folder is None or not self._folder.path.is_dir():  # somebody may have removed the old one
            self._folder = PrivateFolder(self._options.directory or sessions_directory())
        path = self._folder.path / f"layer-{self.num_layers}.kv"
        self.num_layers += 1
        return LayerFile(path, layout, self._reader, self.writer)

    def check_room(self, needed: int) -> None:
        """Check that the disk has so many free bytes. Raises: WriteError."""
        base = self._options.directory or cache_directory()
        wait_for_finalizers()  # which remove files of caches that are gone
        if needed > (found := free_bytes(base)):
            raise WriteError(
                f"the KV cache needs {needed / 1e6:.1f} MB more on the disk of {base} for this call, where "
                f"{found / 1e6:.1f} MB are free. Hint: make room there, set another kv_directory, or kv_max_tokens."
            )

    def close(self) -> None:
        """End the threads and remove the files."""
        self.writer.close()
        if self._folder is not None:
            self._reader.close()
            self._folder.close()

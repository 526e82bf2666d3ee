"""The files of a pool: those of layers on disk, made when the first is offloaded, and open ones of the prefix cache.

Files of the prefix cache are read where they are. They are locked while a layer refers to them, so they are not
evicted. If one is removed all the same, its open descriptors keep its bytes.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import count
from pathlib import Path
from weakref import WeakSet, WeakValueDictionary

import mlx.core as mx

from mlx_flash.errors import CheckpointError, WriteError
from mlx_flash.files import free_bytes
from mlx_flash.folders import cache_directory
from mlx_flash.forks import finalize, wait_for_finalizers
from mlx_flash.kv.disk import NOTHING_PLANNED, DiskRows, Planned
from mlx_flash.kv.memory import MemoryRows
from mlx_flash.kv.options import QUEUE_DEPTH, READ_SIZE, KVOptions, queued_bytes
from mlx_flash.kv.pages import InFile, Page, RowLayout, num_tokens, row_bytes
from mlx_flash.kv.writing import Draft, LayerFile, PageReader, WriteBehind
from mlx_flash.sessions import PrivateFolder
from mlx_flash.storage.ranges import Arrival
from mlx_flash.storage.selftest import way_of_reading

OTHER_FILES = 128
"""Descriptors that are left to everything else."""

MOST_DESCRIPTORS = 4096


def most_files(limit: int) -> int:
    """Return how many files of the prefix cache may be open, with two descriptors each, of ``limit`` in the process.

    The limit is 256 on macOS, and 1024 on Linux if nothing else is set; negative for none.
    """
    return max(16, min(limit - OTHER_FILES if limit > 0 else MOST_DESCRIPTORS, MOST_DESCRIPTORS) // 2)


MOST_FILES = most_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""Most files of the prefix cache that are open at once."""


Stored = Callable[["KVFiles"], InFile | None]
"""Opens rows of the prefix cache once they are written. Returns None if they are not stored, or cannot be opened."""


class StoredFile:
    """A file of the prefix cache that is open and locked while this object lives."""

    def __init__(self, path: Path, reader: PageReader) -> None:
        self.path = path
        file = reader.open(path)
        self.inode = file.identity.inode
        finalize(self, reader.remove, file)

    def flush(self) -> None:
        """Do nothing: it is written."""


def sessions_directory() -> Path:
    """Return the folder of the KV caches of running processes, unless the settings name another one."""
    return cache_directory() / "kv-sessions"


def are_on_one_disk(left: Path, right: Path) -> bool:
    """Return whether a file can be moved from one folder to another."""
    return left.stat().st_dev == right.stat().st_dev


class KVFiles:
    """The files of layers on disk, and the threads that read and write them. The first layer makes the folder."""

    def __init__(self, options: KVOptions, count_written: Callable[[int], None]) -> None:
        self._options = options
        self._writer = WriteBehind(count=count_written)
        self._numbers = count()
        self._folder: PrivateFolder | None = None
        self._open: WeakValueDictionary[Path, StoredFile] = WeakValueDictionary()
        self._drafts: WeakSet[Draft] = WeakSet()  # which may become files of the prefix cache

    @cached_property
    def _reader(self) -> PageReader:
        way = way_of_reading()
        # Some pages are read to memory of the host, where the driver does not copy to.
        arrival: Arrival = "in place" if way == "in place" else "bounced"
        direct = self._options.direct and way != "buffered"
        return PageReader(direct=direct, read_size=READ_SIZE, queue_depth=QUEUE_DEPTH, arrival=arrival)

    @property
    def read_bytes(self) -> int:
        """Bytes of pages that were read."""
        return self._reader.stats.nbytes if self._folder is not None else 0

    @property
    def written_bytes(self) -> int:
        """Bytes of pages that were written, or are queued for it."""
        return self._writer.nbytes

    def write(
        self,
        memory: MemoryRows,
        new: Sequence[mx.array],  # arrays with the shapes of the first tokens, if there are no rows yet
        others: Iterable[tuple[DiskRows, int]],  # rows on disk, each with the number of first tokens that are the same
        stored: Sequence[Page[Stored]] = (),  # the first tokens in files of the prefix cache
        planned: Mapping[int, Planned] = NOTHING_PLANNED,
    ) -> DiskRows:
        """Write the rows of a layer to disk, page by page, without those that files have. Raises: WriteError."""
        step = self._options.step
        disk = _begun(others)
        if disk is None or disk.length < num_tokens(stored):
            fresh = self._new_rows(memory.layout or RowLayout.of(new, step))
            all(self.refer(fresh, page) for page in stored)  # up to the first that is gone
            disk = disk if disk is not None and disk.length >= fresh.length else fresh
        disk.num_forgotten = memory.num_forgotten
        # larger pages than the layer's own would take more memory
        small = {begin: page for begin, page in planned.items() if page.end - begin <= step}
        while disk.length < memory.length:
            start = disk.length
            stop = min(small[start].end if start in small else start + step, memory.length)
            part = [mx.contiguous(a) for a in memory.read(start, stop)]
            mx.eval(part)
            disk.append(row_bytes(part), small)
            disk.flush()  # memory is short: nothing waits
        disk.capacity = memory.had_capacity
        return disk

    def refer(self, disk: DiskRows, page: Page[Stored]) -> bool:
        """Add a page of the prefix cache to a layer on disk, without a copy, and return whether that was possible.

        It is not behind tokens that are in no page, nor with other arrays, nor from a file that is gone.
        """
        if disk.length > disk.paged_tokens:
            return False
        rows = page.where(self)
        if rows is None or rows.components != disk.layout.components:
            return False
        disk.refer(Page(rows, page.length))
        return True

    def open(self, path: Path, inode: int) -> StoredFile | None:
        """Return a file of the prefix cache, which is kept open. None if it is gone, replaced, evicted, or too many."""
        file = self._open.get(path)
        if file is None and self._has_room:
            with suppress(OSError, CheckpointError):
                file = self._open[path] = StoredFile(path, self._reader)
        return file if file is not None and file.inode == inode else None

    @property
    def _has_room(self) -> bool:
        """False when as many files are open as may be."""
        return len(self._open) + len(self._drafts) < MOST_FILES

    def new_draft(self, room: int, beside: Path) -> Draft | None:
        """Return a draft with ``room`` bytes at its beginning, which can be moved to the prefix cache's folder.

        Return None if no layer is on disk yet, too many files are open, or that folder is on another disk.
        """
        if self._folder is None or not self._has_room:
            return None
        path = self._new_path("draft")
        if not are_on_one_disk(path.parent, beside):
            return None
        draft = Draft(path, room, self._reader, self._writer)
        self._drafts.add(draft)
        return draft

    @property
    def draft_bytes(self) -> int:
        """Bytes of drafts that are no files of the prefix cache."""
        return sum([draft.nbytes for draft in self._drafts if not draft.is_named])

    def _new_rows(self, layout: RowLayout) -> DiskRows:
        path = self._new_path("layer")
        return DiskRows(LayerFile(path, layout, self._reader, self._writer))

    def _new_path(self, kind: str) -> Path:
        """Return the path of a new file. It is in a new folder if somebody has removed the old one."""
        if self._folder is None or not self._folder.path.is_dir():
            self._folder = PrivateFolder(self._options.directory or sessions_directory())
        return self._folder.path / f"{kind}-{next(self._numbers)}.kv"

    def limit_queue(self, num_slots: int) -> None:
        """Set the most bytes queued for writing, given the buffers for layers on disk."""
        self._writer.limit_bytes = queued_bytes(num_slots)

    def check_room(self, needed: int) -> None:
        """Check that the disk has so many free bytes. Raises: WriteError."""
        if not needed:
            return
        base = self._options.directory or cache_directory()
        wait_for_finalizers()  # which remove files of caches that are gone
        if needed > (found := free_bytes(base)):
            raise WriteError(
                f"the KV cache needs {needed / 1e6:.1f} MB more on the disk of {base} for this call, where "
                f"{found / 1e6:.1f} MB are free. Hint: make room there, set another kv_directory, or kv_max_tokens."
            )

    def close(self) -> None:
        """End the threads and remove the files."""
        self._writer.close()
        if self._folder is not None:
            self._reader.close()
            self._folder.close()


def _begun(others: Iterable[tuple[DiskRows, int]]) -> DiskRows | None:
    """Return a copy of the rows with the most common tokens in pages, cut to them; None if there are no such tokens."""
    found = [(num_tokens(disk.first_pages(length)), disk) for disk, length in others]
    length, disk = max(found, key=lambda pair: pair[0], default=(0, None))
    if not length or disk is None:
        return None
    begun = disk.fork()
    begun.truncate(length)
    return begun

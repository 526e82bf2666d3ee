"""The files of a pool: those of layers on disk, made when the first is offloaded, and open ones of the prefix cache.

Files of the prefix cache are read where they are. They are locked while a layer refers to them, so they are not
evicted. If one is removed all the same, its open descriptors keep its bytes.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import count
from pathlib import Path
from weakref import WeakValueDictionary

import mlx.core as mx

from mlx_flash.errors import CheckpointError, WriteError
from mlx_flash.files import free_bytes
from mlx_flash.folders import cache_directory
from mlx_flash.forks import finalize, wait_for_finalizers
from mlx_flash.kv.disk import DiskRows
from mlx_flash.kv.memory import MemoryRows
from mlx_flash.kv.options import QUEUE_DEPTH, READ_SIZE, KVOptions, queued_bytes
from mlx_flash.kv.pages import InFile, Page, RowLayout, row_bytes
from mlx_flash.kv.writing import LayerFile, PageReader, WriteBehind
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


class KVFiles:
    """The files of layers on disk, and the threads that read and write them. The first layer makes the folder."""

    def __init__(self, options: KVOptions, count_written: Callable[[int], None]) -> None:
        self._options = options
        self._writer = WriteBehind(count=count_written)
        self._numbers = count()
        self._folder: PrivateFolder | None = None
        self._open: WeakValueDictionary[Path, StoredFile] = WeakValueDictionary()

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
        stored: Sequence[Page[Stored]] = (),  # the first tokens in files of the prefix cache
    ) -> DiskRows:
        """Write the rows of a layer to disk, page by page, without those that files have. Raises: WriteError."""
        step = self._options.step
        disk = self._new_rows(memory.layout or RowLayout.of(new, step))
        all(self.refer(disk, page) for page in stored)  # up to the first that is gone
        while disk.length < memory.length:
            part = [mx.contiguous(a) for a in memory.read(disk.length, min(disk.length + step, memory.length))]
            mx.eval(part)
            disk.append(row_bytes(part))
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
        if file is None and len(self._open) < MOST_FILES:
            with suppress(OSError, CheckpointError):
                file = self._open[path] = StoredFile(path, self._reader)
        return file if file is not None and file.inode == inode else None

    def _new_rows(self, layout: RowLayout) -> DiskRows:
        if self._folder is None or not self._folder.path.is_dir():  # somebody may have removed the old one
            self._folder = PrivateFolder(self._options.directory or sessions_directory())
        path = self._folder.path / f"layer-{next(self._numbers)}.kv"
        return DiskRows(LayerFile(path, layout, self._reader, self._writer))

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

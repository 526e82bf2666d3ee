"""The files of layers on disk, created when the first layer is evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path

import mlx.core as mx

from mlx_flash.errors import WriteError
from mlx_flash.files import free_bytes
from mlx_flash.folders import cache_directory
from mlx_flash.kv.disk import DiskRows
from mlx_flash.kv.layout import RowLayout
from mlx_flash.kv.memory import MemoryRows
from mlx_flash.kv.opened import PageReader, StoredFiles
from mlx_flash.kv.options import NUM_SLOTS, QUEUE_DEPTH, READ_SIZE, KVOptions, queued_bytes
from mlx_flash.kv.pages import FilePages, InFile, Page, num_tokens
from mlx_flash.kv.slots import row_bytes
from mlx_flash.kv.written import LayerFile, WriteBehind
from mlx_flash.sessions import PrivateFolder
from mlx_flash.storage.ranges import Arrival
from mlx_flash.storage.selftest import way_of_reading


def sessions_directory() -> Path:
    """Return the folder of the KV caches of running processes, unless the settings name another one."""
    return cache_directory() / "kv-sessions"


class PageFiles:
    """Files, and the threads that read and write them.

    Args:
        options: the settings.
        count_written: called from another thread with the number of bytes written.
    """

    def __init__(self, options: KVOptions, count_written: Callable[[int], None]) -> None:
        self._options = options
        self._count_written = count_written
        self._numbers = count()
        self._num_slots = NUM_SLOTS
        self._folder: PrivateFolder | None = None
        self._reader: PageReader | None = None
        self._writer: WriteBehind | None = None
        self._stored: StoredFiles | None = None

    @property
    def read_bytes(self) -> int:
        """Bytes of pages that were read."""
        return self._reader.stats.nbytes if self._reader else 0

    @property
    def written_bytes(self) -> int:
        """Bytes of pages that were written, or are queued for it."""
        return self._writer.nbytes if self._writer else 0

    def write(
        self,
        memory: MemoryRows,
        new: Sequence[mx.array],
        others: Iterable[tuple[DiskRows, int]],
        stored: FilePages = (),
    ) -> DiskRows:
        """Write the rows of a layer to disk, page by page, without those that other files have already.

        Args:
            memory: the rows.
            new: arrays with the shapes of the first tokens, if there are no rows yet.
            others: rows on disk, each with the number of first tokens that are the same.
            stored: the first tokens in files of the prefix cache.

        Raises:
            WriteError: the disk is full, or fails.
        """
        step = self._options.step
        disk = self._begun(others)
        if disk is None or disk.length < num_tokens(stored):
            fresh = self._new_rows(RowLayout.of(memory.examples or new, step))
            all(self.refer(fresh, page) for page in stored)  # up to the first that is gone
            disk = disk if disk is not None and disk.length >= fresh.length else fresh
        disk.num_forgotten = memory.num_forgotten
        for start in range(disk.length, memory.length, step):
            part = [mx.contiguous(a) for a in memory.read(start, min(start + step, memory.length))]
            mx.eval(part)
            disk.append(row_bytes(part))
            disk.file.flush()  # memory is short: nothing waits
        return disk

    def _begun(self, others: Iterable[tuple[DiskRows, int]]) -> DiskRows | None:
        found = [(num_tokens(disk.first_pages(length)), disk) for disk, length in others]
        length, disk = max(found, key=lambda pair: pair[0], default=(0, None))
        if not length or disk is None:
            return None
        begun = disk.fork()
        begun.truncate(length)
        return begun

    def refer(self, disk: DiskRows, page: Page[InFile]) -> bool:
        """Add a page of the prefix cache to a layer on disk, without a copy.

        Returns:
            Whether that was possible. It is not behind tokens that are in no page, nor from a file that is gone.
        """
        is_behind_pages = disk.length == disk.paged_tokens
        if self._stored is None or not is_behind_pages or page.where.components != disk.layout.components:
            return False
        if (found := self._stored.open(page)) is None:
            return False
        disk.refer(found)
        return True

    def _new_rows(self, layout: RowLayout) -> DiskRows:
        if self._folder is None:
            self._folder = PrivateFolder(self._options.directory or sessions_directory())
        if self._reader is None or self._writer is None:
            way = way_of_reading()
            direct = self._options.direct and way != "buffered"
            # Some pages are read to memory of the host, where the driver does not copy to.
            arrival: Arrival = "in place" if way == "in place" else "bounced"
            self._reader = PageReader((), direct=direct, read_size=READ_SIZE, queue_depth=QUEUE_DEPTH, arrival=arrival)
            self._stored = StoredFiles(self._reader, direct)
            self._writer = WriteBehind(self._count_written)
            self.limit_queue(self._num_slots)
        path = self._folder.path / f"layer-{next(self._numbers)}.kv"
        return DiskRows(LayerFile(path, layout, self._reader, self._writer, self._options.direct))

    def limit_queue(self, num_slots: int) -> None:
        """Set the most bytes queued for writing, given the buffers for layers on disk."""
        self._num_slots = num_slots
        if self._writer is not None:
            self._writer.limit_bytes = queued_bytes(num_slots)

    def check_room(self, needed: int) -> None:
        """Check that the disk has so many free bytes. Raises: WriteError."""
        base = self._options.directory or cache_directory()
        if needed and needed > (found := free_bytes(base)):
            raise WriteError(
                f"the KV cache needs {needed / 1e6:.1f} MB more on the disk of {base} for this call, where "
                f"{found / 1e6:.1f} MB are free. Hint: make room there, set another directory, or max_tokens."
            )

    def close(self) -> None:
        """End the threads and remove the files."""
        if self._writer is not None:
            self._writer.close()
        if self._reader is not None:
            self._reader.close()
        if self._folder is not None:
            self._folder.close()

"""The files of layers on disk, created when the first layer is evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from mlx_flash.errors import WriteError
from mlx_flash.files import free_bytes
from mlx_flash.folders import cache_directory
from mlx_flash.kv.disk import NOTHING_PLANNED, DiskRows, Planned
from mlx_flash.kv.layout import RowLayout
from mlx_flash.kv.memory import MemoryRows
from mlx_flash.kv.opened import PageReader, Stored, StoredFiles
from mlx_flash.kv.options import NUM_SLOTS, QUEUE_DEPTH, READ_SIZE, KVOptions, queued_bytes
from mlx_flash.kv.pages import Page, num_tokens
from mlx_flash.kv.slots import row_bytes
from mlx_flash.kv.writing import Draft, LayerFile, WriteBehind
from mlx_flash.sessions import PrivateFolder
from mlx_flash.storage.ranges import Arrival
from mlx_flash.storage.selftest import way_of_reading


def sessions_directory() -> Path:
    """Return the folder of the KV caches of running processes, unless the settings name another one."""
    return cache_directory() / "kv-sessions"


def are_on_one_disk(left: Path, right: Path) -> bool:
    """Return whether a file can be moved from one folder to another."""
    return left.stat().st_dev == right.stat().st_dev


class _Disk(NamedTuple):
    """The folder of the files, what reads and writes them, and the files of the prefix cache that are open."""

    folder: PrivateFolder
    reader: PageReader
    writer: WriteBehind
    stored: StoredFiles


class KVFiles:
    """The files of layers on disk, and the threads that read and write them.

    Args:
        options: the settings.
        count_written: called from another thread with the number of bytes written.
    """

    def __init__(self, options: KVOptions, count_written: Callable[[int], None]) -> None:
        self._options = options
        self._count_written = count_written
        self._numbers = count()
        self._num_slots = NUM_SLOTS
        self._disk: _Disk | None = None

    @property
    def read_bytes(self) -> int:
        """Bytes of pages that were read."""
        return self._disk.reader.stats.nbytes if self._disk is not None else 0

    @property
    def written_bytes(self) -> int:
        """Bytes of pages that were written, or are queued for it."""
        return self._disk.writer.nbytes if self._disk is not None else 0

    def write(
        self,
        memory: MemoryRows,
        new: Sequence[mx.array],
        others: Iterable[tuple[DiskRows, int]],
        stored: Sequence[Page[Stored]] = (),
        planned: Mapping[int, Planned] = NOTHING_PLANNED,
    ) -> DiskRows:
        """Write the rows of a layer to disk, page by page, without those that other files have already.

        Args:
            memory: the rows.
            new: arrays with the shapes of the first tokens, if there are no rows yet.
            others: rows on disk, each with the number of first tokens that are the same.
            stored: the first tokens in files of the prefix cache.
            planned: pages to write to drafts, as for :meth:`DiskRows.append`. Larger ones than the layer's own would
                take more memory.

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
        small = {begin: page for begin, page in planned.items() if page.end - begin <= step}
        while disk.length < memory.length:
            start = disk.length
            stop = min(small[start].end if start in small else start + step, memory.length)
            part = [mx.contiguous(a) for a in memory.read(start, stop)]
            mx.eval(part)
            disk.append(row_bytes(part), small)
            disk.flush()  # memory is short: nothing waits
        return disk

    def _begun(self, others: Iterable[tuple[DiskRows, int]]) -> DiskRows | None:
        found = [(num_tokens(disk.first_pages(length)), disk) for disk, length in others]
        length, disk = max(found, key=lambda pair: pair[0], default=(0, None))
        if not length or disk is None:
            return None
        begun = disk.fork()
        begun.truncate(length)
        return begun

    def refer(self, disk: DiskRows, page: Page[Stored]) -> bool:
        """Add a page of the prefix cache to a layer on disk, without a copy.

        Returns:
            Whether that was possible. It is not behind tokens that are in no page, nor from a file that is gone.
        """
        if self._disk is None or disk.length > disk.paged_tokens:
            return False
        found = self._disk.stored.open(page, disk.layout.components)
        if found is not None:
            disk.refer(found)
        return found is not None

    def new_draft(self, room: int, beside: Path) -> Draft | None:
        """Return a file for pages of all layers, which can be moved to the folder ``beside``.

        Args:
            room: bytes to leave free at its beginning.
            beside: the folder of the prefix cache's files.

        Returns:
            None if no layer is on disk yet, too many files are open, or the folder is on another disk.
        """
        if self._disk is None or not self._disk.stored.has_room:
            return None
        folder, reader, writer, stored = self._disk
        if not are_on_one_disk(folder.path, beside):
            return None
        path = folder.path / f"draft-{next(self._numbers)}.kv"
        draft = Draft(path, room, reader, writer, self._options.direct)
        stored.drafts.add(draft)
        return draft

    @property
    def draft_bytes(self) -> int:
        """Bytes of drafts that are no files of the prefix cache."""
        drafts = () if self._disk is None else self._disk.stored.drafts
        return sum([draft.nbytes for draft in drafts if isinstance(draft, Draft) and not draft.is_named])

    def _new_rows(self, layout: RowLayout) -> DiskRows:
        if self._disk is None:
            self._disk = self._opened()
            self.limit_queue(self._num_slots)
        path = self._disk.folder.path / f"layer-{next(self._numbers)}.kv"
        return DiskRows(LayerFile(path, layout, self._disk.reader, self._disk.writer, self._options.direct))

    def _opened(self) -> _Disk:
        folder, way = PrivateFolder(self._options.directory or sessions_directory()), way_of_reading()
        direct = self._options.direct and way != "buffered"
        # Some pages are read to memory of the host, where the driver does not copy to.
        arrival: Arrival = "in place" if way == "in place" else "bounced"
        reader = PageReader((), direct=direct, read_size=READ_SIZE, queue_depth=QUEUE_DEPTH, arrival=arrival)
        return _Disk(folder, reader, WriteBehind(self._count_written), StoredFiles(reader, direct))

    def limit_queue(self, num_slots: int) -> None:
        """Set the most bytes queued for writing, given the buffers for layers on disk."""
        self._num_slots = num_slots
        if self._disk is not None:
            self._disk.writer.limit_bytes = queued_bytes(num_slots)

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
        if self._disk is not None:
            self._disk.writer.close()
            self._disk.reader.close()
            self._disk.folder.close()

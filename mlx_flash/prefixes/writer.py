"""Writing the pages of a store behind the caller's back, as far as its limits and the day's writes allow."""

from __future__ import annotations

import logging
import shutil
import sqlite3
import threading
from collections import Counter
from collections.abc import Mapping

from mlx_flash.kv.wear import WriteGovernor
from mlx_flash.prefixes.access import StoreAccess
from mlx_flash.prefixes.files import Blob, PageKey, encode_page, write_page
from mlx_flash.prefixes.index import Index
from mlx_flash.prefixes.queue import WriteQueue

FREE_SHARE = 1 / 10
"""Of the disk; so much is left free when no floor is set."""

_TOLD = {
    "room": "the disk, or the store's share of it, is full, and what is there is in use.",
    "wear": "enough was written to the disk today. Hint: ssd_write_gb_per_day is the cap.",
}
"""Reasons that users can do something about."""

REASONS = ("stopped", "parent", "queue", "room", "wear")
"""Why a page is not stored: storing has stopped, the page before it is not there, too much is waiting, the disk or the
limit is full, enough was written today."""

_log = logging.getLogger("mlx_flash")


class PageWriter:
    """Writes pages in a thread of its own, which begins with the first of them.

    Args:
        access: to the store.
        governor: counts what is written, and says when it is enough.
        limit_bytes: the most that all pages may take; None for no limit.
        free_space_floor: bytes of the disk that are left free; None for a tenth of it.
        queue_bytes: the most that may wait.
    """

    def __init__(
        self,
        access: StoreAccess,
        governor: WriteGovernor,
        limit_bytes: int | None,
        free_space_floor: int | None,
        queue_bytes: int,
    ) -> None:
        self._access = access
        self._governor = governor
        self._limit = limit_bytes
        self._floor = free_space_floor
        self._queue = WriteQueue(queue_bytes)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def put(self, key: PageKey, blobs: Mapping[str, Blob], *, waits: bool = False, only_new: bool = False) -> bool:
        """Has a page written; with ``waits`` when there is room for it in the queue. Returns whether it is there, or
        going to be; with ``only_new`` whether these bytes are.

        Raises:
            ClosedError: the store was closed.
        """
        nbytes = sum(memoryview(blob.data).nbytes for blob in blobs.values())
        if self._has(key.page) or key.page in self._queue:
            return not only_new
        if reason := self._reason_against(key, nbytes, waits):
            self._refuse(reason)
            return False
        try:
            copies = {name: Blob(_as_bytes(blob), blob.dtype, blob.shape) for name, blob in blobs.items()}
        except BaseException:
            self._queue.give_up(key.page)
            raise
        self._queue.submit(key.page, lambda: self._store(key, copies))
        return True

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until nothing waits to be written. Returns whether that is so, after so many seconds at most."""
        return self._queue.flush(timeout)

    def close(self) -> None:
        """Writes what waits, and ends the thread. Again does nothing."""
        self._queue.close()

    def stats(self) -> dict[str, int]:
        """How many pages were stored and not stored, and why; and the bytes that wait."""
        with self._lock:
            refused = {f"refused_{reason}": self._counts[reason] for reason in REASONS}
            return {"queued_bytes": self._queue.nbytes, "stored": self._counts[""], **refused}

    def _has(self, page: str) -> bool:
        return self._access.ask(lambda index: index.has(page))

    def _reason_against(self, key: PageKey, nbytes: int, waits: bool) -> str:
        """Why a page is not stored; empty when it is, and then it has a place in the queue."""
        if not self._access.is_writable:
            return "stopped"
        if key.parent and key.parent not in self._queue and not self._has(key.parent):
            return "parent"
        if not self._governor.may_write(self._queue.nbytes + nbytes):
            return "wear"
        return "" if self._queue.reserve(key.page, nbytes, waits=waits) else "queue"

    def _refuse(self, reason: str) -> None:
        """Counts a page that is not stored, and tells once why."""
        if self._count(reason) == 1 and reason in _TOLD:
            _log.warning("what is computed is not stored in %s for now: %s", self._access.directory, _TOLD[reason])

    def _count(self, reason: str) -> int:
        with self._lock:
            self._counts[reason] += 1
            return self._counts[reason]

    def _store(self, key: PageKey, blobs: Mapping[str, Blob]) -> None:
        try:
            reason = self._write(self._access.index, key, blobs)
        except (OSError, sqlite3.DatabaseError) as error:
            self._access.stop_storing(error)
            reason = "stopped"
        if reason:
            self._refuse(reason)
        else:
            self._count("")

    def _write(self, index: Index, key: PageKey, blobs: Mapping[str, Blob]) -> str:
        """Writes a page unless it is there. Returns why it is not; empty when it is."""
        if not index.is_stored:
            return "stopped"
        if index.has(key.page):  # another process was faster
            return ""
        if key.parent and not index.has(key.parent):
            return "parent"
        page = encode_page(key, blobs)
        if not index.make_room(page.info.nbytes, key.parent, self._limit, self._free_floor()):
            return "room"
        is_written = False
        try:
            if not self._governor.claim(page.info.nbytes):
                return "wear"
            write_page(self._access.folder, page, self._access.session)
            is_written = True
        finally:
            if not is_written:
                index.give_up()
        return "" if index.add(page.info) else "parent"

    def _free_floor(self) -> int:
        if self._floor is None:
            self._floor = int(shutil.disk_usage(self._access.folder).total * FREE_SHARE)
        return self._floor


def _as_bytes(blob: Blob) -> bytes:
    return blob.data if isinstance(blob.data, bytes) else memoryview(blob.data).tobytes()

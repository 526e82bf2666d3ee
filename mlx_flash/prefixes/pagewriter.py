"""Pages that are written in the background: their queue, and the way of one into the folder."""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mlx_flash.files import PARTIAL_SUFFIX, flush_folder, open_locked
from mlx_flash.kv.wear import WriteGovernor
from mlx_flash.kv.writing import Draft
from mlx_flash.memory.pagecache import drop_cached
from mlx_flash.prefixes.folder import PageFolder, make_room
from mlx_flash.prefixes.pagefile import Blob, EncodedPage, PageKey, encode_page, path_of
from mlx_flash.workers import InOrder, Job

REASONS = ("stopped", "parent", "queue", "room", "wear", "draft")
"""Reasons for not storing a page: storing has stopped, the page before it is missing, too much waits to be written, the
disk or the limit is full, the cap of daily writes is reached, layers did not write its file as a whole."""

_WARNINGS = {
    "room": "the disk, or the cache's share of it, is full, and all of its pages are in use.",
    "wear": "the cap of today's disk writes is reached. Hint: it is ssd_write_gb_per_day.",
}
"""Texts for reasons that users can change."""

_POLL_SECONDS = 0.002

_log = logging.getLogger("mlx_flash")


class _Pending(NamedTuple):
    """A page that waits."""

    key: PageKey
    blobs: Mapping[str, Blob]  # those to write
    nbytes: int  # of these
    draft: Draft | None  # the file with the others


class PageWriter:
    """A queue of pages and the thread that writes them. Threads may share it.

    A page is queued by one step. The thread is asked to write it after that, and again whenever somebody waits for it:
    an interrupt may hide the first time.
    """

    def __init__(self, folder: PageFolder, governor: WriteGovernor, queue_bytes: int) -> None:
        self._folder = folder
        self._governor = governor
        self._queue_bytes = queue_bytes
        self._pending: dict[str, _Pending] = {}
        self._lock = threading.RLock()  # and no condition: `with` on one is Python code, which may end with it locked
        self._thread = InOrder("mlx-flash-prefixes")
        self._is_closed = False
        self._counts: Counter[str] = Counter()

    def put(
        self, key: PageKey, blobs: Mapping[str, Blob], draft: Draft | None = None, *, waits: bool, only_new: bool
    ) -> bool:
        """Queue a page, see :meth:`PrefixStore.put`.

        A snapshot that is larger than the queue is not copied: the caller waits until it is written. Its arrays are
        those of a state, which a model replaces and does not change.
        """
        nbytes, is_asked = sum(memoryview(blob.data).nbytes for blob in blobs.values()), False
        room = max(self._queue_bytes, nbytes) if waits and key.kind else self._queue_bytes
        while True:
            with self._lock:
                if self._has(key.page):
                    return not only_new
                is_full = self._is_closed or self._queued_bytes + nbytes > room
                may_wait = waits and not self._is_closed and nbytes <= room
                if reason := self._reason_against(key, nbytes) or ("queue" if is_full and not may_wait else ""):
                    self._count(reason)
                    return False
                if not is_full:
                    if nbytes <= self._queue_bytes:
                        blobs = {name: blob._replace(data=bytes(blob.data)) for name, blob in blobs.items()}
                    self._pending[key.page] = _Pending(key, blobs, nbytes, draft)
                    self._start_writing()
                    break
                if not is_asked:
                    self._start_writing()
                is_asked = True
            time.sleep(_POLL_SECONDS)
        if nbytes > self._queue_bytes:
            self.flush()
        return True

    def is_queued(self, page: str) -> bool:
        """Return whether a page waits to be written."""
        return page in self._pending

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the queue is empty, at most so many seconds. Return whether it is."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with self._lock:
            self._start_writing()
        while self._pending:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def close(self) -> None:
        """Write what is queued, and end the thread. Further calls do nothing."""
        with self._lock:
            self._is_closed = True
        self.flush()
        self._thread.close()

    def _start_writing(self) -> None:
        """Have as many jobs as pages wait. Submit at least one: it also starts those whose submission was cut short."""
        for _ in range(max(bool(self._pending), len(self._pending) - self._thread.num_waiting)):
            self._thread.submit(Job(self._write_next))  # each writes one page, or none if all are written

    def telemetry(self) -> dict[str, int]:
        """Return how many pages were stored and not stored, by reason, and the bytes that wait."""
        with self._lock:
            refused = {f"refused_{reason}": self._counts[reason] for reason in REASONS}
            return {"queued_bytes": self._queued_bytes, "stored": self._counts["stored"], **refused}

    def _has(self, page: str) -> bool:
        return page in self._pending or self._folder.has(page)

    @property
    def _queued_bytes(self) -> int:
        return sum(pending.nbytes for pending in self._pending.values())

    def _reason_against(self, key: PageKey, nbytes: int) -> str:
        if not self._folder.is_writable:
            return "stopped"
        if key.parent and not self._has(key.parent):
            return "parent"
        return "" if self._governor.may_write(self._queued_bytes + nbytes) else "wear"

    def _count(self, reason: str) -> None:
        """Count a page that is not stored. Warn about the first one of a reason that users can change."""
        self._counts[reason] += 1
        if self._counts[reason] == 1 and reason in _WARNINGS:
            _log.warning("%s: pages are not stored for now: %s", self._folder.path, _WARNINGS[reason])

    def _write_next(self) -> None:
        """Write the first page that waits, if one does."""
        with self._lock:
            if not self._pending:
                return
            key, blobs, _, draft = next(iter(self._pending.values()))
        reason = ""
        try:
            if not self._folder.is_writable:
                reason = "stopped"
            else:
                page = encode_page(key, blobs, draft)
                reason = "draft" if page is None else add_page(self._folder, page, self._governor.claim) or "stored"
        except OSError as error:
            self._folder.stop(error)
            reason = "stopped"
        except BaseException:
            _log.exception("a page for %s was not stored", self._folder.path)
            raise
        finally:
            with self._lock:
                self._count(reason)
                del self._pending[key.page]


def add_page(folder: PageFolder, page: EncodedPage, claim: Callable[[int], bool]) -> str:
    """Write a page, unless it is cached. After an error nothing is left of it.

    ``claim`` counts bytes that are about to be written, or returns False. Return why it is not cached now:
    ``"parent"``, ``"room"``, ``"wear"`` or ``"draft"``; an empty text if it is.
    """
    with folder.locked():
        if folder.has(page.key.page):
            return ""
        if not folder.has_parent(page.key):
            return "parent"
        if not make_room(folder, page):
            return "room"
        if not claim(page.new_bytes):
            return "wear"
        partial = folder.path / f"{page.key.page}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}"
        if (fd := _reserve(partial, page)) is None:
            return "draft"
    try:
        page.write(fd)
        # macOS leaves it to the disk when to write what it was sent; after a loss of power checksums tell
        os.fsync(fd)
        drop_cached(fd, 0, page.nbytes)  # weights need the memory
        with folder.locked():
            if not folder.has_parent(page.key):
                return "parent"
            if not folder.has(page.key.page):
                os.utime(fd, ns=(time.time_ns(),) * 2)
                folder.inodes[page.key.page] = os.fstat(fd).st_ino
                folder.remove(page.key.page)  # a damaged one, whose removal was interrupted
                partial.replace(path_of(folder.path, page.key.page))
        flush_folder(folder.path)
        if page.draft is not None:
            page.draft.name()
        return ""
    finally:
        _give_up(partial, fd)


def _reserve(partial: Path, page: EncodedPage) -> int | None:
    """Make a file of a page's size, which other writers count as soon as they have the lock. Return it open.

    Return None if the page's draft is gone: its caches were dropped.
    """
    if page.draft is not None:
        try:
            page.draft.path.rename(partial)
        except FileNotFoundError:
            return None
    fd = open_locked(partial, create=0o600, shared=True)  # as long as its writer lives
    try:
        os.ftruncate(fd, page.nbytes)
    except BaseException:
        _give_up(partial, fd)
        raise
    return fd


def _give_up(partial: Path, fd: int) -> None:
    with suppress(OSError):  # the next opening removes it
        partial.unlink()
    os.close(fd)

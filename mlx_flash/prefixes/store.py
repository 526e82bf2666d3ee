"""Prefixes of prompts on disk, for every later session and process.

A page's name covers all that decides its bytes, so sessions share pages without knowing of each other. A fault of the
disk costs a page, or the storing of new ones, and a warning; never a run.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mlx_flash.errors import ReadError
from mlx_flash.files import PARTIAL_SUFFIX, HeldLock, flush_folder
from mlx_flash.kv.disk import Write, WriteBehind
from mlx_flash.kv.options import PAGE_TOKENS
from mlx_flash.kv.wear import WriteGovernor
from mlx_flash.logs import log
from mlx_flash.memory.pagecache import drop_cached
from mlx_flash.prefixes.folder import (
    Blob,
    EncodedPage,
    PageFile,
    PageFolder,
    PageKey,
    Place,
    Tokens,
    encode_page,
    full_pages,
    make_room,
    page_names,
    path_of,
    root_name,
)

REASONS = ("stopped", "parent", "room", "wear")
"""Reasons for not storing a page: storing has stopped, the page before it is missing, the disk or the limit is full,
the cap of daily writes is reached."""

_WARNINGS = {
    "room": "the disk, or the cache's share of it, is full, and all of its pages are in use.",
    "wear": "the cap of today's disk writes is reached. Hint: it is ssd_write_gb_per_day.",
}
"""Texts for reasons that users can change."""

QUEUE_BYTES = 64 << 20
"""Two pages of an 8B model at 16 bits."""

_MOST_SECONDS = 10.0
"""The longest time that a prompt waits for its pages to be written, on a disk that does not answer."""


class Prefix(NamedTuple):
    """A cached prefix of a prompt."""

    ends: tuple[int, ...] = ()  # with how many tokens its pages end
    pages: tuple[str, ...] = ()  # their names

    @property
    def num_tokens(self) -> int:
        """Number of tokens it covers."""
        return self.ends[-1] if self.ends else 0

    def cut(self, ends: Collection[int]) -> Prefix:
        """Return the longest part of it that ends with one of these numbers of tokens."""
        count = next((number for number in range(len(self.ends), 0, -1) if self.ends[number - 1] in ends), 0)
        return Prefix(self.ends[:count], self.pages[:count])


class PrefixStore:
    """The pages of one model and one kind of cache, in a directory shared with other models, tenants and processes.

    One thread uses a store, another one of its own writes pages in the background. Close the store; a process that ends
    without closing does no harm. A closed store stores nothing.
    """

    def __init__(
        self,
        directory: Path,
        *,
        model: str,  # fingerprint of all that decides what it computes
        settings: str,  # all that decides how its cache keeps it: dtype, quantization, step
        governor: WriteGovernor,
        tenant: str = "",  # different ones share nothing
        title: str = "",  # name of the model, for people
        limit_bytes: int | None = None,  # the most that all pages in the directory may take
        free_space_floor: int | None = None,  # bytes of the disk that are left free; None for a tenth of it
        page_tokens: int = PAGE_TOKENS,
        queue_bytes: int = QUEUE_BYTES,  # the most that may wait to be written
    ) -> None:
        self.page_tokens = page_tokens
        self._root = root_name(model, settings, tenant, page_tokens)
        self._model, self._title = model, title
        self._governor = governor
        self._folder = PageFolder(directory, limit_bytes, free_space_floor)
        if not governor.zero_write:
            try:
                self._folder.open()
            except OSError as error:
                self._folder.stop(error)
        self._writer = WriteBehind(queue_bytes, "prefixes")
        self._queued: dict[str, Write] = {}  # pages that wait to be written, by name
        self._lock = threading.Lock()  # of the counts
        self._counts: Counter[str] = Counter()

    @property
    def is_writable(self) -> bool:
        """True while pages are still stored."""
        return self._folder.is_writable

    def find(self, tokens: Tokens, *, ends: Sequence[int] | None = None) -> Prefix:
        """Return the longest cached prefix of a prompt. Pages of it that wait to be written are waited for.

        ``ends`` are with how many tokens each page ends; None for pages of ``page_tokens``.
        """
        ends = full_pages(len(tokens), self.page_tokens) if ends is None else ends
        names = page_names(self._root, tokens, ends)
        count = self._folder.num_leading(names)
        if not self._queued.keys().isdisjoint(names[count:]):  # it is faster than computing them
            self.flush(_MOST_SECONDS)
            count = self._folder.num_leading(names)
        return Prefix(tuple(ends[:count]), tuple(names[:count]))

    def touch(self, prefix: Prefix) -> None:
        """Note that a prefix is used."""
        if self._folder.is_writable:
            self._folder.touch(prefix.pages)

    def read(self, page: str, allocate: Callable[[Place], Mapping[str, memoryview]]) -> bool:
        """Read a page into the caller's memory, and check it.

        ``allocate`` returns writable memory for every blob that is wanted, by name. Return False if the page is not
        cached any more. A damaged page is removed.
        """
        try:
            with PageFile(self._folder.path, page) as file:
                for name, view in allocate(file.place).items():
                    file.read_into(name, view)
                return True
        except FileNotFoundError:
            pass  # another process removed it
        except ReadError as error:
            self._folder.drop(page)
            self._count("damaged")
            log.warning("%s. It is not used; its tokens are computed again when they are needed.", error)
        except OSError as error:
            log.warning("cannot read page %s in %s: %s", page, self._folder.path, error.strerror or error)
        return False

    def put(
        self,
        tokens: Tokens,
        page_index: int,  # how many pages come before it
        blobs: Mapping[str, Blob],
        *,
        ends: Sequence[int] | None = None,  # with how many tokens each page ends; None for pages of ``page_tokens``
    ) -> str:
        """Store a page in the background. Return its name if it is cached, or queued; an empty text if it is not.

        While too much is queued, the call waits. Blobs are copied, unless they exceed the queue: then the call waits
        until they are written. The writer refuses what exceeds the limits or the day's writes.
        """
        ends = full_pages(len(tokens), self.page_tokens) if ends is None else ends
        names = page_names(self._root, tokens, ends[: page_index + 1])
        num_tokens = ends[page_index] - (ends[page_index - 1] if page_index else 0)
        key = PageKey(names[-1], "".join(names[-2:-1]), page_index, num_tokens, self._model, self._title)
        nbytes = sum(memoryview(blob.data).nbytes for blob in blobs.values())
        is_large = nbytes > self._writer.limit_bytes
        if self._is_queued(key.page) or self._folder.has(key.page):
            return key.page
        has_parent = self._is_queued(key.parent) or self._folder.has_parent(key)
        if not (self._folder.is_writable and has_parent):
            self._count("parent" if self._folder.is_writable else "stopped")
            return ""
        self._writer.make_room(nbytes)
        if not is_large:
            blobs = {name: blob._replace(data=bytes(blob.data)) for name, blob in blobs.items()}
        self._queued = {page: write for page, write in self._queued.items() if not write.is_done}
        self._queued[key.page] = self._writer.submit(nbytes, partial(self._write, key, blobs, names))
        if is_large:
            self.flush()
        return key.page

    def writes(self, page: str) -> bool:
        """Return whether the page that was put last was queued, and not found. Files of others are not checked."""
        return page in self._queued

    def place(self, page: str) -> Place | None:
        """Return the place of a page that is cached, or queued; None if it is gone."""
        if self._is_queued(page):
            self.flush()
        return self._folder.place(page)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the queue is empty, at most so many seconds. Return whether it is."""
        return self._writer.flush(timeout)

    def close(self) -> None:
        """Write what is queued, and end the thread. Further calls do nothing."""
        self.flush()
        self._folder.is_writable = False
        self._writer.close()

    def telemetry(self) -> dict[str, int]:
        """Return how many pages were stored, not stored by reason, and damaged, and the bytes that wait."""
        with self._lock:
            refused = {f"refused_{reason}": self._counts[reason] for reason in REASONS}
            counts = {name: self._counts[name] for name in ("stored", "damaged")}
        return {"queued_bytes": self._writer.queued_bytes, **counts, **refused}

    def _is_queued(self, page: str) -> bool:
        return page in self._queued and not self._queued[page].is_done

    def _count(self, what: str) -> None:
        """Count a page. Warn about the first one that is not stored for a reason that users can change."""
        with self._lock:
            self._counts[what] += 1
            is_first = self._counts[what] == 1
        if is_first and what in _WARNINGS:
            log.warning("%s: pages are not stored for now: %s", self._folder.path, _WARNINGS[what])

    def _write(self, key: PageKey, blobs: Mapping[str, Blob], names: Sequence[str]) -> None:
        """Write a page, in the store's own thread."""
        try:
            if not self._folder.is_writable:
                self._count("stopped")
                return
            self._count(add_page(self._folder, encode_page(key, blobs), names, self._governor.claim) or "stored")
        except OSError as error:
            self._folder.stop(error)
            self._count("stopped")
        except BaseException:
            log.exception("a page for %s was not stored", self._folder.path)
            raise


def add_page(folder: PageFolder, page: EncodedPage, names: Sequence[str], claim: Callable[[int], bool]) -> str:
    """Write a page, unless it is cached. After an error nothing is left of it.

    ``names`` are those of the pages up to this one. ``claim`` counts bytes that are about to be written, or returns
    False. Return why it is not cached now:
    ``"parent"``, ``"room"`` or ``"wear"``; an empty text if it is.
    """
    with folder.locked():
        if folder.has(page.key.page):
            return ""
        if not folder.has_parent(page.key):
            return "parent"
        if not make_room(folder, page.nbytes, names[:-1]):
            return "room"
        if not claim(page.nbytes):
            return "wear"
        partial = folder.path / f"{page.key.page}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}"
        lock = _reserve(partial, page)
    fd = lock.fd
    try:
        page.write(fd)
        # macOS leaves it to the disk when to write what it was sent; after a loss of power checksums tell
        os.fsync(fd)
        drop_cached(fd, 0, page.nbytes)  # weights need the memory
        with folder.locked():
            if not folder.has_parent(page.key):
                return "parent"
            if not folder.has(page.key.page):
                partial.replace(path_of(folder.path, page.key.page))
                folder.touch(names)
        flush_folder(folder.path)
        return ""
    finally:
        _give_up(partial, lock)


def _reserve(partial: Path, page: EncodedPage) -> HeldLock:
    """Make a file of a page's size, which other writers count as soon as they have the lock. Return it open."""
    lock = HeldLock(partial, create=0o600, shared=True)  # as long as its writer lives
    try:
        os.ftruncate(lock.fd, page.nbytes)
    except BaseException:
        _give_up(partial, lock)
        raise
    return lock


def _give_up(partial: Path, lock: HeldLock) -> None:
    with suppress(OSError):  # the next opening removes it
        partial.unlink()
    lock.release()

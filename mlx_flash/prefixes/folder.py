"""The folder of page files, which is the index of the prefix cache.

A page is cached when its file exists, so every process sees at once what others store and remove. Files are added and
removed under one lock, the last page of a prefix first, so prefixes have no holes. A process that uses a prefix holds a
shared lock on its last page; eviction takes pages that nobody holds and no page follows, the least recently used first.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from mlx_flash.errors import ReadError, WriteError
from mlx_flash.files import PARTIAL_SUFFIX, HeldLock, flush_folder, locked, make_private, open_locked
from mlx_flash.memory.pagecache import drop_cached
from mlx_flash.prefixes.listing import Page, PageListing
from mlx_flash.prefixes.pages import EncodedPage, PageFile, PageKey, Place, path_of

LOCK_SECONDS = 10.0
"""Longest wait for the lock. Others hold it for milliseconds, so a longer wait is for a stopped process."""

FREE_SHARE = 1 / 10
"""Share of the disk that is left free when no floor is set."""

_log = logging.getLogger("mlx_flash")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """The pages of one model: ``pages`` includes snapshots, ``last_used`` is in seconds since 1970."""

    model: str
    title: str
    pages: int
    tokens: int
    nbytes: int
    last_used: float


class Hold(HeldLock):
    """A shared lock on a page file.

    Args:
        path: the file.
        pages: the names of the pages that it keeps from being evicted.

    Raises:
        OSError: the page is being evicted, or cannot be read.
    """

    def __init__(self, path: Path, pages: Sequence[str]) -> None:
        self.pages = pages
        super().__init__(path, shared=True, wait=False, required=False)


class PageFolder:
    """The page files in a directory. Threads and processes may share it.

    Args:
        directory: of the prefix cache.
        limit: the most bytes of all pages; None for no limit.
        free_floor: bytes of the disk that are left free; None for a tenth of it.

    Attributes:
        path: of the folder of pages.
        listing: the pages in it.
        is_writable: whether pages can be added and removed: from :meth:`open` until :meth:`stop`.
    """

    def __init__(self, directory: Path, limit: int | None = None, free_floor: int | None = None) -> None:
        self.path = directory / "pages"
        self.listing = PageListing(self.path)
        self.is_writable = False
        self._directory = directory
        self._limit = limit
        self._free_floor = free_floor
        self._inodes: dict[str, int] = {}  # of the pages that this object has written

    def open(self) -> None:
        """Make the folder writable, and remove what killed processes and damage have left in it."""
        make_private(self.path)
        if self._free_floor is None:
            self._free_floor = int(shutil.disk_usage(self.path).total * FREE_SHARE)
        with self._locked():
            self.listing.repair()
        self.is_writable = True

    def stop(self, error: OSError) -> None:
        """Add and remove nothing any more; pages are still read."""
        self.is_writable = False
        text = "nothing more is stored in %s: %s. Cached pages are still read. Hint: make room, or check who may write."
        _log.warning(text, self._directory, str(error))  # without its traceback, which has pages

    def hold(self, pages: Sequence[str]) -> Hold | None:
        """Keep pages that follow one another, up to the first that is not cached, from being evicted.

        Note that they were used. Return None if none is cached.
        """
        while count := self.listing.num_leading(pages):
            pages = pages[:count]
            try:
                hold = Hold(path_of(self.path, pages[-1]), pages)
            except OSError:  # it is being evicted, or cannot be read
                pages = pages[:-1]
                continue
            if self.listing.num_leading(pages) == count:
                if self.is_writable:
                    self.listing.touch(pages[-1], time.time_ns())
                return hold
            hold.release()
        return None

    def add(self, page: EncodedPage, claim: Callable[[int], bool]) -> str:
        """Write a page, unless it is cached. After an error nothing is left of it.

        Args:
            page: what to write.
            claim: counts bytes that are about to be written, or returns False.

        Returns:
            Why it is not cached now: ``"parent"``, ``"room"`` or ``"wear"``; empty if it is.
        """
        with self._locked():
            if self.listing.has(page.key.page):
                return ""
            if not self.listing.has_parent(page.key):
                return "parent"
            if not self._make_room(page):
                return "room"
            if not claim(page.new_bytes):
                return "wear"
            partial = self.path / f"{page.key.page}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}"
            fd = _reserve(partial, page)
        try:
            page.write(fd)
            # macOS leaves it to the disk when to write what it was sent; after a loss of power checksums tell
            os.fsync(fd)
            drop_cached(fd, 0, page.nbytes)  # weights need the memory
            with self._locked():
                if not self.listing.has_parent(page.key):
                    return "parent"
                if not self.listing.has(page.key.page):
                    os.utime(fd, ns=(time.time_ns(),) * 2)
                    self._inodes[page.key.page] = os.fstat(fd).st_ino
                    self.listing.remove(page.key.page)  # a damaged one, whose removal was interrupted
                    partial.replace(path_of(self.path, page.key.page))
            flush_folder(self.path)
            if page.draft is not None:
                page.draft.name()
            return ""
        finally:
            _give_up(partial, fd)

    def place(self, page: str) -> Place | None:
        """Return the place of a page that :meth:`add` has written; None if it is gone, or another one."""
        try:
            with PageFile(self.path, page) as file:
                return file.place if file.place.inode == self._inodes.get(page) else None
        except (OSError, ReadError):
            return None

    def drop(self, page: str) -> int:
        """Remove an unreadable page and all that follow it, even those in use. Return how many followed it."""
        self.listing.hide([page])
        if self.is_writable:
            try:
                with self._locked():
                    _, useless = self.listing.repair()
                    self.listing.remove(page)
                    return len(useless)
            except OSError as error:
                self.stop(error)
        _, useless = self.listing.look()
        self.listing.hide(useless)
        return len(useless)

    def clear(self, model: str | None) -> None:
        """Remove all pages, or those of one model, that nobody holds."""
        with self._locked():
            pages, _ = self.listing.repair()
            self._evict(pages, sum(page.nbytes for page in pages.values()), lambda key: model in (None, key.model))

    def models(self) -> list[StoredModel]:
        """Return what is cached, the model used last first. Nothing is changed."""
        groups: dict[str, list[Page]] = defaultdict(list)
        for page in self.listing.look()[0].values():
            groups[page.key.model].append(page)
        models = [
            StoredModel(
                model,
                title=max(page.key.title for page in pages),
                pages=len(pages),
                tokens=sum(page.key.tokens for page in pages),
                nbytes=sum(page.nbytes for page in pages),
                last_used=max(page.last_used for page in pages) / 1e9,
            )
            for model, pages in groups.items()
        ]
        return sorted(models, key=lambda model: model.last_used, reverse=True)

    def _locked(self) -> AbstractContextManager[int]:
        return locked(self._directory / "lock", create=0o600, wait=LOCK_SECONDS)

    def _make_room(self, page: EncodedPage) -> bool:
        """Evict pages until another one fits. Return whether it does."""
        excess = page.new_bytes - self._spare_bytes()
        if self._limit is None and excess <= 0:
            return True
        pages, _ = self.listing.repair()
        taken = sum(other.nbytes for other in pages.values())
        if self._limit is not None:
            excess = max(excess, taken + _unfinished_bytes(self.path) + page.nbytes - self._limit)
        if excess > taken:
            return False  # evicting all would not be enough
        freed = self._evict(pages, excess, lambda key: key.page != page.key.parent)
        return freed >= excess and page.new_bytes <= self._spare_bytes()

    def _evict(self, pages: dict[str, Page], excess: int, may_go: Callable[[PageKey], bool]) -> int:
        """Remove pages, least recently used first, until so many bytes are gone. Return how many are.

        A page counts as used whenever a page that follows it was used.
        """
        for page in reversed(pages.values()):
            if parent := pages.get(page.key.parent):
                parent.last_used = max(parent.last_used, page.last_used)
        num_children = Counter(page.key.parent for page in pages.values())
        freed = 0
        for page in sorted(pages.values(), key=lambda page: (page.last_used, -page.key.depth)):
            key = page.key
            if freed >= excess:
                break
            if num_children[key.page] or not may_go(key) or not self._remove_unheld(key.page):
                continue
            freed += page.nbytes
            num_children[key.parent] -= 1
            if key.parent:
                self.listing.touch(key.parent, pages[key.parent].last_used)
        return freed

    def _remove_unheld(self, page: str) -> bool:
        path = path_of(self.path, page)
        try:
            lock = HeldLock(path, wait=False)
        except BlockingIOError:
            return False
        try:
            path.unlink(missing_ok=True)
        finally:
            lock.release()
        return True

    def _spare_bytes(self) -> int:
        return shutil.disk_usage(self.path).free - (self._free_floor or 0)


def _reserve(partial: Path, page: EncodedPage) -> int:
    """Make a file of a page's size, which other writers count as soon as they have the lock. Return it open."""
    if page.draft is not None:
        page.draft.path.rename(partial)
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


def _unfinished_bytes(folder: Path) -> int:
    nbytes = 0
    for path in folder.glob(f"*{PARTIAL_SUFFIX}"):
        with suppress(FileNotFoundError):  # its writer has failed meanwhile
            nbytes += path.stat().st_size
    return nbytes


def list_prefixes(directory: Path) -> list[StoredModel]:
    """Return what a prefix cache holds of each model, the one used last first. The directory need not exist."""
    return PageFolder(directory).models()


def clear_prefixes(directory: Path, model: str | None = None) -> list[StoredModel]:
    """Remove the pages of all models, or of one fingerprint, that nobody uses. Return what is left.

    Raises:
        WriteError: they cannot be removed.
    """
    folder = PageFolder(directory)
    if not folder.path.is_dir():
        return []
    try:
        folder.open()
        folder.clear(model)
        return folder.models()
    except OSError as error:
        raise WriteError(f"cannot clear {directory}: {error}. Hint: check who may write there.") from error

"""The folder of page files, which is the index of the prefix cache, as one process sees it.

A page is cached when its file exists, so every process sees at once what others store and remove. Files are added and
removed under one lock, the last page of a prefix first, so prefixes have no holes. A process that uses a prefix holds a
shared lock on its last page. Where there is no room for another page, those go that nobody holds and that no page
follows, the least recently used first.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from mlx_flash.errors import ReadError, WriteError
from mlx_flash.files import PARTIAL_SUFFIX, HeldLock, free_bytes, free_floor, locked, make_private
from mlx_flash.prefixes.pagefile import SUFFIX, EncodedPage, PageFile, PageKey, Place, path_of

LOCK_SECONDS = 10.0
"""Longest wait for the lock. Others hold it for milliseconds, so a longer wait is for a stopped process."""

_log = logging.getLogger("mlx_flash")


@dataclass(slots=True)
class CachedPage:
    """A page file: its key, its size, and the time of its last use in nanoseconds since 1970."""

    key: PageKey
    nbytes: int
    last_used: int = 0


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
    """A shared lock on a page file, which keeps some pages. Raises: OSError: it is being evicted, or cannot be read."""

    def __init__(self, path: Path, pages: Sequence[str]) -> None:
        self.pages = pages
        super().__init__(path, shared=True, wait=False, required=False)


class PageFolder:
    """The page files in a directory. A description is read once. Threads and processes may share the folder.

    The directory need not exist. ``limit`` is the most bytes of all pages; None for no limit. ``free_floor`` are bytes
    of the disk that are left free; None for a tenth of it, which :meth:`open` finds out.
    """

    def __init__(self, directory: Path, limit: int | None = None, free_floor: int | None = None) -> None:
        self.path = directory / "pages"
        self.is_writable = False  # whether pages can be added and removed: from :meth:`open` until :meth:`stop`
        self.directory = directory
        self.limit = limit
        self.free_floor = free_floor
        self.inodes: dict[str, int] = {}  # of the pages that this object has written, by name
        self._known: dict[str, CachedPage] = {}
        self._hidden: set[str] = set()

    def open(self) -> None:
        """Make the folder writable, and remove what killed processes and damage have left in it."""
        make_private(self.path)
        if self.free_floor is None:
            self.free_floor = free_floor(self.path)
        with self.locked():
            self.repair()
        self.is_writable = True

    def stop(self, error: OSError) -> None:
        """Add and remove nothing any more; pages are still read."""
        self.is_writable = False
        text = "nothing more is stored in %s: %s. Cached pages are still read. Hint: make room, or check who may write."
        _log.warning(text, self.directory, str(error))  # without its traceback, which has pages

    def locked(self) -> AbstractContextManager[int]:
        """Hold the lock under which files are added and removed. Raises: BlockingIOError: another process has it."""
        return locked(self.directory / "lock", create=0o600, wait=LOCK_SECONDS)

    def has(self, page: str) -> bool:
        """Return whether a page is cached."""
        # a Path object would take ten times as long
        return page not in self._hidden and os.access(f"{self.path}/{page}{SUFFIX}", os.F_OK)

    def has_parent(self, key: PageKey) -> bool:
        """Return whether the page before another one is cached, or not needed."""
        return not key.parent or self.has(key.parent)

    def num_leading(self, pages: Sequence[str]) -> int:
        """Return how many of the pages are cached, up to the first that is not."""
        return next((i for i, page in enumerate(pages) if not self.has(page)), len(pages))

    def hold(self, pages: Sequence[str]) -> Hold | None:
        """Keep pages that follow one another, up to the first that is not cached, and note that they were used.

        Return None if none is cached.
        """
        while count := self.num_leading(pages):
            pages = pages[:count]
            try:
                hold = Hold(path_of(self.path, pages[-1]), pages)
            except OSError:  # it is being evicted, or cannot be read
                pages = pages[:-1]
                continue
            if self.num_leading(pages) == count:
                if self.is_writable:
                    self.touch(pages[-1], time.time_ns())
                return hold
            hold.release()
        return None

    def touch(self, page: str, when: int) -> None:
        """Note that a page was used. Only the order of eviction depends on it."""
        with suppress(OSError):
            os.utime(path_of(self.path, page), ns=(when, when))

    def place(self, page: str) -> Place | None:
        """Return the place of a page that this object has written; None if it is gone, or another one."""
        try:
            with PageFile(self.path, page) as file:
                return file.place if file.place.inode == self.inodes.get(page) else None
        except (OSError, ReadError):
            return None

    def look(self) -> tuple[dict[str, CachedPage], list[str]]:
        """Return the usable pages, parents first, and the names of useless ones: damaged, or without their parent."""
        found: dict[str, CachedPage] = {}
        useless = []
        for entry in os.scandir(self.path) if self.path.is_dir() else ():
            name = entry.name.removesuffix(SUFFIX)
            if name == entry.name or name in self._hidden:
                continue
            try:
                found[name] = self._describe(name, entry.stat())
            except FileNotFoundError:
                pass  # it was removed meanwhile
            except ReadError as error:
                _log.warning("%s. It is not used; its tokens are computed again when they are needed.", error)
                useless.append(name)
            except OSError as error:
                _log.warning("%s is not used: %s", entry.path, error.strerror or error)
        self._known = found
        usable: dict[str, CachedPage] = {}
        for name, page in sorted(found.items(), key=lambda item: item[1].key.depth):
            if page.key.parent in usable or not page.key.parent:
                usable[name] = page
            else:
                useless.append(name)
        return usable, useless

    def _describe(self, name: str, status: os.stat_result) -> CachedPage:
        """Return a page; opens only files that are new to this process."""
        page = self._known.get(name)
        if page is None or page.nbytes != status.st_size:
            with PageFile(self.path, name) as file:
                page = CachedPage(file.key, status.st_size)
        page.last_used = status.st_mtime_ns
        return page

    def repair(self) -> tuple[dict[str, CachedPage], list[str]]:
        """Remove useless pages and the unfinished files of killed processes. Return what :meth:`look` found."""
        for path in self.path.glob(f"*{PARTIAL_SUFFIX}"):
            with suppress(FileNotFoundError, BlockingIOError):
                HeldLock(path, wait=False).release()
                path.unlink()
        pages, useless = self.look()
        for page in reversed(useless):
            path_of(self.path, page).unlink(missing_ok=True)
        self.inodes = {page: inode for page, inode in self.inodes.items() if page in pages}
        return pages, useless

    def drop(self, page: str) -> int:
        """Remove an unreadable page and all that follow it, even those in use. Return how many followed it."""
        self._hidden.add(page)
        if self.is_writable:
            try:
                with self.locked():
                    _, useless = self.repair()
                    self.remove(page)
                    return len(useless)
            except OSError as error:
                self.stop(error)
        _, useless = self.look()
        self._hidden.update(useless)
        return len(useless)

    def remove(self, page: str) -> None:
        """Remove the file of a page, if it is there."""
        path_of(self.path, page).unlink(missing_ok=True)
        self._hidden.discard(page)


def list_prefixes(directory: Path) -> list[StoredModel]:
    """Return what a prefix cache holds of each model, the one used last first. The directory need not exist."""
    groups: dict[str, list[CachedPage]] = defaultdict(list)
    for page in PageFolder(directory).look()[0].values():
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


def make_room(folder: PageFolder, page: EncodedPage) -> bool:
    """Evict pages until another one fits. Return whether it does. The caller has the lock."""
    excess = page.new_bytes - _spare_bytes(folder)
    if folder.limit is None and excess <= 0:
        return True
    pages, _ = folder.repair()
    taken = sum(other.nbytes for other in pages.values())
    if folder.limit is not None:
        excess = max(excess, taken + _unfinished_bytes(folder.path) + page.nbytes - folder.limit)
    if excess > taken:
        return False  # evicting all would not be enough
    freed = _evict(folder, pages, excess, page.key.parent)
    return freed >= excess and page.new_bytes <= _spare_bytes(folder)


def clear_prefixes(directory: Path) -> list[StoredModel]:
    """Remove the pages of all models that nobody uses. Return what is left. Raises: WriteError."""
    folder = PageFolder(directory)
    if not folder.path.is_dir():
        return []
    try:
        folder.open()
        with folder.locked():
            pages, _ = folder.repair()
            _evict(folder, pages, sum(page.nbytes for page in pages.values()))
        return list_prefixes(directory)
    except OSError as error:
        raise WriteError(f"cannot clear {directory}: {error}. Hint: check who may write there.") from error


def _evict(folder: PageFolder, pages: dict[str, CachedPage], excess: int, spared: str = "") -> int:
    """Remove pages, least recently used first, until so many bytes are gone. Return how many are.

    The ``spared`` page stays. A page counts as used whenever a page that follows it was used.
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
        if num_children[key.page] or key.page == spared or not _remove_unheld(path_of(folder.path, key.page)):
            continue
        freed += page.nbytes
        num_children[key.parent] -= 1
        if key.parent:
            folder.touch(key.parent, pages[key.parent].last_used)
    return freed


def _remove_unheld(path: Path) -> bool:
    try:
        lock = HeldLock(path, wait=False)
    except BlockingIOError:
        return False
    try:
        path.unlink(missing_ok=True)
    finally:
        lock.release()
    return True


def _spare_bytes(folder: PageFolder) -> int:
    return free_bytes(folder.path) - (folder.free_floor or 0)


def _unfinished_bytes(folder: Path) -> int:
    nbytes = 0
    for path in folder.glob(f"*{PARTIAL_SUFFIX}"):
        with suppress(FileNotFoundError):  # its writer has failed meanwhile
            nbytes += path.stat().st_size
    return nbytes

"""The page files of a prefix cache, as one process sees them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlx_flash.errors import ReadError
from mlx_flash.files import PARTIAL_SUFFIX, HeldLock
from mlx_flash.prefixes.pages import SUFFIX, PageFile, PageKey, path_of

_log = logging.getLogger("mlx_flash")


@dataclass(slots=True)
class Page:
    """A page file: its key, its size, and the time of its last use in nanoseconds since 1970."""

    key: PageKey
    nbytes: int
    last_used: int = 0


class PageListing:
    """The page files of a folder. A description is read once. Threads may share it.

    Args:
        path: the folder, which need not exist.

    Attributes:
        path: as given.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, Page] = {}
        self._hidden: set[str] = set()

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

    def hide(self, pages: Iterable[str]) -> None:
        """Count pages as not cached, though their files may be there."""
        self._hidden.update(pages)

    def remove(self, page: str) -> None:
        """Remove the file of a page, if it is there."""
        path_of(self.path, page).unlink(missing_ok=True)
        self._hidden.discard(page)

    def touch(self, page: str, when: int) -> None:
        """Note that a page was used. Only the order of eviction depends on it."""
        with suppress(OSError):
            os.utime(path_of(self.path, page), ns=(when, when))

    def look(self) -> tuple[dict[str, Page], list[str]]:
        """Return the usable pages, parents first, and the names of useless ones: damaged, or without their parent."""
        found: dict[str, Page] = {}
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
        usable: dict[str, Page] = {}
        for name, page in sorted(found.items(), key=lambda item: item[1].key.depth):
            if page.key.parent in usable or not page.key.parent:
                usable[name] = page
            else:
                useless.append(name)
        return usable, useless

    def _describe(self, name: str, status: os.stat_result) -> Page:
        """Return a page; opens only files that are new to this process."""
        page = self._known.get(name)
        if page is None or page.nbytes != status.st_size:
            with PageFile(self.path, name) as file:
                page = Page(file.key, status.st_size)
        page.last_used = status.st_mtime_ns
        return page

    def repair(self) -> tuple[dict[str, Page], list[str]]:
        """Remove useless pages and the unfinished files of killed processes. Return what :meth:`look` found."""
        for path in self.path.glob(f"*{PARTIAL_SUFFIX}"):
            with suppress(FileNotFoundError, BlockingIOError):
                HeldLock(path, wait=False).release()
                path.unlink()
        pages, useless = self.look()
        for page in reversed(useless):
            path_of(self.path, page).unlink(missing_ok=True)
        return pages, useless

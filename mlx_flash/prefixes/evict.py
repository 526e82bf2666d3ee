"""Eviction of page files, when there is no room for another one, or all are to go.

Pages go that nobody holds and that no page follows, the least recently used first.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mlx_flash.errors import WriteError
from mlx_flash.files import PARTIAL_SUFFIX, HeldLock
from mlx_flash.prefixes.folder import CachedPage, PageFolder, StoredModel, list_prefixes
from mlx_flash.prefixes.pagefile import EncodedPage, PageKey, path_of


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
    freed = _evict(folder, pages, excess, lambda key: key.page != page.key.parent)
    return freed >= excess and page.new_bytes <= _spare_bytes(folder)


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
        with folder.locked():
            pages, _ = folder.repair()
            nbytes = sum(page.nbytes for page in pages.values())
            _evict(folder, pages, nbytes, lambda key: model in (None, key.model))
        return list_prefixes(directory)
    except OSError as error:
        raise WriteError(f"cannot clear {directory}: {error}. Hint: check who may write there.") from error


def _evict(folder: PageFolder, pages: dict[str, CachedPage], excess: int, may_go: Callable[[PageKey], bool]) -> int:
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
        if num_children[key.page] or not may_go(key) or not _remove_unheld(path_of(folder.path, key.page)):
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
    return shutil.disk_usage(folder.path).free - (folder.free_floor or 0)


def _unfinished_bytes(folder: Path) -> int:
    nbytes = 0
    for path in folder.glob(f"*{PARTIAL_SUFFIX}"):
        with suppress(FileNotFoundError):  # its writer has failed meanwhile
            nbytes += path.stat().st_size
    return nbytes

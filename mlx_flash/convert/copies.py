"""The packed copies of derived parameters on disk: which there are, who uses them, and room for another one.

A copy is a folder ``derived/<fingerprint>`` in the cache folder. While it is being written it is called
``<fingerprint>.partial``. Its writer has an exclusive lock on the folder, its users have shared ones; only a copy
without locks is removed.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_flash.convert.writer import write_errors
from mlx_flash.files import PARTIAL_SUFFIX, free_bytes, free_floor, open_locked, read_regular, write_atomically
from mlx_flash.folders import cache_directory

MANIFEST_NAME = "copy.json"
_MOST_BYTES = 64_000_000  # of a description, as of a header of a checkpoint

COPY_HINT = "or set derived_cache_gb=0"
"""Ends the hints of errors when a copy cannot be written."""

_log = logging.getLogger("mlx_flash")


@dataclass(frozen=True, slots=True)
class Copy:
    """A packed copy on disk. Times are in seconds since 1970; ``source`` is empty when it cannot be read."""

    folder: Path
    source: str
    model: str
    versions: Mapping[str, str]
    nbytes: int
    created: float
    last_used: float
    is_complete: bool


def derived_directory() -> Path:
    """Return the folder of all copies; it need not exist."""
    return cache_directory() / "derived"


def list_copies() -> list[Copy]:
    """Return all copies, interrupted ones too, the one used last first."""
    try:
        folders = [path for path in derived_directory().iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(map(_look_at, folders), key=lambda copy: copy.last_used, reverse=True)


def _look_at(folder: Path) -> Copy:
    manifest = read_manifest(folder)
    match manifest:
        case {"source": str(source), "model": str(model), "versions": dict(versions), "created": int() | float()}:
            created = float(manifest["created"])
        case _:
            source, model, versions, created = "", "", {}, 0.0
    last_used = created
    with suppress(OSError):  # it is being removed
        last_used = (folder / MANIFEST_NAME).stat().st_mtime
    is_complete = "files" in manifest and not folder.name.endswith(PARTIAL_SUFFIX)
    return Copy(folder, source, model, versions, _size(folder), created, last_used, is_complete)


def _size(folder: Path) -> int:
    nbytes = 0
    with suppress(OSError):  # it is being removed
        for path in folder.iterdir():
            nbytes += path.stat().st_size
    return nbytes


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the description of a copy; empty if there is none to read."""
    try:
        manifest = json.loads(read_regular(folder / MANIFEST_NAME, _MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}  # interrupted, damaged, or no copy: it is written again when needed
    return manifest if isinstance(manifest, dict) else {}


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Replace the description of a copy."""
    with copy_errors(folder):
        write_atomically(folder / MANIFEST_NAME, json.dumps(manifest, indent=1), mode=0o666, durable=True)


def note_use(folder: Path) -> None:
    """Make a copy the one used last."""
    with suppress(OSError):  # another user's, or a disk that cannot be written: it only goes earlier
        os.utime(folder / MANIFEST_NAME)


def remove(copy: Copy) -> bool:
    """Remove a copy, unless somebody holds it. Return True if it is gone."""
    fd = _lock(copy.folder)
    if fd is None:
        return not copy.folder.exists()
    try:
        discard(copy.folder)
    finally:
        os.close(fd)
    return True


def discard(folder: Path) -> None:
    """Remove a copy, even one in use."""
    with copy_errors(folder):
        (folder / MANIFEST_NAME).unlink(missing_ok=True)  # from here on it is not complete
        shutil.rmtree(folder)


def hold(folder: Path) -> int | None:
    """Keep a copy from being removed until the returned descriptor is closed. Return None if there is no copy."""
    return _lock(folder, shared=True, wait=True)


def is_held(copy: Copy) -> bool:
    """Return True if a process writes or uses a copy."""
    fd = _lock(copy.folder)
    if fd is not None:
        os.close(fd)
    return fd is None and copy.folder.exists()


def _lock(folder: Path, *, shared: bool = False, wait: bool = False) -> int | None:
    """Lock a folder. Return None when it does not exist, or when another process has it and ``wait`` is False."""
    try:
        return open_locked(folder, shared=shared, wait=wait, required=False)
    except (FileNotFoundError, NotADirectoryError, BlockingIOError):
        return None


class Room:
    """Room for more bytes of a copy.

    Args:
        needed: bytes that are still to be written.
        fingerprint: of the copy; neither it nor its beginning is removed for itself.
        limit: bytes of all copies together; None leaves a tenth of the disk free.
    """

    def __init__(self, needed: int, fingerprint: str, limit: int | None) -> None:
        copies = list_copies()
        folder = derived_directory()
        room = free_bytes(folder)
        if limit is None:
            room -= free_floor(folder)
        else:
            room = min(room, limit - sum(copy.nbytes for copy in copies))
        others = [copy for copy in copies if copy.folder.name.removesuffix(PARTIAL_SUFFIX) != fingerprint]
        self._removable = [copy for copy in others if not is_held(copy)]
        self._excess = needed - room

    def is_enough(self) -> bool:
        """Return True if there is room, or would be if others were removed."""
        return self._excess <= sum(copy.nbytes for copy in self._removable)

    def make(self, source: str) -> bool:
        """Remove other copies until there is room; none when that would not be enough. Return True if there is.

        Those of the same source, which are of no use any more, go first, then those used longest ago.
        """
        if not self.is_enough():
            return False
        for copy in sorted(self._removable, key=lambda copy: (copy.source != source, copy.last_used)):
            if self._excess > 0 and remove(copy):
                _log.info("removed %s, the packed copy of %s, to make room", copy.folder, copy.source)
                self._excess -= copy.nbytes
        return self._excess <= 0


def remove_older(source: str, fingerprint: str) -> None:
    """Remove unused copies of a source that has changed since, and copies of no known source."""
    for copy in list_copies():
        if copy.source in (source, "") and copy.folder.name.removesuffix(PARTIAL_SUFFIX) != fingerprint:
            remove(copy)


def copy_errors(path: Path) -> AbstractContextManager[None]:
    """Turn the system's errors while a copy is written into ours."""
    return write_errors(f"cannot write {path}", COPY_HINT)

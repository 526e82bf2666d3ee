"""The part of the files that is read through the page cache: what memory has room for that nothing else needs.

Direct reads leave free memory of the machine idle. A fixed part of the files is read through the page cache instead, so
that the next pass finds it there. It is part of no budget: the system takes these pages back whenever a program needs
memory. The rest is read directly, or each pass would push out what the next one needs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

CACHED_BLOCK_BYTES = 4 << 20
"""Blocks are cached as a whole. They are chosen evenly over each file, so that no unit waits longer than others."""

REFRESH_SECONDS = 5.0
"""The machine is looked at so often, while something is read."""

GOLDEN = 0.6180339887498949
"""Fractions of its multiples fill the unit interval evenly, and a smaller share is part of a larger one."""

_STEP = 1 / 16
"""A share rises by whole steps only, and falls at once."""


class CachedShare:
    """The share of all blocks that is read through the page cache. It follows the free memory of the machine.

    Args:
        nbytes: size of all files.
        room: returns the bytes of memory that nothing else needs now; cached blocks count as free.

    Attributes:
        room: as given; may be replaced.
        share: 0 to 1.
    """

    def __init__(self, nbytes: int, room: Callable[[], int]) -> None:
        self.share = 0.0
        self._nbytes = max(nbytes, 1)
        self.room = room

    @property
    def file_bytes(self) -> int:
        """Bytes of the files that are read through the page cache now."""
        return int(self.share * self._nbytes)

    def leave_out(self, nbytes: int) -> None:
        """Divide the memory among fewer bytes of the files, since so many are not read again."""
        self._nbytes = max(self._nbytes - nbytes, 1)

    def refresh(self) -> None:
        """Look at the memory of the machine."""
        found = min(1.0, max(0.0, self.room() / self._nbytes))
        if found < self.share or found == 1:
            self.share = found
        elif found >= self.share + _STEP:
            self.share = found // _STEP * _STEP

    def holds(self, path: Path, offset: int) -> bool:
        """Return whether the block at an offset of a file is read through the page cache."""
        if self.share in (0.0, 1.0):
            return self.share == 1.0
        start = zlib.crc32(path.name.encode()) / 2**32
        return (start + offset // CACHED_BLOCK_BYTES * GOLDEN) % 1.0 < self.share

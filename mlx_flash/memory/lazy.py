"""Memory that is committed when it is written to, and that the system takes back without its being freed."""

from __future__ import annotations

import ctypes
import io
import json
import mmap
import sys
from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from typing import Any, cast

import mlx.core as mx

from mlx_flash.compat.arrays import address_of, array_over, memory_of
from mlx_flash.forks import finalize
from mlx_flash.memory.footprint import footprint
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, round_up

_PROBE_BYTES = 4 << 20
"""Less than what plans set aside for what running adds to a process."""

_numbers = count()
_committed: dict[int, int] = {}
_idle_maps: list[mmap.mmap] = []
"""Address ranges for later pools. None is ever unmapped, since arrays of MLX may still refer to it."""


@lru_cache(maxsize=1)
def commits_lazily() -> bool:
    """Return whether pages of an array can be released, and committed again when written to. Tried once a process.

    They can on Linux with MLX's CPU back end, whose arrays are private anonymous memory. A GPU's driver commits a whole
    buffer once a kernel uses it.
    """
    if sys.platform != "linux" or mx.default_device() == mx.gpu or mx.cuda.is_available():
        return False
    array = mx.ones((_PROBE_BYTES,), mx.uint8)
    mx.eval(array)
    before = footprint()
    give_back(array)
    gone = before - footprint()
    return gone > _PROBE_BYTES // 2 and not bool(array[_PROBE_BYTES // 2 :][:DIRECT_ALIGNMENT].any())


def reserve(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """Return zeros that are committed when written to, if the system can. For a moment all of them are committed."""
    array = mx.zeros(shape, dtype)
    if commits_lazily():
        mx.eval(array)
        give_back(array)
    return array


def untouched(num_rows: int, width: int) -> mx.array:
    """Return rows of bytes of any value, without writing to them: the system commits pages when they are read into.

    MLX's own zeros are written page by page, which takes as long as reading them from a fast disk. So the array is one
    that MLX loads from a file, and this file writes nothing.

    Args:
        num_rows: number of rows.
        width: bytes of a row.
    """
    file = cast(Any, _Nothing(num_rows, width))
    array = cast(dict[str, mx.array], mx.load(file, format="safetensors", stream=mx.cpu))["rows"]
    mx.eval(array)
    return array


class _Nothing(io.RawIOBase):
    """A safetensors file with a header, whose data leaves the reader's memory as it is."""

    def __init__(self, num_rows: int, width: int) -> None:
        self._nbytes = num_rows * width
        entry = {"dtype": "U8", "shape": [num_rows, width], "data_offsets": [0, self._nbytes]}
        text = json.dumps({"rows": entry}).encode()
        self._head = len(text).to_bytes(8, "little") + text
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = (0, self._at, len(self._head) + self._nbytes)[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        head = self._head[self._at : self._at + len(target)]
        target[: len(head)] = head
        self._at += len(target)
        return len(target)


def give_back(array: mx.array) -> None:
    """Replace the whole pages inside an evaluated array by zeros that take no memory until they are written to."""
    uncommit(memory_of(array))


def uncommit(memory: memoryview) -> None:
    """Replace whole pages by zeros that take no memory until they are written to."""
    address = address_of(memory)
    start = round_up(address, mmap.PAGESIZE)
    nbytes = (address + memory.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if nbytes > 0:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED) != 0:
            raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED) failed")


class LazyRows:
    """An array of zeros whose first rows have memory, and whose other rows get some when they are written to.

    MLX does not count this memory: see :func:`active_memory`. It goes back to the system with this object. Arrays that
    share it read zeros from then on.

    Args:
        num_rows: number of rows.
        width: bytes of a row.

    Attributes:
        array: the rows.
    """

    def __init__(self, num_rows: int, width: int) -> None:
        pages = _take_map(num_rows * width)
        self.array = array_over(memoryview(pages)[: num_rows * width], (num_rows, width))
        self._number = next(_numbers)
        finalize(self, _end, pages, self._number)

    def note(self, committed: int) -> None:
        """Note how many bytes were written to and not given back."""
        _committed[self._number] = committed


def active_memory() -> int:
    """Return the bytes of all arrays of this process: what MLX counts, and the rows of :class:`LazyRows`."""
    return int(mx.get_active_memory()) + sum(list(_committed.values()))


def _take_map(nbytes: int) -> mmap.mmap:
    fitting = [pages for pages in _idle_maps if len(pages) >= nbytes]
    if not fitting:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages = min(fitting, key=len)
    _idle_maps.remove(pages)
    return pages


def _end(pages: mmap.mmap, number: int) -> None:
    _committed.pop(number, None)
    uncommit(memoryview(pages))
    _idle_maps.append(pages)

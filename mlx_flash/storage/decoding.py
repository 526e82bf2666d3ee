"""Reads of compressed blocks, decoded straight into the caller's memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from mlx_flash.errors import ReadError
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, round_up
from mlx_flash.storage.blocks import BLOCK_BYTES, MARGIN, BlockTable
from mlx_flash.storage.codec import CodecError, Decoder

Fetch = Callable[[str, int, int, memoryview], None]
"""Reads a range of a file, for the tensor of a name, to memory that starts at a whole page and has whole pages."""


def decoding_bytes(read_size: int) -> int:
    """Return the memory that a thread needs to read and decode ranges of a size."""
    return _room(read_size) + max(read_size, BLOCK_BYTES) + BLOCK_BYTES


def _room(read_size: int) -> int:
    return round_up(max(read_size, BLOCK_BYTES) + MARGIN, DIRECT_ALIGNMENT)


class BlockReader:
    """Reads and decodes blocks. Each thread has its own.

    Args:
        read_size: bytes that are fetched at once, one block at least.
    """

    def __init__(self, read_size: int) -> None:
        self._decoder = Decoder()
        self._most = max(read_size, BLOCK_BYTES)
        self._coded = memoryview(mmap.mmap(-1, _room(read_size)))
        self._block = memoryview(bytearray(BLOCK_BYTES))
        self._last: tuple[BlockTable, int] | None = None

    def read(
        self,
        path: Path,
        table: BlockTable,
        name: str,
        start: int,
        target: memoryview,
        fetch: Fetch,
        land: Callable[[memoryview], memoryview] = lambda part: part,
    ) -> None:
        """Fill memory with the logical bytes of a tensor from ``start`` on.

        Args:
            path: the file, for errors.
            table: its blocks.
            name: of the tensor.
            start: logical offset.
            target: the memory.
            fetch: reads coded bytes.
            land: returns the memory to decode a part of the target into.

        Raises:
            ReadError: a block is damaged.
        """
        stop = start + len(target)
        blocks = table.around(start, stop)
        if len(blocks) == 1 and self._last == (table, blocks.start):
            self._copy(table, blocks.start, start, land(target))
            return
        for part in self._chunks(table, blocks):
            first = table.offsets[part.start] // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
            fetch(name, first, table.offsets[part.stop] - first, self._coded)
            for some in _whole_and_cut(table, part, start, stop):
                low, high = max(start, table.starts[some.start]), min(stop, table.ends[some.stop - 1])
                coded = self._coded[table.offsets[some.start] - first : table.offsets[some.stop] - first]
                self._decode(path, table, name, some, coded, low, land(target[low - start : high - start]))

    def _decode(
        self, path: Path, table: BlockTable, name: str, blocks: range, coded: memoryview, low: int, landing: memoryview
    ) -> None:
        """Decode whole blocks, or a part of one from the logical offset ``low`` on."""
        sizes = [table.ends[number] - table.starts[number] for number in blocks]
        itemsize = table.itemsize(blocks.start)
        try:
            if len(landing) == sum(sizes):
                self._decoder.decode(coded, landing, itemsize, sizes)
                return
            self._last = None
            self._decoder.decode(coded, self._block[: sizes[0]], itemsize)
        except CodecError as error:
            if len(blocks) > 1:
                for number in blocks:  # one of them has the error
                    at, end = (table.offsets[i] - table.offsets[blocks.start] for i in (number, number + 1))
                    place = landing[table.starts[number] - low : table.ends[number] - low]
                    self._decode(path, table, name, range(number, number + 1), coded[at:end], low, place)
            raise ReadError(
                f"cannot read '{name}' in {path}: the block of {len(coded)} bytes at offset "
                f"{table.offsets[blocks.start]} is damaged: {error}. Hint: check the disk, and pack the model again."
            ) from error
        self._last = table, blocks.start
        self._copy(table, blocks.start, low, landing)

    def _copy(self, table: BlockTable, number: int, low: int, landing: memoryview) -> None:
        at = low - table.starts[number]
        np.copyto(np.frombuffer(landing, np.uint8), np.frombuffer(self._block[at : at + len(landing)], np.uint8))

    def _chunks(self, table: BlockTable, blocks: range) -> Iterator[range]:
        """Yield runs of blocks that are fetched and decoded at once."""
        first = blocks.start
        for number in blocks:
            begin = table.offsets[first] // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
            is_long = table.offsets[number + 1] - begin > len(self._coded) - DIRECT_ALIGNMENT
            if number > first and (is_long or table.ends[number] - table.starts[first] > self._most):
                yield range(first, number)
                first = number
        if first < blocks.stop:
            yield range(first, blocks.stop)


def _whole_and_cut(table: BlockTable, blocks: range, start: int, stop: int) -> Iterator[range]:
    """Yield the blocks that are wanted as a whole together, and those at the ends that are not, by themselves."""
    first, last = blocks.start, blocks.stop
    if first < last and (table.starts[first] < start or table.ends[first] > stop):
        yield range(first, first + 1)
        first += 1
    is_cut = first < last and table.ends[last - 1] > stop
    if first < last - is_cut:
        yield range(first, last - is_cut)
    if is_cut:
        yield range(last - 1, last)

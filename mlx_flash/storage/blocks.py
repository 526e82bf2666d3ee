"""Compressed tensors: the blocks of their bytes, coded, and the table of these blocks.

A compressed file is a safetensors file whose tensors are the coded bytes of others, one block after another. Its
metadata has the header of those others, and for each the bytes of a block, of a run, and of each coded block. Blocks
begin anew with each run of a tensor's bytes, such as an expert of a stack. All blocks of a run have the same size, but
for the last one.

Offsets of tensors, rows and reads are those of an uncompressed file everywhere, the *logical* ones. Only the table
knows where coded blocks lie.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import numpy as np

from mlx_flash.errors import ConfigError, ReadError
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, round_up

LOGICAL_START = 16 * 1024
"""Logical offset of the first tensor."""

BLOCK_BYTES = 512 << 10
"""Bytes of a block at most."""

MARGIN = 64 << 10
"""A coded block is longer than its contents by less than this."""


class BlockTable:
    """The places of all blocks of a file: their logical offsets, and where they lie in it when coded."""

    def __init__(self, blocks: Iterable[tuple[int, int, int]], sizes: Iterable[int], data_start: int) -> None:
        self.starts, self.ends, self.itemsizes = array("q"), array("q"), array("B")
        for start, end, itemsize in blocks:
            self.starts.append(start)
            self.ends.append(end)
            self.itemsizes.append(itemsize)
        self.offsets = array("q", accumulate(sizes, initial=data_start))

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def stored_bytes(self) -> int:
        return self.offsets[-1] - self.offsets[0]

    def around(self, start: int, stop: int) -> range:
        """Return the numbers of the blocks that have any of the logical bytes ``[start, stop)``."""
        return range(bisect_right(self.ends, start), bisect_left(self.starts, stop))

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Return offset and length in the file of the blocks that have any of the logical bytes ``[start, stop)``."""
        blocks = self.around(start, stop)
        return self.offsets[blocks.start], self.offsets[blocks.stop] - self.offsets[blocks.start]

    def cuts(self, start: int, stop: int, step: int) -> Iterator[int]:
        """Yield the starts of ranges of about ``step`` bytes. None but the first begins inside of a block."""
        yield start
        while stop - start > step:
            number = max(bisect_right(self.starts, start + step) - 1, 0)
            start = self.starts[number] if self.starts[number] > start else self.ends[number]
            if start < stop:
                yield start


def num_blocks(nbytes: int, block_bytes: int, run_bytes: int) -> int:
    """Return the number of blocks of a tensor."""
    num_runs, rest = divmod(nbytes, run_bytes)
    return num_runs * -(-run_bytes // block_bytes) + -(-rest // block_bytes)


def blocks_of(
    start: int, nbytes: int, itemsize: int, block_bytes: int, run_bytes: int
) -> Iterator[tuple[int, int, int]]:
    """Yield start, end and item size of each block of a tensor at a logical offset. They begin anew with each run."""
    for run in range(start, start + nbytes, run_bytes):
        stop = min(run + run_bytes, start + nbytes)
        yield from ((at, min(at + block_bytes, stop), itemsize) for at in range(run, stop, block_bytes))


CODED_DTYPES = frozenset({"BF16", "F16", "F32"})
"""Dtypes of tensors that may be compressed."""

WORTH_IT = 1.05
"""A compressed copy pays where a pass is this much faster."""

_PROBE_BLOCKS = 4
_PROBE_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Compression:
    """A compressed checkpoint in numbers."""

    ratio: float  # bytes that are read for each byte of weights
    decode_bytes_per_second: float  # bytes of weights that one core decodes
    disk_bytes_per_second: float  # bytes that the disk delivers
    compute_bytes_per_second: float  # bytes of weights that MLX computes with
    shares_cores: bool  # whether MLX computes on the cores that decode

    @property
    def weight_bytes_per_second(self) -> float:
        """Bytes of weights that reading and decoding side by side deliver. MLX may take one core."""
        free = max(1, num_cores() - self.shares_cores)
        return min(self.disk_bytes_per_second / self.ratio, self.decode_bytes_per_second * free)

    @property
    def num_decoding(self) -> int:
        """Threads that decode while as many others as ever wait for the disk. One more helps where speeds vary."""
        free = max(1, num_cores() - self.shares_cores)
        return min(free, math.ceil(self.disk_bytes_per_second / self.ratio / self.decode_bytes_per_second) + 1)

    @property
    def gain(self) -> float:
        """The time of a pass with an uncompressed copy over that with this one."""
        computing = 1 / self.compute_bytes_per_second
        busy = (1 / self.decode_bytes_per_second + computing * self.shares_cores) / num_cores()
        plain = max(1 / self.disk_bytes_per_second, computing)
        return plain / max(1 / self.weight_bytes_per_second, computing, busy)

    @property
    def pays(self) -> bool:
        """True if the gain is worth a copy that only this program reads."""
        return self.gain >= WORTH_IT


class CodecError(Exception):
    """A block is not what the encoder made."""


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def zstandard_library() -> Any:
    """Return the library. Raises: ConfigError, if it is not installed."""
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise ConfigError("compressed weights need the package zstandard. Hint: pip install zstandard.") from error
    return zstandard


class Encoder:
    """Encodes blocks. Not for several threads at once."""

    def __init__(self) -> None:
        library = zstandard_library()
        parameters = library.ZstdCompressionParameters(
            strategy=library.STRATEGY_FAST, min_match=7, window_log=17, hash_log=6, write_checksum=True
        )
        self._compressor = library.ZstdCompressor(compression_params=parameters)
        self._flush = library.COMPRESSOBJ_FLUSH_BLOCK

    def encode(self, block: bytes | memoryview, itemsize: int) -> bytes:
        """Return a block in coded form. Each significance ends a block of Zstandard, which has its own code."""
        planes = np.ascontiguousarray(np.frombuffer(block, np.uint8).reshape(-1, itemsize).T)
        frame = self._compressor.compressobj(size=planes.size)
        parts = [part for plane in planes for part in (frame.compress(plane.data), frame.flush(self._flush))]
        return b"".join([*parts, frame.flush()])


class Decoder:
    """Decodes blocks. Not for several threads at once."""

    def __init__(self) -> None:
        self._library = zstandard_library()
        self._decompressor = self._library.ZstdDecompressor()
        self._planes = np.empty(BLOCK_BYTES, np.uint8)

    def decode(self, stored: memoryview, target: memoryview, itemsize: int, sizes: Sequence[int] = ()) -> None:
        """Write the contents of blocks, of some sizes or of a single one, to memory of their size. Raises: CodecError.

        Threads that decode hand the GIL to each other, which takes longer than what they do with it. So several blocks
        are decoded at once, one after another.
        """
        if len(target) > len(self._planes):
            self._planes = np.empty(len(target), np.uint8)
        planes, sizes = self._planes[: len(target)], sizes or [len(target)]
        try:
            size = self._library.get_frame_parameters(stored).content_size
            if size != sizes[0]:
                raise CodecError(f"it has {size} bytes, expected {sizes[0]}")
            # each block is decoded in one step, as it is there as a whole and has room
            with self._decompressor.stream_reader(stored, read_across_frames=True) as reader:
                got = reader.readinto(planes.data)
                is_longer = got == len(target) and bool(reader.read(1))
        except self._library.ZstdError as error:
            raise CodecError(str(error)) from error
        if got != len(target) or is_longer:
            raise CodecError(f"it has {'more' if is_longer else got} bytes, expected {len(target)}")
        items, begin = np.frombuffer(target, f"<u{itemsize}"), 0
        for size, group in groupby(sizes):
            end = begin + size * len(list(group))
            _join(planes[begin:end].reshape(-1, itemsize, size // itemsize), items[begin // itemsize : end // itemsize])
            begin = end


def _join(planes: np.ndarray[Any, Any], items: np.ndarray[Any, Any]) -> None:
    """Put items together from their bytes: ``planes`` has those of each block, the least significant first."""
    items = items.reshape(len(planes), -1)
    np.copyto(items, planes[:, -1])
    for number in range(planes.shape[1] - 2, -1, -1):
        np.left_shift(items, 8, out=items)
        np.bitwise_or(items, planes[:, number], out=items)


def decode_speed() -> float:
    """Return the bytes of bfloat16 weights a second that one core decodes. Takes some milliseconds."""
    normal = np.random.default_rng(0).standard_normal(_PROBE_BLOCKS * BLOCK_BYTES // 2, np.float32)
    blocks = (normal.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(_PROBE_BLOCKS, -1)
    encoder, decoder = Encoder(), Decoder()
    stored = [memoryview(encoder.encode(block.data, 2)) for block in blocks]
    target = memoryview(bytearray(BLOCK_BYTES))
    seconds = []
    for _ in range(_PROBE_ROUNDS):
        began = time.perf_counter()
        for block in stored:
            decoder.decode(block, target, 2)
        seconds.append(time.perf_counter() - began)
    return blocks.size / min(seconds)


Fetch = Callable[[str, int, int, memoryview], None]
"""Reads a range of a file, for the tensor of a name, to memory that starts at a whole page and has whole pages."""


def decoding_bytes(read_size: int) -> int:
    """Return the memory that a thread needs to read and decode ranges of a size."""
    return _room(read_size) + max(read_size, BLOCK_BYTES) + BLOCK_BYTES


def _room(read_size: int) -> int:
    return round_up(max(read_size, BLOCK_BYTES) + MARGIN, DIRECT_ALIGNMENT)


class BlockReader:
    """Reads and decodes blocks, ``read_size`` bytes at once and at least one block. Each thread has its own."""

    def __init__(self, read_size: int) -> None:
        self._decoder = Decoder()
        self._most = max(read_size, BLOCK_BYTES)
        self._coded = memoryview(mmap.mmap(-1, _room(read_size)))
        self._block = memoryview(bytearray(BLOCK_BYTES))
        self._last: tuple[BlockTable, int] | None = None  # the block in it: a prompt needs many rows of one

    def read(self, path: Path, table: BlockTable, name: str, start: int, target: memoryview, fetch: Fetch) -> None:
        """Fill memory with the logical bytes of a tensor from ``start`` on. ``fetch`` reads coded ones."""
        stop = start + len(target)
        blocks = table.around(start, stop)
        if len(blocks) == 1 and self._last == (table, blocks.start):
            self._copy(table, blocks.start, start, target)
            return
        for part in self._chunks(table, blocks):
            first = table.offsets[part.start] // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
            fetch(name, first, table.offsets[part.stop] - first, self._coded)
            for some in _whole_and_cut(table, part, start, stop):
                low, high = max(start, table.starts[some.start]), min(stop, table.ends[some.stop - 1])
                coded = self._coded[table.offsets[some.start] - first : table.offsets[some.stop] - first]
                self._decode(path, table, name, some, coded, low, target[low - start : high - start])

    def _decode(
        self, path: Path, table: BlockTable, name: str, blocks: range, coded: memoryview, low: int, landing: memoryview
    ) -> None:
        """Decode whole blocks, or a part of one from the logical offset ``low`` on."""
        sizes = [table.ends[number] - table.starts[number] for number in blocks]
        itemsize = table.itemsizes[blocks.start]
        try:
            if len(landing) == sum(sizes):
                self._decoder.decode(coded, landing, itemsize, sizes)
                return
            self._last = None
            self._decoder.decode(coded, self._block[: sizes[0]], itemsize)
        except CodecError as error:
            raise ReadError(
                f"cannot read '{name}' in {path}: a block of the {len(coded)} bytes at offset "
                f"{table.offsets[blocks.start]} is damaged: {error}. Hint: check the disk, and pack the model again."
            ) from error
        self._last = table, blocks.start
        self._copy(table, blocks.start, low, landing)

    def _copy(self, table: BlockTable, number: int, low: int, landing: memoryview) -> None:
        at = low - table.starts[number]
        np.copyto(np.frombuffer(landing, np.uint8), np.frombuffer(self._block[at : at + len(landing)], np.uint8))

    def _chunks(self, table: BlockTable, blocks: range) -> Iterator[range]:
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
    for is_whole, group in groupby(blocks, lambda number: start <= table.starts[number] < table.ends[number] <= stop):
        numbers = list(group)
        yield from [range(numbers[0], numbers[-1] + 1)] if is_whole else [range(n, n + 1) for n in numbers]

"""Files of compressed tensors: their head, and the table of their blocks.

Such a file has a *logical* layout, that of a safetensors file with the same tensors. Offsets of tensors, rows and
reads are logical ones everywhere. Only the table knows where the coded blocks lie.

| bytes | contents |
| --- | --- |
| 8 | ``MLXFLASH`` |
| 8, 8, 8 | bytes of the header, number of blocks, CRC-32 of header and table; all numbers are little-endian |
| header | JSON: ``format``, the safetensors ``header``, and ``blocks``: bytes of a tensor's blocks and runs |
| 4 x number of blocks | the table: bytes of each coded block |
| | zeros up to a whole page of 4096 bytes, then the blocks, one after another |

The blocks of a tensor begin anew with each run of its bytes, such as an expert of a stack. All blocks of a run have the
same size, but for the last one.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from mlx_flash.errors import HeaderError
from mlx_flash.files import open_regular
from mlx_flash.memory.pagecache import round_up

COMPRESSED_SUFFIX = ".flash"
MAGIC = b"MLXFLASH"
FORMAT = 1
LOGICAL_START = 16 * 1024
"""Logical offset of the first tensor."""

BLOCK_BYTES = 512 << 10
"""Bytes of a block at most."""

MARGIN = 64 << 10
"""A coded block is longer than its contents by less than this."""

_HEAD = struct.Struct("<8sQQQ")
_PAGE = 4096
_MOST_BYTES = 1 << 30
_AGAIN = "Hint: copy it again, or pack the model again."


@dataclass(frozen=True, slots=True)
class Run:
    """Some bytes of a tensor that begin a block.

    Attributes:
        start, end: logical offsets.
        block_bytes: size of each block but the last.
        itemsize: of the tensor.
    """

    start: int
    end: int
    block_bytes: int
    itemsize: int

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield start and end of each block."""
        for start in range(self.start, self.end, self.block_bytes):
            yield start, min(start + self.block_bytes, self.end)


class BlockTable:
    """The places of all blocks of a file.

    Args:
        runs: in the order of their offsets.
        sizes: bytes of each coded block.
        data_start: first byte of the file that belongs to a block.

    Attributes:
        starts, ends: logical offsets of the blocks.
        offsets: of the coded blocks in the file, and the end of the last.
    """

    def __init__(self, runs: Iterable[Run], sizes: Iterable[int], data_start: int) -> None:
        self.starts, self.ends, self._itemsizes = array("q"), array("q"), array("B")
        for run in runs:
            for start, end in run.blocks():
                self.starts.append(start)
                self.ends.append(end)
                self._itemsizes.append(run.itemsize)
        self.offsets = array("q", accumulate(sizes, initial=data_start))

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all coded blocks."""
        return self.offsets[-1] - self.offsets[0]

    def itemsize(self, number: int) -> int:
        """Return the item size of a block's tensor."""
        return self._itemsizes[number]

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


def runs_of(start: int, nbytes: int, itemsize: int, block_bytes: int, run_bytes: int) -> Iterator[Run]:
    """Yield the runs of a tensor at a logical offset."""
    for at in range(start, start + nbytes, run_bytes):
        yield Run(at, min(at + run_bytes, start + nbytes), block_bytes, itemsize)


def make_head(header: dict[str, Any], num_blocks: int) -> tuple[bytes, int]:
    """Return the JSON of a head, and the offset of the first block."""
    text = json.dumps({"format": FORMAT, **header}, separators=(",", ":")).encode()
    return text, round_up(_HEAD.size + len(text) + 4 * num_blocks, _PAGE)


def join_head(text: bytes, sizes: array[int], data_start: int) -> bytes:
    """Return everything before the blocks."""
    table = sizes.tobytes()
    head = _HEAD.pack(MAGIC, len(text), len(sizes), zlib.crc32(table, zlib.crc32(text)))
    return (head + text + table).ljust(data_start, b"\0")


def block_sizes(path: Path, header: dict[str, Any], name: str, itemsize: int) -> tuple[int, int]:
    """Return the bytes of a tensor's blocks and runs, from the JSON of a head.

    Raises:
        HeaderError: they are missing or not possible.
    """
    blocks = header.get("blocks")
    found = blocks.get(name) if isinstance(blocks, dict) else None
    match found:
        case [int(block), int(run)] if itemsize <= block <= BLOCK_BYTES and run > 0 and not (block | run) % itemsize:
            return block, run
    raise HeaderError(f"{path}: blocks and runs of {name!r} have {found} bytes, which is not possible. {_AGAIN}")


def read_head(path: Path) -> tuple[dict[str, Any], array[int], int, int]:
    """Read and check the head of a file.

    Returns:
        The JSON object, the bytes of each coded block, the offset of the first one, and the size of the file.

    Raises:
        HeaderError: the file is truncated or damaged, or no such file.
        OSError: it cannot be read.
    """
    with open(open_regular(path), "rb", buffering=0) as file:
        nbytes = os.fstat(file.fileno()).st_size
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size or not head.startswith(MAGIC):
            raise HeaderError(f"{path}: it must start with {MAGIC!r}, it starts with {head[:8]!r}. {_AGAIN}")
        _, text_bytes, num_blocks, checksum = _HEAD.unpack(head)
        body_bytes = text_bytes + 4 * num_blocks
        if body_bytes > min(nbytes, _MOST_BYTES):
            raise HeaderError(f"{path}: its head promises {body_bytes} bytes, the file has {nbytes}. {_AGAIN}")
        body = file.read(body_bytes)
    if len(body) < body_bytes or zlib.crc32(body) != checksum:
        raise HeaderError(f"{path}: the head is damaged: its checksum does not match. {_AGAIN}")
    try:
        header = json.loads(body[:text_bytes])
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"{path}: the head is not valid JSON: {error}. {_AGAIN}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT or not isinstance(header.get("header"), dict):
        raise HeaderError(f"{path}: the head is not of format {FORMAT}, which this version reads. {_AGAIN}")
    sizes = array("I", body[text_bytes:])
    if max(sizes, default=0) > BLOCK_BYTES + MARGIN:
        raise HeaderError(f"{path}: a block of {max(sizes)} bytes is longer than its contents. {_AGAIN}")
    _, data_start = make_head({key: value for key, value in header.items() if key != "format"}, num_blocks)
    if nbytes != data_start + sum(sizes):
        raise HeaderError(
            f"{path}: it has {nbytes} bytes, its head promises {data_start + sum(sizes)}: the file is truncated or "
            f"was changed. {_AGAIN}"
        )
    return header, sizes, data_start, nbytes

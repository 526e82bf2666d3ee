"""A file of compressed tensors, read one range after another: for programs that copy and compare."""

from __future__ import annotations

from pathlib import Path

from mlx_flash.storage.placement import Piece, Segment
from mlx_flash.storage.ranges import RangeReader
from mlx_flash.storage.safetensors import read_shard
from mlx_flash.storage.source import SourceFile

_READ_SIZE = 4 << 20


class DecodedFile:
    """Such a file.

    Args:
        path: the file.

    Raises:
        CheckpointError: it cannot be opened, or its head is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._file = SourceFile(path, direct=False, table=read_shard(path).blocks)
        self._reader = RangeReader(_READ_SIZE, "buffered")

    def read(self, name: str, start: int, target: memoryview) -> None:
        """Fill memory with the bytes of a tensor from an offset on. The page cache keeps nothing.

        Raises:
            ReadError: they cannot be read, or are damaged.
        """
        piece = Piece(name, start, len(target), 0)
        segment = Segment(self._file.path, start, len(target), None, (piece,))
        self._reader.read(self._file, segment, start, start + len(target), target, keep_cached=False)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

"""A comparison of the weights in memory with the bytes of their files, for ``mlx-flash verify``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_flash.commands.report import Json
from mlx_flash.compat.arrays import memory_of
from mlx_flash.engine.engine import Engine
from mlx_flash.errors import ReadError
from mlx_flash.layout.parts import ModelLayout, Parameter
from mlx_flash.memory.pagecache import drop_cached, open_buffered
from mlx_flash.storage.blocks import COMPRESSED_SUFFIX
from mlx_flash.storage.decodedfile import DecodedFile
from mlx_flash.storage.placement import Segment

_CHUNK_BYTES = 4 << 20


class ByteCheck:
    """Compares every slot that is released, and every array that stays in memory, with the files.

    It reads the files through the page cache, without the reader that filled the slots.

    Attributes:
        nbytes: bytes compared so far.
        wrong: the first wrong byte of each tensor that differed, in words.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.wrong: dict[str, str] = {}
        self._fds: dict[Path, int] = {}
        self._decoded: dict[Path, DecodedFile] = {}

    @contextmanager
    def watching(self, engine: Engine) -> Iterator[None]:
        """Compare slots as they are released during a block."""
        stream, before = engine.stream, engine.stream.before_release

        def compare(index: int, memory: memoryview) -> None:
            self.segments(stream.units[index].placement.segments, memory)
            if before is not None:
                before(index, memory)

        stream.before_release = compare
        try:
            yield
        finally:
            stream.before_release = before

    def resident(self, engine: Engine, layout: ModelLayout) -> None:
        """Compare what stays in memory: arrays of the checkpoint that are not streamed, and experts in the pool."""
        for parameter in [*layout.resident, *(p for unit in layout.units for p in (*unit.large, *unit.small))]:
            if parameter.records and not engine.is_streamed(parameter.container, parameter.key):
                self._array(parameter)
        pool = engine.experts.pool if engine.experts is not None else None
        for number in range(len(pool.layers) if pool is not None else 0):
            assert pool is not None
            for expert in np.flatnonzero(pool.ready(number)):
                self.segments(*pool.reads((number, int(expert))))

    def close(self) -> None:
        """Close the files."""
        for fd in self._fds.values():
            os.close(fd)
        for file in self._decoded.values():
            file.close()
        self._fds.clear()
        self._decoded.clear()

    def segments(self, segments: Sequence[Segment], memory: memoryview) -> None:
        """Compare a buffer with the parts of files that were read into it."""
        for segment in segments:
            for piece in segment.pieces:
                part = memory[piece.buffer_offset : piece.buffer_offset + piece.nbytes]
                self._compare(piece.name, segment.path, piece.offset, part)

    def _array(self, parameter: Parameter) -> None:
        array: mx.array = parameter.container[parameter.key]
        flat = mx.contiguous(array).reshape(-1).view(mx.uint8)
        mx.eval(flat)
        memory, start = memory_of(flat), 0
        for record in parameter.records:
            self._compare(record.name, record.extent.path, record.extent.offset, memory[start : start + record.nbytes])
            start += record.nbytes

    def _compare(self, name: str, path: Path, offset: int, memory: memoryview) -> None:
        for start in range(0, len(memory), _CHUNK_BYTES):
            part = np.frombuffer(memory[start : start + _CHUNK_BYTES], np.uint8)
            expected = np.frombuffer(self._read(name, path, offset + start, len(part)), np.uint8)
            if not np.array_equal(part, expected):
                at = int(np.flatnonzero(part != expected)[0]) if len(part) == len(expected) else len(expected)
                self.wrong.setdefault(name, f"byte {start + at} of '{name}' in {path.name}")
        self.nbytes += len(memory)

    def _read(self, name: str, path: Path, offset: int, nbytes: int) -> bytes | bytearray:
        """Read some bytes of a tensor again."""
        if path.suffix == COMPRESSED_SUFFIX:
            if path not in self._decoded:
                self._decoded[path] = DecodedFile(path)
            found = bytearray(nbytes)
            self._decoded[path].read(name, offset, memoryview(found))
            return found
        fd = self._fds.get(path)
        if fd is None:
            fd = self._fds[path] = open_buffered(path)
        try:
            return os.pread(fd, nbytes, offset)
        except OSError as error:
            raise ReadError(
                f"cannot read '{name}' again at offset {offset} of {path}: {error.strerror}. Hint: check the disk."
            ) from error
        finally:
            drop_cached(fd, offset, nbytes)


@contextmanager
def checked_bytes(engine: Engine, layout: ModelLayout) -> Iterator[tuple[ByteCheck, Json]]:
    """Compare the weights that a model computes with in a block. Yield the check, and what it counts, at the end."""
    check, numbers = ByteCheck(), Json()
    with closing(check):
        with check.watching(engine):
            yield check, numbers
        check.resident(engine, layout)
    numbers["bytes_read"] = engine.reader.stats.nbytes
    numbers["bytes_compared"] = check.nbytes
    numbers["wrong_bytes"] = list(check.wrong.values())

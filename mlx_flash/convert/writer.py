"""Safetensors files, written front to back in bounded memory.

The header comes first, so all tensors of a file are known before its first byte is written. The header is padded with
spaces until the data section begins at a multiple of a page. The format allows no holes between tensors: their order
alone decides where each of them starts (:func:`aligned_order`).
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mlx_flash.errors import ReadError, TruncatedFileError, WriteError
from mlx_flash.files import PARTIAL_SUFFIX, AtomicFile, write_at
from mlx_flash.memory.pagecache import drop_cached, open_buffered
from mlx_flash.storage.blocks import COMPRESSED_SUFFIX
from mlx_flash.storage.decodedfile import DecodedFile
from mlx_flash.storage.safetensors import DTYPE_SIZES, Extent, TensorRecord

DATA_ALIGNMENT = 16 * 1024
"""Data sections begin at a multiple of this: the page of Apple silicon, a multiple of most other machines' page."""

TENSOR_ALIGNMENT = 16
"""Alignment of addresses that GPU kernels need; no dtype needs more."""

COPY_BYTES = 4 << 20
"""Bytes that are read, then written, at a time."""

_LENGTH_BYTES = 8


class TensorSpec(NamedTuple):
    """A tensor to be written: its name, a key of ``DTYPE_SIZES``, and its dimensions."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return DTYPE_SIZES[self.dtype] * math.prod(self.shape)


Pieces = Callable[[TensorSpec], Iterable[memoryview]]
"""Returns the bytes of a tensor, piece by piece. A piece may be overwritten when the next one is asked for."""


def aligned_order(tensors: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Order a file's tensors so that each starts at a multiple of its item size, and all but the last few of 16 bytes.

    Tensors whose size is a multiple of 16 keep their order. The others, which move what follows them, come at the end,
    larger items first.
    """
    odd = [tensor for tensor in tensors if tensor.nbytes % TENSOR_ALIGNMENT]
    whole = [tensor for tensor in tensors if not tensor.nbytes % TENSOR_ALIGNMENT]
    return whole + sorted(odd, key=lambda tensor: DTYPE_SIZES[tensor.dtype], reverse=True)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """A safetensors file to be written: its tensors in order, and the header's ``__metadata__``."""

    name: str
    tensors: Sequence[TensorSpec]
    metadata: dict[str, str] | None = None
    alignment: int = DATA_ALIGNMENT

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def header(self) -> dict[str, object]:
        """The entries of the header."""
        header: dict[str, object] = {} if self.metadata is None else {"__metadata__": self.metadata}
        start = 0
        for tensor in self.tensors:
            if tensor.name in header or tensor.name == "__metadata__":
                raise ValueError(f"tensor {tensor.name!r}: the name is taken")
            offsets = [start, start := start + tensor.nbytes]
            header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        return header

    @property
    def head(self) -> bytes:
        """Everything before the tensors."""
        text = json.dumps(self.header, separators=(",", ":")).encode()
        blanks = b" " * (-(_LENGTH_BYTES + len(text)) % self.alignment)
        text = text[:-1] + blanks + text[-1:]  # behind it, a damaged length could move all tensors unnoticed
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text

    def records(self, folder: Path) -> Iterator[TensorRecord]:
        """Yield the places of the tensors in the file, written or not."""
        start = len(self.head)
        for tensor in self.tensors:
            yield TensorRecord(*tensor, Extent(folder / self.name, start, tensor.nbytes))
            start += tensor.nbytes

    def is_written(self, folder: Path) -> bool:
        """Return True if the file is complete in a folder.

        A file gets its name only after all of its bytes have reached the disk, so its header and size are enough.
        """
        head = self.head
        try:
            with (folder / self.name).open("rb") as file:
                return os.fstat(file.fileno()).st_size == len(head) + self.nbytes and file.read(len(head)) == head
        except FileNotFoundError:
            return False

    def write(
        self,
        folder: Path,
        pieces: Pieces,
        progress: Callable[[int], object] = lambda nbytes: None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Write the file. An older one is replaced at the end; an error leaves it, and removes what was written.

        Args:
            folder: its folder.
            pieces: returns the bytes of a tensor.
            progress: called with the size of each piece after it was written.
            check: called before the file gets its name.

        Raises:
            ValueError: the tensors make no valid header, or the pieces of one have another size.
            WriteError: the system could not write it.
        """
        end = len(head := self.head)
        with NewFile(folder / self.name, check) as file:
            file.write(head)
            for tensor in self.tensors:
                for piece in pieces(tensor):
                    file.write(piece)
                    progress(len(piece))
                    del piece  # or its array stays while the next one is computed
                got, end = file.nbytes - end, end + tensor.nbytes
                if file.nbytes != end:
                    raise ValueError(f"{folder / self.name}: got {got} of {tensor.nbytes} bytes of {tensor.name!r}")


def cut(data: memoryview) -> Iterator[memoryview]:
    """Yield the bytes of an array in memory, piece by piece."""
    flat = data.cast("B") if data.nbytes else memoryview(b"")
    return (flat[start : start + COPY_BYTES] for start in range(0, len(flat), COPY_BYTES))


def copy_buffer() -> memoryview:
    """Return memory for :func:`read_pieces`."""
    return memoryview(mmap.mmap(-1, COPY_BYTES))


def read_pieces(record: TensorRecord, buffer: memoryview) -> Iterator[memoryview]:
    """Yield a tensor of a file piece by piece, each at the start of the buffer. The page cache keeps nothing of it.

    Raises:
        ReadError: the bytes cannot be read; TruncatedFileError when the file ends before them.
    """
    extent = record.extent
    if extent.path.suffix == COMPRESSED_SUFFIX:
        yield from _decoded_pieces(record, buffer)
        return
    try:
        with open(open_buffered(extent.path), "rb") as file:
            file.seek(extent.offset)
            for start in range(extent.offset, extent.end, len(buffer)):
                piece = buffer[: min(len(buffer), extent.end - start)]
                if (got := file.readinto(piece)) < len(piece):
                    raise TruncatedFileError(
                        f"read {start + got - extent.offset} of {extent.nbytes} bytes of {record.name!r} at offset "
                        f"{extent.offset} in {extent.path}: the file is truncated. Hint: download it again."
                    )
                drop_cached(file.fileno(), start, len(piece))
                yield piece
    except TruncatedFileError:
        raise
    except OSError as error:
        raise ReadError(
            f"cannot read {record.name!r} ({extent.nbytes} bytes at offset {extent.offset}) in {extent.path}: "
            f"{error.strerror}. Hint: check the disk."
        ) from error


def _decoded_pieces(record: TensorRecord, buffer: memoryview) -> Iterator[memoryview]:
    extent = record.extent
    with closing(DecodedFile(extent.path)) as file:
        for start in range(extent.offset, extent.end, len(buffer)):
            piece = buffer[: min(len(buffer), extent.end - start)]
            file.read(record.name, start, piece)
            yield piece


class NewFile(AtomicFile):
    """A file of a copy, which replaces an older one at the end of a block. An error leaves that, and nothing else.

    Args:
        path: the file.
        check: called before the file gets its name.

    Raises:
        WriteError: the system could not write it; every method raises it.
    """

    def __init__(self, path: Path, check: Callable[[], object]) -> None:
        self._check = check
        self._failure = f"cannot write {path}{PARTIAL_SUFFIX}"
        with write_errors(self._failure):
            super().__init__(path, mode=0o666, durable=True)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        with write_errors(self._failure):
            super().write(data)

    def write_head(self, head: bytes) -> None:
        """Replace the first bytes."""
        with write_errors(self._failure):
            write_at(self.fd, head, 0)

    def commit(self) -> None:
        """Replace the old file by the new one."""
        self._check()
        with write_errors(self._failure):
            os.fsync(self.fd)
            drop_cached(self.fd, 0, self.nbytes)  # so that the next read comes from the disk
            super().commit()


@contextmanager
def write_errors(what: str, otherwise: str = "then start it again") -> Iterator[None]:
    """Turn the system's errors into a WriteError that begins with ``what``; ``otherwise`` ends its hint."""
    try:
        yield
    except OSError as error:
        hint = "make room on the disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check who may write there"
        raise WriteError(f"{what}: {error.strerror or error}. Hint: {hint}, {otherwise}.") from error

"""A writer of safetensors files, front to back, in bounded memory.

The header comes first, so what a file will hold must be known before its bytes are. It is padded with spaces until the
data section begins at a multiple of a page. The format allows no holes between tensors: the order alone decides where
each of them starts (:func:`aligned_order`).
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from mlx_flash.errors import ReadError, TruncatedFileError, WriteError
from mlx_flash.files import PARTIAL_SUFFIX, AtomicFile
from mlx_flash.memory.pagecache import drop_cached, open_buffered
from mlx_flash.storage.safetensors import DTYPE_SIZES, Extent

DATA_ALIGNMENT = 16 * 1024
"""Where data sections begin: the page of Apple silicon, a multiple of that of most other machines."""

TENSOR_ALIGNMENT = 16
"""Alignment of addresses that GPU kernels need; no dtype needs more."""

COPY_BYTES = 4 << 20
"""Bytes that are read, then written, at a time."""

_LENGTH_BYTES = 8


class TensorSpec(NamedTuple):
    """A tensor to be written.

    Attributes:
        name: its name in the file.
        dtype: a key of ``DTYPE_SIZES``.
        shape: dimensions, row-major; ``()`` for a scalar.
        nbytes: its size in bytes; must be what dtype and shape make.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def aligned_order(tensors: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Orders a file's tensors so that each starts at a multiple of its item size, and all but the last few of 16 bytes.

    Those whose size is a multiple of 16 keep their order. The others, which move what follows them, come at the end,
    larger items first.
    """
    odd = [tensor for tensor in tensors if tensor.nbytes % TENSOR_ALIGNMENT]
    whole = [tensor for tensor in tensors if not tensor.nbytes % TENSOR_ALIGNMENT]
    return whole + sorted(odd, key=lambda tensor: DTYPE_SIZES[tensor.dtype], reverse=True)


def make_head(
    tensors: Sequence[tuple[str, str, Sequence[int], int]],
    metadata: Mapping[str, str] | None = None,
    *,
    alignment: int = DATA_ALIGNMENT,
) -> bytes:
    """Everything of a file before its data section.

    Raises:
        ValueError: a name comes twice or is reserved, a dtype is unknown, or a size is not that of dtype and shape.
    """
    specs = [TensorSpec(name, dtype, tuple(shape), nbytes) for name, dtype, shape, nbytes in tensors]
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    starts = accumulate((spec.nbytes for spec in specs), initial=0)
    for spec, start in zip(specs, starts, strict=False):
        _check_spec(spec)
        if spec.name in header or spec.name == "__metadata__":
            raise ValueError(f"tensor {spec.name!r}: the name is taken")
        offsets = [start, start + spec.nbytes]
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % alignment)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _check_spec(spec: TensorSpec) -> None:
    if spec.dtype not in DTYPE_SIZES:
        raise ValueError(f"tensor {spec.name!r}: dtype is {spec.dtype!r}, must be one of {', '.join(DTYPE_SIZES)}")
    needed = DTYPE_SIZES[spec.dtype] * math.prod(spec.shape)
    if min(spec.shape, default=0) < 0 or spec.nbytes != needed:
        raise ValueError(
            f"tensor {spec.name!r}: {spec.dtype} of shape {spec.shape} takes {needed} bytes, nbytes is {spec.nbytes}"
        )


def is_complete(path: Path, head: bytes, nbytes: int) -> bool:
    """Return True if a file begins with ``head`` and has ``nbytes`` more: :class:`ShardWriter` wrote it to its end.

    A file gets its name only after all of its bytes have reached the disk, so its data needs no look.
    """
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size == len(head) + nbytes and file.read(len(head)) == head
    except FileNotFoundError:
        return False


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """A safetensors file that is to be written.

    Attributes:
        name: of the file.
        tensors: in the order in which they are written.
        metadata: the header's ``__metadata__``.
    """

    name: str
    tensors: list[TensorSpec]
    metadata: dict[str, str] | None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def head(self) -> bytes:
        """Everything before the tensors."""
        return make_head(self.tensors, self.metadata)

    def is_written(self, folder: Path) -> bool:
        """Return True if the file is complete in a folder."""
        return is_complete(folder / self.name, self.head, self.nbytes)


class ByteCounter:
    """Sums bytes up for a caller's progress function."""

    def __init__(self, total: int, progress: Callable[[int, int], object] | None) -> None:
        self._done, self._total = 0, total
        self._progress = progress or (lambda done, total: None)

    def add(self, nbytes: int) -> None:
        """Count bytes, and report."""
        self._done += nbytes
        self._progress(self._done, self._total)


class ShardWriter:
    """A writer of one safetensors file, tensor by tensor in the order of the header.

    The bytes go to ``<name>.partial`` beside the file, which is given its name when all of them are on the disk. As a
    context manager it does so at the end, or removes what it wrote if the block raised.

    Args:
        path: the file; one of that name is replaced at the end.
        tensors: (name, dtype, shape, nbytes) of each tensor in the order in which they will come.
        metadata: the header's ``__metadata__``; None writes no such entry.
        alignment: the data section begins at a multiple of this many bytes.
        progress: called with the number of bytes after each piece that was written, at most ``COPY_BYTES``.

    Raises:
        ValueError: the tensors make no valid header.
        WriteError: the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        tensors: Sequence[tuple[str, str, Sequence[int], int]],
        metadata: Mapping[str, str] | None = None,
        *,
        alignment: int = DATA_ALIGNMENT,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        self.path = path
        self._partial = path.with_name(f"{path.name}{PARTIAL_SUFFIX}")
        self._left = deque((name, nbytes) for name, _, _, nbytes in tensors)
        self._progress = progress or (lambda nbytes: None)
        self._buffer: memoryview | None = None
        head = make_head(tensors, metadata, alignment=alignment)
        with write_errors(f"cannot write {self._partial}"):
            self._file = AtomicFile(path, mode=0o666, durable=True)
        try:
            self._append(memoryview(head))
        except BaseException:
            self.abort()
            raise

    def write(self, name: str, data: bytes | bytearray | memoryview) -> None:
        """Write the next tensor from memory.

        Args:
            name: its name, as a check.
            data: its bytes, C-contiguous.

        Raises:
            ValueError: it is not this tensor's turn, or the size is wrong.
            WriteError: the bytes cannot be written.
        """
        view = memoryview(data)
        self._begin(name, view.nbytes)
        flat = view.cast("B") if view.nbytes else memoryview(b"")
        for start in range(0, len(flat), COPY_BYTES):
            piece = flat[start : start + COPY_BYTES]
            self._append(piece)
            self._progress(len(piece))

    def copy(self, name: str, extent: Extent) -> None:
        """Copies the next tensor from another file.

        Args:
            name: its name, as a check.
            extent: its bytes.

        Raises:
            ValueError: it is not this tensor's turn, or the size is wrong.
            ReadError: the bytes cannot be read.
            WriteError: the bytes cannot be written.
        """
        self._begin(name, extent.nbytes)
        if self._buffer is None:
            self._buffer = copy_buffer()
        for piece in read_pieces(name, extent, self._buffer):
            self._append(piece)
            self._progress(len(piece))

    def _begin(self, name: str, nbytes: int) -> None:
        expected = self._left[0] if self._left else None
        if expected != (name, nbytes):
            turn = "no tensor" if expected is None else f"{expected[0]!r} of {expected[1]} bytes"
            raise ValueError(f"{self.path}: got {name!r} of {nbytes} bytes when it was the turn of {turn}")
        self._left.popleft()

    def _append(self, piece: memoryview) -> None:
        if not self._file.is_open:
            raise ValueError(f"{self.path}: this writer is finished")
        with write_errors(f"cannot write {self._partial}"):
            self._file.write(piece)

    def finish(self) -> None:
        """Give the file its name once all of its bytes are on the disk.

        Raises:
            ValueError: not every tensor was written.
            WriteError: the system could not do it.
        """
        if not self._file.is_open or self._left:
            raise ValueError(f"{self.path}: finished with {len(self._left)} tensors left to write")
        with write_errors(f"cannot write {self._partial}"):
            os.fsync(self._file.fd)
            drop_cached(self._file.fd, 0, self._file.nbytes)  # whoever reads it next reads what the disk holds
            self._file.commit()

    def abort(self) -> None:
        """Remove what was written. Harmless when repeated, or after :meth:`finish`."""
        self._file.abort()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.abort()


def copy_buffer() -> memoryview:
    """Memory for :func:`read_pieces`."""
    return memoryview(mmap.mmap(-1, COPY_BYTES))


def read_pieces(name: str, extent: Extent, buffer: memoryview) -> Iterator[memoryview]:
    """Read a tensor piece by piece through the page cache, and leave nothing there.

    Args:
        name: the tensor's name, for errors.
        extent: its bytes.
        buffer: where the pieces are put, one after another: each is gone when the next one comes.

    Yields:
        Parts of the buffer, as large as it or the last one.

    Raises:
        ReadError: the bytes cannot be read; TruncatedFileError when the file ends before them.
    """
    with _read_errors(name, extent):
        fd = open_buffered(extent.path)
    try:
        for start in range(extent.offset, extent.end, len(buffer)):
            piece = buffer[: min(len(buffer), extent.end - start)]
            with _read_errors(name, extent):
                _fill(fd, piece, start, name, extent)
                drop_cached(fd, start, len(piece))
            yield piece
    finally:
        os.close(fd)


def _fill(fd: int, piece: memoryview, start: int, name: str, extent: Extent) -> None:
    got = 0
    while got < len(piece):
        count = os.preadv(fd, [piece[got:]], start + got)
        if not count:
            raise TruncatedFileError(
                f"read {start + got - extent.offset} of {extent.nbytes} bytes of {name!r} at offset {extent.offset} "
                f"in {extent.path}: the file is truncated. Hint: download it again."
            )
        got += count


@contextmanager
def _read_errors(name: str, extent: Extent) -> Iterator[None]:
    try:
        yield
    except ReadError:
        raise
    except OSError as error:
        raise ReadError(
            f"cannot read {name!r} ({extent.nbytes} bytes at offset {extent.offset}) in {extent.path}: "
            f"{error.strerror}. Hint: check the disk."
        ) from error


@contextmanager
def write_errors(what: str, otherwise: str = "then start it again") -> Iterator[None]:
    """Turn the system's errors into ours.

    Args:
        what: what failed, to begin the message.
        otherwise: how the hint goes on.
    """
    try:
        yield
    except OSError as error:
        hint = "make room on the disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check who may write there"
        raise WriteError(f"{what}: {error.strerror or error}. Hint: {hint}, {otherwise}.") from error

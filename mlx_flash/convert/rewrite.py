"""A checkpoint's tensors written again to another folder, whole or not at all.

Everything is written to ``<target>.partial``, which its writer locks. At the end it is read back and compared with what
was written, and renamed. A run that was interrupted is resumed at the first shard that is not complete, if the
checkpoint's files are still the same.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mlx_flash.errors import FileChangedError, FlashError, ReadError, TruncatedFileError, WriteError
from mlx_flash.files import PARTIAL_SUFFIX, AtomicFile, open_locked, rename_durably, write_atomically
from mlx_flash.layout.fingerprint import State, state_of
from mlx_flash.memory.pagecache import drop_cached, open_buffered
from mlx_flash.storage.blocks import COMPRESSED_SUFFIX
from mlx_flash.storage.ranges import DecodedFile
from mlx_flash.storage.safetensors import DTYPE_SIZES, Checkpoint, Extent, TensorRecord, read_shard
from mlx_flash.storage.shards import weight_files

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


@dataclass(frozen=True)
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
        with new_file(folder / self.name, check) as file:
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


@contextmanager
def new_file(path: Path, check: Callable[[], object]) -> Iterator[AtomicFile]:
    """Yield a file of a copy, which replaces an older one at the end of a block. An error leaves that alone.

    Args:
        path: the file.
        check: called before the file gets its name.

    Raises:
        WriteError: the system could not write it.
    """
    with write_errors(f"cannot write {path}{PARTIAL_SUFFIX}"), AtomicFile(path, mode=0o666, durable=True) as file:
        yield file
        check()
        os.fsync(file.fd)
        drop_cached(file.fd, 0, file.nbytes)  # so that the next read comes from the disk


@contextmanager
def write_errors(what: str, otherwise: str = "then start it again") -> Iterator[None]:
    """Turn the system's errors into a WriteError that begins with ``what``; ``otherwise`` ends its hint."""
    try:
        yield
    except FlashError:
        raise
    except OSError as error:
        hint = "make room on the disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check who may write there"
        raise WriteError(f"{what}: {error.strerror or error}. Hint: {hint}, {otherwise}.") from error


STATE_NAME = ".mlx-flash-pack.json"
"""In the partial folder: the files that its shards come from, and checksums of the tensors written so far."""

Progress = Callable[[int, int], object]
"""Called with (bytes done, bytes to do). Each byte counts twice: when it is written, and when it is read back."""


def plan_shards(
    groups: Sequence[Sequence[TensorSpec]], shard_bytes: int, metadata: dict[str, str] | None, name: str
) -> list[ShardPlan]:
    """Divide tensors, in order, among shards of at most ``shard_bytes``. A group stays whole, and may be larger.

    Names of shards are made with ``name``, a format of ``number``, from 1, and ``count``.
    """
    parts: list[list[TensorSpec]] = [[]]
    size = 0
    for group in groups:
        nbytes = sum(tensor.nbytes for tensor in group)
        if size and size + nbytes > shard_bytes:
            parts.append([])
            size = 0
        parts[-1] += group
        size += nbytes
    names = (name.format(number=number, count=len(parts)) for number in range(1, len(parts) + 1))
    return [ShardPlan(name, aligned_order(part), metadata) for name, part in zip(names, parts, strict=True)]


def _read_back(path: Path, count: Callable[[int], object]) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Yield name, type, shape and checksum of each tensor of a file."""
    buffer = copy_buffer()
    for record in read_shard(path).tensors:
        checksum = 0
        for piece in read_pieces(record, buffer):
            checksum = zlib.crc32(piece, checksum)
            count(len(piece))
        yield record.name, record.dtype, record.shape, checksum


class Rewrite:
    """A folder of shards that are made from a checkpoint.

    Args:
        target: the folder.
        shards: its files.
        checkpoint: the source.
        state: of the source when it was read.
        mode: permissions of the folder, less the umask.
        hint: ends the hints of errors when something cannot be written.
    """

    def __init__(
        self,
        target: Path,
        shards: Sequence[ShardPlan],
        checkpoint: Checkpoint,
        state: State,
        mode: int = 0o777,
        hint: str = "then start it again",
    ) -> None:
        self.target, self.shards = target, shards
        self.partial = target.with_name(f"{target.name}{PARTIAL_SUFFIX}")
        self.nbytes = sum(shard.nbytes for shard in shards)
        self._checkpoint, self._state = checkpoint, state
        self._checksums: dict[str, int] = {}
        self._mode, self._hint = mode, hint
        self._is_renamed = False
        self._progress: Progress | None = None
        self._done = 0

    @contextmanager
    def locked(self, busy: Callable[[], object]) -> Iterator[None]:
        """Make the partial folder, and keep other runs out of it. Call ``busy`` before waiting for another run."""
        with write_errors(f"cannot make {self.partial}", self._hint):
            fd = self._lock(busy)
        try:
            yield
        finally:
            if not self._is_renamed:
                with suppress(OSError):  # not empty: the next run goes on
                    self.partial.rmdir()
            os.close(fd)

    def _lock(self, busy: Callable[[], object]) -> int:
        wait = False
        while True:
            self.partial.mkdir(mode=self._mode, parents=True, exist_ok=True)
            try:
                return open_locked(self.partial, wait=wait, required=False)
            except BlockingIOError:
                busy()
                wait = True
            except FileNotFoundError:
                pass  # the other run has renamed or removed it

    def clear(self) -> None:
        """Empty the partial folder, but for complete shards of an earlier run from the same source."""
        with write_errors(f"cannot empty {self.partial}", self._hint):
            self._checksums = self._noted()
            keep = {shard.name for shard in self.shards if all(t.name in self._checksums for t in shard.tensors)}
            for entry in self.partial.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name not in keep and entry.name != STATE_NAME:
                    entry.unlink()
        self._take_note()

    def _noted(self) -> dict[str, int]:
        """Return the checksums of an earlier run from the same source."""
        with suppress(FileNotFoundError, ValueError):
            match json.loads((self.partial / STATE_NAME).read_bytes()):
                case {"state": self._state, "checksums": dict(checksums)}:
                    return checksums
        return {}

    def _take_note(self) -> None:
        note = self.partial / STATE_NAME
        with write_errors(f"cannot write {note}", self._hint):
            text = json.dumps({"state": self._state, "checksums": self._checksums})
            write_atomically(note, text, mode=0o666, durable=True)

    @property
    def missing(self) -> list[ShardPlan]:
        """Shards that are not complete yet."""
        return [shard for shard in self.shards if not shard.is_written(self.partial)]

    @property
    def missing_bytes(self) -> int:
        """Bytes that are still to be written."""
        return sum(shard.nbytes for shard in self.missing)

    def write(self, pieces: Pieces, progress: Progress | None) -> None:
        """Write the missing shards. Raise FileChangedError if the checkpoint's files are not those that were read."""

        def summed(tensor: TensorSpec) -> Iterator[memoryview]:
            for piece in pieces(tensor):
                self._checksums[tensor.name] = zlib.crc32(piece, self._checksums[tensor.name])
                yield piece
                del piece  # or its array stays while the next one is computed

        self._progress, self._done = progress, 0
        self._count(self.nbytes - self.missing_bytes)
        for shard in self.missing:
            self._checksums.update((tensor.name, 0) for tensor in shard.tensors)
            shard.write(self.partial, summed, self._count, self._check_source)
            self._take_note()

    def _check_source(self) -> None:
        if state_of(self._checkpoint) != self._state:
            raise FileChangedError(
                f"the files of {self._checkpoint.directory} changed while they were copied. Hint: start it again."
            )

    def _count(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, 2 * self.nbytes)

    def finish(self) -> None:
        """Check what was written, and give the folder its name.

        A file that is read back otherwise is removed, so that the next run writes it again.

        Raises:
            WriteError: there are other files, or a tensor has another name, type, shape, or other bytes.
        """
        found, planned = [path.name for path in weight_files(self.partial)], sorted(shard.name for shard in self.shards)
        if found != planned:
            raise WriteError(
                f"{self.partial} holds the weights {found}, but {planned} were written. Hint: start it again."
            )
        for shard in self.shards:
            path = self.partial / shard.name
            written = {(*tensor, self._checksums[tensor.name]) for tensor in shard.tensors}
            try:
                if wrong := written ^ {*_read_back(path, self._count)}:
                    raise WriteError(
                        f"{min(wrong)[0]!r} in {path} is not what was written. "
                        "Hint: check disk and memory of this machine, then start it again."
                    )
            except FlashError:
                path.unlink(missing_ok=True)
                raise
        with write_errors(f"cannot rename {self.partial} to {self.target}", self._hint):
            rename_durably(self.partial, self.target)
            self._is_renamed = True
            (self.target / STATE_NAME).unlink()


def write_text(path: Path, text: str) -> None:
    """Write a file of a partial folder to the disk."""
    with write_errors(f"cannot write {path}"), path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())

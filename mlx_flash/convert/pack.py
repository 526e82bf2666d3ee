"""Rewrites a checkpoint in streaming order: the same tensors, those of a unit next to each other.

mlx saves the tensors of a file in the order of a hash table, after a header of any length, so a layer is read in many
pieces and each goes through a bounce buffer. Here a unit's streamed tensors are one run of bytes, and every tensor
starts where kernels can use it. The result is a checkpoint like any other: same names, dtypes, shapes and bytes, same
files beside the weights.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import shutil
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from mlx_flash.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    FileChangedError,
    WriteError,
)
from mlx_flash.files import (
    PARTIAL_SUFFIX,
    HeldLock,
    NewFile,
    atomic_file,
    free_bytes,
    read_json_object,
    rename_durably,
    write_at,
    write_atomically,
    write_errors,
)
from mlx_flash.layout.load import State, load_lazily, state_of, whole_tensors
from mlx_flash.layout.parts import ModelLayout, Unit
from mlx_flash.layout.units import make_layout
from mlx_flash.memory.pagecache import drop_cached
from mlx_flash.storage.blocks import (
    BLOCK_BYTES,
    CODED_DTYPES,
    LOGICAL_START,
    MARGIN,
    Encoder,
    blocks_of,
    num_blocks,
    num_cores,
)
from mlx_flash.storage.prefetcher import read_pieces
from mlx_flash.storage.safetensors import (
    CODED,
    COMPRESSED_NAME,
    DTYPE_SIZES,
    INDEX_NAME,
    PLAIN_NAME,
    STOCK_PATTERN,
    Checkpoint,
    TensorRecord,
    make_head,
    read_checkpoint,
    read_shard,
    refuse_unreadable,
)

DATA_ALIGNMENT = 16 * 1024
"""Data sections begin at a multiple of this: the page of Apple silicon, a multiple of most other machines' page."""

TENSOR_ALIGNMENT = 16
"""Alignment of addresses that GPU kernels need; no dtype needs more."""

COPY_BYTES = 4 << 20
"""Bytes that are read, then written, at a time."""

AGAIN = "then start it again"
"""Ends the hints of errors when something cannot be written."""


class TensorSpec(NamedTuple):
    """A tensor to be written: its name, a key of ``DTYPE_SIZES``, and its dimensions."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return DTYPE_SIZES[self.dtype] * math.prod(self.shape)


Pieces = Callable[[TensorSpec], Iterable[memoryview]]
"""Returns the bytes of a tensor, piece by piece. A piece may be overwritten when the next one is asked for."""


def aligned_order(tensors: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Order a file's tensors so that each starts at a multiple of its item size, and all but the last few of 16 bytes.

    Tensors whose size is a multiple of 16 keep their order. The others, which move what follows them, come at the end,
    larger items first.
    """
    return sorted(tensors, key=lambda t: -DTYPE_SIZES[t.dtype] if t.nbytes % TENSOR_ALIGNMENT else -math.inf)


@dataclass(frozen=True)
class ShardPlan:
    """A safetensors file to be written: its tensors in order, and the header's ``__metadata__``."""

    name: str
    tensors: Sequence[TensorSpec]
    metadata: dict[str, str] | None = None
    alignment: int = DATA_ALIGNMENT

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def header(self) -> dict[str, object]:
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
        return make_head(self.header, self.alignment)

    def records(self, folder: Path) -> Iterator[TensorRecord]:
        """Yield the places of the tensors in the file, written or not."""
        start = self.data_start
        for tensor in self.tensors:
            yield TensorRecord(*tensor, folder / self.name, start, tensor.nbytes)
            start += tensor.nbytes

    @property
    def data_start(self) -> int:
        return len(self.head)

    def is_written(self, folder: Path) -> bool:
        """Return True if the file is complete in a folder.

        A file gets its name only after all of its bytes have reached the disk, so its header and size are enough.
        """
        try:
            shard = read_shard(folder / self.name)
        except CheckpointError:
            return False
        return {*shard.tensors} == {*self.records(folder)} and shard.metadata == (self.metadata or {})

    def write(
        self,
        folder: Path,
        pieces: Pieces,
        progress: Callable[[int], object] = lambda nbytes: None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Write the file, and read it back from the disk. Raises: WriteError.

        An older file is replaced at the end, after a check; an error leaves it, and removes what was written.
        ``progress`` gets each byte twice: when it is written, and when it is read back.
        """
        path, sums = folder / self.name, dict[str, int]()
        partial = path.with_name(f"{path.name}{PARTIAL_SUFFIX}")

        def summed(tensor: TensorSpec) -> Iterator[memoryview]:
            got = sums[tensor.name] = 0
            for piece in pieces(tensor):
                got += len(piece)
                sums[tensor.name] = zlib.crc32(piece, sums[tensor.name])
                yield piece
                del piece  # or its array stays while the next one is computed
            if got != tensor.nbytes:
                raise ValueError(f"{self.name}: got {got} of {tensor.nbytes} bytes of {tensor.name!r}")

        with write_errors(f"cannot write {partial}", AGAIN), atomic_file(path, mode=0o666, durable=True) as file:
            self._fill(file, summed, progress)
            check()
            os.fsync(file.fd)
            drop_cached(file.fd, 0, file.nbytes)  # so that the next read comes from the disk
            written = {(*tensor, sums[tensor.name]) for tensor in self.tensors}
            if wrong := written ^ {*_read_back(partial, progress)}:
                raise WriteError(
                    f"{min(wrong)[0]!r} in {partial} is not what was written. "
                    "Hint: check disk and memory of this machine, then start it again."
                )

    def _fill(self, file: NewFile, pieces: Pieces, progress: Callable[[int], object]) -> None:
        file.write(self.head)
        for tensor in self.tensors:
            for piece in pieces(tensor):
                file.write(piece)
                progress(len(piece))
                del piece  # as above


def cut(data: memoryview) -> Iterator[memoryview]:
    """Yield the bytes of an array in memory, piece by piece."""
    flat = data.cast("B") if data.nbytes else memoryview(b"")
    return (flat[start : start + COPY_BYTES] for start in range(0, len(flat), COPY_BYTES))


def copy_buffer() -> memoryview:
    """Return memory for :func:`read_pieces`."""
    return memoryview(mmap.mmap(-1, COPY_BYTES))


NOTE_NAME = ".mlx-flash-copy.json"
"""In a folder that is written: the files that its shards come from, and what else is to be known of it."""

MOST_NOTE_BYTES = 64_000_000  # as of a header of a checkpoint

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


_WAIT_SECONDS = 0.1
"""After so long a wait the folder is opened by its name again: a run that has renamed it may hold it until it ends."""


class Rewrite:
    """A folder of shards that are made from a checkpoint in a state, with a note of facts about it.

    A hint ends those of errors when it is written.
    """

    def __init__(
        self,
        target: Path,
        shards: Sequence[ShardPlan],
        checkpoint: Checkpoint,
        state: State,
        about: Mapping[str, object] | None = None,
        mode: int = 0o777,
        hint: str = AGAIN,
    ) -> None:
        self.target, self.shards = target, shards
        self.partial = target.with_name(f"{target.name}{PARTIAL_SUFFIX}")
        self.nbytes = sum(shard.nbytes for shard in shards)
        self._checkpoint, self._state = checkpoint, state
        self._note = {"state": state, **(about or {})}
        self._mode, self._hint = mode, hint

    @contextmanager
    def locked(self, busy: Callable[[], object]) -> Iterator[None]:
        """Make the partial folder, and keep other runs out of it. Call ``busy`` before waiting for another run."""
        with write_errors(f"cannot make {self.partial}", self._hint):
            lock = self._lock(busy)
        try:
            yield
        finally:
            with suppress(OSError):  # it was renamed, or is not empty: the next run goes on
                self.partial.rmdir()
            lock.release()

    def _lock(self, busy: Callable[[], object]) -> HeldLock:
        wait = 0.0
        while True:
            self.partial.mkdir(mode=self._mode, parents=True, exist_ok=True)
            try:
                return HeldLock(self.partial, wait=wait, required=False)
            except BlockingIOError:
                if not wait:
                    busy()
                wait = _WAIT_SECONDS
            except FileNotFoundError:
                pass  # the other run has renamed or removed it

    def clear(self) -> None:
        """Empty the partial folder, but for complete shards of an earlier run from the same source."""
        is_same = _note_in(self.partial).get("state") == self._state
        keep = {shard.name for shard in self.shards if is_same and shard.is_written(self.partial)}
        with write_errors(f"cannot empty {self.partial}", self._hint):
            for entry in self.partial.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name not in keep:
                    entry.unlink()
        self._write_note(self._note)

    def _write_note(self, note: Mapping[str, object]) -> None:
        path = self.partial / NOTE_NAME
        with write_errors(f"cannot write {path}", self._hint):
            write_atomically(path, json.dumps(note), mode=0o666, durable=True)

    @property
    def missing(self) -> list[ShardPlan]:
        return [shard for shard in self.shards if not shard.is_written(self.partial)]

    @property
    def missing_bytes(self) -> int:
        return sum(shard.nbytes for shard in self.missing)

    def write(self, pieces: Pieces, progress: Progress | None) -> None:
        """Write the missing shards. Raise FileChangedError if the checkpoint's files are not those that were read."""
        done = 0

        def count(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(done, 2 * self.nbytes)

        missing = self.missing
        count(2 * (self.nbytes - sum(shard.nbytes for shard in missing)))
        for shard in missing:
            shard.write(self.partial, pieces, count, self._check_source)

    def _check_source(self) -> None:
        if state_of(self._checkpoint) != self._state:
            raise FileChangedError(
                f"the files of {self._checkpoint.directory} changed while they were copied. Hint: start it again."
            )

    def finish(self, *, keeps_note: bool = False) -> None:
        """Give the folder its name. Raises: WriteError. A note that is kept tells what later changes of files."""
        self._write_note({**self._note, "files": self._stamps(self.partial)})
        with write_errors(f"cannot rename {self.partial} to {self.target}", self._hint):
            if keeps_note and self.target.exists():
                shutil.rmtree(self.target)  # damaged
            rename_durably(self.partial, self.target)
            if not keeps_note:
                (self.target / NOTE_NAME).unlink()

    def is_whole(self) -> bool:
        """Return whether the folder is there with its name and its note, and no file has changed since."""
        is_as_noted = _note_in(self.target).get("files") == self._stamps(self.target)
        return is_as_noted and all(shard.is_written(self.target) for shard in self.shards)

    def _stamps(self, folder: Path) -> dict[str, list[int]]:
        """Return size and time of each file; empty when one is missing."""
        try:
            found = {shard.name: (folder / shard.name).stat() for shard in self.shards}
        except FileNotFoundError:
            return {}
        return {name: [status.st_size, status.st_mtime_ns] for name, status in found.items()}


def _note_in(folder: Path) -> dict[str, Any]:
    return read_json_object(folder / NOTE_NAME, MOST_NOTE_BYTES)


def streaming_order(layout: ModelLayout, checkpoint: Checkpoint) -> list[list[str]]:
    """Return every tensor's name, in units, in the order in which a pass uses these: tables, layers, rest, heads.

    Streamed tensors of a unit come first, the largest before others: the plan pins small ones. A tensor that is no
    unit's parameter, since mlx-lm computes with it while loading, is one of the rest, each of which is a unit.
    """
    owners: dict[str, Unit] = {}  # the first one, where several share a tensor
    for unit in layout.units:
        for parameter in (*unit.large, *unit.small):
            for record in parameter.records:
                owners.setdefault(record.name, unit)
    names: dict[int, list[str]] = {}
    for name in sorted(owners, key=_natural):
        names.setdefault(id(owners[name]), []).append(name)

    def tensors(unit: Unit) -> list[str]:
        own = names.get(id(unit), [])
        sizes = {p.record.name: p.nbytes for p in unit.large if p.record is not None}
        return sorted(own, key=lambda name: -sizes.get(name, 0))

    return [
        *map(tensors, [*layout.embeddings, *layout.layers]),
        *([name] for name in sorted(checkpoint.tensors.keys() - owners.keys(), key=_natural)),
        *map(tensors, layout.heads),
    ]


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts expert 10 after expert 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


TABLE_BLOCK_BYTES = 128 << 10
"""Block of an embedding table, of which single rows are read too."""

MOST_RATIO = 0.95
"""A tensor that takes a larger share of its bytes is stored as it is."""

_LEAST_BYTES = 4096
_NUM_SAMPLES = 3


def sampled_ratio(record: TensorRecord) -> float:
    """Return the share of its bytes that a tensor takes when compressed, from some blocks of it. 1 if it may not be."""
    if record.dtype not in CODED_DTYPES or record.nbytes < _LEAST_BYTES:
        return 1.0
    flat = replace(record, dtype="U8", shape=(record.nbytes,))
    step = BLOCK_BYTES if record.nbytes > BLOCK_BYTES else record.nbytes
    last = (record.nbytes - step) // record.itemsize * record.itemsize
    starts = {last * i // (_NUM_SAMPLES - 1) // record.itemsize * record.itemsize for i in range(_NUM_SAMPLES)}
    encoder, buffer, stored, nbytes = Encoder(), copy_buffer(), 0, 0
    for start in starts:
        for piece in read_pieces(flat.rows(start, start + step), buffer):
            stored += len(encoder.encode(piece, record.itemsize))
            nbytes += len(piece)
    return stored / nbytes


@dataclass(frozen=True)
class CompressedPlan(ShardPlan):
    """A file of compressed tensors to be written; ``nbytes`` are those of the tensors, and the file takes less."""

    tables: frozenset[str] = frozenset()  # names of embedding tables

    @cached_property
    def _sizes(self) -> dict[str, tuple[int, int]]:
        """The bytes of a block and of a run of each tensor. Experts of a stack are runs, so each can be read alone."""
        blocks = {t.name: TABLE_BLOCK_BYTES if t.name in self.tables else BLOCK_BYTES for t in self.tensors}
        runs = {t.name: t.nbytes // t.shape[0] if len(t.shape) == 3 and t.nbytes else t.nbytes for t in self.tensors}
        return {name: (blocks[name], max(runs[name], 1)) for name in blocks}

    @property
    def data_start(self) -> int:
        return LOGICAL_START

    def _head(self, stored: Mapping[str, Sequence[int]], nbytes: int = 0) -> bytes:
        """Return the head of the file, at least so long, for the bytes of each coded block of the tensors."""
        blocks = {name: [*sizes, *stored[name]] for name, sizes in self._sizes.items()}
        about = json.dumps({"header": self.header, "blocks": blocks}, separators=(",", ":"))
        coded = [TensorSpec(tensor.name, "U8", (sum(stored[tensor.name]),)) for tensor in self.tensors]
        return make_head(ShardPlan(self.name, coded, {CODED: about}).header, self.alignment, nbytes)

    def _fill(self, file: NewFile, pieces: Pieces, progress: Callable[[int], object]) -> None:
        sizes = self._sizes
        most = {t.name: [BLOCK_BYTES + MARGIN] * num_blocks(t.nbytes, *sizes[t.name]) for t in self.tensors}
        place = len(self._head(most))
        file.write(bytes(place))
        stored: dict[str, list[int]] = {name: [] for name in sizes}
        for name, coded, nbytes in self._coded(pieces):
            file.write(coded)
            stored[name].append(len(coded))
            progress(nbytes)
        write_at(file.fd, self._head(stored, place), 0)

    def _coded(self, pieces: Pieces) -> Iterator[tuple[str, bytes, int]]:
        """Yield each block, coded on all cores: its tensor, its bytes, and the number of those of its contents."""
        num_threads, encoder = num_cores(), _LocalEncoder()
        under_way: deque[tuple[str, Future[bytes], int]] = deque()
        with ThreadPoolExecutor(num_threads) as coders:
            for name, block, itemsize in self._blocks(pieces):
                under_way.append((name, coders.submit(encoder.encode, block, itemsize), len(block)))
                if len(under_way) > 2 * num_threads:
                    name, coded, nbytes = under_way.popleft()
                    yield name, coded.result(), nbytes
            for name, coded, nbytes in under_way:
                yield name, coded.result(), nbytes

    def _blocks(self, pieces: Pieces) -> Iterator[tuple[str, bytes, int]]:
        for tensor in self.tensors:
            itemsize, rest = DTYPE_SIZES[tensor.dtype], bytearray()
            source = iter(pieces(tensor))
            for start, end, _ in blocks_of(0, tensor.nbytes, itemsize, *self._sizes[tensor.name]):
                while len(rest) < end - start:
                    rest += next(source)
                yield tensor.name, bytes(rest[: end - start]), itemsize
                del rest[: end - start]
            for _ in source:  # raises ValueError at its end if there is more
                pass


class _LocalEncoder(Encoder, threading.local):
    """An encoder of each thread."""


def worth_compressing(layout: ModelLayout, checkpoint: Checkpoint) -> dict[str, float]:
    """Return the tensors that shrink, and to which share of their bytes.

    Only what every pass reads counts, and no tensor that mlx-lm reads itself. So an embedding table counts only if it
    serves as the head.
    """
    tables = {p.name for unit in layout.embeddings if unit.name not in layout.tied for p in unit.large}
    read = [p for unit in layout.units for p in unit.large if p.name not in tables]
    names = whole_tensors(checkpoint, (record for p in read for record in p.records))
    ratios = {name: sampled_ratio(checkpoint.tensors[name]) for name in sorted(names)}
    return {name: ratio for name, ratio in ratios.items() if ratio <= MOST_RATIO}


def _plan_files(
    units: Sequence[Sequence[str]],
    checkpoint: Checkpoint,
    shard_bytes: int,
    tables: frozenset[str],
    ratios: Collection[str],
) -> list[ShardPlan]:
    """Divide tensors among files. In a compressed copy some have what shrinks, and the others what mlx-lm may read."""
    records = [[checkpoint.tensors[name] for name in unit] for unit in units]
    groups = [[TensorSpec(record.name, record.dtype, record.shape) for record in group] for group in records]
    if not ratios:
        found = {key: value for shard in checkpoint.shards for key, value in shard.metadata.items()}
        shards = plan_shards(groups, shard_bytes, found or None, "model-{number:05}-of-{count:05}.safetensors")
        return shards if len(shards) > 1 else [replace(shard, name="model.safetensors") for shard in shards]
    metadata = {"format": "mlx"}
    small = [[tensor for tensor in group if tensor.name in ratios] for group in groups]
    rest = [[tensor for tensor in group if tensor.name not in ratios] for group in groups]
    return [
        *(
            CompressedPlan(plan.name, plan.tensors, metadata, tables=tables)
            for plan in plan_shards(small, shard_bytes, metadata, COMPRESSED_NAME)
        ),
        *plan_shards(rest, shard_bytes, metadata, PLAIN_NAME),
    ]


SHARD_BYTES = 5 * 10**9
"""Shards are as large as mlx-lm's."""

NOT_COPIED = frozenset({".git", ".hg", ".svn", ".cache", "__pycache__", ".ipynb_checkpoints"})
"""Folders that belong to tools, not to the model."""


@dataclass(frozen=True, slots=True)
class PackReport:
    """Result of :func:`pack`."""

    target: Path  # the new checkpoint
    num_tensors: int
    num_shards: int
    nbytes: int  # of its tensors
    resumed_bytes: int  # those that an earlier, interrupted run had written
    seconds: float  # of this run
    ratio: float  # bytes of the files for each byte of the tensors


def pack(
    source: Path,
    target: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
    compresses: bool = False,
) -> PackReport:
    """Write a checkpoint again, in streaming order, to a folder that does not exist, or is empty. Raises: FlashError.

    Shards are cut between units only. A copy that ``compresses`` what shrinks is not loaded by stock mlx-lm.
    """
    began = time.perf_counter()
    if shard_bytes <= 0:
        raise ConfigError(f"shard_bytes is {shard_bytes}, must be above 0")
    target = Path(os.path.realpath(target.expanduser()))
    _check_target(source, target)
    checkpoint = read_checkpoint(source)
    state = state_of(checkpoint)
    layout = make_layout(load_lazily(source, checkpoint))
    units = streaming_order(layout, checkpoint)
    ratios = worth_compressing(layout, checkpoint) if compresses else {}
    saved = sum((1 - share) * checkpoint.tensors[name].nbytes for name, share in ratios.items())
    ratio = 1 - saved / max(checkpoint.nbytes, 1)
    tables = frozenset(record.name for unit in layout.embeddings for p in unit.large for record in p.records)
    rewrite = Rewrite(target, _plan_files(units, checkpoint, shard_bytes, tables, ratios), checkpoint, state)
    partial = rewrite.partial

    def refuse() -> NoReturn:
        raise ConfigError(f"another run is writing {partial}. Hint: wait for it, or name another target.")

    with rewrite.locked(refuse):
        if not any(partial.glob(f"{NOTE_NAME}*")) and (found := sorted(entry.name for entry in partial.iterdir())):
            raise ConfigError(
                f"{partial} is in the way: it holds {found[0]!r}, which this version did not write. Hint: move it away."
            )
        rewrite.clear()
        resumed = rewrite.nbytes - rewrite.missing_bytes
        _fill(rewrite, checkpoint, progress, ratio)
        rewrite.finish()
    return PackReport(
        target=target,
        num_tensors=len(checkpoint.tensors),
        num_shards=len(rewrite.shards),
        nbytes=checkpoint.nbytes,
        resumed_bytes=resumed,
        seconds=time.perf_counter() - began,
        ratio=read_checkpoint(target).ratio,
    )


def _check_target(source: Path, target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} is not a folder. Hint: name one that does not exist yet.")
    if target.is_dir() and (found := sorted(path.name for path in target.iterdir())):
        raise ConfigError(f"{target} is not empty: it holds {found[0]!r}. Hint: name a folder that does not exist yet.")
    if target.is_mount():
        raise ConfigError(f"{target} is a disk's own folder, which cannot be renamed to. Hint: name a folder in it.")
    if target.is_relative_to(os.path.realpath(source)):
        raise ConfigError(f"{target} is inside of the source {source}. Hint: name a folder beside it.")


# --- the files -------------------------------------------------------------------------------------------------------


def _contents(folder: Path) -> Iterator[Path]:
    """Yield all below a folder that is to be copied, but no folders."""
    try:
        found = [path for path in folder.iterdir() if path.name not in NOT_COPIED]
    except OSError as fault:
        refuse_unreadable(folder, "folder", fault)
    for path in found:
        if path.is_dir() and not path.is_symlink():
            yield from _contents(path)
        else:
            yield path


def _fill(rewrite: Rewrite, checkpoint: Checkpoint, progress: Progress | None, ratio: float) -> None:
    """Write everything of the folder that an earlier run has not written."""
    folder, buffer = rewrite.partial, copy_buffer()
    source = checkpoint.directory
    rewritten = {source / INDEX_NAME, *(shard.path for shard in checkpoint.shards)}
    others = [path for path in _contents(source) if path not in rewritten]
    if strange := next((path for path in others if not path.is_file()), None):
        raise CheckpointNotFoundError(
            f"{strange} is no file that can be copied: a link to a folder or to nothing, or a device. Hint: remove it."
        )
    nbytes = round(rewrite.missing_bytes * ratio) + sum(path.stat().st_size for path in others)
    if nbytes > (free := free_bytes(folder)):
        raise WriteError(
            f"{folder} needs {nbytes / 1e9:.2f} GB more, {free / 1e9:.2f} GB are free on its disk. "
            "Hint: make room, or name a folder on another disk."
        )

    rewrite.write(lambda tensor: read_pieces(checkpoint.tensors[tensor.name], buffer), progress)
    for path in others:
        copy = folder / path.relative_to(source)
        with write_errors(f"cannot copy {path} to {copy}", AGAIN):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
    os.sync()
    if len(rewrite.shards) > 1 and all(Path(shard.name).match(STOCK_PATTERN) for shard in rewrite.shards):
        with write_errors(f"cannot write {folder / INDEX_NAME}", AGAIN):
            places = {tensor.name: shard.name for shard in rewrite.shards for tensor in shard.tensors}
            index = {"metadata": {"total_size": rewrite.nbytes}, "weight_map": dict(sorted(places.items()))}
            text = json.dumps(index, indent=4) + "\n"
            write_atomically(folder / INDEX_NAME, text, mode=0o666, durable=True)

"""Rewrites a checkpoint in streaming order: the same tensors, those of a unit next to each other.

mlx saves the tensors of a file in the order of a hash table, after a header of any length, so a layer is read in many
pieces and each goes through a bounce buffer. Here a unit's streamed tensors are one run of bytes, and every tensor
starts where kernels can use it. The result is a checkpoint like any other: same names, dtypes, shapes and bytes, same
files beside the weights.

Everything is written to ``<target>.partial``, which is renamed at the end. A run that was interrupted is taken up at
the first shard that is not complete.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mlx_flash.convert.order import ReadPattern, UnitTensors, read_pattern, streaming_order
from mlx_flash.convert.writer import (
    ByteCounter,
    ShardPlan,
    ShardWriter,
    TensorSpec,
    aligned_order,
    copy_buffer,
    read_pieces,
    write_errors,
)
from mlx_flash.errors import CheckpointNotFoundError, ConfigError, FileChangedError, WriteError
from mlx_flash.files import PARTIAL_SUFFIX, open_locked, rename_durably
from mlx_flash.layout.load import load_lazily
from mlx_flash.layout.units import make_layout
from mlx_flash.storage.safetensors import INDEX_NAME, Checkpoint, read_checkpoint, read_shard
from mlx_flash.storage.source import identity_of

SHARD_BYTES = 5 * 10**9
"""Shards are as large as mlx-lm's."""

NOT_COPIED = frozenset({".git", ".hg", ".svn", ".cache", "__pycache__", ".ipynb_checkpoints"})
"""Folders that belong to tools, not to the model."""

STATE_NAME = ".mlx-flash-pack.json"
"""In the partial folder: which source its shards come from."""

Progress = Callable[[int, int], object]


@dataclass(frozen=True, slots=True)
class PackReport:
    """Result of :func:`pack`.

    Attributes:
        target: the new checkpoint.
        num_tensors: its tensors.
        num_shards: its safetensors files.
        nbytes: bytes of its tensors.
        resumed_bytes: those that an earlier, interrupted run had written.
        seconds: how long this run took.
        before: how the source is read.
        after: how the target is read.
    """

    target: Path
    num_tensors: int
    num_shards: int
    nbytes: int
    resumed_bytes: int
    seconds: float
    before: ReadPattern
    after: ReadPattern


def pack(
    source: Path,
    target: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    verify: bool = False,
    progress: Progress | None = None,
) -> PackReport:
    """Write a checkpoint again, in streaming order.

    Args:
        source: a model folder.
        target: the new folder; it must not exist, or be empty.
        shard_bytes: size of a shard at most, unless one unit is larger; shards are cut between units only.
        verify: read everything back at the end and compare it with the source.
        progress: called with (bytes done, bytes to do) of tensors; with ``verify`` every byte counts twice.

    Raises:
        CheckpointError: the source is not a usable checkpoint.
        ConfigError: the target is in use, or cannot be where it should.
        ReadError: the source cannot be read; FileChangedError when it changed meanwhile.
        WriteError: there is not enough room, the target cannot be written, or it does not hold what was written.
    """
    began = time.perf_counter()
    if shard_bytes <= 0:
        raise ConfigError(f"shard_bytes is {shard_bytes}, must be above 0")
    target = Path(os.path.realpath(target))
    _check_target(source, target)
    checkpoint = read_checkpoint(source)
    state = _state(checkpoint)
    units = streaming_order(make_layout(load_lazily(source, checkpoint)), checkpoint)
    folder = target.with_name(f"{target.name}{PARTIAL_SUFFIX}")
    with _locked(folder):
        shards = _plan_shards(units, checkpoint, shard_bytes)
        _clear_unless(folder, state, {shard.name for shard in shards})
        resumed = _write(checkpoint, state, folder, shards, verify, progress)
        with write_errors(f"cannot rename {folder} to {target}"):
            rename_durably(folder, target)
            (target / STATE_NAME).unlink()
    return PackReport(
        target=target,
        num_tensors=len(checkpoint.tensors),
        num_shards=len(shards),
        nbytes=checkpoint.nbytes,
        resumed_bytes=resumed,
        seconds=time.perf_counter() - began,
        before=read_pattern(units, checkpoint),
        after=read_pattern(units, read_checkpoint(target)),
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


def _plan_shards(units: Sequence[UnitTensors], checkpoint: Checkpoint, shard_bytes: int) -> list[ShardPlan]:
    parts: list[list[TensorSpec]] = [[]]
    size = 0
    for unit in units:
        records = [checkpoint.tensors[name] for name in unit.names]
        nbytes = sum(record.nbytes for record in records)
        if size and size + nbytes > shard_bytes:
            parts.append([])
            size = 0
        parts[-1] += [TensorSpec(record.name, record.dtype, record.shape, record.nbytes) for record in records]
        size += nbytes
    metadata = {key: value for shard in checkpoint.shards for key, value in shard.metadata.items()}
    names = [f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
    names = names if len(parts) > 1 else ["model.safetensors"]
    return [ShardPlan(name, aligned_order(part), metadata or None) for name, part in zip(names, parts, strict=True)]


# --- the files -------------------------------------------------------------------------------------------------------


def _write(
    checkpoint: Checkpoint,
    state: str,
    folder: Path,
    shards: Sequence[ShardPlan],
    verify: bool,
    progress: Progress | None,
) -> int:
    """Fills the folder. Returns how many bytes an earlier run had written."""
    others = list(_other_files(checkpoint, checkpoint.directory))
    left = [shard for shard in shards if not shard.is_written(folder)]
    _check_room(folder, sum(shard.nbytes for shard in left) + sum(path.stat().st_size for path in others))
    resumed = checkpoint.nbytes - sum(shard.nbytes for shard in left)
    counter = ByteCounter(checkpoint.nbytes * (2 if verify else 1), progress)
    counter.add(resumed)
    for shard in left:
        _write_shard(folder, shard, checkpoint, state, counter)
    for shard in shards if verify else ():
        _compare(folder / shard.name, checkpoint, counter)
    for path in others:
        _copy_file(path, folder / path.relative_to(checkpoint.directory))
    if len(shards) > 1:
        _write_text(folder / INDEX_NAME, _index(shards))
    return resumed


def _state(checkpoint: Checkpoint) -> str:
    """Return a text that identifies the source; another one, or a changed one, gives another text."""
    try:
        files = {str(shard.path): asdict(identity_of(shard.path)) for shard in checkpoint.shards}
    except OSError as error:
        raise FileChangedError(
            f"{error.filename} was there a moment ago: {error.strerror}. Hint: start it again."
        ) from error
    return json.dumps({"source": os.path.realpath(checkpoint.directory), "files": files}, indent=1)


def _clear_unless(folder: Path, state: str, keep: set[str]) -> None:
    """Empties the folder, but for the shards of an earlier run from the same source."""
    path = folder / STATE_NAME
    if not path.exists() and (found := sorted(entry.name for entry in folder.iterdir())):
        raise ConfigError(f"{folder} is in the way: it holds {found[0]!r}, and no run made it. Hint: move it away.")
    is_same = path.exists() and path.read_text() == state
    with write_errors(f"cannot empty {folder}"):
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif not (is_same and entry.name in keep):
                entry.unlink()
    _write_text(path, state)


def _check_room(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise WriteError(
            f"{folder} needs {nbytes / 1e9:.2f} GB more, {free / 1e9:.2f} GB are free on its disk. "
            "Hint: make room, or name a folder on another disk."
        )


def _write_shard(folder: Path, shard: ShardPlan, checkpoint: Checkpoint, state: str, counter: ByteCounter) -> None:
    with ShardWriter(folder / shard.name, shard.tensors, shard.metadata, progress=counter.add) as writer:
        for tensor in shard.tensors:
            writer.copy(tensor.name, checkpoint.tensors[tensor.name].extent)
        if _state(checkpoint) != state:
            raise FileChangedError(
                f"the files of {checkpoint.directory} changed while they were copied. Hint: start it again."
            )


def _compare(shard: Path, checkpoint: Checkpoint, counter: ByteCounter) -> None:
    """Compares a shard with its source, byte for byte; one that differs is removed, so that the next run writes it."""
    buffers = copy_buffer(), copy_buffer()
    for written in read_shard(shard).tensors:
        original = checkpoint.tensors[written.name]
        pairs = zip(
            read_pieces(original.name, original.extent, buffers[0]),
            read_pieces(written.name, written.extent, buffers[1]),
            strict=True,
        )
        for theirs, ours in pairs:
            if not np.array_equal(np.frombuffer(theirs, np.uint8), np.frombuffer(ours, np.uint8)):
                shard.unlink()
                raise WriteError(
                    f"{written.name!r} in {shard} is not what {original.extent.path} holds. "
                    "Hint: check disk and memory of this machine, then start it again."
                )
            counter.add(len(ours))


def _other_files(checkpoint: Checkpoint, folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Every file but the weights, which are written anew. Links are followed, except to a folder that they are in."""
    rewritten = {*(shard.path for shard in checkpoint.shards), checkpoint.directory / INDEX_NAME}
    above |= {folder.resolve()}
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if path.name not in NOT_COPIED and path.resolve() not in above:
                yield from _other_files(checkpoint, path, above)
        elif path not in rewritten:
            if not path.is_file():
                raise CheckpointNotFoundError(
                    f"{path} is no file that can be copied: a link to nothing, or a device. Hint: remove it."
                )
            yield path


def _copy_file(source: Path, target: Path) -> None:
    with write_errors(f"cannot copy {source} to {target}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
        _sync(target)


def _write_text(path: Path, text: str) -> None:
    with write_errors(f"cannot write {path}"):
        path.write_text(text)
        _sync(path)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _index(shards: Sequence[ShardPlan]) -> str:
    places = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
    total = sum(shard.nbytes for shard in shards)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}, indent=4) + "\n"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make the folder, and keep a second run out of it."""
    with write_errors(f"cannot make {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            fd = open_locked(folder, wait=False, required=False)
        except BlockingIOError:
            raise ConfigError(f"another run is writing {folder}. Hint: wait for it, or name another target.") from None
    try:
        yield
    finally:
        os.close(fd)

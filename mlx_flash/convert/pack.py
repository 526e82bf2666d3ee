"""Rewrites a checkpoint in streaming order: the same tensors, those of a unit next to each other.

mlx saves the tensors of a file in the order of a hash table, after a header of any length, so a layer is read in many
pieces and each goes through a bounce buffer. Here a unit's streamed tensors are one run of bytes, and every tensor
starts where kernels can use it. The result is a checkpoint like any other: same names, dtypes, shapes and bytes, same
files beside the weights.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from mlx_flash.convert.compress import plan_files, worth_compressing
from mlx_flash.convert.order import ReadPattern, UnitTensors, read_pattern, streaming_order
from mlx_flash.convert.rewrite import STATE_NAME, PlannedFile, Progress, Rewrite, plan_shards, write_text
from mlx_flash.convert.writer import TensorSpec, copy_buffer, read_pieces, write_errors
from mlx_flash.errors import CheckpointNotFoundError, ConfigError, WriteError
from mlx_flash.files import free_bytes
from mlx_flash.layout.fingerprint import state_of
from mlx_flash.layout.load import load_lazily
from mlx_flash.layout.units import make_layout
from mlx_flash.storage.safetensors import INDEX_NAME, Checkpoint, read_checkpoint
from mlx_flash.storage.shards import STOCK_PATTERN

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
    before: ReadPattern  # how the source is read
    after: ReadPattern  # how the target is read
    ratio: float  # bytes of the files for each byte of the tensors


def pack(
    source: Path,
    target: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
    compress: Callable[[float], bool] | None = None,
) -> PackReport:
    """Write a checkpoint again, in streaming order.

    Args:
        source: a model folder.
        target: the new folder; it must not exist, or be empty.
        shard_bytes: size of a shard at most, unless one unit is larger; shards are cut between units only.
        progress: called while tensors are written and read back.
        compress: called with the share of the bytes that a compressed copy is expected to take. True makes one, which
            stock mlx-lm does not load. None compresses nothing.

    Raises:
        CheckpointError: the source is not a usable checkpoint.
        ConfigError: the target is in use, or cannot be where it should.
        ReadError: the source cannot be read; FileChangedError when it changed meanwhile.
        WriteError: there is not enough room, the target cannot be written, or it does not hold what was written.
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
    ratio, files = 1.0, _plan_shards(units, checkpoint, shard_bytes)
    if compress is not None:
        ratios = worth_compressing(layout, checkpoint)
        saved = sum((1 - share) * checkpoint.tensors[name].nbytes for name, share in ratios.items())
        if ratios and compress(1 - saved / checkpoint.nbytes):
            ratio = 1 - saved / checkpoint.nbytes
            files = [*plan_files(_groups(units, checkpoint), ratios, layout, shard_bytes)]
    rewrite = Rewrite(target, files, checkpoint, state)
    with rewrite.locked(lambda: _refuse(rewrite.partial)):
        _check_unused(rewrite.partial)
        rewrite.clear()
        resumed = rewrite.nbytes - rewrite.missing_bytes
        _fill(rewrite, checkpoint, progress, ratio)
        rewrite.finish()
    packed = read_checkpoint(target)
    return PackReport(
        target=target,
        num_tensors=len(checkpoint.tensors),
        num_shards=len(rewrite.shards),
        nbytes=checkpoint.nbytes,
        resumed_bytes=resumed,
        seconds=time.perf_counter() - began,
        before=read_pattern(units, checkpoint),
        after=read_pattern(units, packed),
        ratio=packed.ratio,
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


def _refuse(folder: Path) -> NoReturn:
    raise ConfigError(f"another run is writing {folder}. Hint: wait for it, or name another target.")


def _check_unused(folder: Path) -> None:
    if not any(folder.glob(f"{STATE_NAME}*")) and (found := sorted(entry.name for entry in folder.iterdir())):
        raise ConfigError(f"{folder} is in the way: it holds {found[0]!r}, and no run made it. Hint: move it away.")


def _check_room(folder: Path, nbytes: int) -> None:
    free = free_bytes(folder)
    if nbytes > free:
        raise WriteError(
            f"{folder} needs {nbytes / 1e9:.2f} GB more, {free / 1e9:.2f} GB are free on its disk. "
            "Hint: make room, or name a folder on another disk."
        )


def _groups(units: Sequence[UnitTensors], checkpoint: Checkpoint) -> list[list[TensorSpec]]:
    records = [[checkpoint.tensors[name] for name in unit.names] for unit in units]
    return [[TensorSpec(record.name, record.dtype, record.shape) for record in group] for group in records]


def _plan_shards(units: Sequence[UnitTensors], checkpoint: Checkpoint, shard_bytes: int) -> list[PlannedFile]:
    groups = _groups(units, checkpoint)
    metadata = {key: value for shard in checkpoint.shards for key, value in shard.metadata.items()}
    shards = plan_shards(groups, shard_bytes, metadata or None, "model-{number:05}-of-{count:05}.safetensors")
    return [*shards] if len(shards) > 1 else [replace(shard, name="model.safetensors") for shard in shards]


# --- the files -------------------------------------------------------------------------------------------------------


def _fill(rewrite: Rewrite, checkpoint: Checkpoint, progress: Progress | None, ratio: float) -> None:
    """Write everything of the folder that an earlier run has not written."""
    folder, buffer = rewrite.partial, copy_buffer()
    others = list(_other_files(checkpoint, checkpoint.directory))
    _check_room(folder, round(rewrite.missing_bytes * ratio) + sum(path.stat().st_size for path in others))
    rewrite.write(lambda tensor: read_pieces(checkpoint.tensors[tensor.name], buffer), progress)
    for path in others:
        _copy_file(path, folder / path.relative_to(checkpoint.directory))
    if len(rewrite.shards) > 1 and all(Path(shard.name).match(STOCK_PATTERN) for shard in rewrite.shards):
        write_text(folder / INDEX_NAME, _index(rewrite))


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
        with target.open("rb") as file:
            os.fsync(file.fileno())


def _index(rewrite: Rewrite) -> str:
    places = {tensor.name: shard.name for shard in rewrite.shards for tensor in shard.tensors}
    header = {"metadata": {"total_size": rewrite.nbytes}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(header, indent=4) + "\n"

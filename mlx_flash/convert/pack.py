"""Rewrites a checkpoint in streaming order: the same tensors, those of a unit next to each other.

mlx saves the tensors of a file in the order of a hash table, after a header of any length, so a layer is read in many
pieces and each goes through a bounce buffer. Here a unit's streamed tensors are one run of bytes, and every tensor
starts where kernels can use it. The result is a checkpoint like any other: same names, dtypes, shapes and bytes, same
files beside the weights.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from statistics import mean, median
from typing import Any, NoReturn

from mlx_flash.convert.rewrite import (
    STATE_NAME,
    Pieces,
    Progress,
    Rewrite,
    ShardPlan,
    TensorSpec,
    copy_buffer,
    new_file,
    plan_shards,
    read_pieces,
    write_errors,
    write_text,
)
from mlx_flash.errors import CheckpointNotFoundError, ConfigError, HeaderError, WriteError
from mlx_flash.files import free_bytes, write_at
from mlx_flash.layout.fingerprint import state_of
from mlx_flash.layout.load import load_lazily
from mlx_flash.layout.parts import ModelLayout, Parameter, Unit
from mlx_flash.layout.standins import whole_tensors
from mlx_flash.layout.units import make_layout
from mlx_flash.memory.arena import kernel_alignment
from mlx_flash.storage.blocks import (
    BLOCK_BYTES,
    LOGICAL_START,
    Run,
    join_head,
    make_head,
    num_blocks,
    read_head,
    runs_of,
)
from mlx_flash.storage.codec import CODED_DTYPES, Encoder, num_cores
from mlx_flash.storage.placement import place
from mlx_flash.storage.safetensors import DTYPE_SIZES, INDEX_NAME, Checkpoint, TensorRecord, read_checkpoint
from mlx_flash.storage.shards import COMPRESSED_NAME, PLAIN_NAME, STOCK_PATTERN


@dataclass(frozen=True, slots=True)
class UnitTensors:
    """Names of the tensors of a unit. Streamed ones go by size, the largest first: the plan pins small ones.

    Every pass needs all of the streamed tensors of a unit that is read whole.
    """

    streamed: tuple[str, ...]
    others: tuple[str, ...]
    is_read_whole: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, in streaming order."""
        return self.streamed + self.others


@dataclass(frozen=True, slots=True)
class ReadPattern:
    """The reads of one pass over everything that is read whole: layers, heads, a table that serves as head."""

    num_units: int
    num_reads: int  # contiguous runs of bytes; a long one is then read in several steps
    num_copied: int  # runs that go through a bounce buffer, because their tensors are not aligned
    nbytes: int  # of all runs, in whole pages
    median_bytes: float  # of a run
    mean_bytes: float


def streaming_order(layout: ModelLayout, checkpoint: Checkpoint) -> list[UnitTensors]:
    """Every tensor of a checkpoint, in units, in the order in which a pass uses these: tables, layers, rest, heads.

    A tensor that is no unit's parameter, since mlx-lm computes with it while loading, goes to the unit whose name, or
    what the names of its other tensors begin with, begins that tensor's name; else it is one of the rest, each of which
    is a unit of its own.
    """
    owners = _owners(layout.units)
    homes = _homes(layout.units, owners)
    rest = []
    for name in sorted(checkpoint.tensors.keys() - owners.keys(), key=_natural):
        if (home := _find_home(name, homes)) is not None:
            owners[name] = home
        else:
            rest.append(UnitTensors((), (name,)))
    names = _names_by_unit(owners)
    tables = [_unit_tensors(unit, names, unit.name in layout.tied) for unit in layout.embeddings]
    layers = [_unit_tensors(unit, names, True) for unit in layout.layers]
    return [*tables, *layers, *rest, *(_unit_tensors(unit, names, True) for unit in layout.heads)]


def _owners(units: Iterable[Unit]) -> dict[str, Unit]:
    """The unit of each tensor that is a unit's parameter; the first one, where several share it."""
    owners: dict[str, Unit] = {}
    for unit in units:
        for record in _records([*unit.large, *unit.small]):
            owners.setdefault(record.name, unit)
    return owners


def _records(parameters: Sequence[Parameter]) -> list[TensorRecord]:
    return [parameter.record for parameter in parameters if parameter.record is not None]


def _names_by_unit(owners: dict[str, Unit]) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, unit in owners.items():
        names.setdefault(id(unit), []).append(name)
    return names


def _homes(units: Sequence[Unit], owners: dict[str, Unit]) -> dict[str, Unit]:
    """Return the places of tensors without an owner: units by their names in the model, and in the checkpoint."""
    names = _names_by_unit(owners)
    homes = {_common_prefix(names[id(unit)]): unit for unit in units if id(unit) in names}
    homes.update({unit.name: unit for unit in units})
    homes.pop("", None)
    return homes


def _common_prefix(names: Iterable[str]) -> str:
    columns = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, columns))


def _find_home(name: str, homes: dict[str, Unit]) -> Unit | None:
    parts = name.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
    return next((homes[prefix] for prefix in prefixes if prefix in homes), None)


def _unit_tensors(unit: Unit, names: dict[int, list[str]], is_read_whole: bool) -> UnitTensors:
    own = names.get(id(unit), [])
    sizes = {record.name: record.nbytes for record in _records(unit.large) if record.name in own}
    streamed = tuple(sorted(sizes, key=lambda name: sizes[name], reverse=True))
    return UnitTensors(streamed, tuple(name for name in own if name not in sizes), is_read_whole)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts expert 10 after expert 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def read_pattern(units: Sequence[UnitTensors], checkpoint: Checkpoint) -> ReadPattern:
    """Return how the units would be read from a checkpoint that holds their tensors."""
    read = [unit for unit in units if unit.is_read_whole]
    placements = [place([checkpoint.tensors[name] for name in unit.streamed], kernel_alignment()) for unit in read]
    segments = [segment for placement in placements for segment in placement.segments]
    sizes = [segment.nbytes for segment in segments] or [0]
    return ReadPattern(
        num_units=len(read),
        num_reads=len(segments),
        num_copied=sum(segment.buffer_offset is None for segment in segments),
        nbytes=sum(sizes),
        median_bytes=median(sizes),
        mean_bytes=mean(sizes),
    )


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
    flat = TensorRecord(record.name, "U8", (record.nbytes,), record.extent)
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
    """A file of compressed tensors to be written; ``nbytes`` are those of the tensors, and the file takes less.

    Attributes:
        tables: names of embedding tables.
    """

    tables: frozenset[str] = frozenset()

    @cached_property
    def _sizes(self) -> dict[str, tuple[int, int]]:
        """The bytes of a block and of a run of each tensor."""
        return {tensor.name: _block_sizes(tensor, tensor.name in self.tables) for tensor in self.tensors}

    @cached_property
    def _header(self) -> dict[str, Any]:
        return {"header": self.header, "blocks": {name: list(sizes) for name, sizes in self._sizes.items()}}

    def _runs(self, tensor: TensorSpec, start: int) -> Iterator[Run]:
        return runs_of(start, tensor.nbytes, DTYPE_SIZES[tensor.dtype], *self._sizes[tensor.name])

    @cached_property
    def _num_blocks(self) -> int:
        return sum(num_blocks(tensor.nbytes, *self._sizes[tensor.name]) for tensor in self.tensors)

    def is_written(self, folder: Path) -> bool:
        """Return True if the file is complete in a folder. It gets its name only then, so the head is enough."""
        try:
            header, sizes, _, _ = read_head(folder / self.name)
        except (FileNotFoundError, HeaderError):
            return False
        return {"format": header["format"], **self._header} == header and len(sizes) == self._num_blocks

    def write(
        self,
        folder: Path,
        pieces: Pieces,
        progress: Callable[[int], object] = lambda nbytes: None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Write the file, on all cores. Arguments and errors are those of :meth:`ShardPlan.write`."""
        text, data_start = make_head(self._header, self._num_blocks)
        with new_file(folder / self.name, check) as file:
            file.write(bytes(data_start))
            sizes = array("I")
            for coded, nbytes in self._coded(pieces):
                file.write(coded)
                sizes.append(len(coded))
                progress(nbytes)
            write_at(file.fd, join_head(text, sizes, data_start), 0)

    def _coded(self, pieces: Pieces) -> Iterator[tuple[bytes, int]]:
        """Yield each coded block, and the bytes of its contents."""
        num_threads = num_cores()
        encoders = deque(Encoder() for _ in range(num_threads))

        def encode(block: bytes, itemsize: int) -> bytes:
            encoder = encoders.pop()
            try:
                return encoder.encode(block, itemsize)
            finally:
                encoders.append(encoder)

        under_way: deque[tuple[Future[bytes], int]] = deque()
        with ThreadPoolExecutor(num_threads) as pool:
            for block, itemsize in self._blocks(pieces):
                under_way.append((pool.submit(encode, block, itemsize), len(block)))
                if len(under_way) > 2 * num_threads:
                    coded, nbytes = under_way.popleft()
                    yield coded.result(), nbytes
            while under_way:
                coded, nbytes = under_way.popleft()
                yield coded.result(), nbytes

    def _blocks(self, pieces: Pieces) -> Iterator[tuple[bytes, int]]:
        for tensor in self.tensors:
            rest = bytearray()
            source = iter(pieces(tensor))
            for run in self._runs(tensor, LOGICAL_START):
                for start, end in run.blocks():
                    while len(rest) < end - start:
                        piece = next(source, None)
                        if piece is None:
                            raise ValueError(f"{tensor.name!r} has fewer bytes than its header says")
                        rest += piece
                    yield bytes(rest[: end - start]), run.itemsize
                    del rest[: end - start]


def _block_sizes(tensor: TensorSpec, is_table: bool) -> tuple[int, int]:
    """Return the bytes of a block and of a run. Experts of a stack are runs, so that each can be read alone."""
    run = tensor.nbytes // tensor.shape[0] if len(tensor.shape) == 3 and tensor.nbytes else max(tensor.nbytes, 1)
    return (TABLE_BLOCK_BYTES if is_table else BLOCK_BYTES), run


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


def plan_files(
    groups: Sequence[Sequence[TensorSpec]], shrinking: Collection[str], layout: ModelLayout, shard_bytes: int
) -> list[ShardPlan]:
    """Divide tensors among the files of a compressed copy: what shrinks, and the rest, which mlx-lm may read."""
    metadata = {"format": "mlx"}
    small = [[tensor for tensor in group if tensor.name in shrinking] for group in groups]
    rest = [[tensor for tensor in group if tensor.name not in shrinking] for group in groups]
    tables = frozenset(record.name for unit in layout.embeddings for p in unit.large for record in p.records)
    coded = plan_shards(small, shard_bytes, metadata, COMPRESSED_NAME)
    return [
        *(CompressedPlan(plan.name, plan.tensors, metadata, tables=tables) for plan in coded),
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
            files = plan_files(_groups(units, checkpoint), ratios, layout, shard_bytes)
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


def _plan_shards(units: Sequence[UnitTensors], checkpoint: Checkpoint, shard_bytes: int) -> list[ShardPlan]:
    groups = _groups(units, checkpoint)
    metadata = {key: value for shard in checkpoint.shards for key, value in shard.metadata.items()}
    shards = plan_shards(groups, shard_bytes, metadata or None, "model-{number:05}-of-{count:05}.safetensors")
    return shards if len(shards) > 1 else [replace(shard, name="model.safetensors") for shard in shards]


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

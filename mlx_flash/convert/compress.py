"""Writes files of compressed tensors, and chooses the tensors that are worth it."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mlx_flash.convert.rewrite import plan_shards
from mlx_flash.convert.writer import NewFile, Pieces, ShardPlan, TensorSpec, copy_buffer, read_pieces
from mlx_flash.errors import HeaderError
from mlx_flash.layout.parts import ModelLayout
from mlx_flash.layout.standins import whole_tensors
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
from mlx_flash.storage.safetensors import DTYPE_SIZES, Checkpoint, TensorRecord
from mlx_flash.storage.shards import COMPRESSED_NAME, PLAIN_NAME

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
class CompressedPlan:
    """A file of compressed tensors to be written, with the interface of :class:`ShardPlan`.

    Attributes:
        logical: the safetensors file with the same tensors.
        tables: names of embedding tables.
    """

    logical: ShardPlan
    tables: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Name of the file."""
        return self.logical.name

    @property
    def tensors(self) -> Sequence[TensorSpec]:
        """Its tensors in order."""
        return self.logical.tensors

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors; the file takes less."""
        return self.logical.nbytes

    @cached_property
    def _sizes(self) -> dict[str, tuple[int, int]]:
        """The bytes of a block and of a run of each tensor."""
        return {tensor.name: _block_sizes(tensor, tensor.name in self.tables) for tensor in self.tensors}

    @cached_property
    def _header(self) -> dict[str, Any]:
        return {"header": self.logical.header, "blocks": {name: list(sizes) for name, sizes in self._sizes.items()}}

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
        with NewFile(folder / self.name, check) as file:
            file.write(bytes(data_start))
            sizes = array("I")
            for coded, nbytes in self._coded(pieces):
                file.write(coded)
                sizes.append(len(coded))
                progress(nbytes)
            file.write_head(join_head(text, sizes, data_start))

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
) -> list[CompressedPlan | ShardPlan]:
    """Divide tensors among the files of a compressed copy: what shrinks, and the rest, which mlx-lm may read."""
    metadata = {"format": "mlx"}
    small = [[tensor for tensor in group if tensor.name in shrinking] for group in groups]
    rest = [[tensor for tensor in group if tensor.name not in shrinking] for group in groups]
    tables = frozenset(record.name for unit in layout.embeddings for p in unit.large for record in p.records)
    coded = plan_shards(small, shard_bytes, metadata, COMPRESSED_NAME)
    return [*(CompressedPlan(plan, tables) for plan in coded), *plan_shards(rest, shard_bytes, metadata, PLAIN_NAME)]

"""A folder that mlx-lm can load lazily in place of a compressed copy.

Its shards have the headers of the compressed files, and holes for weights. mlx-lm only makes arrays of their shapes.
The weights are read by :mod:`mlx_flash.storage`, and the files are cut to nothing as soon as the model is there, so
that reading from one raises an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from mlx_flash.errors import CheckpointError
from mlx_flash.folders import cache_directory
from mlx_flash.sessions import PrivateFolder
from mlx_flash.storage.blocks import LOGICAL_START
from mlx_flash.storage.safetensors import Checkpoint, TensorRecord


@contextmanager
def stock_folder(directory: Path, checkpoint: Checkpoint) -> Iterator[Path]:
    """Yield a folder that mlx-lm can load lazily: the model's own if nothing in it is compressed."""
    if not checkpoint.tables:
        yield directory
        return
    with closing(PrivateFolder(cache_directory() / "headers", "headers of compressed weights")) as private:
        paths = {shard.path.name: shard for shard in checkpoint.shards}
        for path in directory.iterdir():
            if path.name not in paths:
                (private.path / path.name).symlink_to(path.resolve())
        stand_ins = []
        for name, shard in paths.items():
            path = private.path / f"model-{name.removesuffix(shard.path.suffix)}.safetensors"
            if shard.blocks is None:
                path.symlink_to(shard.path.resolve())
            else:
                places = [(r, r.extent.offset - LOGICAL_START) for r in shard.tensors]
                tensors = {r.name: (r.dtype, r.shape, (start, start + r.nbytes)) for r, start in places}
                write_stand_in(path, tensors, shard.metadata)
                stand_ins.append(path)
        yield private.path
        for path in stand_ins:
            os.truncate(path, 0)


def write_stand_in(
    path: Path,
    tensors: Mapping[str, tuple[str, Sequence[int], Sequence[int]]],
    metadata: Mapping[str, str] | None,
    nbytes: int = 0,
) -> None:
    """Write a safetensors file with a hole in place of tensors: dtype, shape and data offsets by name.

    The file has at least so many bytes. Blanks in the header move the tensors to its end.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, (dtype, shape, offsets) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}
    end = max((offsets[1] for _, _, offsets in tensors.values()), default=0)
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(nbytes - 8 - end)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)


def whole_tensors(checkpoint: Checkpoint, records: Iterable[TensorRecord]) -> set[str]:
    """Return the names of tensors of which some records have every byte. Equal records count once.

    Parameters that mlx-lm computed may have a tensor's name. Their records are in the files of another copy.
    """
    found: dict[str, set[tuple[int, int]]] = {}
    tensors = checkpoint.tensors
    for record in records:
        if record.name in tensors and record.extent.path == tensors[record.name].extent.path:
            found.setdefault(record.name, set()).add((record.extent.offset, record.nbytes))
    return {name for name, parts in found.items() if sum(nbytes for _, nbytes in parts) == tensors[name].nbytes}


def check_direct(directory: Path, checkpoint: Checkpoint, records: Iterable[TensorRecord]) -> None:
    """Check that every compressed tensor is in the records that this program reads, since mlx-lm cannot read it.

    Raises:
        CheckpointError: mlx-lm would compute with one.
    """
    compressed = {record.name: record.nbytes for shard in checkpoint.shards if shard.blocks for record in shard.tensors}
    if not compressed:
        return
    if missing := sorted(compressed.keys() - whole_tensors(checkpoint, records)):
        raise CheckpointError(
            f"mlx-lm computes parameters from {missing[0]!r} of {directory} while it loads, and the tensor is "
            "compressed. Hint: pack the model without --compress, which makes an uncompressed copy of it."
        )

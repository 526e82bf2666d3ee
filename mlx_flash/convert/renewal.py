"""Direct parameters, loaded again from where their bytes lie."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from mlx_flash.layout.load import LoadedModel, iter_parameters
from mlx_flash.storage.safetensors import Checkpoint, TensorRecord


def bind(container: dict[Any, Any] | list[Any], key: Any, array: mx.array) -> None:
    """Puts an array into a module, dict or list; a module does not look at it."""
    if isinstance(container, dict):
        dict.__setitem__(container, key, array)
    else:
        container[key] = array


def renew(loaded: LoadedModel, checkpoint: Checkpoint) -> None:
    """Loads the direct parameters of a model again, in place.

    The arrays that they were may be what derived ones are computed from. They would be evaluated with these, and since
    the model has them they would stay in memory.
    """
    files = {shard.path: cast(dict[str, mx.array], mx.load(str(shard.path))) for shard in checkpoint.shards}
    whole = {(shard.path, record.name): record for shard in checkpoint.shards for record in shard.tensors}
    renewed: dict[int, mx.array] = {}
    for _, container, key, array in list(iter_parameters(loaded.model, "")):
        records = loaded.sources.get(id(array), ())
        if records:
            if id(array) not in renewed:
                renewed[id(array)] = _joined([_rows(files, whole, record) for record in records], array)
            bind(container, key, renewed[id(array)])
    sources = {id(fresh): loaded.sources[key] for key, fresh in renewed.items()}
    loaded.sources.clear()
    loaded.sources.update(sources)
    loaded.keep_alive[:] = renewed.values()
    gc.collect()  # what is in cycles holds arrays too


def _rows(
    files: dict[Path, dict[str, mx.array]], whole: dict[tuple[Path, str], TensorRecord], record: TensorRecord
) -> mx.array:
    """The lazily loaded tensor, or rows of it, that a record describes."""
    place = record.extent.path, record.name
    array, tensor = files[record.extent.path][record.name], whole[place]
    if record.extent == tensor.extent:
        return array
    row_bytes = tensor.nbytes // tensor.shape[0]
    start = (record.extent.offset - tensor.extent.offset) // row_bytes
    return array[start : start + record.nbytes // row_bytes]


def _joined(parts: Sequence[mx.array], like: mx.array) -> mx.array:
    """An array of some shape and dtype whose bytes are those of others, one after another."""
    if len(parts) == 1 and (parts[0].shape, parts[0].dtype) == (like.shape, like.dtype):
        return parts[0]
    flat = mx.concatenate([part.reshape(-1) for part in parts])
    return flat.view(like.dtype).reshape(like.shape)

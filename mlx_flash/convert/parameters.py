"""The parameters of a model by origin: derived ones were computed while loading, direct ones can be loaded again."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_flash.convert.writer import TensorSpec
from mlx_flash.layout.load import LoadedModel, iter_parameters
from mlx_flash.layout.parts import bind
from mlx_flash.storage.safetensors import Checkpoint, TensorRecord

_DTYPES = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.float32: "F32",
    mx.uint64: "U64",
    mx.int64: "I64",
    mx.complex64: "C64",
}


@dataclass(slots=True, eq=False)
class DerivedParameter:
    """A parameter that was computed, at every place of the model that holds it.

    Attributes:
        name: its path in the model, the first one if there are several.
        array: not evaluated; None once it was let go.
        places: (container, key) of each.
        spec: the tensor that it is written as.
    """

    name: str
    array: mx.array | None
    places: list[tuple[Any, Any]]
    spec: TensorSpec

    def bind(self, array: mx.array) -> None:
        """Put another array in its places."""
        for container, key in self.places:
            bind(container, key, array)

    def let_go(self) -> mx.array:
        """Hands the array over; nothing else holds it afterwards.

        In its places is an array that nothing can be computed with: a model that was left half done must not be used.
        """
        assert self.array is not None
        array, self.array = self.array, None
        self.bind(mx.zeros((0,), array.dtype))
        return array


def derived_parameters(loaded: LoadedModel) -> list[DerivedParameter]:
    """The parameters that were computed from tensors of the checkpoint, in the order of the module tree.

    Constants that a module makes for itself, such as RoPE frequencies, are private to it and none of them: mlx-lm loads
    weights into what ``parameters()`` names.
    """
    named = {id(array) for _, array in cast(Any, tree_flatten(loaded.model.parameters()))}
    found: dict[int, DerivedParameter] = {}
    for name, container, key, array in iter_parameters(loaded.model, ""):
        if id(array) in loaded.sources or id(array) not in named or not array.nbytes:
            continue
        if array.dtype in _DTYPES:
            spec = TensorSpec(name, _DTYPES[array.dtype], tuple(array.shape), int(array.nbytes))
            parameter = found.setdefault(id(array), DerivedParameter(name, array, [], spec))
            parameter.places.append((container, key))
    return list(found.values())


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
    width = 1 if array.ndim == 1 else array.shape[-1]
    row_bytes = tensor.nbytes * width // array.size
    start = (record.extent.offset - tensor.extent.offset) // row_bytes
    rows = array.reshape(-1, width)[start : start + record.nbytes // row_bytes]
    return rows.reshape(record.shape) if array.dtype.size == record.itemsize else rows


def _joined(parts: Sequence[mx.array], like: mx.array) -> mx.array:
    """An array of some shape and dtype whose bytes are those of others, one after another."""
    if len(parts) == 1 and (parts[0].shape, parts[0].dtype) == (like.shape, like.dtype):
        return parts[0]
    flat = mx.concatenate([part.reshape(-1) for part in parts])
    return flat.view(like.dtype).reshape(like.shape)

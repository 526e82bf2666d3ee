"""The parameters of a model that mlx-lm computed while loading, in contrast to those that are tensors of a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_flash.convert.writer import TensorSpec
from mlx_flash.layout.load import LoadedModel, iter_parameters
from mlx_flash.layout.parts import bind

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
    """A parameter that was computed, at every place (container, key) of the model that holds it.

    Its name is its path in the model, the first one if there are several. The array is not evaluated.
    """

    array: mx.array
    places: list[tuple[Any, Any]]
    spec: TensorSpec

    def bind(self, array: mx.array) -> None:
        """Put another array in its places."""
        for container, key in self.places:
            bind(container, key, array)


def derived_parameters(loaded: LoadedModel) -> list[DerivedParameter]:
    """The parameters that were computed from tensors of the checkpoint, in the order of the module tree.

    Constants that a module makes for itself, such as RoPE frequencies, are private to it and none of them: mlx-lm loads
    weights into what ``parameters()`` names.
    """
    named = {id(array) for _, array in cast(Any, tree_flatten(loaded.model.parameters()))}
    found: dict[int, DerivedParameter] = {}
    for name, container, key, array in iter_parameters(loaded.model):
        if id(array) in loaded.sources or id(array) not in named or not array.nbytes:
            continue
        if array.dtype in _DTYPES:
            spec = TensorSpec(name, _DTYPES[array.dtype], tuple(array.shape))
            parameter = found.setdefault(id(array), DerivedParameter(array, [], spec))
            parameter.places.append((container, key))
    return list(found.values())

"""The adapters that make whole matrices in each call, and the memory that these take."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.nn as nn
from mlx.utils import tree_map

from mlx_flash.compat.adapters import adapted_part, adapted_product
from mlx_flash.compat.tape import result_bytes, tape_of
from mlx_flash.layout.parts import Parameter
from mlx_flash.layout.trace import CallTrace, zeros_for


def find_adapted(modules: Sequence[nn.Module], trace: CallTrace) -> tuple[nn.Module, ...]:
    """Return the adapters that make a whole matrix in each call. An embedding that only looks up rows makes none."""
    return tuple(module for module in modules if id(module) in trace.called and _is_whole(module, trace))


def _is_whole(module: nn.Module, trace: CallTrace) -> bool:
    part = adapted_part(module)
    return part is not None and not trace.covers(part, [(id(part), "weight")])


def adapted_bytes(modules: Sequence[nn.Module], parameters: Sequence[Parameter]) -> int:
    """Return the most bytes of the results of one adapter. Nothing is computed.

    Args:
        modules: the adapters.
        parameters: every array of the model.
    """
    found: dict[object, int] = {}
    with zeros_for(parameters):
        for module in modules:
            key = str(tree_map(lambda array: (array.shape, array.dtype), module.parameters()))
            if key not in found:
                product, x = adapted_product(module)
                found[key] = result_bytes(tape_of(product, [x]))
    return max(found.values(), default=0)

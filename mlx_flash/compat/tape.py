"""The memory that a computation takes, from MLX's own record of its operations. Nothing is computed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from mlx_flash.compat.require import require

require(mx, "export_function")

_VIEWS = frozenset({"Broadcast", "BroadcastAxes", "ExpandDims", "Slice", "Split", "Squeeze", "StopGradient"})
"""Primitives whose results share the memory of their input."""

_ORDERS = frozenset({"AsStrided", "Slice", "Split", "Transpose"})
"""Primitives whose results share the memory of their input in another order."""

_RESHAPES = frozenset({"Flatten", "Reshape", "Unflatten"})
"""Primitives whose results share the memory of their input where its order allows it."""

_INTO_NEW = frozenset({"Concatenate", "Convolution", "Gather", "GatherAxis", "Matmul", "AddMM", "QuantizedMatmul"})
"""Primitives that never write into the memory of an input."""

_CONVOLUTION_BYTES = 4


def tape_of(function: Callable[..., Any], inputs: Sequence[mx.array]) -> list[Mapping[str, Any]]:
    """Return MLX's record of a function: its inputs, outputs and operations in an order in which they can run.

    Args:
        function: takes arrays, returns arrays. It may not look at their numbers.
        inputs: arrays of the shapes that count.

    Raises:
        ValueError: it does.
    """
    events: list[Mapping[str, Any]] = []
    mx.export_function(events.append, function, *inputs)
    return events


def result_bytes(tape: Sequence[Mapping[str, Any]]) -> int:
    """Return the most bytes that the results of a record's operations take, inputs and constants not counted.

    MLX runs ahead of its devices, so a result may be there until all are computed. Only the one use of a result lets
    the next operation write into its memory.
    """
    steps = [event for event in tape if event["type"] == "primitive"]
    uses = Counter(name for step in steps for name, _, _ in step["inputs"])
    sizes: dict[str, int] = {}  # of results that the next operation may write into
    in_order: dict[str, bool] = {}
    total = scratch = 0
    for step in steps:
        kind, names = step["name"], [name for name, _, _ in step["inputs"]]
        was_in_order = all(in_order.get(name, True) for name in names[:1])
        is_view = kind in _VIEWS | _ORDERS or (kind in _RESHAPES and was_in_order)
        free = [] if kind in _INTO_NEW else [sizes.get(name, 0) for name in names if uses[name] == 1]
        for name, shape, dtype in step["outputs"]:
            nbytes = math.prod(shape) * dtype.size
            in_order[name] = kind not in _ORDERS and (was_in_order or kind not in _VIEWS)
            if is_view:
                sizes[name] = sizes.get(names[0], 0) if names and uses[names[0]] == 1 else 0
                continue
            sizes[name] = nbytes
            if nbytes in free:
                free.remove(nbytes)
            else:
                total += nbytes
        scratch = max(scratch, _scratch_bytes(step))
    return total + scratch


def _scratch_bytes(step: Mapping[str, Any]) -> int:
    """Return what an operation takes beside its result: a convolution copies its input and all windows of it.

    The CPU back end computes it in 32 bits.
    """
    if step["name"] != "Convolution":
        return 0
    (_, given, dtype), (_, weight, _) = step["inputs"][:2]
    [(_, result, _)] = step["outputs"]
    windows = math.prod(result[:-1]) * math.prod(weight[1:])
    converted = math.prod(result) + math.prod(weight) if dtype.size < _CONVOLUTION_BYTES else 0
    return int((windows + math.prod(given) + converted) * _CONVOLUTION_BYTES)

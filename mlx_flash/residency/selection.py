"""The choice of streamed tensors: a number of bytes, spread evenly, so that reading overlaps computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_flash.residency.sizes import Chosen, TensorSize, UnitSize


@dataclass(frozen=True, slots=True)
class Streamed:
    """Sums over the streamed tensors of layers. Sizes in bytes.

    Attributes:
        num_layers: those of which anything is streamed.
        nbytes: what is read.
        buffer_bytes: what all of it would take in memory.
        largest: what the layer takes of a buffer that takes most.
    """

    num_layers: int
    nbytes: int
    buffer_bytes: int
    largest: int


_NONE: Chosen = ((), 0, 0)


def add_up(chosen: Sequence[Chosen]) -> Streamed:
    """Add up the streamed tensors of each layer."""
    buffers = [buffer_bytes for _, _, buffer_bytes in chosen]
    num_layers = len(buffers) - buffers.count(0)
    return Streamed(num_layers, sum([nbytes for _, nbytes, _ in chosen]), sum(buffers), max(buffers, default=0))


def spread(layers: Sequence[UnitSize], target: int, whole_layers: bool) -> list[tuple[TensorSize, ...]]:
    """Choose the streamed tensors of each layer, so that every stretch of layers has its share of the target bytes.

    With ``whole_layers`` a layer is streamed whole or not at all; fewer layers are waited for then.
    """
    chosen = [tensors for tensors, _, _ in choose(layers, target, whole_layers)]
    return [
        tensors if len(tensors) in (0, len(unit.tensors)) else _in_order(unit, tensors)
        for unit, tensors in zip(layers, chosen, strict=True)
    ]


def choose(layers: Sequence[UnitSize], target: int, whole_layers: bool) -> list[Chosen]:
    """Choose as :func:`spread` does. Returns the bytes too."""
    total = max(sum([unit.nbytes for unit in layers]), 1)
    chosen, passed, done = [], 0, 0
    for unit in layers:  # thousands of times for a plan: only a layer of which a part is streamed needs a call
        passed += unit.nbytes
        due = target * passed // total - done
        least, most = (unit.nbytes, unit.nbytes) if whole_layers else unit.bounds
        found = _NONE if 2 * due < least else unit.whole if 2 * due >= most else _some(unit, due)
        done += found[1]
        chosen.append(found)
    return chosen


def _in_order(unit: UnitSize, tensors: tuple[TensorSize, ...]) -> tuple[TensorSize, ...]:
    names = {tensor.name for tensor in tensors}
    return tuple([tensor for tensor in unit.tensors if tensor.name in names])


def _some(unit: UnitSize, due: int) -> Chosen:
    """Tensors of together about ``due`` bytes, the largest first."""
    kept, nbytes, buffer_bytes = [], 0, 0
    for tensor in unit.largest_first:
        if 2 * due >= tensor.nbytes:
            kept.append(tensor)
            due -= tensor.nbytes
            nbytes += tensor.nbytes
            buffer_bytes += tensor.buffer_bytes
    if len(kept) == len(unit.tensors):
        return unit.tensors, nbytes, buffer_bytes
    return tuple(kept), nbytes, buffer_bytes

"""The choice of streamed tensors: a number of bytes, spread evenly, so that reading overlaps computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_flash.residency.sizes import TensorSize, UnitSize


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


def add_up(chosen: Sequence[tuple[TensorSize, ...]]) -> Streamed:
    """Add up the streamed tensors of each layer."""
    buffers = [sum([tensor.buffer_bytes for tensor in tensors]) for tensors in chosen]
    nbytes = sum([tensor.nbytes for tensors in chosen for tensor in tensors])
    return Streamed(sum(map(bool, chosen)), nbytes, sum(buffers), max(buffers, default=0))


def spread(layers: Sequence[UnitSize], target: int, whole_layers: bool) -> list[tuple[TensorSize, ...]]:
    """Choose the streamed tensors of each layer, so that every stretch of layers has its share of the target.

    Args:
        layers: the layers.
        target: bytes to stream, over all layers.
        whole_layers: stream a layer whole or not at all; fewer layers are waited for then.
    """
    total = max(sum([unit.nbytes for unit in layers]), 1)
    choose = _whole if whole_layers else _some
    chosen, passed, done = [], 0, 0
    for unit in layers:
        passed += unit.nbytes
        tensors = choose(unit, target * passed // total - done)
        done += unit.nbytes if tensors is unit.tensors else sum([tensor.nbytes for tensor in tensors])
        chosen.append(tensors)
    return chosen


def spread_whole(units: Sequence[UnitSize], target: int) -> list[UnitSize]:
    """Choose units to stream whole, of together about ``target`` bytes, evenly over all of them."""
    return [unit for unit, tensors in zip(units, spread(units, target, True), strict=True) if tensors]


def _whole(unit: UnitSize, due: int) -> tuple[TensorSize, ...]:
    return unit.tensors if 2 * due >= unit.nbytes else ()


def _some(unit: UnitSize, due: int) -> tuple[TensorSize, ...]:
    """Tensors of together about ``due`` bytes, the largest first."""
    kept = set()
    for tensor in unit.largest_first:
        if 2 * due >= tensor.nbytes:
            kept.add(tensor.name)
            due -= tensor.nbytes
    if len(kept) in (0, len(unit.tensors)):
        return unit.tensors if kept else ()
    return tuple([tensor for tensor in unit.tensors if tensor.name in kept])

"""Which tensors of which layers are streamed, so that reading overlaps computing evenly. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_flash.residency.sizes import TensorSize, UnitSize


def spread(layers: Sequence[UnitSize], target: int, whole_layers: bool) -> list[tuple[TensorSize, ...]]:
    """Chooses which tensors of each layer are streamed, so that every stretch of layers has its share of the target.

    Args:
        layers: the layers.
        target: bytes to stream, over all layers.
        whole_layers: stream a layer whole or not at all; fewer layers are waited for then.
    """
    total = sum(unit.nbytes for unit in layers)
    chosen, passed, done = [], 0, 0
    for unit in layers:
        passed += unit.nbytes
        due = target * passed // max(total, 1) - done
        tensors = _whole(unit, due) if whole_layers else _some(unit, due)
        done += unit.nbytes if tensors is unit.tensors else sum([tensor.nbytes for tensor in tensors])
        chosen.append(tensors)
    return chosen


def spread_whole(units: Sequence[UnitSize], target: int) -> list[UnitSize]:
    """Chooses units to stream whole, of together about ``target`` bytes, evenly over all of them."""
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

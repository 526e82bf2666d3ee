"""The choice of streamed tensors: a number of bytes, spread evenly, so that reading overlaps computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mlx_flash.residency.sizes import TensorSize, UnitSize


@dataclass(frozen=True)
class Streamed:
    """The streamed tensors of some layers. Sizes in bytes.

    Attributes:
        layers: all of them.
        pieces: those of each layer, or the layer itself for all of them.
        buffers: what these take of a buffer.
    """

    layers: Sequence[UnitSize]
    pieces: Sequence[Sequence[TensorSize | UnitSize]]
    buffers: Sequence[int]

    @cached_property
    def num_layers(self) -> int:
        """Layers of which anything is streamed."""
        return len(self.buffers) - self.buffers.count(0)

    @cached_property
    def nbytes(self) -> int:
        """Bytes that are read."""
        return sum([piece.nbytes for pieces in self.pieces for piece in pieces])

    @cached_property
    def buffer_bytes(self) -> int:
        """Memory that all of it would take."""
        return sum(self.buffers)

    @cached_property
    def largest(self) -> int:
        """Buffer bytes of the layer that takes most."""
        return max(self.buffers, default=0)

    @cached_property
    def names(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The name of each layer of which anything is streamed, and the names of these tensors, in their order."""
        found = []
        for unit, pieces in zip(self.layers, self.pieces, strict=True):
            chosen = {piece.name for piece in pieces}
            is_whole = unit.name in chosen
            names = [tensor.name for tensor in unit.tensors if is_whole or tensor.name in chosen]
            found += [(unit.name, tuple(names))] if names else []
        return tuple(found)


def spread(layers: Sequence[UnitSize], target: int, whole_layers: bool) -> Streamed:
    """Choose the streamed tensors of each layer, so that every stretch of layers has its share of the target bytes.

    With ``whole_layers`` a layer is streamed whole or not at all; fewer layers are waited for then. Otherwise the
    largest tensors of a layer come first.
    """
    total = max(sum([unit.nbytes for unit in layers]), 1)
    chosen: list[list[TensorSize | UnitSize]] = []
    buffers, passed, done = list[int](), 0, 0
    for unit in layers:
        passed += unit.nbytes
        due = target * passed // total - done
        found: list[TensorSize | UnitSize] = []
        taken = 0
        for piece in (unit,) if whole_layers else unit.largest_first:
            if 2 * due >= piece.nbytes:
                found.append(piece)
                taken += piece.buffer_bytes
                due -= piece.nbytes
                done += piece.nbytes
        chosen.append(found)
        buffers.append(taken)
    return Streamed(layers, chosen, buffers)

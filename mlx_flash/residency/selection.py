"""The choice of streamed tensors: a number of bytes, spread evenly, so that reading overlaps computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mlx_flash.residency.sizes import Piece, UnitSize


@dataclass(frozen=True)
class Streamed:
    """The streamed tensors of some layers. Sizes in bytes.

    Attributes:
        layers: all of them.
        pieces: those of each layer.
        buffers: what these take of a buffer.
    """

    layers: Sequence[UnitSize]
    pieces: Sequence[Sequence[Piece]]
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
            chosen = {name for piece in pieces for name in piece.names}
            if chosen:
                found.append((unit.name, tuple([tensor.name for tensor in unit.tensors if tensor.name in chosen])))
        return tuple(found)


def spread(layers: Sequence[UnitSize], target: int, whole_layers: bool) -> Streamed:
    """Choose the streamed tensors of each layer, so that every stretch of layers has its share of the target bytes.

    With ``whole_layers`` a layer is streamed whole or not at all; fewer layers are waited for then. Otherwise the
    largest tensors of a layer come first.
    """
    total = max(sum([unit.nbytes for unit in layers]), 1)
    chosen, buffers, passed, done = list[list[Piece]](), list[int](), 0, 0
    for unit in layers:
        passed += unit.nbytes
        due = target * passed // total - done
        found, taken = [], 0
        for piece in unit.whole if whole_layers else unit.pieces:
            if 2 * due >= piece.nbytes:
                found.append(piece)
                taken += piece.buffer_bytes
                due -= piece.nbytes
                done += piece.nbytes
        chosen.append(found)
        buffers.append(taken)
    return Streamed(layers, chosen, buffers)

"""The experts of a layer, as the expert pool sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, cast

import numpy as np

from mlx_flash.layout.experts import place_experts
from mlx_flash.layout.parts import ExpertStack
from mlx_flash.storage.placement import PlacedRows, Segment

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
ABSENT = -1


@dataclass(slots=True)
class ExpertStats:
    """Counters of the experts.

    Attributes:
        num_calls: calls of layers of experts.
        num_full: those that ran at the full number of experts.
        num_routed: experts that calls needed, each once a call.
        num_hits: those of them that were in the pool, or in flight, when the call came.
        num_predicted: experts that were read because a router was expected to choose them.
        num_predicted_right: those of them that the next call of their layer needed.
        num_evicted: experts that lost their slots to others.
        read_bytes: bytes of experts that were read.
        wait_seconds: time that calls waited for experts.
    """

    num_calls: int = 0
    num_full: int = 0
    num_routed: int = 0
    num_hits: int = 0
    num_predicted: int = 0
    num_predicted_right: int = 0
    num_evicted: int = 0
    read_bytes: int = 0
    wait_seconds: float = 0.0


@dataclass(frozen=True)
class PoolLayer:
    """The experts of one layer, as the pool sees them.

    Attributes:
        placements: where the tensors of each expert lie, in its file and in a slot: there all in the same places.
        kept: arrays that are always in memory, as bytes ``(experts, row)``, and where their rows go in a slot.
        expert_bytes: bytes of one expert that are read from disk.
        stacks: the offset of each tensor that is read, if slots are parts of stacks. ``kept`` has such offsets then,
            too.
    """

    placements: PlacedRows
    kept: Sequence[tuple[int, Bytes]]
    expert_bytes: int
    stacks: tuple[int, ...] | None = None

    @cached_property
    def file_order(self) -> Sequence[tuple[str, int]]:
        """For each expert a key that sorts experts as their bytes lie on disk."""
        return self.placements.starts

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offsets in each slot of the tensors that are read."""
        return self.placements.offsets if self.stacks is None else self.stacks

    @property
    def widths(self) -> list[int]:
        """Bytes of each tensor of an expert: first those that are read, then those that are kept."""
        pieces = chain.from_iterable(segment.pieces for segment in self.placements[0].segments)
        sizes = {piece.buffer_offset: piece.nbytes for piece in pieces}
        return [*(sizes[offset] for offset in self.placements.offsets), *(rows.shape[1] for _, rows in self.kept)]

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return len(self.placements)

    def segments(self, expert: int) -> Sequence[Segment]:
        """Return the reads of an expert to the memory of its slot."""
        segments = self.placements[expert].segments
        if self.stacks is None:
            return segments
        offsets, found = dict(zip(self.placements.offsets, self.stacks, strict=True)), []
        for segment in segments:
            pieces = tuple([replace(piece, buffer_offset=offsets[piece.buffer_offset]) for piece in segment.pieces])
            found.append(Segment(segment.path, segment.offset, segment.nbytes, None, pieces))
        return found


def pool_layer(stack: ExpertStack) -> PoolLayer:
    """Return what the pool needs of a stack, whose small parameters have been evaluated."""
    placed = place_experts(stack)
    rows = [
        np.frombuffer(memoryview(cast(Any, p.array)).cast("B"), np.uint8).reshape(stack.num_experts, -1)
        for p in stack.unit.small
    ]
    return PoolLayer(placed.read, list(zip(placed.kept, rows, strict=True)), stack.expert_bytes)


def stack_layers(layers: Sequence[PoolLayer], offsets: Sequence[int]) -> list[PoolLayer]:
    """Return layers whose experts lie in stacks.

    Args:
        layers: layers whose experts have tensors of the same sizes.
        offsets: of each tensor in a slot, in the order of :attr:`PoolLayer.widths`.
    """
    num_read = len(layers[0].placements.offsets)
    read, kept = tuple(offsets[:num_read]), offsets[num_read:]
    return [
        replace(layer, stacks=read, kept=[(offset, rows) for offset, (_, rows) in zip(kept, layer.kept, strict=True)])
        for layer in layers
    ]

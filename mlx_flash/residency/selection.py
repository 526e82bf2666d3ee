"""The choice of what is streamed: tensors, spread evenly so that reading overlaps computing, and tiles of heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter

from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, round_up
from mlx_flash.residency.sizes import TensorSize, UnitSize

MAX_TILES = 60
"""Each tile is waited for."""

TILE_ROW_MULTIPLE = 64
TILE_SLACK_BYTES = 12 * DIRECT_ALIGNMENT
"""Padding to pages and alignment that a tile may need beside its rows."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """The streamed tensors of some layers. Sizes in bytes.

    Attributes:
        layers: all of them.
        pieces: those of each layer, or the layer itself for all of them.
        reads: bytes that are read of each layer.
        num_layers: layers of which anything is streamed.
        buffer_bytes: memory that all of it would take.
        largest: buffer bytes of the layer that takes most.
    """

    layers: Sequence[UnitSize]
    pieces: Sequence[Sequence[TensorSize | UnitSize]]
    reads: Sequence[int]
    num_layers: int
    buffer_bytes: int
    largest: int

    @property
    def names(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The name of each layer of which anything is streamed, and the names of these tensors, in their order."""
        found, name_of = list[tuple[str, tuple[str, ...]]](), attrgetter("name")
        for unit, pieces, nbytes in zip(self.layers, self.pieces, self.reads, strict=True):
            if pieces:
                is_whole = nbytes == unit.nbytes
                chosen = unit.tensors if is_whole else [tensor for tensor in unit.tensors if tensor in pieces]
                found.append((unit.name, tuple(map(name_of, chosen))))
        return tuple(found)


def spread(layers: Sequence[UnitSize], target: int, whole_layers: bool) -> Streamed:
    """Choose the streamed tensors of each layer, so that every stretch of layers has its share of the target bytes.

    With ``whole_layers`` a layer is streamed whole or not at all; fewer layers are waited for then. Otherwise the
    largest tensors of a layer come first.
    """
    total = max(sum(map(attrgetter("nbytes"), layers)), 1)
    chosen: list[list[TensorSize | UnitSize]] = []
    reads, buffers, passed, done = list[int](), list[int](), 0, 0
    for unit in layers:
        passed += unit.nbytes
        due = target * passed // total - done
        found: list[TensorSize | UnitSize] = []
        read = taken = 0
        for piece in (unit,) if whole_layers else unit.largest_first:
            if 2 * due >= piece.nbytes:
                found.append(piece)
                read += piece.nbytes
                taken += piece.buffer_bytes
                due -= piece.nbytes
        done += read
        chosen.append(found)
        reads.append(read)
        buffers.append(taken)
    return Streamed(layers, chosen, reads, len(buffers) - buffers.count(0), sum(buffers), max(buffers, default=0))


@dataclass(frozen=True, slots=True)
class Tiles:
    """The heads that are streamed, in tiles of rows.

    Attributes:
        heads: these.
        rows: of a tile of each.
        number: of all tiles.
        slot_bytes: size of a slot, for tiles and for what is streamed of a layer.
    """

    heads: Sequence[UnitSize]
    rows: Sequence[int]
    number: int
    slot_bytes: int


def cut_heads(heads: Sequence[UnitSize], largest_layer: int, tile_bytes: int, *, is_exact: bool) -> Tiles:
    """Cut heads into tiles of some bytes at least, beside layers of which the largest takes so much of a slot.

    A head is one tile unless ``is_exact``: some rows are computed as in the whole product.
    """
    if not heads:
        return Tiles((), (), 0, largest_layer)
    whole = max([head.nbytes for head in heads])
    least = max([max(TILE_ROW_MULTIPLE * head.row_bytes, head.nbytes // MAX_TILES) for head in heads])
    tile = max(least, min(tile_bytes, whole) if is_exact else whole)
    slot_bytes = max(largest_layer, tile + TILE_SLACK_BYTES)
    rows = [tile_rows(head.num_rows or 0, head.row_bytes, slot_bytes) for head in heads]
    number = sum([-(-(head.num_rows or 0) // each) for head, each in zip(heads, rows, strict=True)])
    return Tiles(heads, rows, number, slot_bytes)


@lru_cache(1024)  # a search asks for thousands, and layers are alike
def tile_rows(num_rows: int, row_bytes: int, slot_bytes: int) -> int:
    """Return the rows in one tile of a head with so many: few equal tiles that fit the slot, aligned."""
    most = max(TILE_ROW_MULTIPLE, (slot_bytes - TILE_SLACK_BYTES) // row_bytes)
    rows = min(round_up(-(-num_rows // -(-num_rows // most)), TILE_ROW_MULTIPLE), num_rows)
    return rows if rows <= most else most // TILE_ROW_MULTIPLE * TILE_ROW_MULTIPLE

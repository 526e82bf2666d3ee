"""The streamed part of a plan."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_flash.layout.parts import ModelLayout


@dataclass(frozen=True, slots=True)
class Streaming:
    """The weights that pass through the slots on every pass.

    Attributes:
        layers: of each layer that is not in memory whole, its name and the names of the parameters that are read.
        heads: rows a tile of each head, or embedding table serving as head, that is computed tile by tile.
        tables: names of the embedding tables of which rows are read on demand.
        is_tiled: whether linear layers of the layers are in ``heads``.
        cut: the cut whose units ``layers`` names: 0 for whole layers, ``i`` for ``finer[i - 1]`` of the layout.
        num_units: number of units that take turns in the slots: layers, and tiles of heads.
        num_slots: number of slots.
        slot_bytes: size of each.
        read_bytes: bytes read on a pass that decodes one token, embedding rows aside.
        seconds: predicted time of that pass.
        compute_seconds: the part of it that is not spent reading.
    """

    layers: tuple[tuple[str, tuple[str, ...]], ...] = ()
    heads: tuple[tuple[str, int], ...] = ()
    tables: tuple[str, ...] = ()
    num_units: int = 0
    num_slots: int = 0
    slot_bytes: int = 0
    read_bytes: int = 0
    seconds: float = 0.0
    compute_seconds: float = 0.0
    cut: int = 0
    is_tiled: bool = False

    def parameters(self, layout: ModelLayout) -> set[str]:
        """Return the names of the parameters that are read on every pass, or by rows."""
        apart = {*dict(self.heads), *self.tables}
        units = [*layout.cut(self.cut), *layout.heads, *layout.embeddings]
        partly = {name for _, names in self.layers for name in names}
        return partly | {parameter.name for unit in units if unit.name in apart for parameter in unit.large}

"""The part of a model that each of several machines computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import RenderableType
from rich.table import Table

from mlx_flash.engine.prepare import Prepared, share_equally
from mlx_flash.layout.units import layers_of
from mlx_flash.monitor.words import size
from mlx_flash.ranks.shares import runs


@dataclass(frozen=True, slots=True)
class RankPart:
    """The part of a model that one of several equal machines computes.

    Attributes:
        rank: its number.
        layers: first layer and the one after the last of each of its runs.
        nbytes: of these layers.
        files: the files that hold them.
    """

    rank: int
    layers: list[tuple[int, int]]
    nbytes: int
    files: list[str]


def rank_parts(prepared: Prepared, num_ranks: int) -> list[RankPart]:
    """Return the parts of all ranks, if machines like this one share a model."""
    owners = share_equally(prepared, num_ranks)
    layers = layers_of(prepared.loaded.model)
    owner_of = {id(module): rank for layer, rank in zip(layers, owners, strict=True) for module in layer.modules()}
    parts = []
    for rank in range(num_ranks):
        large = [p for unit in prepared.layout.layers if owner_of[id(unit.module)] == rank for p in unit.large]
        files = sorted({record.extent.path.name for parameter in large for record in parameter.records})
        parts.append(RankPart(rank, runs(owners, rank), sum(parameter.nbytes for parameter in large), files))
    return parts


def render_ranks(parts: Sequence[RankPart]) -> RenderableType:
    """Return a table of the ranks."""
    table = Table("Rank", "Layers", box=box.SIMPLE_HEAD)
    table.add_column("Weights", justify="right")
    table.add_column("Files")
    for part in parts:
        layers = ", ".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in part.layers)
        table.add_row(str(part.rank), layers, size(part.nbytes), ", ".join(part.files))
    return table

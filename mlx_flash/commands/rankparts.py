"""The part of a model that each of several machines computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import RenderableType
from rich.table import Table

from mlx_flash.engine.layershares import layer_bytes, share_equally
from mlx_flash.engine.prepare import Prepared
from mlx_flash.monitor.words import layer_runs, size
from mlx_flash.ranks import needed_files, runs


@dataclass(frozen=True, slots=True)
class RankPart:
    """The part of a model that one of several equal machines computes.

    Attributes:
        rank: its number.
        layers: first layer and the one after the last of each of its runs.
        nbytes: of these layers.
        files: the shards with them, or with what every machine computes.
    """

    rank: int
    layers: list[tuple[int, int]]
    nbytes: int
    files: list[str]


def rank_parts(prepared: Prepared, num_ranks: int) -> list[RankPart]:
    """Return the parts of all ranks, if machines like this one share a model."""
    owners = share_equally(prepared.loaded, prepared.plan, prepared.machine, num_ranks)
    nbytes = layer_bytes(prepared.loaded)
    needed = needed_files(len(nbytes), prepared.checkpoint)
    parts = []
    for rank in range(num_ranks):
        own = [number for number, owner in enumerate(owners) if owner == rank]
        parts.append(RankPart(rank, runs(owners, rank), sum(nbytes[number] for number in own), needed.of(own)))
    return parts


def render_ranks(parts: Sequence[RankPart], num_files: int) -> RenderableType:
    """Return a table of the ranks.

    Args:
        parts: theirs.
        num_files: shards of the model.
    """
    table = Table("Rank", "Layers", box=box.SIMPLE_HEAD)
    table.add_column("Weights", justify="right")
    table.add_column("Shards to copy, with all files that are no shards")
    for part in parts:
        files = f"all {num_files}" if 1 < num_files == len(part.files) else ", ".join(part.files)
        table.add_row(str(part.rank), layer_runs(part.layers), size(part.nbytes), files)
    return table

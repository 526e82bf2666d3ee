"""The order in which a pass reads a checkpoint's tensors, and what its reads are like."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import mean, median

from mlx_flash.layout.parts import ModelLayout, Parameter, Unit
from mlx_flash.memory.arena import kernel_alignment
from mlx_flash.storage.placement import place
from mlx_flash.storage.safetensors import Checkpoint, TensorRecord


@dataclass(frozen=True, slots=True)
class UnitTensors:
    """Names of the tensors of a unit. Streamed ones go by size, the largest first: the plan pins small ones.

    Every pass needs all of the streamed tensors of a unit that is read whole.
    """

    streamed: tuple[str, ...]
    others: tuple[str, ...]
    is_read_whole: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, in streaming order."""
        return self.streamed + self.others


@dataclass(frozen=True, slots=True)
class ReadPattern:
    """The reads of one pass over everything that is read whole: layers, heads, a table that serves as head."""

    num_units: int
    num_reads: int  # contiguous runs of bytes; a long one is then read in several steps
    num_copied: int  # runs that go through a bounce buffer, because their tensors are not aligned
    nbytes: int  # of all runs, in whole pages
    median_bytes: float  # of a run
    mean_bytes: float


def streaming_order(layout: ModelLayout, checkpoint: Checkpoint) -> list[UnitTensors]:
    """Every tensor of a checkpoint, in units, in the order in which a pass uses these: tables, layers, rest, heads.

    A tensor that is no unit's parameter, since mlx-lm computes with it while loading, goes to the unit whose name, or
    what the names of its other tensors begin with, begins that tensor's name; else it is one of the rest, each of which
    is a unit of its own.
    """
    owners = _owners(layout.units)
    homes = _homes(layout.units, owners)
    rest = []
    for name in sorted(checkpoint.tensors.keys() - owners.keys(), key=_natural):
        if (home := _find_home(name, homes)) is not None:
            owners[name] = home
        else:
            rest.append(UnitTensors((), (name,)))
    names = _names_by_unit(owners)
    tables = [_unit_tensors(unit, names, unit.name in layout.tied) for unit in layout.embeddings]
    layers = [_unit_tensors(unit, names, True) for unit in layout.layers]
    return [*tables, *layers, *rest, *(_unit_tensors(unit, names, True) for unit in layout.heads)]


def _owners(units: Iterable[Unit]) -> dict[str, Unit]:
    """The unit of each tensor that is a unit's parameter; the first one, where several share it."""
    owners: dict[str, Unit] = {}
    for unit in units:
        for record in _records([*unit.large, *unit.small]):
            owners.setdefault(record.name, unit)
    return owners


def _records(parameters: Sequence[Parameter]) -> list[TensorRecord]:
    return [parameter.record for parameter in parameters if parameter.record is not None]


def _names_by_unit(owners: dict[str, Unit]) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, unit in owners.items():
        names.setdefault(id(unit), []).append(name)
    return names


def _homes(units: Sequence[Unit], owners: dict[str, Unit]) -> dict[str, Unit]:
    """Return the places of tensors without an owner: units by their names in the model, and in the checkpoint."""
    names = _names_by_unit(owners)
    homes = {_common_prefix(names[id(unit)]): unit for unit in units if id(unit) in names}
    homes.update({unit.name: unit for unit in units})
    homes.pop("", None)
    return homes


def _common_prefix(names: Iterable[str]) -> str:
    columns = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, columns))


def _find_home(name: str, homes: dict[str, Unit]) -> Unit | None:
    parts = name.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
    return next((homes[prefix] for prefix in prefixes if prefix in homes), None)


def _unit_tensors(unit: Unit, names: dict[int, list[str]], is_read_whole: bool) -> UnitTensors:
    own = names.get(id(unit), [])
    sizes = {record.name: record.nbytes for record in _records(unit.large) if record.name in own}
    streamed = tuple(sorted(sizes, key=lambda name: sizes[name], reverse=True))
    return UnitTensors(streamed, tuple(name for name in own if name not in sizes), is_read_whole)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts expert 10 after expert 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def read_pattern(units: Sequence[UnitTensors], checkpoint: Checkpoint) -> ReadPattern:
    """Return how the units would be read from a checkpoint that holds their tensors."""
    read = [unit for unit in units if unit.is_read_whole]
    placements = [place([checkpoint.tensors[name] for name in unit.streamed], kernel_alignment()) for unit in read]
    segments = [segment for placement in placements for segment in placement.segments]
    sizes = [segment.nbytes for segment in segments] or [0]
    return ReadPattern(
        num_units=len(read),
        num_reads=len(segments),
        num_copied=sum(segment.buffer_offset is None for segment in segments),
        nbytes=sum(sizes),
        median_bytes=median(sizes),
        mean_bytes=mean(sizes),
    )

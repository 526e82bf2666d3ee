"""The files that a rank needs: those with weights of its own layers, and of what every rank computes.

A rank loads mlx-lm's model whole, so that the model's own code makes all shapes. For a shard that it lacks, another
rank sends the header. Reading weights from such a shard raises an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.nn as nn

from mlx_flash.errors import CheckpointError
from mlx_flash.folders import cache_directory
from mlx_flash.layout.load import iter_parameters
from mlx_flash.layout.parts import ModelLayout
from mlx_flash.ranks.peers import Peers
from mlx_flash.sessions import PrivateFolder
from mlx_flash.storage.safetensors import Checkpoint, read_shard

_HINT = "Hint: copy it; `mlx-flash plan --model DIR --ranks N` prints the files that each rank needs."


@dataclass(frozen=True, slots=True)
class NeededFiles:
    """The files of a checkpoint by the layers whose weights they hold.

    Attributes:
        layers: for each layer the names of the files.
        all_ranks: those with weights that every rank computes.
    """

    layers: list[set[str]]
    all_ranks: set[str]

    def of(self, numbers: Iterable[int]) -> list[str]:
        """Return the files that a rank with some layers needs."""
        return sorted(self.all_ranks.union(*(self.layers[number] for number in numbers)))


def needed_files(layers: Sequence[nn.Module], layout: ModelLayout, checkpoint: Checkpoint) -> NeededFiles:
    """Return the files that each layer needs.

    mlx-lm computes some parameters from tensors while it loads. Such a tensor counts for the one layer that others of
    its name's prefix belong to, and else for every rank.

    Args:
        layers: the model's layers.
        layout: the whole model.
        checkpoint: the tensors.
    """
    users = _users(layers, layout)
    known = {name for name in users if name in checkpoint.tensors}
    by_prefix: dict[str, set[int]] = {}
    for name, numbers in users.items():
        for prefix in _prefixes(name):
            by_prefix.setdefault(prefix, set()).update(numbers)
    needed = NeededFiles([set() for _ in layers], set())
    for name, record in checkpoint.tensors.items():
        numbers = users[name] if name in known else _guessed(name, by_prefix)
        for files in [needed.layers[number] for number in numbers] or [needed.all_ranks]:
            files.add(record.extent.path.name)
    return needed


_OUTSIDE = -1


def _users(layers: Sequence[nn.Module], layout: ModelLayout) -> dict[str, set[int]]:
    """Return the layers that use each tensor and each parameter, by name; none for those that every rank computes."""
    layers_of: dict[int, set[int]] = {}
    for number, layer in enumerate(layers):
        for _, container, _, _ in iter_parameters(layer):
            layers_of.setdefault(id(container), set()).add(number)
    users: dict[str, set[int]] = {}
    units = [parameter for unit in layout.units for parameter in [*unit.large, *unit.small]]
    for parameter in [*units, *layout.resident]:
        for name in (parameter.name, *(record.name for record in parameter.records)):
            users.setdefault(name, set()).update(layers_of.get(id(parameter.container), {_OUTSIDE}))
    return {name: set() if _OUTSIDE in numbers else numbers for name, numbers in users.items()}


def _prefixes(name: str) -> list[str]:
    """Return the modules that a tensor is in, the innermost first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def _guessed(name: str, by_prefix: dict[str, set[int]]) -> set[int]:
    found = next((by_prefix[prefix] for prefix in _prefixes(name) if prefix in by_prefix), set())
    return found if len(found) == 1 else set()


@dataclass(slots=True, weakref_slot=True, eq=False)
class RankFolder:
    """A model folder on a rank, completed by headers of the shards that it lacks.

    Attributes:
        path: the folder to load from.
        missing: for each rank the names of the shards that it lacks.
        rank: this one.
    """

    path: Path
    missing: list[set[str]]
    rank: int
    private: PrivateFolder | None = None
    _stand_ins: list[Path] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """True if this rank has all shards."""
        return not self.missing[self.rank]

    def has(self, path: Path) -> bool:
        """Return True if this rank has the weights of a shard."""
        return path.name not in self.missing[self.rank]

    def let_go(self) -> None:
        """Cut the weights off the stand-ins, once the model is loaded lazily: reading them raises from now on."""
        for path in self._stand_ins:
            os.truncate(path, 0)

    def able_ranks(self, needed: NeededFiles) -> list[list[int]]:
        """Return for each layer the ranks that have its files.

        Raises:
            CheckpointError: a rank lacks a file that every rank needs, or no rank has all files of a layer.
        """
        for rank, missing in enumerate(self.missing):
            if lacking := sorted(missing & needed.all_ranks):
                raise CheckpointError(
                    f"the folder of rank {rank} lacks {', '.join(lacking)}, with weights that every rank computes. "
                    f"{_HINT}"
                )
        able = [[rank for rank, missing in enumerate(self.missing) if not missing & files] for files in needed.layers]
        for number, ranks in enumerate(able):
            if not ranks:
                names = ", ".join(sorted(needed.layers[number]))
                raise CheckpointError(f"no rank has all files of layer {number}: {names}. {_HINT}")
        return able


def complete_folder(directory: Path, peers: Peers) -> RankFolder:
    """Return the model folder, with headers for shards that it lacks and another rank has. All ranks call it.

    Raises:
        CheckpointError: ranks have different shards of a name.
    """
    told = [json.loads(peers.data(_tell(directory), rank)) for rank in range(peers.size)]
    sizes = _common_sizes(told)
    missing = [sizes.keys() - shards.keys() for shards in told]
    headers = {}
    for name in sorted(set().union(*missing)):
        owner = next(rank for rank, lacking in enumerate(missing) if name not in lacking)
        headers[name] = peers.data(_header_of(directory / name) if owner == peers.rank else b"", owner)
    found = RankFolder(directory, missing, peers.rank)
    if not found.is_complete:
        found.private = PrivateFolder(cache_directory() / "ranks", "headers of other ranks")
        found.path = found.private.path
        _fill(found, directory, {name: (headers[name], sizes[name]) for name in missing[peers.rank]})
    return found


def _tell(directory: Path) -> bytes:
    return json.dumps({path.name: path.stat().st_size for path in directory.glob("model*.safetensors")}).encode()


def _header_of(path: Path) -> bytes:
    """Return the bytes before the data of a shard, with a valid header."""
    with path.open("rb") as file:
        return file.read(read_shard(path).data_offset)


def _common_sizes(told: Sequence[dict[str, int]]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for rank, shards in enumerate(told):
        for name, nbytes in shards.items():
            if sizes.setdefault(name, nbytes) != nbytes:
                raise CheckpointError(
                    f"{name} has {nbytes} bytes on rank {rank} and {sizes[name]} on one before it. Hint: copy "
                    "the model's folder again."
                )
    return sizes


def _fill(folder: RankFolder, directory: Path, stand_ins: dict[str, tuple[bytes, int]]) -> None:
    for path in directory.iterdir():
        (folder.path / path.name).symlink_to(path.resolve())
    for name, (header, nbytes) in stand_ins.items():
        path = folder.path / name
        path.unlink(missing_ok=True)
        with path.open("wb") as file:
            file.write(header)
            file.truncate(nbytes)  # a hole, which takes no space
        folder._stand_ins.append(path)

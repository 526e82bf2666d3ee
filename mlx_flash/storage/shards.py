"""The weight files of a model folder: mlx-lm's shards, or the files of a compressed copy."""

from __future__ import annotations

import glob
import re
from pathlib import Path
from reprlib import repr as brief
from typing import NoReturn

from mlx_flash.errors import CheckpointError, CheckpointNotFoundError
from mlx_flash.storage.blocks import COMPRESSED_SUFFIX

STOCK_PATTERN = "model*.safetensors"
"""Names of the shards that mlx-lm loads."""

COMPRESSED_NAME = f"compressed-{{number:05}}-of-{{count:05}}{COMPRESSED_SUFFIX}"
PLAIN_NAME = "uncompressed-{number:05}-of-{count:05}.safetensors"
"""Names of the files of a compressed copy. mlx-lm finds no shard there, and says so."""

_OWN = re.compile(rf"(compressed|uncompressed)-(\d{{5}})-of-(\d{{5}})({re.escape(COMPRESSED_SUFFIX)}|\.safetensors)")
_HINT = "Hint: copy the folder again, or pack the model again."


def weight_files(directory: Path) -> list[Path]:
    """Return the weight files that a folder has, of either kind."""
    own = (path for path in directory.glob("*compressed-*") if _OWN.fullmatch(path.name))
    return sorted([*directory.glob(STOCK_PATTERN), *own])


def find_shards(directory: Path) -> list[Path]:
    """Return the weight files of a model, in the order in which mlx-lm loads them.

    Raises:
        CheckpointNotFoundError: there is no such folder, or no shard in it, or a part of a compressed copy is missing.
        CheckpointError: the folder cannot be read, or has shards of both kinds.
    """
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError as fault:
        refuse_unreadable(directory, "folder", fault)
    own = [name for name in names if _OWN.fullmatch(name)]
    if own:
        return _compressed(directory, names, own)
    # The call of mlx_lm.utils.load_model, unsorted and unescaped: where two shards hold a
    # tensor of one name, the later shard wins, so the order must be the same.
    paths = [Path(found) for found in glob.glob(str(directory / STOCK_PATTERN))]  # noqa: PTH207
    is_pattern = glob.escape(str(directory)) != str(directory)
    if is_pattern and {path.parent for path in paths} != {directory}:
        raise CheckpointNotFoundError(
            f"{directory}: mlx-lm takes '*', '?' and '[' in this path for a pattern, which matches other folders "
            "or none. Hint: rename the folder."
        )
    if not paths:
        raise CheckpointNotFoundError(
            f"no {STOCK_PATTERN} in {directory}, which holds {brief(names)}. "
            "Hint: give the folder of the downloaded safetensors weights."
        )
    return paths


def _compressed(directory: Path, names: list[str], own: list[str]) -> list[Path]:
    stock = next((name for name in names if Path(name).match(STOCK_PATTERN)), None)
    if stock is not None:
        raise CheckpointError(f"{directory} has both {own[0]} and {stock}. Hint: remove one kind, or pack again.")
    kinds: dict[tuple[str, int, str], set[int]] = {}
    for kind, number, count, suffix in (match.groups() for match in map(_OWN.fullmatch, own) if match):
        kinds.setdefault((kind, int(count), suffix), set()).add(int(number))
    for (kind, count, suffix), numbers in kinds.items():
        if missing := set(range(1, count + 1)) - numbers:
            name = f"{kind}-{min(missing):05}-of-{count:05}{suffix}"
            raise CheckpointNotFoundError(f"{directory} lacks {name}, a part of a compressed copy. {_HINT}")
    if {"compressed", "uncompressed"} != {kind for kind, _, _ in kinds} or len(kinds) != 2:
        raise CheckpointNotFoundError(
            f"{directory} holds {brief(own)}, which are not the files of one compressed copy. {_HINT}"
        )
    return [directory / name for name in own]


def refuse_unreadable(path: Path, kind: str, fault: OSError) -> NoReturn:
    """Raise the error for a file or folder that the system cannot read."""
    if isinstance(fault, FileNotFoundError | NotADirectoryError):
        raise CheckpointNotFoundError(f"{path}: no such {kind}. Hint: check the path, or download it again.") from fault
    reason = fault.strerror or fault
    hint = "check its permissions" if isinstance(fault, PermissionError) else "download it again"
    raise CheckpointError(f"{path}: cannot read this {kind}: {reason}. Hint: {hint}.") from fault

"""A streamed model in place of one that mlx-lm loaded lazily."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_flash.compat.arrays import num_nodes
from mlx_flash.config import FlashConfig
from mlx_flash.engine.prepare import Prepared, prepare
from mlx_flash.errors import ConfigError
from mlx_flash.layout.load import iter_parameters

_HINT = "Hint: load it with mlx_flash.load(path, config), then change it."


def prepare_loaded(model: nn.Module, config: FlashConfig, path: Path | None) -> Prepared:
    """Plan for a model that mlx-lm loaded lazily. Its files are read again: nothing of the given model is used.

    Args:
        model: the model, as ``mlx_lm.load(path, lazy=True)`` returns it.
        config: how to stream.
        path: its folder; None finds it from the files that this process has open.

    Raises:
        ConfigError: the folder is unknown, or the model is not as mlx-lm loads it from there.
    """
    given = _recorded(model)
    if not any(operations for *_, operations in given.values()):
        raise ConfigError(f"FlashLLM takes a lazily loaded model, and the weights of this one are in memory. {_HINT}")
    folder = path or _folder_of_open_files()
    prepared = prepare(folder, config)
    fresh = _recorded(prepared.loaded.model)
    changed = [name for name in given.keys() | fresh.keys() if given.get(name) != fresh.get(name)]
    if changed:
        raise ConfigError(
            f"FlashLLM was given a model whose {min(changed)!r} is not as mlx-lm loads it from {folder}: "
            f"{len(changed)} parameters were changed or computed. {_HINT}"
        )
    return prepared


def _recorded(model: nn.Module) -> dict[str, tuple[Any, mx.Dtype, int]]:
    """Return the shape, the dtype and the number of recorded operations of each parameter."""
    named = {id(array) for _, array in cast(Any, tree_flatten(model.parameters()))}
    found = [(name, array) for name, _, _, array in iter_parameters(model) if id(array) in named]
    return {name: (array.shape, array.dtype, num_nodes(array)) for name, array in found}


def _folder_of_open_files() -> Path:
    folders = {path.parent for path in _open_files() if path.match("model*.safetensors")}
    if len(folders) != 1:
        names = ", ".join(sorted(map(str, folders))) or "none"
        raise ConfigError(
            f"the folder of a lazily loaded model is not known: this process has shards open in {names}. "
            "Hint: FlashLLM(model, config, model_path=...)"
        )
    return folders.pop()


def _open_files() -> list[Path]:
    found = []
    for fd in os.listdir("/dev/fd"):  # noqa: PTH208
        try:
            if sys.platform == "darwin":
                name = fcntl.fcntl(int(fd), fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0").decode()
            else:
                name = os.readlink(f"/dev/fd/{fd}")  # noqa: PTH115
        except OSError:
            continue  # closed meanwhile, or no file
        found.append(Path(name))
    return found

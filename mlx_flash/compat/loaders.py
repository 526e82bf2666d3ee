"""The functions with which mlx-lm finds, builds and loads models."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils
from mlx_lm.tuner import dora

from mlx_flash.compat.require import require

LoadModel = Callable[..., tuple[nn.Module, dict[str, Any]]]
ModelClasses = Callable[..., tuple[type[nn.Module], type]]

WRITERS = frozenset(
    {
        "mlx_lm.convert",
        "mlx_lm.fuse",
        "mlx_lm.gguf",
        "mlx_lm.lora",
        "mlx_lm.quant.awq",
        "mlx_lm.quant.dwq",
        "mlx_lm.quant.dynamic_quant",
        "mlx_lm.quant.gptq",
    }
)
"""Modules of mlx-lm that load a model in order to change its weights: the patch refuses them."""

_download = require(utils, "_download", "path_or_hf_repo", "revision")

model_classes: ModelClasses = require(utils, "_get_classes", "config")
"""The default of ``load_model(get_model_classes=...)``; a subclass of what it returns shows ``sanitize`` at work."""

_load_config = require(utils, "load_config", "model_path")

require(utils, "load_model", "model_path", "lazy", "strict", "model_config", "get_model_classes")


def missing_parameters(error: Exception) -> list[str]:
    """Return the parameters that mlx-lm found no tensors for, from its error; none if it says something else."""
    if isinstance(error, KeyError):  # sanitize() took a tensor that is not there
        return [name for name in error.args if isinstance(name, str)]
    head, _, names = str(error).partition(" parameters: \n")
    return names.removesuffix(".").split(",\n") if head.startswith("Missing ") else []


def makes_own_cache(path: Path) -> bool:
    """Return whether a model builds its own prompt cache. mlx-lm ignores ``max_kv_size`` then."""
    return hasattr(model_classes(_load_config(path))[0], "make_cache")


def download(path_or_hf_repo: str, revision: str | None = None) -> Path:
    """Return a model's folder; download it if the argument names no folder. ``mlx_lm.load`` begins with it."""
    return Path(_download(path_or_hf_repo, revision=revision))


def current_load_model() -> LoadModel:
    """Return ``mlx_lm.utils.load_model``, in which every way to load a model ends; the patch replaces it."""
    function: LoadModel = utils.load_model
    return function


ShardedLoad = Callable[..., tuple[Any, ...]]

stock_sharded_load: ShardedLoad = require(utils, "sharded_load", "repo", "pipeline_group", "tensor_group")
"""Loads a model that several ranks share."""


class Change(NamedTuple):
    """An attribute of mlx-lm that means something else while the patch is applied."""

    module: str
    name: str
    stock: Any
    new: Any

    def apply(self) -> None:
        """Replace the attribute, unless somebody has."""
        self._swap(self.stock, self.new)

    def undo(self) -> None:
        """Put the attribute back, unless somebody has replaced it once more."""
        self._swap(self.new, self.stock)

    def _swap(self, old: Any, new: Any) -> None:
        module = sys.modules.get(self.module)
        if module is not None and vars(module).get(self.name) is old:
            vars(module)[self.name] = new


DoRALinear: Any = require(dora, "DoRALinear")
DoRAEmbedding: Any = require(dora, "DoRAEmbedding")


ADAPTED = (DoRALinear, DoRAEmbedding)
"""Adapters that make a matrix in each call."""


def adapted_part(module: nn.Module) -> nn.Module:
    """Return the module with the weights that such an adapter changes."""
    part: nn.Module = module["embedding" if isinstance(module, DoRAEmbedding) else "linear"]
    return part


def adapted_product(module: Any) -> tuple[Callable[[mx.array], mx.array], mx.array]:
    """Return the product with the weights that a DoRA adapter has changed, and an input of one token for it."""
    is_table = isinstance(module, DoRAEmbedding)
    part = module.embedding if is_table else module.linear
    dtype = part["scales" if "scales" in part else "weight"].dtype
    width = module.lora_b.shape[1] if is_table else module.lora_a.shape[0]
    return module.as_linear if is_table else module, mx.zeros((1, 1, width), dtype)

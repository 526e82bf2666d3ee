"""mlx-vlm, a library of models that see. It is imported with this module, and with nothing else of mlx-flash.

mlx-vlm has layers and caches of its own, with mlx-lm's names and interfaces.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm import utils
from mlx_vlm.models import cache

from mlx_flash.compat.caches import CacheKinds
from mlx_flash.compat.require import require

TESTED_VLM = ("0.7.10", "0.7.10")
"""The oldest and the newest release of mlx-vlm that the tests ran with."""

VlmLoadModel = Callable[..., nn.Module]

VLM_WRITERS = frozenset({"mlx_vlm.convert", "mlx_vlm.lora", "mlx_vlm.train", "mlx_vlm.trainer.sft_trainer"})
"""Modules of mlx-vlm that load a model in order to change its weights: the patch refuses them."""

require(utils, "load_model", "model_path", "lazy")
require(utils, "load", "path_or_hf_repo", "adapter_path", "lazy")
require(utils, "sanitize_weights", "model_obj", "weights")
_load_safetensors = require(utils, "_load_safetensors", "path")
require(utils, "load_processor", "model_path", "add_detokenizer", "eos_token_ids")
require(utils, "load_image_processor", "model_path")
get_model_path: Callable[..., Path] = require(utils, "get_model_path", "path_or_hf_repo", "revision")
make_vlm_cache: Callable[[nn.Module], list[Any]] = require(cache, "make_prompt_cache", "model", "max_kv_size")

CacheKinds.add(cache)


def installed_vlm() -> str:
    """Return the version of mlx-vlm."""
    return importlib.metadata.version("mlx-vlm")


@contextmanager
def loaded_tensors(seen: Callable[[Mapping[str, mx.array]], None]) -> Iterator[None]:
    """Show the tensors that mlx-vlm loads from each file while a block runs, before it changes them."""

    def load(path: str) -> dict[str, mx.array]:
        found: dict[str, mx.array] = _load_safetensors(path)
        seen(found)
        return found

    utils._load_safetensors = load
    try:
        yield
    finally:
        utils._load_safetensors = _load_safetensors


def language_part(model: nn.Module) -> nn.Module | None:
    """Return the part of a model that mlx-vlm's loops call with tokens; None if it has none."""
    found = getattr(model, "language_model", None)
    return found if isinstance(found, nn.Module) else None


def current_vlm_load_model() -> VlmLoadModel:
    """Return ``mlx_vlm.utils.load_model``, in which ``mlx_vlm.load`` ends; the patch replaces it."""
    function: VlmLoadModel = utils.load_model
    return function


def replace_vlm_load_model(new: VlmLoadModel, old: VlmLoadModel) -> None:
    """Make mlx-vlm load models with another function, also where it has been imported by name."""
    utils.load_model = new
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_vlm") and module is not None and vars(module).get("load_model") is old:
            vars(module)["load_model"] = new


def load_processor(path: Path, model: nn.Module, **options: Any) -> Any:
    """Return the processor of texts and pictures for a model, as ``mlx_vlm.load`` does."""
    images = utils.load_image_processor(path, **options)
    processor = utils.load_processor(path, True, eos_token_ids=getattr(model.config, "eos_token_id", None), **options)
    if images is not None:
        processor.image_processor = images
    return processor

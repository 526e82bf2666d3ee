"""Random weights for any architecture, saved as mlx-lm's converter saves them."""

from __future__ import annotations

import contextlib
import copy
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path
from mlx_lm import utils as mlx_lm_utils

KEPT = ("signs",)
"""Parameters that keep the model's own values, because only certain values are valid."""


class UnfitError(Exception):
    """A fault of the zoo: a configuration lacks what its architecture needs."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A storage format of weights. Mixed: every other layer has 8 bits, embedding tables are not quantized."""

    dtype: mx.Dtype = mx.bfloat16
    bits: int | None = None
    group_size: int = 32
    mode: str = "affine"
    mixed: bool = False


VARIANTS = {
    "bf16": Variant(),
    "fp16": Variant(mx.float16),
    "fp32": Variant(mx.float32),
    "4bit": Variant(bits=4),
    "4bit-fp32": Variant(mx.float32, bits=4),
    "4bit-g64": Variant(bits=4, group_size=64),
    "8bit": Variant(bits=8),
    "mixed": Variant(mx.float32, bits=4, mixed=True),
    "mxfp4": Variant(bits=4, mode="mxfp4"),
    "mxfp8": Variant(bits=8, mode="mxfp8"),
    "nvfp4": Variant(bits=4, group_size=16, mode="nvfp4"),
}


def save(directory: Path, config: dict[str, Any], variant: Variant) -> None:
    """Write a random model and its configuration, with mlx-lm's own functions."""
    model = build(config, variant)
    config = copy.deepcopy(config)
    if variant.bits is not None:
        model, config = quantize(model, config, variant)
    mlx_lm_utils.save_model(directory, model)
    mlx_lm_utils.save_config(config, directory / "config.json")


def build(config: dict[str, Any], variant: Variant) -> nn.Module:
    """Return a random model, not quantized yet. Raises: UnfitError: the configuration lacks arguments."""
    mx.random.seed(7)
    model_class, args_class = mlx_lm_utils._get_classes(config)
    try:
        args = args_class.from_dict(copy.deepcopy(config))
    except TypeError as error:
        raise UnfitError(str(error)) from error
    model: nn.Module = model_class(args)
    may_cast = getattr(model, "cast_predicate", lambda name: True)

    def prepared(name: str, array: mx.array) -> mx.array:
        array = vary(name, array)
        castable = mx.issubdtype(array.dtype, mx.floating) and may_cast(name)
        return array.astype(variant.dtype) if castable else array

    model.update(tree_map_with_path(prepared, model.parameters()))
    mx.eval(model.parameters())
    return model


def vary(name: str, array: mx.array) -> mx.array:
    """Return a parameter: unchanged if its values are random, else with noise around its constant."""
    first = array.reshape(-1)[:1]
    if name.split(".")[-1] in KEPT or array.size < 2 or not bool(mx.all(array == first)):
        return array
    if not mx.issubdtype(array.dtype, mx.floating):
        return mx.random.randint(0, 1 << 31, array.shape).astype(array.dtype) if array.ndim > 1 else array
    is_matrix = array.ndim > 1 and first.item() == 0 and name.split(".")[-1] not in ("scales", "biases")
    scale = array.shape[-1] ** -0.5 if is_matrix else 0.05
    return (array + scale * mx.random.normal(array.shape)).astype(array.dtype)


def quantize(model: nn.Module, config: dict[str, Any], variant: Variant) -> tuple[nn.Module, dict[str, Any]]:
    """Quantize a model as ``mlx_lm.convert`` does."""
    own = getattr(model, "quant_predicate", None)

    def mixed(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if isinstance(module, nn.Embedding):
            return False
        answer: bool | dict[str, Any] = own(path, module) if own is not None else True
        index = re.search(r"\.(\d+)\.", path)
        bits = 8 if index is not None and int(index[1]) % 2 else 4
        return {"group_size": variant.group_size, "bits": bits, "mode": "affine"} if answer is True else answer

    with contextlib.redirect_stdout(io.StringIO()):
        quantized: tuple[nn.Module, dict[str, Any]] = mlx_lm_utils.quantize_model(
            model,
            config,
            variant.group_size,
            variant.bits,
            mode=variant.mode,
            quant_predicate=mixed if variant.mixed else None,
        )
    return quantized

"""Adapters of mlx-lm that make whole matrices in each call: DoRA measures the rows of the adapted weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner import dora

from mlx_flash.compat.require import require

DoRALinear: Any = require(dora, "DoRALinear")
DoRAEmbedding: Any = require(dora, "DoRAEmbedding")


def adapted_part(module: nn.Module) -> nn.Module | None:
    """Return the module with the weights that a DoRA adapter changes, given the adapter; None for other modules."""
    if not isinstance(module, (DoRALinear, DoRAEmbedding)):
        return None
    part: nn.Module = module["embedding" if isinstance(module, DoRAEmbedding) else "linear"]
    return part


def adapted_product(module: Any) -> tuple[Callable[[mx.array], mx.array], mx.array]:
    """Return the product with the weights that a DoRA adapter has changed, and an input of one token for it."""
    is_table = isinstance(module, DoRAEmbedding)
    part = module.embedding if is_table else module.linear
    dtype = part["scales" if "scales" in part else "weight"].dtype
    width = module.lora_b.shape[1] if is_table else module.lora_a.shape[0]
    return module.as_linear if is_table else module, mx.zeros((1, 1, width), dtype)

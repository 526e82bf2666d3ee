"""A llama whose checkpoints fuse tensors, so that mlx-lm computes parameters while loading.

In each layer ``up_proj`` and ``down_proj`` are halves of one tensor. ``down_proj`` is transposed, and ``up_proj``
depends on ``gate_proj`` too, which is a parameter itself. ``k_proj`` and ``v_proj`` are rows of one tensor.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from models import LLAMA, build
from zoo.configurations import LLAMA3_ROPE

SMALL = {**LLAMA, "intermediate_size": 320, "num_hidden_layers": 4, "rope_scaling": LLAMA3_ROPE}
"""Its frequencies of positions are constants that mlx-lm computes. No copy has them."""

STOCK_SANITIZE = llama.Model.sanitize


def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Split fused tensors."""
    weights = STOCK_SANITIZE(self, weights)
    for name in [name for name in weights if name.endswith("kv.weight")]:
        rows = mx.split(weights.pop(name), 2)
        weights[name.replace("kv", "k_proj")], weights[name.replace("kv", "v_proj")] = rows
    for name in [name for name in weights if name.endswith("fused.weight")]:
        fused = weights.pop(name)
        half = len(fused) // 2
        weights[name.replace("fused", "down_proj")] = fused[:half].T
        weights[name.replace("fused", "up_proj")] = fused[half:] - weights[name.replace("fused", "gate_proj")]
    return weights


def save_fused(directory: Path, config: dict[str, Any], dtype: mx.Dtype = mx.bfloat16) -> Path:
    """Write a checkpoint with fused tensors, of one file."""
    weights = dict(tree_flatten(build(config, dtype).parameters()))
    for name in [name for name in weights if re.search(r"layers\.\d+\.mlp\.down_proj", name)]:
        down, up = weights.pop(name), weights.pop(name.replace("down_proj", "up_proj"))
        weights[name.replace("down_proj", "fused")] = mx.concatenate([down.T, up])
    for name in [name for name in weights if name.endswith("k_proj.weight")]:
        both = [weights.pop(name), weights.pop(name.replace("k_proj", "v_proj"))]
        weights[name.replace("k_proj", "kv")] = mx.concatenate(both)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "pt"})
    return directory

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_flash.convert.pack import ShardPlan, TensorSpec, cut
from zoo import configuration
from zoo.weights import VARIANTS, build

Weights = dict[str, mx.array]


Config = dict[str, Any]


CODES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint8: "U8",
    mx.int32: "I32",
    mx.uint32: "U32",
    mx.int64: "I64",
}


def write(directory: Path, config: Config, weights: Weights, fp8: frozenset[str] = frozenset()) -> None:
    """Write a checkpoint in two shards, as PyTorch programs do, with 8-bit floats as bytes, since MLX has none."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    names = list(weights)
    for i, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        arrays = {name: mx.contiguous(weights[name]) for name in part}
        mx.eval(list(arrays.values()))
        specs = [
            TensorSpec(name, "F8_E4M3" if name in fp8 else CODES[array.dtype], tuple(array.shape))
            for name, array in arrays.items()
        ]
        shard = ShardPlan(f"model-{i + 1:05}-of-00002.safetensors", specs, {"format": "pt"})
        shard.write(directory, lambda tensor, arrays=arrays: cut(memoryview(arrays[tensor.name])))  # type: ignore[misc]


def random_weights(config: Config, variant: str) -> Weights:
    """Return the parameters of a random model of mlx-lm."""
    return dict(tree_flatten(build(config, VARIANTS[variant]).parameters()))


def with_single_experts(weights: Weights, stack: str, single: str, names: dict[str, str]) -> Weights:
    """Split stacks of experts."""
    result = {}
    for name, array in weights.items():
        found = re.fullmatch(rf"(.*\.){re.escape(stack)}\.(\w+)\.(\w+)", name)
        if found is None:
            result[name] = array
            continue
        for i, expert in enumerate(array):
            result[f"{found[1]}{single}.{i}.{names[found[2]]}.{found[3]}"] = expert
    return result


PROJECTIONS = {name: name for name in ("gate_proj", "up_proj", "down_proj")}


def gemma3(directory: Path) -> None:
    config = configuration("gemma3")
    weights = random_weights(config, "bf16")
    write(directory, config, {**weights, "vision_tower.patches.weight": mx.ones((64, 64), mx.bfloat16)})


def mixtral(directory: Path) -> None:
    config = configuration("mixtral")
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    weights = random_weights(config, "fp32")
    write(
        directory,
        config,
        with_single_experts(weights, "block_sparse_moe.switch_mlp", "block_sparse_moe.experts", names),
    )


def qwen3_moe(directory: Path) -> None:
    config = configuration("qwen3_moe")
    weights = random_weights(config, "fp32")
    write(directory, config, with_single_experts(weights, "mlp.switch_mlp", "mlp.experts", PROJECTIONS))


DIRECT = {
    "gemma3": gemma3,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
}

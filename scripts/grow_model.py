#!/usr/bin/env python3
"""Write a larger Llama model that computes the same function as a small trained one.

    python scripts/grow_model.py SMALL LARGE --layers 48 --width 4

Random weights say nothing about how predictable text is, and trained models that are larger than memory are large
downloads. The result has the size of the one and the text of the other.

Added layers hold random weights, but their output projections are zero, so that they add exact zeros to the residual
stream. Their outputs equal the small model's bit for bit. A width of 4 or 16 multiplies hidden size, intermediate size
and heads: added hidden values are always zero, and nothing reads added heads and neurons. Powers of four scale
the norms by powers of two, so rounding stays as it was. Only sums get longer, by zeros, and kernels may order them
another way.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

Weights = dict[str, mx.array]
Config = dict[str, Any]

WIDTHS = (1, 4, 16)
READERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
"""Projections that read the residual stream; the others add to it."""
WRITERS = ("self_attn.o_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
WIDENED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def grown_config(config: Config, num_layers: int, width: int) -> Config:
    """Return the config.json of the larger model.

    Raises:
        SystemExit: the small model cannot be grown so.
    """
    found, least = config["model_type"], config["num_hidden_layers"]
    if found != "llama" or config.get("attention_bias") or config.get("mlp_bias") or config.get("quantization"):
        raise SystemExit(f"grow a model of type {found!r}: only a llama without biases and quantization can be grown")
    if num_layers < least:
        raise SystemExit(f"grow to {num_layers} layers: the model has {least}. Hint: ask for as many at least.")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    eps = config["rms_norm_eps"] / width
    sizes = {name: width * config[name] for name in WIDENED}
    return {**config, **sizes, "head_dim": head_dim, "num_hidden_layers": num_layers, "rms_norm_eps": eps}


def places(num_small: int, num_large: int) -> dict[int, int]:
    """Return the layers of the large model that compute, each with its number in the small one."""
    return {i * num_large // num_small: i for i in range(num_small)}


def grown_layer(layer: Weights, width: int) -> Weights:
    """Return the wider weights of a layer, by their names within the layer."""
    grown = {f"{name}.weight": _norm(layer[f"{name}.weight"], width) for name in NORMS}
    for name in READERS:
        old = layer[f"{name}.weight"]
        grown[f"{name}.weight"] = _placed(old, _noise([width * size for size in old.shape], old.dtype))
    for name in WRITERS:
        old = layer[f"{name}.weight"]
        grown[f"{name}.weight"] = _placed(old, mx.zeros([width * size for size in old.shape], old.dtype))
    return grown


def idle_layer(like: Weights) -> Weights:
    """Return random weights, shaped like those of a layer, that add zeros to the residual stream."""
    return {
        name: mx.zeros_like(value)
        if name.removesuffix(".weight") in WRITERS
        else mx.ones_like(value)
        if name.removesuffix(".weight") in NORMS
        else _noise(value.shape, value.dtype)
        for name, value in like.items()
    }


def _placed(old: mx.array, new: mx.array) -> mx.array:
    """Return a larger matrix with a smaller one in its first rows and columns."""
    new[: old.shape[0], : old.shape[1]] = old
    return new


def _norm(weight: mx.array, width: int) -> mx.array:
    """Return the weights of a wider norm. Its mean is ``width`` times as small, since all added values are zero."""
    return mx.concatenate([weight, mx.ones(((width - 1) * len(weight),), weight.dtype)]) / math.isqrt(width)


def _noise(shape: Any, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape, dtype, scale=1 / math.sqrt(shape[1]))


def grow(small: Path, large: Path, num_layers: int, width: int) -> int:
    """Write the larger model, one file for each layer. Return its size in bytes."""
    weights: Weights = {}
    for path in sorted(small.glob("model*.safetensors")):
        weights.update(mx.load(str(path)))
    config = json.loads((small / "config.json").read_text())
    config = grown_config(config, num_layers, width)
    large.mkdir(parents=True, exist_ok=True)
    files = {name: f"model-{i:05}-of-{num_layers + 1:05}.safetensors" for i, name in enumerate(_parts(num_layers), 1)}
    index: dict[str, str] = {}
    num_bytes = 0
    computing = places(_num_layers(weights), num_layers)
    for name, file in files.items():
        part = _part(weights, name, computing, width)
        mx.save_safetensors(str(large / file), part, metadata={"format": "mlx"})
        index.update(dict.fromkeys(part, file))
        num_bytes += sum(value.nbytes for value in part.values())
    written = {"metadata": {"total_size": num_bytes}, "weight_map": index}
    (large / "model.safetensors.index.json").write_text(json.dumps(written, indent=2) + "\n")
    (large / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in small.glob("token*"):
        shutil.copy(path, large)
    return num_bytes


def _parts(num_layers: int) -> list[str]:
    return ["model.", *(f"model.layers.{i}." for i in range(num_layers))]


def _num_layers(weights: Weights) -> int:
    return 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))


def _part(weights: Weights, prefix: str, computing: dict[int, int], width: int) -> Weights:
    """Return the grown weights of a layer, or those outside all layers."""
    if prefix == "model.":
        found = {name: value for name, value in weights.items() if not name.startswith("model.layers.")}
        return {name: _outside(value, width) for name, value in found.items()}
    number = int(prefix.split(".")[2])
    source = f"model.layers.{computing.get(number, 0)}."
    small = {name.removeprefix(source): value for name, value in weights.items() if name.startswith(source)}
    layer = grown_layer(small, width)
    layer = layer if number in computing else idle_layer(layer)
    return {prefix + name: value for name, value in layer.items()}


def _outside(value: mx.array, width: int) -> mx.array:
    """Return the wider embedding, head or last norm."""
    if value.ndim == 1:
        return _norm(value, width)
    return _placed(value, mx.zeros((value.shape[0], width * value.shape[1]), value.dtype))


def main(arguments: list[str] | None = None) -> int:
    """Write the larger model, and print its size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("small", type=Path, help="folder of the trained model")
    parser.add_argument("large", type=Path, help="folder to write")
    parser.add_argument("--layers", type=int, required=True, help="layers of the larger model")
    parser.add_argument("--width", type=int, choices=WIDTHS, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    mx.random.seed(args.seed)
    print(f"{grow(args.small, args.large, args.layers, args.width) / 1e9:.2f} GB in {args.large}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

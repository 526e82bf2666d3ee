from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from models import stock

ADAPTERS = {
    "lora": {},
    "lora-keys": {"keys": ["self_attn.q_proj", "mlp.down_proj", "lm_head"]},
    "dora": {},
}


def save_adapter(directory: Path, base: Path, kind: str, num_layers: int, keys: list[str] | None = None) -> Path:
    model = stock(base)
    parameters = {"rank": 4, "scale": 10.0, "dropout": 0.0, **ADAPTERS[kind]}
    parameters |= {"keys": keys} if keys else {}
    linear_to_lora_layers(model, num_layers, parameters, use_dora=kind == "dora")
    mx.random.seed(3)
    leaves = {k: v for k, v in tree_flatten(model.parameters()) if k.rsplit(".", 1)[-1] in ("lora_a", "lora_b", "m")}
    leaves = {k: v if k.endswith(".m") else 0.1 * mx.random.normal(v.shape) for k, v in leaves.items()}
    directory.mkdir()
    mx.save_safetensors(str(directory / "adapters.safetensors"), leaves)
    settings = {
        "fine_tune_type": kind.split("-")[0],
        "num_layers": num_layers,
        "lora_parameters": parameters,
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory

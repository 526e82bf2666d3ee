"""Models that have a head for multi-token prediction, and stream beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_flash import FlashLLM, load_model
from mlx_flash.residency import planner
from mlx_flash.residency.plan import Streaming
from models import build
from streamed import LARGE_GB, config
from zoo import configuration

QWEN = {"norm": "norm", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "join": "fc"}

DEEPSEEK = {"norm": "shared_head.norm", "enorm": "enorm", "hnorm": "hnorm", "join": "eh_proj"}

MIMO = {"norm": "final_layernorm", "enorm": "token_layernorm", "hnorm": "hidden_layernorm", "join": "input_proj"}

NAMES: dict[str, tuple[str, str, Mapping[str, str]]] = {
    "qwen3_5": ("mtp.", "layers.0.", QWEN),
    "qwen3_5_moe": ("mtp.", "layers.0.", QWEN),
    "qwen3_next": ("mtp.", "layers.0.", QWEN),
    "glm4_moe": ("model.layers.4.", "", DEEPSEEK),
    "glm4_moe_lite": ("model.layers.4.", "", DEEPSEEK),
    "deepseek_v32": ("model.layers.4.", "", DEEPSEEK),
    "glm_moe_dsa": ("model.layers.4.", "", DEEPSEEK),
    "mimo": ("model.mtp_layers.0.", "", MIMO),
}
"""Of each model the beginning of the names of the head, of its layer in it, and of the modules beside the layer."""

COUNTS = {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}

ALONE = {"num_hidden_layers": 1, "full_attention_interval": 1, "mlp_only_layers": [], "first_k_dense_replace": 0}
"""Entries of a configuration that make a head's layer the only one."""

ENDS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
"""Matrices whose zeros make a layer return its input."""


def config_of(name: str) -> dict[str, Any]:
    found = configuration(name)
    return {**found, **({"text_config": {**found["text_config"], **COUNTS}} if "text_config" in found else COUNTS)}


def save_with_head(
    directory: Path, name: str, *, knows: bool = False, bits: int | None = None, head_bits: int | None = None
) -> Path:
    """Write a random model with a random head; where it ``knows``, the next token follows from the last one alone."""
    config = config_of(name)
    weights = _weights(build(config, bits=bits), knows)
    inner = {**config.get("text_config", config), **ALONE}
    whole = {**config, "text_config": inner} if "text_config" in config else inner
    layer = _weights(build({key: value for key, value in whole.items() if key != "quantization"}), knows)
    [path] = {key.partition("layers.0.")[0] for key in layer if "layers.0." in key}
    dims = inner["hidden_size"]
    prefix, layer_prefix, names = NAMES[name]
    head = {
        f"{layer_prefix}{key.partition('layers.0.')[2]}": value for key, value in layer.items() if "layers.0." in key
    }
    ones, join = mx.ones(dims), 0.05 * mx.random.normal((dims, 2 * dims))
    if knows:
        halves = [mx.zeros((dims, dims)) if is_hidden != (name == "mimo") else mx.eye(dims) for is_hidden in (0, 1)]
        join = mx.concatenate(halves, axis=1)
    head |= {f"{names[norm]}.weight": ones for norm in ("enorm", "hnorm")} | {f"{names['join']}.weight": join}
    head[f"{names['norm']}.weight"] = weights[f"{path}norm.weight"]
    if head_bits is not None:
        head = _quantized(head, head_bits)
    weights |= {f"{prefix}{key}": value for key, value in head.items()}
    if name == "qwen3_next":  # mlx-lm drops the head of such a checkpoint only where experts are one by one
        weights = _one_by_one(weights)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    return directory


def _weights(model: nn.Module, knows: bool) -> dict[str, mx.array]:
    found = dict(tree_flatten(model.parameters()))
    ends = [key for key in found if knows and f"{key.rpartition('.')[0]}.weight".endswith(ENDS)]
    return found | {key: mx.zeros_like(found[key]) for key in ends}


def _one_by_one(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    found = dict(weights)
    for key in [key for key in weights if ".switch_mlp." in key]:
        for number, expert in enumerate(found.pop(key)):
            found[key.replace("switch_mlp", f"experts.{number}")] = expert
    return found


def _quantized(head: dict[str, mx.array], bits: int) -> dict[str, mx.array]:
    found = dict(head)
    for key, value in head.items():
        if key.endswith(".weight") and value.ndim == 2 and "gate.weight" not in key:
            parts = mx.quantize(value, group_size=32, bits=bits)
            found |= dict(zip((key, f"{key[:-6]}scales", f"{key[:-6]}biases"), parts, strict=True))
    return found


def streamed_with_head(directory: Path, **settings: Any) -> FlashLLM:
    """A model that has its head in memory, and streams whole layers, whatever the planner would do."""
    model, _ = load_model(directory, config(**{"ram_budget_gb": LARGE_GB, **settings}))
    prepared = model._life.prepared
    least = replace(model._life.config, ram_budget_gb="min")
    plan = planner._plain_plan(prepared.sizes.guessing, least, prepared.machine)
    units = prepared.layout.layers
    streaming = Streaming(
        layers=tuple((unit.name, tuple(each.name for each in unit.large)) for unit in units),
        tables=tuple(unit.name for unit in prepared.layout.embeddings if unit.name not in prepared.layout.tied),
        num_units=len(units),
        num_slots=2,
        slot_bytes=max(unit.nbytes for unit in units) + 300_000,
        read_bytes=sum(unit.nbytes for unit in units),
    )
    plan = replace(plan, streaming=streaming, pool=None, budget_bytes=plan.budget_bytes + plan.model_bytes + 50_000_000)
    model._life._stop()
    model._life.carry_out(replace(prepared, plan=plan))
    assert plan.mtp_bytes
    return model

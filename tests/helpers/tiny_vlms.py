"""Tiny models of mlx-vlm with random weights, made from its own classes, and inputs for them."""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from PIL import Image

from vlm_configs import QWEN_VISION
from vocabularies import write_tokenizer

IMAGE = 290
SPECIAL = ("<|vision_start|>", "<|video_pad|>", "<|image_pad|>", "<|vision_end|>", "<|im_end|>")
"""Tokens from 288 on, as Qwen's processors name them."""

CHAT = """\
{%- for message in messages -%}
{{ message.role }}: {% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content -%}
{%- if part.type == "text" %}{{ part.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif -%}
{%- endfor -%}
{%- endif %}<|im_end|>
{% endfor -%}
{% if add_generation_prompt %}assistant: {% endif %}"""
TEXT = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 300,
}
VISION = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "patch_size": 14,
    "image_size": 56,
}

MODELS: dict[str, dict[str, Any]] = {
    "llava": {
        "image_token_index": IMAGE,
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": VISION | {"model_type": "clip_vision_model", "projection_dim": 64},
    },
    "qwen2_vl": TEXT
    | {
        "image_token_id": IMAGE,
        "vision_start_token_id": 288,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        "text_config": {},
        "vision_config": {"depth": 3, "embed_dim": 128, "hidden_size": 128, "num_heads": 4, "patch_size": 14},
    },
    "qwen3_vl_moe": {
        "image_token_id": IMAGE,
        "vision_start_token_id": 288,
        "text_config": TEXT
        | {
            "model_type": "qwen3_vl_moe_text",
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": 1024,  # the smallest budget holds a part of the experts
            "norm_topk_prob": True,
            "rope_theta": 1e4,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6], "mrope_interleaved": True},
        },
        "vision_config": QWEN_VISION | {"model_type": "qwen3_vl_moe", "deepstack_visual_indexes": [1]},
    },
    "gemma3": {
        "image_token_index": IMAGE,
        "hidden_size": 128,
        "text_config": TEXT
        | {"model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 2, "mm_tokens_per_image": 4},
        "vision_config": VISION | {"model_type": "siglip_vision_model"},
    },
}
"""Configurations, by mlx-vlm's names of architectures."""


def save(directory: Path, name: str, num_layers: int = 3) -> Path:
    """Write a model with random weights. Return its folder."""
    package = importlib.import_module(f"mlx_vlm.models.{name}")
    config = copy.deepcopy({"model_type": name, "vocab_size": 300, **MODELS[name]})
    for part in (config, config["text_config"]):
        if "num_hidden_layers" in part:
            part["num_hidden_layers"] = num_layers
    text = json.dumps(config)
    args = package.ModelConfig.from_dict(config)
    args.text_config = package.TextConfig.from_dict(config["text_config"])
    args.vision_config = package.VisionConfig.from_dict(config["vision_config"])
    mx.random.seed(5)
    model = package.Model(args)
    weights = {key: mx.random.normal(array.shape) * 0.05 for key, array in tree_flatten(model.parameters())}
    directory.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    (directory / "config.json").write_text(text)
    return directory


def inputs(name: str, has_picture: bool) -> tuple[mx.array, mx.array | None, dict[str, Any]]:
    """Return tokens, the numbers of a picture, and further arguments of ``get_input_embeddings``."""
    if not has_picture:
        return mx.array([[1, 2, 3, 4, 5, 6, 7]]), None, {"mask": mx.ones((1, 7), mx.int32)}
    mx.random.seed(6)
    if name.startswith("qwen"):
        tokens = [1, 288, *[IMAGE] * 4, 2, 3]
        pixels, extra = mx.random.normal((16, 3 * 2 * 14 * 14)), {"image_grid_thw": mx.array([[1, 4, 4]])}
    else:
        num_patches = {"llava": 16, "gemma3": 4}[name]
        tokens = [1, *[IMAGE] * num_patches, 2, 3]
        pixels, extra = mx.random.normal((1, 3, 56, 56)), {}
    return mx.array([tokens]), pixels, {"mask": mx.ones((1, len(tokens)), mx.int32), **extra}


def write_processor(directory: Path, min_pixels: int = 28 * 28, max_pixels: int = 4 * 112 * 112) -> Path:
    """Write the files that make a Qwen2-VL folder whole: a tokenizer, a chat template and sizes of pictures."""
    write_tokenizer(directory, IMAGE - 2, SPECIAL)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(CHAT)
    sizes = {"min_pixels": min_pixels, "max_pixels": max_pixels, "patch_size": 14, "temporal_patch_size": 2}
    (directory / "preprocessor_config.json").write_text(json.dumps({**sizes, "merge_size": 2}))
    return directory


def picture(directory: Path, size: tuple[int, int] = (56, 84)) -> Path:
    """Write a picture, the same for the same size. Return its path."""
    colours = bytes(
        (x * 7 + y * 13 + channel * 50) % 256 for y in range(size[1]) for x in range(size[0]) for channel in range(3)
    )
    path = directory / f"{size[0]}x{size[1]}.png"
    Image.frombytes("RGB", size, colours).save(path)
    return path

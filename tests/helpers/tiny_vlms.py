"""Some of the zoo of mlx-vlm's models as folders that commands take, with processors, and pictures in files."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image

from vlm_zoo import IMAGE, configuration, write_model
from vocabularies import write_tokenizer

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


def save(directory: Path, name: str, num_layers: int = 3) -> Path:
    """Write a model with random weights. Return its folder."""
    config = configuration(name)
    for part in (config, config["text_config"]):
        if "num_hidden_layers" in part:
            part["num_hidden_layers"] = num_layers
    return write_model(directory, config, spread=0.05)


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

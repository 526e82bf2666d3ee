"""Facts about models in Ollama's form, from the files of their folders."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from mlx_flash.errors import FlashError
from mlx_flash.server.catalog import Source
from mlx_flash.server.ollama.common import tagged
from mlx_flash.storage.safetensors import read_checkpoint
from mlx_flash.vision.detect import is_installed, loads_with_vlm

_FOR_EVER = timedelta(days=36_500)
"""The time for which a model stays that never leaves. Clients show "for ever" from some decades on."""


_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
}
"""Sizes of a model: Ollama's names, and the entries of ``config.json``."""


def folder_of(source: Source) -> Path | None:
    """Return the folder of a model on this machine; None if it is not downloaded."""
    folder = Path(source.base)
    if folder.is_dir():
        return folder
    config = try_to_load_from_cache(source.base, "config.json") if source.base.count("/") == 1 else None
    return Path(config).parent if isinstance(config, str) else None


def listed(source: Source) -> dict[str, Any]:
    """Return a model as the list of models has it."""
    folder = folder_of(source)
    files = [] if folder is None else sorted(_weights(folder))
    states = [(path.name, path.stat()) for path in files]
    modified = max((state.st_mtime for _, state in states), default=float(source.created))
    digest = hashlib.sha256(repr([(name, s.st_size, s.st_mtime_ns) for name, s in states]).encode()).hexdigest()
    name = tagged(source.name)
    return {
        "name": name,
        "model": name,
        "modified_at": _time(datetime.fromtimestamp(modified, timezone.utc)),
        "size": sum(state.st_size for _, state in states),
        "digest": digest,
        "details": _details_of(folder, digest),
    }


def _details_of(folder: Path | None, digest: str) -> dict[str, Any]:
    """Return the family and the size of a model, and how its weights are quantized."""
    config = {} if folder is None else _json(folder / "config.json")
    family = str(config.get("model_type", ""))
    bits = _quantization_of(config).get("bits")
    num_parameters = 0 if folder is None else _num_parameters(folder, digest)
    dtype = config.get("dtype") or config.get("torch_dtype")
    level = f"{bits}-bit" if bits else str(dtype or "")
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _short(num_parameters) if num_parameters else "",
        "quantization_level": level,
    }


@lru_cache(maxsize=256)
def _num_parameters(folder: Path, digest: str) -> int:
    """Return the number of a model's weights; 0 if its files cannot be read.

    Args:
        folder: of the model.
        digest: changes with its files.
    """
    quantization = _quantization_of(_json(folder / "config.json"))
    try:
        tensors = read_checkpoint(folder).tensors
    except (FlashError, OSError):
        return 0
    total = 0
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        own = quantization.get(module)
        bits = own.get("bits") if isinstance(own, dict) else quantization.get("bits")
        if bits and tensor.dtype == "U32":
            total += math.prod(tensor.shape) * 32 // int(bits)
        elif not bits or kind not in ("scales", "biases"):
            total += math.prod(tensor.shape)
    return total


def _quantization_of(config: dict[str, Any]) -> dict[str, Any]:
    found = config.get("quantization") or config.get("quantization_config")
    return found if isinstance(found, dict) else {}


def _short(number: int) -> str:
    """Return a number in the form of Ollama: ``1.5B`` or ``268.10M``."""
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.2f}M"


def shown(source: Source) -> dict[str, Any]:
    """Return the facts about one model."""
    folder = folder_of(source)
    config = {} if folder is None else _json(folder / "config.json")
    template = str(source.tokenizer_settings.get("chat_template") or _template(folder))
    defaults = source.defaults
    parameters = {
        "temperature": defaults.temperature,
        "top_p": defaults.top_p,
        "top_k": defaults.top_k,
        "min_p": defaults.min_p,
        "num_predict": defaults.max_tokens,
        "repeat_penalty": defaults.repetition_penalty or None,
        "seed": defaults.seed,
    }
    lines = [f"{name} {value}" for name, value in parameters.items() if value is not None]
    lines += [f"stop {json.dumps(text, ensure_ascii=False)}" for text in defaults.stop]
    entry = listed(source)
    family = str(config.get("model_type", ""))
    info: dict[str, Any] = {"general.architecture": family, "general.basename": source.name}
    text = {**config, **(config["text_config"] if isinstance(config.get("text_config"), dict) else {})}
    if folder is not None:
        info["general.parameter_count"] = _num_parameters(folder, entry["digest"])
    for name, key in _SIZES.items():
        if isinstance(text.get(key), int):
            info[f"{family}.{name}"] = text[key]
    capabilities = ["completion"]
    capabilities += ["tools"] if "tools" in template else []
    if folder is not None and is_installed() and loads_with_vlm(folder, source.vision, prefers=False):
        capabilities.append("vision")
    capabilities += ["thinking"] if "enable_thinking" in template or "reasoning_effort" in template else []
    opening = [f"ADAPTER {source.adapter}"] if source.adapter is not None else []
    for message in source.first_messages:
        word = "SYSTEM" if message["role"] == "system" else f"MESSAGE {message['role']}"
        opening.append(f'{word} """{message["content"]}"""')
    licenses = [] if folder is None else sorted(path for path in folder.glob("LICENSE*") if path.is_file())
    return {
        "license": "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in licenses),
        "modelfile": "\n".join([f"FROM {source.base}", *opening, *(f"PARAMETER {text}" for text in lines), ""]),
        "parameters": "\n".join(lines),
        "template": template,
        "details": entry["details"],
        "model_info": info,
        "capabilities": capabilities,
        "modified_at": entry["modified_at"],
    }


def running(source: Source, num_bytes: int, context_length: int, seconds: float | None) -> dict[str, Any]:
    """Return a model in memory.

    Args:
        source: the model.
        num_bytes: memory of its weights.
        context_length: tokens that its plan has memory for.
        seconds: time until it leaves; None for ever.
    """
    left = _FOR_EVER if seconds is None else timedelta(seconds=max(0.0, seconds))
    expires = datetime.now(timezone.utc) + min(left, _FOR_EVER)
    found = {**listed(source), "expires_at": _time(expires), "size_vram": num_bytes, "context_length": context_length}
    del found["modified_at"]
    return found


def _weights(folder: Path) -> Iterator[Path]:
    yield from (path for path in folder.iterdir() if path.suffix == ".safetensors" and path.is_file())


def _template(folder: Path | None) -> str:
    if folder is None:
        return ""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = _json(folder / "tokenizer_config.json").get("chat_template")
    return template if isinstance(template, str) else ""


def _json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is none. Loading the model tells what is wrong."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _time(when: datetime) -> str:
    return when.isoformat().replace("+00:00", "Z")

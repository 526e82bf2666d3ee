"""mlx-vlm, a library of models that see. It is imported with this module, and with nothing else of mlx-flash.

mlx-vlm has layers and caches of its own, with mlx-lm's names and interfaces.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm import prompt_utils, utils
from mlx_vlm.generate import ar, dispatch
from mlx_vlm.models import cache, linear, switch_layers
from transformers import ProcessorMixin, dynamic_module_utils

from mlx_flash.compat.caches import CacheKinds
from mlx_flash.compat.expertstacks import StackCall, StackKinds
from mlx_flash.compat.require import require

VlmLoadModel = Callable[..., nn.Module]

VLM_WRITERS = frozenset({"mlx_vlm.convert", "mlx_vlm.lora", "mlx_vlm.train", "mlx_vlm.trainer.sft_trainer"})
"""Modules of mlx-vlm that load a model in order to change its weights: the patch refuses them."""

require(utils, "load_model", "model_path", "lazy")
require(utils, "load", "path_or_hf_repo", "adapter_path", "lazy")
require(utils, "sanitize_weights", "model_obj", "weights")
_load_safetensors = require(utils, "_load_safetensors", "path")
require(utils, "load_processor", "model_path", "add_detokenizer", "eos_token_ids")
require(utils, "load_image_processor", "model_path")
require(dynamic_module_utils, "get_class_in_module")
get_model_path: Callable[..., Path] = require(utils, "get_model_path", "path_or_hf_repo", "revision")
make_vlm_cache: Callable[[nn.Module], list[Any]] = require(cache, "make_prompt_cache", "model", "max_kv_size")

generate_step: Callable[..., Iterator[Any]] = require(ar, "generate_step", "input_ids", "pixel_values", "mask")
stream_generate: Callable[..., Generator[Any, None, None]] = require(dispatch, "stream_generate", "processor", "prompt")
load_image: Callable[..., Any] = require(utils, "load_image", "image_source")
_prepare_inputs = require(utils, "prepare_inputs", "images", "prompts", "image_token_index", "add_special_tokens")
_should_add_special_tokens = require(utils, "should_add_special_tokens", "model_type", "processor")
apply_chat_template: Callable[..., str] = require(
    prompt_utils, "apply_chat_template", "processor", "config", "prompt", "num_images"
)

_TEMPLATE_FUNCTIONS = (
    apply_chat_template,
    require(prompt_utils, "get_message_json", "prompt", "num_audios"),
    require(prompt_utils, "get_chat_template", "processor", "messages"),
    require(prompt_utils.MessageFormatter, "format_message", "prompt", "num_audios"),
    require(prompt_utils.MessageBuilder, "video_message", "max_pixels", "fps"),
    ProcessorMixin.apply_chat_template,
)
TEMPLATE_ARGUMENTS = frozenset(
    {"video", "audio_token"}.union(*(inspect.signature(function).parameters for function in _TEMPLATE_FUNCTIONS))
)
"""Arguments of functions that make prompts, not variables of chat templates. Two of them are in no signature."""

CacheKinds.add(cache)
_combine = require(switch_layers.SwitchGLU, "_combine", "routed", "weights", "shared", "residual")
_tokenwise = require(linear, "tokenwise", "operation", "x")
_BLOCK_SIZE: int = require(linear, "DECODE_BLOCK_SIZE")


def _call_stack(
    module: nn.Module,
    run: StackCall,
    x: mx.array,
    indices: mx.array,
    weights: mx.array | None = None,
    shared: mx.array | None = None,
    residual: Any = None,
) -> mx.array:
    """Answer a call of mlx-vlm's stack of experts: it computes a few tokens as it would one after another."""
    is_block = not module.training and x.ndim == 3 and 1 < x.shape[1] <= _BLOCK_SIZE
    routed = _tokenwise(run, x, indices) if is_block else run(x, indices)
    found: mx.array = _combine(routed, weights, shared, residual)
    return found


StackKinds.add(switch_layers.SwitchGLU, _call_stack)
StackKinds.linears += (require(switch_layers, "SwitchLinear"),)


@contextmanager
def loaded_tensors(seen: Callable[[Mapping[str, mx.array]], None]) -> Iterator[None]:
    """Show the tensors that mlx-vlm loads from each file while a block runs, before it changes them."""

    def load(path: str) -> dict[str, mx.array]:
        found: dict[str, mx.array] = _load_safetensors(path)
        seen(found)
        return found

    utils._load_safetensors = load
    try:
        yield
    finally:
        utils._load_safetensors = _load_safetensors


def language_part(model: nn.Module) -> nn.Module | None:
    """Return the part of a model that mlx-vlm's loops call with tokens; None if it has none."""
    found = getattr(model, "language_model", None)
    return found if isinstance(found, nn.Module) else None


def current_vlm_load_model() -> VlmLoadModel:
    """Return ``mlx_vlm.utils.load_model``, in which ``mlx_vlm.load`` ends; the patch replaces it."""
    function: VlmLoadModel = utils.load_model
    return function


def replace_vlm_load_model(new: VlmLoadModel, old: VlmLoadModel) -> None:
    """Make mlx-vlm load models with another function, also where it has been imported by name."""
    utils.load_model = new
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_vlm") and module is not None and vars(module).get("load_model") is old:
            vars(module)["load_model"] = new


def load_processor(path: Path, model: nn.Module, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """Return the processor of texts and pictures for a model, as ``mlx_vlm.load`` does.

    Code of the folder that is not trusted does not run, also where mlx-vlm would trust it by itself. Raises:
    ValueError.
    """
    options["trust_remote_code"] = trust_remote_code
    with nullcontext() if trust_remote_code else _without_folder_code():
        images = utils.load_image_processor(path, **options)
        eos = getattr(model.config, "eos_token_id", None)
        processor = utils.load_processor(path, True, eos_token_ids=eos, **options)
    if images is not None:
        processor.image_processor = images
    return processor


@contextmanager
def _without_folder_code() -> Iterator[None]:
    """Refuse to run code of model folders in a block. Some processors of mlx-vlm trust it whatever they are told."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError(
            "it needs code of its folder, which is not run. trust_remote_code, or --trust-remote-code, runs it"
        )

    run = dynamic_module_utils.get_class_in_module
    dynamic_module_utils.get_class_in_module = refuse
    try:
        yield
    finally:
        dynamic_module_utils.get_class_in_module = run


def prepare_inputs(model: nn.Module, processor: Any, prompt: str, images: list[Any]) -> dict[str, Any]:
    """Return what a model is called with for a prompt and pictures. Raises: ValueError, if they do not agree."""
    config: Any = model.config
    found: dict[str, Any] = _prepare_inputs(
        processor,
        images=images or None,
        prompts=prompt,
        image_token_index=getattr(config, "image_token_index", None),
        add_special_tokens=_should_add_special_tokens(config.model_type, processor),
    )
    return found

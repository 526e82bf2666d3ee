"""Tiny models of mlx-vlm, from its own configurations, compared stock and streamed."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import math
import pkgutil
import tempfile
import typing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm import models, utils
from mlx_vlm.models.cache import make_prompt_cache

from mlx_flash import BudgetError, FlashConfig, FlashError
from mlx_flash.compat.vlm import language_part
from mlx_flash.vision.flashvlm import load_vlm_model
from zoo.compare import Outcome, one_line
from zoo.pool import Case

# Tiny configurations, and pictures in the forms that processors make

IMAGE = 290
"""The token that stands for a part of a picture."""

# Settings by their names


def by_name(*values: tuple[Any, str]) -> dict[str, Any]:
    """Return settings that are given as values and the names that have each."""
    return {name: value for value, names in values for name in names.split()}


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
PARTS = ("text", "vision", "audio", "projector", "perceiver")
SMALL = TEXT | by_name(
    (False, "enable_audio_output"),
    (0, "num_kv_shared_layers pad_token_id"),
    (1, "first_k_dense_replace n_group topk_group insert_layer_id"),
    (2, "num_global_layers mlp_ratio num_experts_per_tok linear_num_key_heads full_attention_interval"),
    (2, "_sliding_window_pattern"),
    (3, "depth num_layers n_layers vision_n_layers"),
    (4, "num_heads num_experts num_local_experts n_routed_experts linear_num_value_heads default_output_length"),
    (4, "vision_n_heads"),
    (16, "sliding_window laurel_rank"),
    (32, "hidden_size_per_layer_input q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"),
    (32, "linear_key_head_dim linear_value_head_dim global_head_dim"),
    (56, "crop_size"),
    (64, "moe_intermediate_size shared_expert_intermediate_size"),
    (128, "d_model embed_dim out_hidden_size projection_dim proj_out_dim projector_input_dim projector_output_dim"),
    (128, "vision_output_dim vision_dim image_dim_out"),
    (256, "intermediate_size_mlp proj_inner_dim vision_inter_dim"),
    (300, "vocab_size_per_layer_input"),
    (512, "max_position_embeddings"),
    (10000.0, "rope_theta"),
)
TOKENS = ("image_token_id", "image_token_index", "img_context_token_id", "media_placeholder_token_id", "im_patch_id")
OTHERS = {"video_token_id": 289, "video_token_index": 289, "vision_start_token_id": 288, "audio_token_id": 287}

KINDS = {
    "text_config": ("{name}", "{name}_text", "llama", "mistral", "qwen2", "gemma", "gemma2"),
    "vision_config": (
        *("{name}", "{name}_vision", "{name}_vision_model", "siglip_vision_model", "clip_vision_model", "pixtral"),
        *("intern_vit_6b", "siglip2_vision_model", "vit", "radio", "vision"),
    ),
}
"""Values of ``model_type`` that parts of models have; the first one that mlx-vlm takes is used."""

# Architectures by their names

PARTIAL_MROPE = {"type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4, "partial_rotary_factor": 0.25}
FULL_MROPE = {"type": "default", "mrope_section": [4, 6, 6]}
MROPE = {**FULL_MROPE, "type": "mrope"}
QWEN_VISION = by_name((3, "depth"), (128, "hidden_size out_hidden_size"), (256, "intermediate_size"), (4, "num_heads"))
QWEN_VISION |= {"patch_size": 14, "num_position_embeddings": 64, "deepstack_visual_indexes": []}
QWEN3_5 = {"text_config": {"num_hidden_layers": 4, "rope_parameters": PARTIAL_MROPE}, "vision_config": QWEN_VISION}
OMNI_TEXT = TEXT | by_name((4, "num_experts"), (2, "num_experts_per_tok"), (1, "decoder_sparse_step"))
OMNI_TEXT |= {"mlp_only_layers": [], "moe_intermediate_size": 64, "rope_theta": 10000.0, "rope_scaling": FULL_MROPE}
OMNI_TEXT |= {"max_position_embeddings": 512}
OMNI_AUDIO = by_name((2, "encoder_layers num_hidden_layers"), (4, "encoder_attention_heads"), (64, "d_model"))
OMNI_AUDIO |= by_name((32, "downsample_hidden_size"), (128, "encoder_ffn_dim output_dim"))
OMNI = {"text_config": OMNI_TEXT, "vision_config": QWEN_VISION, "audio_config": OMNI_AUDIO, "image_token_id": IMAGE}
GEMMA3N = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA3N |= {"activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "intermediate_size": [256] * 4}
LLAMA4_TEXT = {"num_experts_per_tok": 1, "attention_chunk_size": 64, "no_rope_layers": [1, 1, 0]}
LLAMA4 = by_name((0.5, "pixel_shuffle_ratio"), (0.0, "projector_dropout"), (3, "num_channels"))
LLAMA4 |= {"intermediate_size": 512, "vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
GLM_MOE = by_name((False, "use_qk_norm attention_bias"), (True, "norm_topk_prob"), (1, "n_shared_experts"))
GLM_MOE |= by_name((1.0, "partial_rotary_factor routed_scaling_factor")) | {"rope_scaling": FULL_MROPE}
GLM_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3]}
PHI_AUDIO = {"attention_dim": 128, "attention_heads": 4, "num_blocks": 2, "linear_units": 256}
MLLAMA_VISION = {"intermediate_layers_indices": [0, 2], "vision_output_dim": 384}
DEEPSEEK_V4 = by_name((2, "o_groups vision_downsample_ratio"), (4, "index_n_heads"), (16, "qk_rope_head_dim"))
DEEPSEEK_V4 |= by_name((32, "o_lora_rank"), (64, "index_head_dim"))


def parts(text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    """Return entries of the parts of a model, and others."""
    found = {"text_config": text, "vision_config": vision, **others}
    return {name: value for name, value in found.items() if value is not None}


ENTRIES: dict[str, dict[str, Any]] = {
    "gemma3n": parts(GEMMA3N),
    "gemma4": parts({"num_hidden_layers": 4, "sliding_window_pattern": 2}, {"num_key_value_heads": 4}),
    "llama4": parts(LLAMA4_TEXT, LLAMA4),
    "glm4v": parts({"eos_token_id": [1], "rope_scaling": GLM_ROPE}),
    "glm4v_moe": parts(GLM_MOE, eos_token_id=[1]),
    "llava_bunny": parts(vision={"image_size": 378}),
    "llava_onevision": {"image_grid_pinpoints": [[56, 56]]},
    "mllama": parts({"cross_attention_layers": [1]}, MLLAMA_VISION),
    "deepseek_v4": DEEPSEEK_V4,
    "qwen3_omni_moe": {"thinker_config": {**OMNI, **OTHERS}, "talker_config": parts(OMNI_TEXT)},
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5,
    "qwen4_exp": QWEN3_5,
    "minicpmv4_6": parts({"num_hidden_layers": 4}, image_size=56),
    "phi4_siglip": {"mm_hidden_size": 128},
    "phi4mm": {"mm_hidden_size": 128, "audio_processor": {"config": PHI_AUDIO}},
    "glm5_next": parts({"num_key_value_heads": 4, "qk_rope_head_dim": 0}),
}
"""By architecture: entries that replace those of the generated configuration."""

QWEN_TOKENS = {"image_token_id": IMAGE, "vision_start_token_id": 288}
QWEN3_MOE = OMNI_TEXT | {"num_experts": 8, "norm_topk_prob": True, "tie_word_embeddings": False}
QWEN3_MOE |= {"model_type": "qwen3_vl_moe_text", "rope_scaling": MROPE | {"mrope_interleaved": True}}
QWEN3_MOE |= {"moe_intermediate_size": 1024}  # the smallest budget holds a part of the experts
GEMMA3 = TEXT | {"model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 2}

MODELS: dict[str, dict[str, Any]] = {
    "llava": parts(
        TEXT | {"model_type": "llama"},
        VISION | {"model_type": "clip_vision_model", "projection_dim": 64},
        image_token_index=IMAGE,
    ),
    "qwen2_vl": TEXT
    | QWEN_TOKENS
    | {"rope_scaling": MROPE, "text_config": {}}
    | {"vision_config": by_name((3, "depth"), (128, "embed_dim hidden_size"), (4, "num_heads"), (14, "patch_size"))},
    "qwen3_vl_moe": parts(
        QWEN3_MOE, QWEN_VISION | {"model_type": "qwen3_vl_moe", "deepstack_visual_indexes": [1]}, **QWEN_TOKENS
    ),
    "gemma3": parts(
        GEMMA3 | {"mm_tokens_per_image": 4},
        VISION | {"model_type": "siglip_vision_model"},
        image_token_index=IMAGE,
        hidden_size=128,
    ),
}
"""Configurations, by mlx-vlm's names of architectures."""

# Pictures

PATCHES = {"spatial_shapes": mx.array([[4, 4]]), "pixel_attention_mask": mx.ones((1, 16), mx.int32)}
Picture = tuple[mx.array, Any, dict[str, Any]]
"""Tokens, the numbers of a picture, and further arguments of ``get_input_embeddings``."""


def _tokens(count: int, image: int = IMAGE) -> mx.array:
    return mx.array([[1, 288, *[image] * count, 2, 3]])


def _marks(count: int) -> mx.array:
    """Return which of the tokens stand for a picture."""
    return _tokens(count) == IMAGE


def _pixels(*shape: int) -> mx.array:
    return mx.random.normal(shape)


def _of_qwen() -> Picture:
    return _tokens(4), _pixels(16, 3 * 2 * 14 * 14), {"image_grid_thw": mx.array([[1, 4, 4]])}


def _of_moondream() -> Picture:
    return _tokens(16), _pixels(1, 56, 56, 3), {"num_crops": [1], "crop_layouts": [(1, 1)]}


def _deepseek_v4() -> Picture:
    """Return a picture whose tokens are behind the vocabulary, of which each kind has its own."""
    kinds = mx.array([0, 2, 2, 2, 2, 4])
    tokens = mx.concatenate([mx.array([1, 5]), 300 + kinds, mx.array([2, 3])])[None]
    extra = {"image_grid_hw": [[4, 4]], "image_sample_indices": [0], "image_offsets": [2], "image_types": kinds}
    extra |= {"image_type_offsets": [0, 6], "image_permutations": [2, 0, 1, 3]}
    return tokens, _pixels(16, 3 * 14 * 14), {name: mx.array(value) for name, value in extra.items()}


FORMS: dict[str, Callable[[], Picture]] = {
    "llava": lambda: (_tokens(16), _pixels(1, 3, 56, 56), {}),
    "gemma3": lambda: (_tokens(4), _pixels(1, 3, 56, 56), {}),
    "qwen2_vl": _of_qwen,
    "qwen3_vl_moe": _of_qwen,
    "deepseek_v4": _deepseek_v4,
    "idefics2": lambda: (
        _tokens(64),
        _pixels(1, 1, 3, 56, 56),
        {"pixel_attention_mask": mx.ones((1, 1, 56, 56), mx.int32)},
    ),
    "llava_bunny": lambda: (_tokens(1), _pixels(1, 3, 378, 378), {}),
    "llava_onevision": lambda: (_tokens(36), _pixels(1, 2, 3, 56, 56), {"image_sizes": mx.array([[56, 56]])}),
    "minicpmv4_6": lambda: (
        _tokens(1),
        [[_pixels(3, 14, 14 * 16)]],
        {"tgt_sizes": [mx.array([[4, 4]])], "image_bound": [mx.array([[2, 3]])]},
    ),
    "mllama": lambda: (
        _tokens(1),
        _pixels(1, 1, 4, 3, 56, 56),
        {
            "aspect_ratio_ids": mx.array([[1]]),
            "aspect_ratio_mask": mx.array([[[1, 0, 0, 0]]]),
            "cross_attention_mask": mx.array([[[[0] * 4], *[[[1, 0, 0, 0]]] * 4]]),
        },
    ),
    "moondream2": _of_moondream,
    "phi4_siglip": lambda: (_tokens(1, -200), _pixels(1, 16, 3 * 14 * 14), PATCHES),
    "phi4mm": lambda: (_tokens(1), _pixels(1, 16, 3 * 14 * 14), PATCHES),
    "qwen3_omni_moe": _of_qwen,
}
"""By architecture: a function that makes the same picture in every run, after ``mx.random.seed``."""


def picture_of(name: str) -> Picture:
    """Return the picture for an architecture of :data:`FORMS`."""
    mx.random.seed(6)
    picture = FORMS[name]()
    mx.eval(picture)
    return picture


# Stock and streamed

MAX_BYTES = 2e9
"""The largest model that is tried. The towers of some have sizes that no configuration changes."""

SPARE_GB = 0.04
"""Added to the smallest budget where a picture has no room in it."""


def architectures() -> list[str]:
    """Return mlx-vlm's architectures with a picture's configuration."""
    found = []
    for module in pkgutil.iter_modules(models.__path__):
        if module.ispkg and (Path(models.__path__[0]) / module.name / "vision.py").exists():
            found.append(module.name)
    return sorted(found)


def candidates(name: str) -> Iterator[dict[str, Any]]:
    """Yield configurations that differ in the ``model_type`` of their parts."""
    config = configuration(name)
    yield config
    for text in KINDS["text_config"]:
        for vision in KINDS["vision_config"]:
            kinds = {"text_config": text.format(name=name), "vision_config": vision.format(name=name)}
            parts = {part: {**config[part], "model_type": kind} for part, kind in kinds.items() if part in config}
            yield {**config, **parts}


def configuration(name: str) -> dict[str, Any]:
    """Return a tiny configuration, with the defaults of mlx-vlm's classes where they do not matter."""
    if name in MODELS:
        return copy.deepcopy({"model_type": name, "vocab_size": 300, **MODELS[name]})
    package = importlib.import_module(f"mlx_vlm.models.{name}")
    config: dict[str, Any] = {}
    for part in PARTS:
        kind = getattr(package, f"{part.title()}Config", None)
        if kind is not None and dataclasses.is_dataclass(kind):
            config[f"{part}_config"] = _small(kind, SMALL | (VISION if part == "vision" else {}))
    text = config.get("text_config", {})
    found = {**text, **_small(package.ModelConfig, SMALL), **config, "model_type": name}
    return merged(found, ENTRIES.get(name, {}))


def merged(config: dict[str, Any], entries: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with some entries replaced, those inside of others included."""
    found = dict(config)
    for key, value in entries.items():
        inner = found.get(key)
        found[key] = merged(inner, value) if isinstance(value, dict) and isinstance(inner, dict) else value
    return found


def _small(kind: Any, small: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.name.endswith("_config"):
            continue
        if field.name in TOKENS:
            found[field.name] = IMAGE
        elif field.name in OTHERS:
            found[field.name] = OTHERS[field.name]
        elif field.name in small:
            found[field.name] = small[field.name]
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            hint = str(hints.get(field.name))
            found[field.name] = "" if "str" in hint and "Dict" not in hint else 1e-6 if "float" in hint else 4
    return found


def save(folder: Path, name: str) -> None:
    """Write a model with random weights."""
    first: Exception | None = None
    for config in candidates(name):
        try:
            write_model(folder, config)
        except (ValueError, KeyError, AttributeError, TypeError, AssertionError) as error:
            first = first or error
        else:
            return
    raise first or ValueError("no configuration")


def write_model(folder: Path, config: dict[str, Any], spread: float | None = None) -> Path:
    """Write a model with random weights of a spread, by default of one that suits their width. Return its folder."""
    text, package = json.dumps(config), importlib.import_module(f"mlx_vlm.models.{config['model_type']}")
    config = json.loads(text)
    config.setdefault("text_config", {})
    config.setdefault("vision_config", {})
    config.setdefault("audio_config", {})
    args = package.ModelConfig.from_dict(config)
    args = utils.update_module_configs(args, package, config, list(PARTS))
    mx.random.seed(5)
    flat = tree_flatten(package.Model(args).parameters())
    if sum(array.nbytes for _, array in flat) > MAX_BYTES:
        raise ValueError(f"its smallest configuration has {sum(array.nbytes for _, array in flat) / 1e9:.1f} GB")
    widths = {key: array.shape[-1] if array.ndim else 1 for key, array in flat}
    weights = {
        key: mx.random.normal(array.shape) * (spread or 0.5 / math.sqrt(widths[key] or 1)) for key, array in flat
    }
    weights |= {key: mx.abs(array) for key, array in weights.items() if key.endswith("running_var")}
    # Such as experts of tokens.
    integers = {key: array for key, array in flat if mx.issubdtype(array.dtype, mx.integer)}
    weights |= {key: mx.random.randint(0, 4, array.shape, array.dtype) for key, array in integers.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(text)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def pictures() -> Iterator[Picture]:
    """Yield pictures in the forms that processors make."""
    mx.random.seed(6)
    grid, patches = mx.array([[1, 4, 4]]), 16
    forms: list[tuple[tuple[int, ...], dict[str, Any]]] = [
        ((1, 3, 56, 56), {}),
        ((1, 3, 56, 56), {"image_sizes": [(56, 56)]}),
        ((1, 3, 56, 56), {"image_sizes": mx.array([[56, 56]])}),
        ((1, 1, 3, 56, 56), {}),
        *(((patches, length * 3 * 14 * 14), {"image_grid_thw": grid}) for length in (2, 1)),
        ((1, patches, 3, 14, 14), {"image_grid_thw": grid}),
        *(((patches, 3, 14, 14), extra) for extra in ({"image_grid_hws": grid[:, 1:]}, {"grid_thws": grid})),
        ((1, patches, 3 * 14 * 14), PATCHES),
        ((patches, 3 * 14 * 14), {"spatial_shapes": grid[:, 1:]}),
    ]
    for shape, extra in forms:
        pixels = _pixels(*shape)
        for count in (4, 16, 1, 2, 8, 9, 64):
            yield _tokens(count), pixels, extra


def outputs(model: Any, tokens: mx.array, pixels: Any, extra: dict[str, Any]) -> list[mx.array]:
    """Logits of a prompt and of two more tokens."""
    language = model.language_model
    for name in ("_position_ids", "_rope_deltas"):
        if hasattr(language, name):
            setattr(language, name, None)
    given = model.get_input_embeddings(tokens, pixels, **{"mask": mx.ones(tokens.shape, mx.int32), **extra})
    rest = {key: value for key, value in given.to_dict().items() if value is not None}
    cache = make_prompt_cache(language)
    found = [language(tokens, cache=cache, **rest).logits]
    found += [language(mx.array([[token]]), cache=cache).logits for token in (3, 4)]
    mx.eval(found)
    return found


def picture_for(model: Any, name: str) -> Picture | None:
    """Return a picture that stock mlx-vlm computes with, and that changes its output; None if none is known."""
    if name in FORMS:
        picture = picture_of(name)
        if not _changes(model, *picture):
            raise ValueError("the output does not depend on the picture")
        return picture
    for picture in pictures():
        try:
            if _changes(model, *picture):
                return picture
        except Exception:
            continue
    return None


def _changes(model: Any, tokens: mx.array, pixels: Any, extra: dict[str, Any]) -> bool:
    """Return whether a picture changes a model's output. Some marks of pictures are no tokens of the vocabulary."""
    words = mx.where((tokens < 0) | (tokens >= SMALL["vocab_size"]), 5, tokens)
    found, plain = outputs(model, tokens, pixels, extra), outputs(model, words, None, {})
    return not mx.array_equal(found[-1], plain[-1]) and not mx.any(mx.isnan(found[-1]))


def stock_outputs(folder: Path, text: mx.array, picture: Picture | None) -> list[list[mx.array]]:
    """Return what a new stock model computes: some keep a part of earlier calls."""
    model = utils.load_model(folder)
    return [outputs(model, text, None, {}), *([] if picture is None else [outputs(model, *picture)])]


def _streamed(folder: Path, text: mx.array, picture: Any, least_bytes: int = 0) -> tuple[list[Any], tuple[int, int]]:
    """Return streamed outputs at the smallest budget, and the numbers of units streamed and in towers.

    Where a picture finds no room, the budget is what the error asks for, and a little more.
    """
    budget: Any = least_bytes / 1e9 + SPARE_GB if least_bytes else "min"
    try:
        with load_vlm_model(folder, FlashConfig(ram_budget_gb=budget, telemetry=False)) as model:
            if picture is not None:
                tokens, pixels, extra = picture
                mask = mx.ones(tokens.shape, mx.int32)
                model.expect(tokens.size + 2, {"input_ids": tokens, "pixel_values": pixels, "mask": mask, **extra})
            found = [outputs(model, text, None, {})]
            if picture is not None:
                found.append(outputs(model, *picture))
            return found, (model.plan.streaming.num_units, len(model.layout.towers))
    except BudgetError as error:
        if picture is None or least_bytes:
            raise
        needed = error.minimum_bytes
    return _streamed(folder, text, picture, needed)


def compare(case: Case, connection: Connection) -> None:
    """Compare one architecture, in a process of its own: some configurations end it."""
    connection.send("stock")
    with tempfile.TemporaryDirectory(prefix="zoo-vlm-") as folder:
        connection.send(outcome_of_model(case.name, Path(folder), connection.send))


def outcome_of_model(name: str, folder: Path, enter: Callable[[str], None] = lambda phase: None) -> Outcome:
    """Return the outcome of one architecture. ``enter`` is called with the phase in which streaming is to blame."""
    outcome = Outcome(name, "fp32", "cannot")
    text = mx.array([[1, 2, 3, 4, 5, 6, 7]])
    try:
        save(folder, name)
        stock = utils.load_model(folder)
        picture = picture_for(stock, name) if language_part(stock) is not None else None
        expected = stock_outputs(folder, text, picture) if language_part(stock) is not None else []
    except Exception as error:
        outcome.reason = one_line(error)
        return outcome
    outcome.sees, outcome.status = picture is not None, "failed"
    del stock
    enter("streamed")
    try:
        found, (outcome.num_streamed, outcome.num_towers) = _streamed(folder, text, picture)
    except FlashError as error:
        outcome.status, outcome.reason = "refused", one_line(error)
    except Exception as error:
        outcome.reason = one_line(error)
    else:
        if not expected:
            outcome.reason = "a model without a language model was not refused"
        elif _same(expected, found):
            outcome.status = "ok"
        elif not _same(expected, stock_outputs(folder, text, picture)):
            outcome.status, outcome.reason = "cannot", "stock mlx-vlm gives other outputs when it is repeated"
    return outcome


def _same(some: list[list[mx.array]], others: list[list[mx.array]]) -> bool:
    pairs = [(a, b) for one, other in zip(some, others, strict=True) for a, b in zip(one, other, strict=True)]
    return all(bool(mx.array_equal(a, b, equal_nan=True)) for a, b in pairs)

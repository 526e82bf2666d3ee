"""Tiny configurations: the text side of vision-language models, whose own settings are in ``text_config``."""

from __future__ import annotations

from typing import Any

from zoo.dense import GEMMA3, GEMMA3N, GEMMA4, MINISTRAL3
from zoo.experts import DEEPSEEK_V3, LLAMA4_TEXT, MINIMAX_M3, MISTRAL4, MUSE_SPARK, QWEN_EXPERTS
from zoo.recurrent import KIMI_K3, QWEN3_5, RECURRENT

HADAMARD_PACKED = [
    {"path": "model.embed_tokens", "embedding": True, "dtype": "float16", "block": 512},
    {"path": "model.layers.0.mlp.gate_proj", "embedding": False, "dtype": "float16", "block": 512},
    {"path": "model.layers.0.mlp.up_proj", "embedding": False, "dtype": "float16", "block": 512},
    {"path": "model.layers.1.mlp.down_proj", "embedding": False, "dtype": "float16", "block": 0},
    {"path": "model.layers.3.self_attn.q_proj", "embedding": False, "dtype": "float16", "block": 512},
    {"path": "lm_head", "embedding": False, "dtype": "float16", "block": 512},
]

WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": {**GEMMA3, "model_type": "gemma3_text"}},
    "gemma3n": {"text_config": {**GEMMA3N, "model_type": "gemma3n_text"}},
    "gemma4": {"text_config": {**GEMMA4, "model_type": "gemma4_text"}},
    "kimi_k25": {"text_config": {**DEEPSEEK_V3, "model_type": "deepseek_v3"}},
    "kimi_k3": {"text_config": KIMI_K3},
    "kimi_vl": {"text_config": {**DEEPSEEK_V3, "model_type": "deepseek_v3"}},
    "lfm2-vl": {"text_config": {**RECURRENT["lfm2"], "model_type": "lfm2"}},
    "llama4": {"text_config": LLAMA4_TEXT},
    "minimax_m3_vl": {"text_config": MINIMAX_M3},
    "mistral3": {"text_config": {**MINISTRAL3, "model_type": "ministral3"}},
    "mistral3:llama": {"text_config": {"model_type": "mistral", "tie_word_embeddings": True}},
    "mistral3:mistral4": {"text_config": {**MISTRAL4, "model_type": "mistral4"}},
    "muse_spark": {"text_config": MUSE_SPARK},
    "pixtral": {"text_config": {"model_type": "llama"}},
    "prism_hadamard_qwen35": {
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": HADAMARD_PACKED,
        "text_config": {**QWEN3_5, "model_type": "qwen3_5_text", "hidden_size": 512, "intermediate_size": 512},
    },
    "qwen2_vl": {"text_config": {"model_type": "qwen2_vl_text", "tie_word_embeddings": True}},
    "qwen3_5_moe": {
        "text_config": {
            **QWEN3_5,
            **QWEN_EXPERTS,
            "shared_expert_intermediate_size": 64,
            "model_type": "qwen3_5_moe_text",
        }
    },
    "qwen3_vl": {"text_config": {"model_type": "qwen3_vl_text", "tie_word_embeddings": True}},
    "qwen3_vl_moe": {"text_config": {**QWEN_EXPERTS, "model_type": "qwen3_vl_moe_text"}},
}

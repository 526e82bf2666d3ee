"""Entries that make mlx-vlm's architectures tiny where the names of their settings do not tell how."""

from __future__ import annotations

from typing import Any

PARTIAL_MROPE = {"type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4, "partial_rotary_factor": 0.25}
QWEN_VISION = {
    "depth": 3,
    "hidden_size": 128,
    "intermediate_size": 256,
    "out_hidden_size": 128,
    "num_heads": 4,
    "patch_size": 14,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [],
}
LINEAR = {"full_attention_interval": 2, "num_hidden_layers": 4}
DEEPSEEK = {
    "text_config": {"num_key_value_heads": 4, "qk_rope_head_dim": 16},
    "vision_config": {"model_type": "vision", "layers": 3, "width": 128, "image_size": 64},
    "projector_config": {"input_dim": 128, "n_embed": 128},
}
PROJECTOR = {"input_dim": 128, "n_embed": 128, "projector_type": "mlp_gelu", "depth": 2}
ERNIE_TEXT = {
    "moe_num_experts": [4, 4],
    "moe_layer_start_index": [1, 1],
    "moe_layer_end_index": [2, 2],
    "moe_intermediate_size": [64, 64],
    "mrope_section": [6, 6, 4],
    "freq_allocation": 4,
}

OMNI_TEXT = {
    "num_hidden_layers": 3,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 300,
    "rope_theta": 1e4,
    "max_position_embeddings": 512,
    "rope_scaling": {"type": "default", "mrope_section": [4, 6, 6]},
}

ENTRIES: dict[str, dict[str, Any]] = {
    "aya_vision": {"text_config": {"sliding_window_pattern": 2, "num_hidden_layers": 4}},
    "gemma3n": {
        "text_config": {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            "intermediate_size": [256] * 4,
            "laurel_rank": 16,
        }
    },
    "gemma4": {
        "text_config": {
            "num_hidden_layers": 4,
            "sliding_window_pattern": 2,
            "_sliding_window_pattern": 2,
            "global_head_dim": 32,
        },
        "vision_config": {"global_head_dim": 32, "num_key_value_heads": 4, "default_output_length": 4},
    },
    "llama4": {
        "text_config": {"num_experts_per_tok": 1, "attention_chunk_size": 64, "no_rope_layers": [1, 1, 0]},
        "vision_config": {
            "pixel_shuffle_ratio": 0.5,
            "norm_eps": 1e-5,
            "projector_dropout": 0.0,
            "projector_input_dim": 128,
            "projector_output_dim": 128,
            "vision_output_dim": 128,
            "intermediate_size": 512,
            "num_channels": 3,
            "initializer_range": 0.02,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
        },
    },
    "glm4v": {
        "text_config": {"eos_token_id": [1], "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
    },
    "glm4v_moe": {
        "eos_token_id": [1],
        "text_config": {
            "rope_scaling": {"type": "default", "mrope_section": [4, 6, 6]},
            "partial_rotary_factor": 1.0,
            "use_qk_norm": False,
            "attention_bias": False,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_shared_experts": 1,
        },
    },
    "llava_bunny": {"vision_config": {"image_size": 378}},
    "llava_onevision": {"image_grid_pinpoints": [[56, 56]]},
    "mllama": {
        "text_config": {"cross_attention_layers": [1]},
        "vision_config": {"intermediate_layers_indices": [0, 2], "vision_output_dim": 384},
    },
    "moondream2": {"vision_config": {"crop_size": 56, "proj_out_dim": 128, "proj_inner_dim": 256}},
    "plamo2vl": {"vision_config": {"image_feature_size": 128, "image_proj_hidden_size": 128}},
    "muse_glimmer": {"out_hidden_size": 512, "projector_hidden_size": 128},
    "paddleocr_vl": {"hidden_size": 1024},
    "granite4_vision": {
        "vision_config": {"image_size": 112},
        "deepstack_layer_map": [[-2, 0], [-1, 1]],
        "spatial_target_layers": [0, 1, 2, 2],
    },
    "inkling": {"vision_config": {"patch_size": 40}},
    "jina_vlm": {"vision_config": {"vit_layers": [-1, -2], "output_size": 128}},
    "deepseek_v4": {
        "o_groups": 2,
        "o_lora_rank": 32,
        "index_n_heads": 4,
        "index_head_dim": 64,
        "qk_rope_head_dim": 16,
        "vision_n_layers": 3,
        "vision_dim": 128,
        "vision_n_heads": 4,
        "vision_inter_dim": 256,
        "vision_downsample_ratio": 2,
    },
    "qwen3_omni_moe": {
        "enable_audio_output": False,
        "thinker_config": {
            "text_config": OMNI_TEXT,
            "vision_config": {**QWEN_VISION},
            "audio_config": {
                "d_model": 64,
                "encoder_layers": 2,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 128,
                "num_hidden_layers": 2,
                "output_dim": 128,
                "downsample_hidden_size": 32,
            },
            "image_token_id": 290,
            "video_token_id": 289,
            "vision_start_token_id": 288,
            "audio_token_id": 287,
        },
        "talker_config": {"text_config": OMNI_TEXT},
    },
    "muse_spark": {
        "text_config": {
            "rope_parameters": {"rope_theta": 1e4},
            "layer_rope_theta": [1e4, 0.0, 1e4],
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "final_logit_softcapping": 30.0,
            "output_multiplier": 1.0,
            "moe_hidden_size": 128,
        },
        "vision_config": {"pos_emb_height": 8, "pos_emb_width": 8},
        "audio_config": {"hidden_sizes": [16, 32, 64, 128], "num_hidden_layers": 4},
        "out_hidden_size": 512,
        "projector_hidden_size": 128,
    },
    "step3p7": {
        "text_config": {
            "num_attention_groups": 2,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "share_expert_dim": 64,
            "moe_layers_enum": [1, 2],
        },
        "vision_config": {"width": 128, "layers": 3, "heads": 4, "mlp_ratio": 2.0},
    },
    "phi3_v": {"vision_config": {"image_dim_out": 128}},
    "qwen3_5": {"text_config": {**LINEAR, "rope_parameters": PARTIAL_MROPE}, "vision_config": QWEN_VISION},
    "qwen3_5_moe": {"text_config": {**LINEAR, "rope_parameters": PARTIAL_MROPE}, "vision_config": QWEN_VISION},
    "qwen4_exp": {"text_config": {**LINEAR, "rope_parameters": PARTIAL_MROPE}, "vision_config": QWEN_VISION},
    "lfm2_vl": {
        "text_config": {
            "layer_types": ["conv", "full_attention", "conv"],
            "block_dim": 128,
            "conv_dim": 128,
            "conv_dim_out": 128,
            "block_auto_adjust_ff_dim": False,
        },
        "vision_config": {"num_patches": 16},
        "projector_hidden_size": 128,
    },
    "hunyuan_vl": {
        "text_config": {
            "attention_head_dim": 32,
            "rope_scaling": {
                "alpha": 1000.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "type": "xdrope",
                "xdrope_section": [4, 4, 4, 4],
            },
        },
        "vision_config": {"max_image_size": 224},
    },
    "minicpmv4_6": {"text_config": LINEAR, "insert_layer_id": 1, "image_size": 56},
    "deepseek_vl_v2": {**DEEPSEEK, "projector_config": PROJECTOR},
    "deepseekocr": DEEPSEEK,
    "deepseekocr_2": {
        **DEEPSEEK,
        "vision_config": {
            "model_type": "vision",
            "width": {"qwen2-0-5b": {"dim": 128, "layers": 3, "heads": 4, "kv_heads": 2, "intermediate_size": 256}},
        },
    },
    "ernie4_5_moe_vl": {**ERNIE_TEXT, "im_patch_id": 290, "pixel_hidden_size": 128},
    "molmo": {
        "text_config": {
            "n_heads": 4,
            "n_kv_heads": 2,
            "mlp_hidden_size": 512,
            "embedding_size": 300,
            "additional_vocab_size": 8,
        },
        "vision_config": {
            "hidden_size": 256,
            "image_default_input_size": [56, 56],
            "image_emb_dim": 128,
            "image_num_heads": 4,
            "image_num_key_value_heads": 4,
            "image_num_layers": 3,
            "image_head_dim": 32,
            "image_mlp_dim": 256,
            "image_num_pos": 17,
            "intermediate_size": 588,
            "vit_layers": [-2, -3],
        },
    },
    "molmo2": {
        "image_end_token_id": 289,
        "image_patch_id": 290,
        "text_config": {"additional_vocab_size": 8},
        "vision_config": {
            "vit_config": {
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "head_dim": 32,
                "image_num_pos": 16,
                "image_default_input_size": [56, 56],
            },
            "adapter_config": {
                "hidden_size": 128,
                "intermediate_size": 256,
                "text_hidden_size": 128,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "head_dim": 32,
                "vit_layers": [-1, -2],
            },
        },
    },
    "moondream3": {
        "text_config": {"num_key_value_heads": 4, "rope_dim": 16, "moe_start_layer": 1, "prefix_attn": 4},
        "vision_config": {"proj_out_dim": 128, "proj_inner_dim": 256, "crop_size": 56},
    },
    "multi_modality": {
        "vision_config": {"cls": "", "params": {"image_size": 56}},
        "projector_config": {
            "cls": "MlpProjector",
            "model_type": "projector",
            "params": {"depth": 2, "input_dim": 128, "n_embed": 128, "projector_type": "mlp_gelu"},
        },
    },
    "mimo_v2": {
        "text_config": {
            "hybrid_layer_pattern": [0, 1, 0],
            "moe_layer_freq": [0, 1, 1],
            "swa_head_dim": 32,
            "swa_v_head_dim": 32,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "partial_rotary_factor": 0.5,
        },
        "vision_config": {"qk_channels": 32, "fullatt_block_indexes": [0, 1, 2], "vit_window_attn_types": [-1, -1, -1]},
    },
    "kimi_k3": {
        "text_config": {
            "linear_attn_config": {
                "kda_layers": [1, 2],
                "full_attn_layers": [3],
                "num_heads": 4,
                "head_dim": 32,
                "short_conv_kernel_size": 4,
            },
            "num_key_value_heads": 4,
            "num_experts": None,
        },
        "vision_config": {
            "vt_num_attention_heads": 4,
            "vt_num_hidden_layers": 3,
            "vt_hidden_size": 128,
            "vt_intermediate_size": 256,
            "qkv_hidden_size": 128,
            "mm_hidden_size": 128,
            "text_hidden_size": 128,
            "init_pos_emb_height": 8,
            "init_pos_emb_width": 8,
        },
    },
    "nemotron_h_nano_omni": {
        "text_config": {
            "hybrid_override_pattern": "M*-M",
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 1,
            "layer_norm_epsilon": 1e-5,
            "attention_bias": False,
            "mamba_proj_bias": False,
            "mlp_bias": False,
            "use_bias": False,
            "use_conv_bias": True,
        },
        "vit_hidden_size": 128,
        "projector_hidden_size": 128,
    },
    "phi4_siglip": {"mm_hidden_size": 128},
    "phi4mm": {
        "mm_hidden_size": 128,
        "audio_processor": {
            "config": {"attention_dim": 128, "attention_heads": 4, "num_blocks": 2, "linear_units": 256}
        },
    },
    "glm5_next": {"text_config": {"num_key_value_heads": 4, "qk_rope_head_dim": 0}},
}
"""By architecture: entries that replace those of the generated configuration."""


def merged(config: dict[str, Any], entries: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with some entries replaced, those inside of others included."""
    found = dict(config)
    for key, value in entries.items():
        inner = found.get(key)
        found[key] = merged(inner, value) if isinstance(value, dict) and isinstance(inner, dict) else value
    return found

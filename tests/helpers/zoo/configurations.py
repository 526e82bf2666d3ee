"""Tiny configurations: what each architecture has beside :data:`SHARED` and the defaults of mlx-lm's classes."""

from __future__ import annotations

from typing import Any

_NAMES_BY_VALUE: tuple[tuple[Any, str], ...] = (
    (True, "norm_topk_prob use_qk_norm moe_router_enable_expert_bias use_conv_bias add_swa_attention_sink_bias"),
    (True, "altup_correct_scale block_auto_adjust_ff_dim latent_moe_use_norm linear_allow_neg_eigval mamba_rms_norm"),
    (True, "mla_scale_kv_lora mla_scale_q_lora mla_use_output_gate qk_layernorm use_cla use_expert_bias"),
    (True, "use_mixed_mlp_moe"),
    (False, "tie_word_embeddings attention_bias use_bias mlp_bias conv_bias bias mamba_proj_bias"),
    (False, "add_full_attention_sink_bias post_norm"),
    (0.1, "attention_multiplier"),
    (0.5, "residual_multiplier lm_head_multiplier"),
    (1, "topk_group first_k_dense_replace n_shared_experts moe_layer_freq num_shared_experts decoder_sparse_step"),
    (1, "num_dense_layers n_groups mamba_n_groups attn_layer_offset candidate_source_layer_id expert_layer_offset"),
    (1, "moe_layer_start_index moe_num_shared_experts num_shared_expert num_swa_key_value_heads"),
    (2, "num_key_value_heads num_experts_per_tok n_group moe_topk moe_k num_kv_shared_layers layer_group_size"),
    (2, "conv_window attn_res_block_size blocksparse_num_local_blocks blocksparse_vert_stride candidate_block_size"),
    (2, "candidate_topk_blocks cla_share_factor dense_attention_every_n_layers emb_split_num expert_layer_period"),
    (2, "hc_mult interleave_moe_layer_step n_shared_head ngram_vocab_size_ratio num_expert_group"),
    (2, "num_experts_per_token num_kv_reuse_layers num_loops o_groups swa_num_key_value_heads zero_expert_num"),
    (2.5, "routed_scaling_factor"),
    (3, "conv_L_cache emb_neighbor_num"),
    (4, "num_hidden_layers num_layers n_layers n_layer num_attention_heads num_heads n_heads n_head num_local_experts"),
    (4, "linear_num_value_heads linear_conv_kernel_dim full_attention_interval mamba_d_conv conv_kernel index_n_heads"),
    (4, "logits_scaling altup_num_inputs attn_layer_period conv1d_width hc_sinkhorn_iters num_swa_attention_heads"),
    (4, "num_transformer_layers swa_num_attention_heads"),
    (8, "sliding_window num_experts n_routed_experts mamba_n_heads mamba_num_heads attention_chunk_size"),
    (8, "attention_window_size loop_window_size sliding_window_size"),
    (16, "qk_rope_head_dim mamba_d_state state_size mamba_chunk_size"),
    (32, "head_dim v_head_dim qk_nope_head_dim index_head_dim linear_key_head_dim linear_value_head_dim"),
    (32, "hidden_size_per_layer_input mamba_d_head mamba_head_dim block_multiple_of blocksparse_block_size"),
    (32, "hidden_size_per_head kv_channels laurel_rank o_lora_rank swa_v_head_dim"),
    (64, "moe_intermediate_size kv_lora_rank shared_expert_intermediate_size global_head_dim expert_ffn_hidden_size"),
    (64, "a_low_rank_dim decay_low_rank_dim dim_model_base ffn_dim_divisor gate_low_rank_dim moe_hidden_size"),
    (64, "routed_expert_hidden_size share_expert_dim v_low_rank_dim"),
    (96, "q_lora_rank"),
    (128, "hidden_size n_embd model_dim d_model hidden_dim block_dim ff_intermediate_size"),
    (256, "intermediate_size dense_intermediate_size intermediate_size_mlp mamba_d_ssm n_inner"),
    (320, "vocab_size vocab_size_per_layer_input embedding_size num_vocab"),
    (512, "max_position_embeddings mlp_hidden_size model_max_length"),
    (1024, "n_positions n_ctx"),
    (1e-05, "rms_norm_eps layer_norm_epsilon layer_norm_eps norm_eps norm_epsilon layernorm_epsilon"),
    (10000.0, "rope_theta swa_rope_theta rotary_emb_base"),
    ("sigmoid", "scoring_func score_function"),
    ("noaux_tc", "topk_method"),
    ([0], "mlp_only_layers"),
    ("1,2,3", "moe_layers_enum"),
    ("MLA", "attention_method"),
    ("identity", "zero_expert_type"),
    (0, "altup_active_idx"),
    (0.25, "rotary_pct"),
    (1.0, "block_ffn_dim_multiplier"),
    (1.4, "scale_depth"),
    (2.0, "hidden_dim_scale_factor"),
    (384, "block_ff_dim"),
    (48, "swa_head_dim"),
    (5.0, "moe_router_logit_softcapping embedding_multiplier activation_situ_beta activation_situ_linear_beta"),
    (5.0, "gegelu_limit logits_soft_cap scale_emb altup_coef_clip"),
)
SHARED: dict[str, Any] = {name: value for value, names in _NAMES_BY_VALUE for name in names.split()}
"""Settings that architectures share; they ignore names that they do not know."""

SLIDING_3_1 = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
SLIDING_1_1 = ["sliding_attention", "full_attention"] * 2
BETWEEN = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]

TIED = {"tie_word_embeddings": True}
LATENT = {"num_key_value_heads": 4}

LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"original_max_position_embeddings": 64}
YARN_ROPE = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1}
YARN_ROPE |= {"mscale": 1.0, "mscale_all_dim": 1.0}
LONG_ROPE = {"type": "longrope", "long_factor": [1.0 + 0.5 * i for i in range(16)], "short_factor": [1.0] * 16}
LONG_ROPE |= {"original_max_position_embeddings": 64}
SCALED_YARN = {**YARN_ROPE, "rope_type": "yarn", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
SCALED_YARN |= {"original_max_position_embeddings": 8}
WIDE_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64, "truncate": False}
DYNAMIC_ROPE = {"factor": 2.0, "type": "dynamic", "rope_type": "dynamic", "alpha": 1000.0}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
ROPE_BY_KIND = {"sliding_attention": PLAIN_ROPE, "full_attention": {**PLAIN_ROPE, "partial_rotary_factor": 0.5}}

# Attention and a feed-forward network in every layer

GEMMA3 = {"sliding_window_pattern": 3}

GEMMA3N = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
GEMMA3N |= {"rope_local_base_freq": 1e4, "vocab_size_per_layer_input": 256, "final_logit_softcapping": 30.0}
GEMMA3N |= {"activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0]}

GEMMA4 = {"num_hidden_layers": 6, "sliding_window_pattern": 2, **TIED}

GEMMA4_EXPERTS = {**GEMMA4, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False}
GEMMA4_EXPERTS |= {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
GEMMA4_EXPERTS |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}

MINISTRAL3 = {"layer_types": SLIDING_1_1, "rope_parameters": SCALED_YARN}

DENSE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bitnet", "ernie4_5", "exaone", "granite", "qwen2", "smollm3", "starcoder2"), TIED),
    **dict.fromkeys(("cohere", "gpt_neox", "nanochat", "phi"), LATENT),
    "afm7": {"num_kv_heads": 2},
    "apertus": {"qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [1, 3]},
    "exaone4": {"sliding_window_pattern": "LLLG", "rope_scaling": LLAMA3_ROPE},
    "gear": {"layer_types": SLIDING_1_1, "final_logit_softcapping": 30.0, **TIED},
    "gemma3_text": GEMMA3,
    "gemma4_text": GEMMA4,
    "gemma4_text:experts": GEMMA4_EXPERTS,
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "gpt_bigcode": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, **TIED},
    "gptj": {"rotary_dim": 16},
    "hunyuan_v1_dense": {"rope_scaling": DYNAMIC_ROPE},
    "internlm2": {"rope_scaling": DYNAMIC_ROPE},
    "internlm3": {"qkv_bias": True, "rope_scaling": DYNAMIC_ROPE},
    "lille-130m": {"block_size": 256, "n_kv_heads": 2, **TIED},
    "llama": {"rope_scaling": LLAMA3_ROPE},
    "llama:tied": {"attention_bias": True, "mlp_bias": True, **TIED},
    "llama:sliding": {"layer_types": SLIDING_3_1},
    "mimo": {"num_nextn_predict_layers": 0},
    "minicpm3": {**LATENT, "rope_scaling": LONG_ROPE | {"long_factor": [1.5] * 8, "short_factor": [1.0] * 8}},
    "ministral3": MINISTRAL3,
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "num_hidden_layers": 5,
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"replace_with_linear": True}},
        ],
    },
    "openelm": {"num_query_heads": [4, 4, 8, 8], "num_kv_heads": [2, 2, 4, 4], "ffn_multipliers": [1.0, 1.5, 2.0, 2.5]},
    "phi3": {"rope_scaling": LONG_ROPE, "original_max_position_embeddings": 64},
    "phi3small": {"vocab_size": 100_352, "hidden_size": 64},  # it masks tokens by number, whatever the vocabulary
    "plamo3": {"sliding_window_pattern": 2},
    "qwen": {"intermediate_size": 512},
    "qwen3:tied": {"rope_scaling": YARN_ROPE, **TIED},
    "seed_oss": {"attention_bias": True},
    "spark2_5": {"rope_parameters": ROPE_BY_KIND, **TIED},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5, "use_parallel_residual": True},
    "telechat3": {"rope_scaling": YARN_ROPE},
    "youtu_llm": {**LATENT, **TIED},
}

# Mixtures of experts, most of them with a dense layer first

DEEPSEEK_V3 = {**LATENT, "rope_scaling": YARN_ROPE}
INDEXER = {"index_topk": 6}

LONGCAT = {"ffn_hidden_size": 256, "n_routed_experts": 6, "num_layers": 3}

SPARSE = {"sparse_num_index_heads": 2, "sparse_index_dim": 32, "sparse_block_size": 4, "sparse_topk_blocks": 2}
MINIMAX_M3 = {"shared_intermediate_size": 64, "num_local_experts": 8, "moe_layer_freq": [0, 1, 1, 1]}
MINIMAX_M3 |= {"layer_types": ["full_attention", "sparse", "sparse", "full_attention"]}
MINIMAX_M3 |= {"sparse_attention_config": {**SPARSE, "sparse_local_block": 1}}

MISTRAL4 = {**LATENT, "rope_parameters": SCALED_YARN}

MUSE_SPARK = {"num_shared_experts": 0, "post_norm_eps": 1e-8, "num_local_experts": 8, "layer_types": SLIDING_3_1}
MUSE_SPARK |= {"rope_parameters": {"rope_theta": 5e5}, "layer_rope_theta": [5e5, 5e5, 5e5, 0.0]}
MUSE_SPARK |= {"final_logit_softcapping": 20.0, "output_multiplier": 0.5}

DEEPSEEK_V41 = {"scoring_func": "sqrtsoftplus", "num_hidden_layers": 5, "q_lora_rank": 64, "index_topk": 2}
DEEPSEEK_V41 |= {"compress_ratios": [0, 2, 2, 2, 2], "kv_source_layer_ids": [1, 3]}
DEEPSEEK_V41 |= {"index_source_layer_ids": [1, 2, 3], "rope_scaling": YARN_ROPE}

MIMO_V2 = {"hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1], "head_dim": 48}
MIMO_V2 |= {"partial_rotary_factor": 0.334}

LAGUNA_ROPE = {**YARN_ROPE, "rope_type": "yarn", "rope_theta": 1e5, "partial_rotary_factor": 0.5}

STEP3P5 = {"num_attention_groups": 2, "moe_num_experts": 8, "moe_top_k": 2, "layer_types": BETWEEN}
STEP3P5 |= {"attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 4}}
STEP3P5 |= {"partial_rotary_factors": [0.5, 1.0, 1.0, 0.5]}
STEP3P5 |= {"swiglu_limits": [0.0, 0.0, 7.0, 7.0], "swiglu_limits_shared": [0.0, 0.0, 0.0, 16.0]}

EXPERTS: dict[str, dict[str, Any]] = {
    "afmoe": {"layer_types": SLIDING_3_1},
    "bailing_moe:softmax": {"n_group": 1, "moe_router_enable_expert_bias": False},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
    },
    "deepseek": LATENT,
    "deepseek_v2": {**DEEPSEEK_V3, "topk_method": "group_limited_greedy"},
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": {**DEEPSEEK_V3, **INDEXER},
    "deepseek_v41": DEEPSEEK_V41,
    "dots1": {"scoring_func": "noaux_tc", **LATENT},
    "ernie4_5_moe": {"moe_num_experts": 4, **TIED},
    "exaone_moe": {"layer_types": SLIDING_3_1, "is_moe_layer": [False, True, True, True]},
    "glm4_moe": {"attention_bias": True, "partial_rotary_factor": 0.5, "rope_scaling": None},
    "glm4_moe_lite": {**LATENT, "num_nextn_predict_layers": 0},
    "glm_moe_dsa": {**LATENT, **INDEXER, "rope_parameters": PLAIN_ROPE},
    "gpt_oss": {"intermediate_size": 64, "layer_types": SLIDING_1_1, "rope_scaling": WIDE_YARN},
    "granitemoe": TIED,
    "hunyuan": {"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}, "num_experts": 4, **TIED},
    "laguna": {
        "layer_types": BETWEEN,
        "num_attention_heads_per_layer": [4, 8, 8, 4],
        "rope_parameters": {"full_attention": LAGUNA_ROPE, "sliding_attention": PLAIN_ROPE},
    },
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": LONGCAT,
    "longcat_flash_ngram": LONGCAT,
    "mellum": {"layer_types": SLIDING_1_1, "rope_parameters": ROPE_BY_KIND},
    "mimo_v2_flash": MIMO_V2,
    "minimax": {"num_local_experts": 8, "shared_intermediate_size": 0, "rotary_dim": 16},
    "mistral4": MISTRAL4,
    "mixtral": {"intermediate_size": 64},
    "phimoe": {
        "rope_scaling": {**LONG_ROPE, "short_mscale": 1.2, "long_mscale": 1.2},
        "original_max_position_embeddings": 64,
    },
    "phixtral": {"rotary_dim": 16},
    "solar_open": {"partial_rotary_factor": 1.0},
    "step3p5": STEP3P5,
}

# Recurrent layers, alone or between attention layers

QWEN3_5 = {"linear_num_key_heads": 2, "num_experts": 0}
QWEN3_5 |= {"rope_parameters": {**PLAIN_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}}

KDA = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4}
KIMI_LINEAR = {**LATENT, "linear_attn_config": KDA}

KIMI_K3 = {**KIMI_LINEAR, "num_hidden_layers": 5, "q_lora_rank": 64}

MAMBA = {"time_step_rank": 8}

NEMOTRON_H = {"hybrid_override_pattern": ["M", "*", "-", "M", "E"], "ssm_state_size": 16, "n_groups": 2}
NEMOTRON_H |= {"n_group": 1, "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 64}

RECURRENT: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {**LATENT, "group_norm_size": 2},
    "bailing_moe_linear": {"group_norm_size": 2, "partial_rotary_factor": 0.5},
    "bailing_moe_v3": {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "model_type": "bailing_hybrid",
        "moe_shared_expert_intermediate_size": 64,
    },
    "falcon_h1": TIED,
    "granitemoehybrid": {
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "shared_intermediate_size": 64,
        "mamba_conv_bias": True,
        **TIED,
    },
    "jamba": {"mamba_expand": 2, "num_experts": 4, "intermediate_size": 64, **TIED},
    "kimi_linear": KIMI_LINEAR,
    "lfm2": {"full_attn_idxs": [1, 3]},
    "lfm2_moe": {"num_experts": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba": {**MAMBA, **TIED},
    "mamba:falcon": {**MAMBA, "model_type": "falcon_mamba"},
    "mamba2": {"num_heads": 8, "time_step_limit": [0.0, float("inf")], "time_step_rank": "auto", **TIED},
    "nemotron_h": NEMOTRON_H,
    "olmo_hybrid": {"linear_num_key_heads": 4},
    "plamo2": {"full_attention_idx": [3], "mamba_num_heads": 4},
    "qwen3_5": QWEN3_5,
    "qwen3_next": {"linear_num_key_heads": 2, "mlp_only_layers": [], "partial_rotary_factor": 0.25},
    "recurrent_gemma": {
        "num_key_value_heads": 1,
        "block_types": ["recurrent", "recurrent", "attention"],
        "num_hidden_layers": 5,
    },
}

# The text side of vision-language models

HADAMARD_PACKED = [
    {"path": path, "embedding": "embed" in path, "dtype": "float16", "block": 0 if "down_proj" in path else 512}
    for path in (
        *("model.embed_tokens", "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj", "lm_head"),
        *("model.layers.1.mlp.down_proj", "model.layers.3.self_attn.q_proj"),
    )
]

WRAPPERS: dict[str, dict[str, Any]] = {
    name: {"text_config": {**config} if kind is None else {**config, "model_type": kind}}
    for name, kind, config in (
        ("gemma3", "gemma3_text", GEMMA3),
        ("gemma3n", "gemma3n_text", GEMMA3N),
        ("gemma4", None, GEMMA4),
        ("kimi_k25", None, DEEPSEEK_V3),
        ("kimi_k3", None, KIMI_K3),
        ("kimi_vl", None, DEEPSEEK_V3),
        ("lfm2-vl", "lfm2", RECURRENT["lfm2"]),
        ("llama4", "llama4_text", {"num_experts_per_tok": 1, "rope_scaling": LLAMA3_ROPE, "intermediate_size": 128}),
        ("minimax_m3_vl", None, MINIMAX_M3),
        ("mistral3", "ministral3", MINISTRAL3),
        ("mistral3:llama", "mistral", TIED),
        ("mistral3:mistral4", "mistral4", MISTRAL4),
        ("muse_spark", None, MUSE_SPARK),
        ("pixtral", "llama", {}),
        ("qwen2_vl", "qwen2_vl_text", TIED),
        ("qwen3_5_moe", "qwen3_5_moe_text", {**QWEN3_5, "num_experts": 8}),
        ("qwen3_vl", "qwen3_vl_text", TIED),
        ("qwen3_vl_moe", "qwen3_vl_moe_text", {}),
    )
}
WRAPPERS["prism_hadamard_qwen35"] = {
    "tensor_namespace": "mlx-vlm-qwen3_5",
    "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
    "modules": HADAMARD_PACKED,
    "text_config": {**QWEN3_5, "model_type": "qwen3_5_text", "hidden_size": 512, "intermediate_size": 512},
}

CONFIGURATIONS = {**DENSE, **EXPERTS, **RECURRENT, **WRAPPERS}

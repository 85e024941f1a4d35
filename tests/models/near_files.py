"""Tiny models of families of known blocks, with GGUF files of the same tensors: see files.py."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
}
ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
WINDOWS = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
COHERE_EXPERTS = {
    "logit_scale": 0.25,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "prefix_dense_intermediate_size": 64,
    "first_k_dense_replace": 2,
}
FACTORS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.5,
    "logits_scaling": 8.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "gemma": {"model_type": "gemma", **SIZES, "tie_word_embeddings": True},
    "cohere": {"model_type": "cohere", **SIZES, "layer_norm_eps": 1e-5, "logit_scale": 0.25},
    "seed_oss": {"model_type": "seed_oss", **SIZES},
    "arcee": {"model_type": "arcee", **SIZES},
    "ernie4_5": {"model_type": "ernie4_5", **SIZES},
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        **SIZES,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 2,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **SIZES,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "olmoe": {"model_type": "olmoe", **SIZES, "num_experts": 3, "num_experts_per_tok": 2},
    "granitemoe": {
        "model_type": "granitemoe",
        **SIZES,
        **FACTORS,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "dots1": {"model_type": "dots1", **SIZES, **ROUTED},
    "exaone_moe": {"model_type": "exaone_moe", **SIZES, **ROUTED, **WINDOWS},
    "hy_v3": {
        "model_type": "hy_v3",
        **SIZES,
        "num_experts": 4,
        "num_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "router_scaling_factor": 1.5,
    },
    "mellum": {
        "model_type": "mellum",
        **SIZES,
        **WINDOWS,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0}
            | {"original_max_position_embeddings": 32},
            "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
        },
    },
    "granite_swa": {
        "model_type": "granite_swa",
        **SIZES,
        **WINDOWS,
        **FACTORS,
        "layer_rope_theta": [5000.0, 0, 5000.0],
    },
    "granitemoe_swa": {
        "model_type": "granitemoe_swa",
        **SIZES,
        **WINDOWS,
        **FACTORS,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "cohere2_moe": {
        "model_type": "cohere2_moe",
        **SIZES,
        **WINDOWS,
        **COHERE_EXPERTS,
        "rms_norm_eps": None,
        "layer_norm_eps": 1e-5,
        "expert_selection_fn": "softmax",
    },
    "cohere2_moe-rms-sigmoid": {
        "model_type": "cohere2_moe",
        **SIZES,
        **WINDOWS,
        **COHERE_EXPERTS,
        "expert_selection_fn": "sigmoid",
    },
    "minimax_m2": {
        "model_type": "minimax_m2",
        **SIZES,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "partial_rotary_factor": 0.5,
    },
    "afmoe": {"model_type": "afmoe", **SIZES, **ROUTED, **WINDOWS, "mup_enabled": True},
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        **{key: value for key, value in SIZES.items() if key != "rms_norm_eps"},
        "norm_eps": 1e-4,
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}
ARCHITECTURES = {name: name for name in MODELS}
ARCHITECTURES |= {"cohere": "command-r", "ernie4_5_moe": "ernie4_5-moe", "qwen2_moe": "qwen2moe"}
ARCHITECTURES |= {"exaone_moe": "exaone-moe", "minimax_m2": "minimax-m2", "lfm2_moe": "lfm2moe"}
ARCHITECTURES |= {"granitemoe_swa": "granite_swa", "cohere2_moe": "cohere2moe"}
FUSED_EXPERTS = ("granitemoe_swa",)  # models whose files have gate and up projections of experts as one
INTERLEAVED = ("command-r", "arcee", "ernie4_5", "ernie4_5-moe", "granitemoe")
INTERLEAVED += ("granite_swa", "cohere2moe")  # architectures
WRITERS = {
    "moe_layer_start_index": "add_leading_dense_block_count",
    "moe_layer_interval": "add_interleave_moe_layer_step",
    "shared_expert_intermediate_size": "add_expert_shared_feed_forward_length",
    "shared_intermediate_size": "add_expert_shared_feed_forward_length",
    "norm_topk_prob": "add_expert_weights_norm",
    "router_scaling_factor": "add_expert_weights_scale",
}

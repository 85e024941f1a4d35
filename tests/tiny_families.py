"""The configurations of the tiny random checkpoints (tests/tiny.py), one for every family and variant.

Sizes are odd on purpose: no dimension is a multiple of a tile, a vector register or a page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VOCAB_SIZE = 173

# 6 query heads share 2 key heads; with 3 layers there is one that is neither first nor last
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 60,
    "intermediate_size": 85,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "original_max_position_embeddings": 64,
}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.6}
SLIDING, FULL = "sliding_attention", "full_attention"
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.3, 1.2, 1.5],
    "long_factor": [1.0, 1.4, 2.1, 3.5, 6.0],
}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5}


class Family(NamedTuple):
    """A model's configuration, as transformers names it."""

    kind: str  # the class of transformers
    options: dict[str, Any]
    model: str = ""  # the class of its model, if AutoModelForCausalLM does not know it

    def config(self) -> PretrainedConfig:
        import transformers

        made: PretrainedConfig = getattr(transformers, self.kind)(**(SIZES | self.options))
        return made


FAMILIES = {
    "llama": Family("LlamaConfig", {"head_dim": 14, "tie_word_embeddings": True}),
    "llama-attention-bias": Family("LlamaConfig", {"attention_bias": True}),
    "llama-llama3-rope": Family("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": Family("LlamaConfig", {"rope_parameters": LINEAR_ROPE}),
    "mistral-window": Family("MistralConfig", {"head_dim": 14, "sliding_window": 9}),
    "qwen2": Family("Qwen2Config", {}),
    "qwen2-some-windows": Family(
        "Qwen2Config", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    ),
    "qwen3": Family("Qwen3Config", {"head_dim": 14, "tie_word_embeddings": True}),
    "qwen3-moe": Family(
        "Qwen3MoeConfig",
        {
            "head_dim": 14,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 37,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe-raw-weights": Family(
        "Qwen3MoeConfig",
        {
            "head_dim": 14,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 37,
            "norm_topk_prob": False,
        },
    ),
    "mixtral": Family("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "llama-yarn-rope": Family("LlamaConfig", {"rope_parameters": YARN_ROPE}),
    "phi3": Family(
        "Phi3Config",
        {"pad_token_id": 0, "rope_parameters": LONG_ROPE, "original_max_position_embeddings": 20},
    ),
    "ministral": Family(
        "MinistralConfig", {"head_dim": 14, "sliding_window": 9, "layer_types": [SLIDING, FULL, SLIDING]}
    ),
}

MLA = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 18,
    "qk_rope_head_dim": 10,
    "qk_nope_head_dim": 14,
    "v_head_dim": 9,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "moe_intermediate_size": 19,
    "n_shared_experts": 2,
    "routed_scaling_factor": 0.7,
}

GEMMA4 = {
    "num_hidden_layers": 5,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
    "head_dim": 14,
    "global_head_dim": 18,
    "sliding_window": 9,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}

# families with blocks that llama does not have, for which a backend may have no kernels
TORCH_FAMILIES = {
    "phi3-partial-rope": Family("Phi3Config", {"pad_token_id": 0, "rope_parameters": PARTIAL_ROPE}),
    "gemma2": Family(
        "Gemma2Config",
        {
            "head_dim": 14,
            "sliding_window": 9,
            "query_pre_attn_scalar": 11,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": Family(
        "Gemma3TextConfig",
        {
            "head_dim": 14,
            "sliding_window": 9,
            "query_pre_attn_scalar": 11,
            "layer_types": [SLIDING, FULL, SLIDING],
        },
    ),
    # the E sizes: layers that share keys and values, a second embedding
    "gemma4": Family(
        "Gemma4TextConfig",
        GEMMA4
        | {
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 7,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 3.0,
        },
    ),
    # the large ones: one matrix for keys and values, fewer KV heads in layers without windows, experts
    "gemma4-moe": Family(
        "Gemma4TextConfig",
        GEMMA4
        | {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 19,
        },
    ),
    "ministral3": Family(
        "Ministral3Config",
        {"head_dim": 14, "rope_parameters": YARN_ROPE | {"llama_4_scaling_beta": 0.3}}
        | {"original_max_position_embeddings": 11},
    ),
    "exaone4": Family("Exaone4Config", {"sliding_window": 9, "layer_types": [SLIDING, FULL, SLIDING]}),
    "llama4": Family(
        "Llama4TextConfig",
        {
            "head_dim": 14,
            "intermediate_size_mlp": 77,
            "no_rope_layers": [1, 0, 1],
            "moe_layers": [0, 1],
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "attention_chunk_size": 11,
            "floor_scale": 7,
            "attn_scale": 0.3,
        },
    ),
    "olmo2": Family("Olmo2Config", {}),
    "olmo3": Family(
        "Olmo3Config",
        {
            "sliding_window": 9,
            "layer_types": [SLIDING, FULL, SLIDING],
            "rope_parameters": {FULL: YARN_ROPE, SLIDING: {"rope_type": "default", "rope_theta": 500.0}},
        },
    ),
    "granite": Family(
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
            "attention_bias": True,
        },
    ),
    "smollm3": Family("SmolLM3Config", {"no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "glm4": Family("Glm4Config", {"head_dim": 12, "pad_token_id": 0}),
    "glm4-moe": Family(
        "Glm4MoeConfig",
        {
            "pad_token_id": 0,
            "head_dim": 12,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 3,
            "topk_group": 2,
            "moe_intermediate_size": 37,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
        },
    ),
    "deepseek-v2": Family(
        "DeepseekV2Config",
        MLA
        | {
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
    "deepseek-v3": Family(
        "DeepseekV3Config",
        MLA | {"q_lora_rank": 18, "first_k_dense_replace": 2, "rms_norm_eps": 1e-4, "attention_bias": True},
    ),
    "gpt-oss": Family(
        "GptOssConfig",
        {
            "head_dim": 14,
            "sliding_window": 9,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "rope_parameters": YARN_ROPE | {"truncate": False},
        },
    ),
    "cohere2": Family(
        "Cohere2Config",
        {"sliding_window": 9, "layer_types": [SLIDING, FULL, SLIDING], "pad_token_id": 0, "logit_scale": 0.3},
    ),
}
DELTA_NET: dict[str, Any] = {
    "rms_norm_eps": 1e-2,  # what a state gives may be near 0, and its norm would enlarge rounding errors
    "head_dim": 12,
    "layer_types": ["linear_attention", FULL, "linear_attention"],
    "linear_key_head_dim": 18,
    "linear_value_head_dim": 22,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}
SHARED_EXPERT: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 37,
    "shared_expert_intermediate_size": 23,
}
MAMBA: dict[str, Any] = {
    "rms_norm_eps": 1e-2,
    "layer_types": ["linear_attention", FULL, "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 11,
    "shared_intermediate_size": 23,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
}
# families with recurrent layers
HYBRIDS = {
    "lfm2": Family(
        "Lfm2Config",
        {"layer_types": ["conv", FULL, "conv"], "block_multiple_of": 7, "conv_bias": True},
    ),
    "qwen3-5": Family("Qwen3_5TextConfig", DELTA_NET),
    "qwen3-next": Family("Qwen3NextConfig", DELTA_NET | SHARED_EXPERT | {"mlp_only_layers": [1]}),
    "granite-hybrid": Family("GraniteMoeHybridConfig", MAMBA | {"num_local_experts": 5}),
    "nemotron-h": Family(
        "NemotronHConfig",
        {
            "layer_norm_epsilon": 1e-2,
            "layers_block_type": ["linear_attention", "moe", FULL, "mlp", "linear_attention"],
            "head_dim": 14,
            "ssm_state_size": 11,
            "mamba_num_heads": 8,
            "mamba_head_dim": 9,
            "n_groups": 2,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 19,
            "moe_shared_expert_intermediate_size": 23,
            "routed_scaling_factor": 1.5,
        },
    ),
}
# combinations of what these have, and Mamba2 beside attention: `make test-large` tries them all
MORE_HYBRIDS = {
    # the scale keeps rows near each other in size: four random matrices in a row amplify rounding
    "nemotron-h-latent": HYBRIDS["nemotron-h"]._replace(
        options=HYBRIDS["nemotron-h"].options | {"moe_latent_size": 37, "routed_scaling_factor": 0.2}
    ),
    "falcon-h1": Family(
        "FalconH1Config",
        {
            "rms_norm_eps": 1e-2,
            "mamba_d_ssm": 72,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 11,
            "mamba_rms_norm": True,
            "key_multiplier": 0.7,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.8,
            "ssm_multipliers": [0.6, 1.4, 0.9, 1.1, 0.7],
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.5,
            "mlp_multipliers": [1.5, 0.6],
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.4,
        },
    ),
    "qwen3-5-moe": Family("Qwen3_5MoeTextConfig", DELTA_NET | SHARED_EXPERT),
    "falcon-h1-without-norm": Family(
        "FalconH1Config",
        {"mamba_d_ssm": 72, "mamba_n_heads": 8, "mamba_d_state": 11}
        | {"rms_norm_eps": 1e-2, "ssm_in_multiplier": 0.5, "ssm_out_multiplier": 0.1},
    ),
    "granite-hybrid-dense": Family("GraniteMoeHybridConfig", MAMBA | {"num_local_experts": 0}),
}
TORCH_FAMILIES |= HYBRIDS
MORE_FAMILIES = {
    "gemma4-unified": Family(
        "Gemma4UnifiedTextConfig",
        {name: value for name, value in GEMMA4.items() if name != "vocab_size_per_layer_input"}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
}
# what transformers does otherwise than for the context that is served
ROPES_BY_LENGTH = {
    "llama-dynamic-rope": Family(
        "LlamaConfig", {"rope_parameters": DYNAMIC_ROPE, "max_position_embeddings": 24}
    ),
    "phi3-longrope": Family(
        "Phi3Config",
        {"pad_token_id": 0, "rope_parameters": LONG_ROPE, "original_max_position_embeddings": 24},
    ),
}

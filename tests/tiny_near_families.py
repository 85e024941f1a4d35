"""The configurations of tiny checkpoints of families that are declared by blocks which others have too.

tests/models/test_near_families.py holds each to transformers once.
"""

from __future__ import annotations

from typing import Any

from tests.tiny_families import FULL, LLAMA3_ROPE, MLA, SLIDING, YARN_ROPE, Family

EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 19}
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 5, "num_experts_per_tok": 2}
ROUTED_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 3,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 19,
    "routed_scaling_factor": 1.5,
}
WINDOWS: dict[str, Any] = {"sliding_window": 9, "layer_types": [SLIDING, FULL, SLIDING]}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
}

NEAR_FAMILIES = {
    "gemma": Family("GemmaConfig", {"head_dim": 14}),
    "cohere": Family("CohereConfig", {"pad_token_id": 0, "logit_scale": 0.3}),
    "glm": Family("GlmConfig", {"head_dim": 12, "pad_token_id": 0}),
    "seed-oss": Family("SeedOssConfig", {"head_dim": 14, "attention_out_bias": True}),
    "ernie4-5": Family("Ernie4_5Config", {"head_dim": 14}),
    "arcee": Family("ArceeConfig", {"rope_parameters": YARN_ROPE}),
    "helium": Family("HeliumConfig", {"head_dim": 10, "attention_bias": True}),
    "cwm": Family(
        "CwmConfig",
        {"head_dim": 14, "sliding_window": 9, "rope_parameters": LLAMA3_ROPE, "num_hidden_layers": 5},
    ),
    "hyperclovax": Family("HyperCLOVAXConfig", GRANITE),
    "granite-swa": Family(
        "GraniteSWAConfig", GRANITE | {"sliding_window": 9, "layer_rope_theta": [0, 500.0, 700.0]}
    ),
    "youtu": Family(
        "YoutuConfig",
        {name: MLA[name] for name in MLA if name.startswith(("kv", "qk", "v_", "num_key"))}
        | {"q_lora_rank": 18},
    ),
    "qwen2-moe": Family(
        "Qwen2MoeConfig", EXPERTS | {"shared_expert_intermediate_size": 23, "mlp_only_layers": [1]}
    ),
    "olmoe": Family("OlmoeConfig", {"num_experts": 5, "num_experts_per_tok": 2}),
    "flex-olmo": Family("FlexOlmoConfig", {"pad_token_id": 0, "num_experts": 5, "num_experts_per_tok": 2}),
    "granite-moe": Family("GraniteMoeConfig", GRANITE | LOCAL_EXPERTS),
    "granite-moe-shared": Family(
        "GraniteMoeSharedConfig", GRANITE | LOCAL_EXPERTS | {"shared_intermediate_size": 23}
    ),
    "granite-moe-swa": Family(
        "GraniteMoeSWAConfig", GRANITE | LOCAL_EXPERTS | {"sliding_window": 9, "shared_intermediate_size": 23}
    ),
    "mellum": Family(
        "MellumConfig",
        EXPERTS
        | WINDOWS
        | {
            "head_dim": 14,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_parameters": {FULL: YARN_ROPE, SLIDING: {"rope_type": "default", "rope_theta": 500.0}},
        },
    ),
    "dots1": Family(
        "Dots1Config", ROUTED_EXPERTS | WINDOWS | {"first_k_dense_replace": 1, "norm_topk_prob": True}
    ),
    "solar-open": Family("SolarOpenConfig", ROUTED_EXPERTS | {"head_dim": 14}),
    "exaone-moe": Family(
        "ExaoneMoeConfig",
        WINDOWS
        | {"num_experts": 6, "num_experts_per_tok": 2, "n_group": 3, "topk_group": 2}
        | {"moe_intermediate_size": 19, "num_shared_experts": 2},
    ),
    "hy-v3": Family("HYV3Config", EXPERTS | {"head_dim": 14, "num_shared_experts": 2}),
    "minimax-m2": Family(
        "MiniMaxM2Config", LOCAL_EXPERTS | {"head_dim": 14, "rotary_dim": 6, "pad_token_id": 0}
    ),
    "ernie4-5-moe": Family(
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 19, "moe_layer_end_index": 1},
    ),
    "afmoe": Family(
        "AfmoeConfig",
        EXPERTS
        | WINDOWS
        | {"head_dim": 14, "num_shared_experts": 2, "mup_enabled": True}
        | {"route_scale": 1.5},
    ),
    "cohere2-moe": Family(
        "Cohere2MoeConfig",
        WINDOWS
        | {"num_experts": 5, "num_experts_per_tok": 2, "num_shared_experts": 1, "pad_token_id": 0}
        | {"shared_expert_combination_strategy": "sum", "logit_scale": 0.3, "head_dim": 14}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"], "prefix_dense_intermediate_size": 37},
    ),
    "cohere2-moe-sigmoid": Family(
        "Cohere2MoeConfig",
        WINDOWS
        | {"num_experts": 5, "num_experts_per_tok": 2, "expert_selection_fn": "sigmoid"}
        | {"rms_norm_eps": 1e-5, "pad_token_id": 0, "logit_scale": 0.3, "head_dim": 14},
    ),
    "glm4-moe-lite": Family("Glm4MoeLiteConfig", MLA | {"q_lora_rank": 18}),
    "lfm2-moe": Family(
        "Lfm2MoeConfig", EXPERTS | {"layer_types": ["conv", FULL, "conv"], "num_dense_layers": 1}
    ),
    "mistral4": Family(
        "Mistral4Config",
        {name: value for name, value in MLA.items() if name not in ("n_group", "topk_group")}
        | {"q_lora_rank": 18, "first_k_dense_replace": 1}
        | {
            "rope_parameters": YARN_ROPE
            | {"original_max_position_embeddings": 11, "llama_4_scaling_beta": 0.3}
            | {"mscale": 1.0, "mscale_all_dim": 1.0}
        },
        model="transformers.models.mistral4.modeling_mistral4.Mistral4ForCausalLM",
    ),
}

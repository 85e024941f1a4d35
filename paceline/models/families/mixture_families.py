"""The families whose layers attend and have experts; table.py has the others."""

from __future__ import annotations

from dataclasses import replace

from paceline.models.families import expert_fields as experts
from paceline.models.families import family_fields as blocks
from paceline.models.families import layer_kinds as windows
from paceline.models.families.family import Family
from paceline.models.families.layer_kinds import FULL, SLIDING
from paceline.models.files import file_layouts as layouts
from paceline.models.files.file_layouts import FileLayout

CORRECTION = "gate.e_score_correction_bias"
_DEEPSEEK_V3 = Family(
    moe=experts.glm4,
    more=blocks.latent_attention,
    mtp="model.layers.{layers}.",
    defaults={"n_routed_experts": 256, "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4}
    | {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "max_position_embeddings": 4096},
)

_OLMOE = Family(
    optional_bias="qkvo",
    joint_qk_norm=True,
    moe=experts.qwen,
    more=blocks.olmoe,
    derived=blocks.other_keys(moe_intermediate_size="intermediate_size"),
    defaults={"num_local_experts": 64, "rms_norm_eps": 1e-5},
)
_GRANITE_MOE = Family(
    optional_bias="qkvo",
    moe=experts.granite,
    more=blocks.granite,
    files=FileLayout(layouts.GRANITE_HYBRID_NAMES),
)
MIXTURES = {
    "qwen3_moe": Family(optional_bias="qkvo", qk_norm=True, windows=windows.qwen_moe, moe=experts.qwen),
    "mixtral": Family(
        windows=windows.everywhere,
        moe=experts.mixtral,
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    ),
    "glm4_moe": Family(
        optional_bias="qkv",
        partial_rope=True,
        moe=experts.glm4,
        more=blocks.glm4_moe,
        mtp="model.layers.{layers}.",
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    ),
    "deepseek_v2": Family(
        moe=experts.deepseek_v2,
        more=blocks.latent_attention,
        defaults={"n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2}
        | {"first_k_dense_replace": 0, "norm_topk_prob": False, "max_position_embeddings": 2048},
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "gpt_oss": Family(
        optional_bias="qkvo",
        windows=windows.patterned(2, 128),
        moe=experts.gpt_oss,
        more=blocks.gpt_oss,
        files=FileLayout({"router": "gate"}, stacked_experts="alternating"),
        quantizations=("mxfp4",),
        rope={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
        | {"truncate": False},
        defaults={"head_dim": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "attention_bias": True}
        | {"num_local_experts": 128, "num_experts_per_tok": 4, "rope_theta": 150000.0},
    ),
    "llama4_text": Family(
        optional_bias="qkvo",
        moe=experts.llama4,
        more=blocks.llama4,
        files=FileLayout(
            {"feed_forward": "mlp", "router": "gate", "shared_expert": "shared_experts"},
            interleaved_rope=True,
            stacked_experts="halves",
        ),
        defaults={"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
    ),
    "qwen2_moe": Family(
        windows=windows.qwen2_moe,
        moe=experts.qwen2,
        more=blocks.qwen2_moe,
        files=FileLayout({"shared_expert": "shared_experts"}),
        defaults={"num_key_value_heads": 16, "num_local_experts": 60, "num_experts_per_tok": 4}
        | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    ),
    "olmoe": _OLMOE,
    "flex_olmo": replace(
        _OLMOE,
        norm_placement="post",
        files=FileLayout(layouts.POST_NORMS),
        defaults={"num_local_experts": 7, "num_experts_per_tok": 5, "rope_theta": 5e5},
    ),
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE,
    "granitemoe_swa": replace(
        _GRANITE_MOE, windows=windows.after_full(4, 128), more=blocks.granite_swa, defaults={}
    ),
    "mellum": Family(
        optional_bias="qkvo",
        qk_norm=True,
        windows=windows.listed(1024),
        moe=experts.mellum,
        more=blocks.mellum,
        mtp="mtp.",
        rope={FULL: {"rope_theta": 5e5}, SLIDING: {"rope_theta": 1e4}},
        defaults={"num_key_value_heads": 4, "head_dim": 128, "num_local_experts": 64}
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 896, "norm_topk_prob": True, "rope_theta": 5e5}
        | {"first_k_dense_replace": 0},
    ),
    "dots1": Family(
        optional_bias="qkvo",
        qk_norm=True,
        windows=windows.qwen,
        moe=experts.glm4,
        defaults={"num_key_value_heads": 32, "use_sliding_window": True, "max_window_layers": 62}
        | {"first_k_dense_replace": 0, "norm_topk_prob": False},
    ),
    "solar_open": Family(
        optional_bias="qkv",
        moe=experts.glm4,
        derived=blocks.other_keys(intermediate_size="moe_intermediate_size"),
        defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
        | {"first_k_dense_replace": 0, "moe_intermediate_size": 1280},
    ),
    "exaone_moe": Family(
        qk_norm=True,
        windows=windows.exaone4,
        moe=experts.glm4,
        more=blocks.exaone4,
        derived=blocks.other_keys(n_routed_experts="num_experts", n_shared_experts="num_shared_experts"),
        files=FileLayout({"e_score_correction_bias": CORRECTION}),
        mtp="mtp",
        defaults={"rms_norm_eps": 1e-5, "n_routed_experts": 64, "moe_intermediate_size": 1024}
        | {"routed_scaling_factor": 2.5},
    ),
    "hy_v3": Family(
        optional_bias="qkvo",
        qk_norm=True,
        moe=experts.glm4,
        derived=blocks.other_keys(
            n_routed_experts="num_experts",
            n_shared_experts="num_shared_experts",
            routed_scaling_factor="router_scaling_factor",
        ),
        files=FileLayout({"router": "", "shared_mlp": "shared_experts", "expert_bias": CORRECTION}),
        mtp="model.layers.{layers}.",
        defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 11158840.0}
        | {"n_routed_experts": 192, "moe_intermediate_size": 1536, "routed_scaling_factor": 2.826},
    ),
    "minimax_m2": Family(
        joint_qk_norm=True,
        partial_rope=True,
        moe=experts.minimax,
        derived=blocks.partial_rope_keys,
        files=FileLayout({"block_sparse_moe": "mlp", "e_score_correction_bias": CORRECTION}),
        defaults={"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5e6}
        | {"num_local_experts": 256, "num_experts_per_tok": 8},
    ),
    "ernie4_5_moe": Family(
        moe=experts.ernie,
        derived=blocks.other_keys(
            n_routed_experts="moe_num_experts",
            n_shared_experts="moe_num_shared_experts",
            num_experts_per_tok="moe_k",
        ),
        more=blocks.without_biases,
        files=FileLayout({"moe_statics": "gate"}, interleaved_rope=True),
        defaults={"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
        | {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6}
        | {"moe_intermediate_size": 1536, "tie_word_embeddings": True},
    ),
    "afmoe": Family(
        qk_norm=True,
        norm_placement="sandwich",
        windows=windows.patterned(4, 1024, "global_attn_every_n_layers"),
        moe=experts.glm4,
        derived=blocks.other_keys(
            n_routed_experts="num_experts",
            n_shared_experts="num_shared_experts",
            first_k_dense_replace="num_dense_layers",
            routed_scaling_factor="route_scale",
        ),
        more=blocks.afmoe,
        files=FileLayout(layouts.AFMOE_NAMES),
        defaults={"head_dim": 128, "rms_norm_eps": 1e-5, "n_shared_experts": 2, "num_experts_per_tok": 6}
        | {"n_routed_experts": 64},
    ),
    "cohere2_moe": Family(
        optional_bias="qkvo",
        norm="layer",
        norm_placement="parallel",
        windows=windows.cohere2,
        moe=experts.cohere2,
        derived=blocks.other_keys(num_local_experts="num_experts"),
        more=blocks.cohere2_moe,
        files=FileLayout(interleaved_rope=True),
        eps_name="layer_norm_eps",
        defaults={"layer_norm_eps": 1e-5, "tie_word_embeddings": True, "head_dim": 128}
        | {"first_k_dense_replace": 0},
    ),
    "glm4_moe_lite": replace(
        _DEEPSEEK_V3,
        defaults={"n_routed_experts": 64, "moe_intermediate_size": 1536, "num_experts_per_tok": 4}
        | {"routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5, "q_lora_rank": 768}
        | {"qk_nope_head_dim": 192, "v_head_dim": 256, "max_position_embeddings": 202752},
    ),
    "mistral4": replace(
        _DEEPSEEK_V3,
        moe=experts.softmax,
        more=blocks.mistral4,
        rope_fields=(blocks.QUERY_GROWTH,),
        rope=blocks.MISTRAL_ROPE
        | {"rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192},
        mtp="",
        defaults={"n_routed_experts": 128, "moe_intermediate_size": 2048, "num_experts_per_tok": 4}
        | {"first_k_dense_replace": 0, "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64},
    ),
}

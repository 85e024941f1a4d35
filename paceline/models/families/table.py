"""The supported model families in one table.

A family is a line of FAMILIES: its differences from llama. config_reader.py reads the rest alike for all. The
keys are those of Hugging Face; GGUF metadata is translated to them first, so that there is one set of checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paceline.models.families import expert_fields as experts
from paceline.models.families import family_fields as blocks
from paceline.models.families import gemma_fields as gemmas
from paceline.models.families import hybrid_fields as hybrids
from paceline.models.families import layer_kinds as windows
from paceline.models.families.family import Family
from paceline.models.families.mixture_families import MIXTURES
from paceline.models.files import file_layouts as layouts
from paceline.models.files.file_layouts import FileLayout

_GEMMA_SIZES = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
}
_GEMMA2 = Family(
    optional_bias="qkvo",
    norm_placement="sandwich",
    activation="gelu_pytorch_tanh",
    activation_name="hidden_activation",
    windows=windows.patterned(2),
    more=gemmas.gemma2,
    files=FileLayout(layouts.SANDWICH_NORMS, norm_offset=1.0),
    defaults=_GEMMA_SIZES
    | {"vocab_size": 256000, "max_position_embeddings": 8192}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
)
_GEMMA3 = replace(
    _GEMMA2,
    qk_norm=True,
    windows=windows.patterned(6),
    more=gemmas.gemma3,
    files=FileLayout(layouts.SANDWICH_NORMS, norm_offset=1.0),
    defaults=_GEMMA_SIZES | {"vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6},
)
_GEMMA4 = replace(
    _GEMMA3,
    windows=gemmas.gemma4_windows,
    more=gemmas.gemma4,
    files=FileLayout(layouts.GEMMA4_NAMES),
    defaults=_GEMMA_SIZES | {"vocab_size": 262144, "max_position_embeddings": 131072},
)
_OLMO2 = Family(
    optional_bias="qkvo",
    joint_qk_norm=True,
    norm_placement="post",
    files=FileLayout(layouts.POST_NORMS),
    defaults={"rms_norm_eps": 1e-5},
)
_QWEN3_5_SIZES: dict[str, object] = {"head_dim": 256, "partial_rotary_factor": 0.25}
_QWEN3_5 = Family(
    optional_bias="qkvo",
    qk_norm=True,
    partial_rope=True,
    more=hybrids.qwen_hybrid,
    files=FileLayout({"shared_expert": "shared_experts"}, norm_offset=1.0, gated_queries=True),
    mtp="mtp.",
    defaults=_QWEN3_5_SIZES,
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    moe=experts.qwen2,
    defaults=_QWEN3_5_SIZES
    | {"moe_intermediate_size": 512, "intermediate_size": 5632, "norm_topk_prob": True}
    | {"shared_expert_intermediate_size": 512},
)

# language models of vision models that are a family under another name, and what their configs may lack
_QWEN2_VL = ("qwen2", {"rms_norm_eps": 1e-5, "rope_theta": 1e6})
_QWEN3_VL: dict[str, object] = {"rope_theta": 5e5}
OTHER_NAMES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "qwen2_vl": _QWEN2_VL,  # whose files describe it beside the vision model, without a text_config
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": ("qwen3", _QWEN3_VL),
    "glm4v_text": ("glm4", {"head_dim": None, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}),
    "glm4v_moe_text": ("glm4_moe", {"attention_bias": True}),
    "qwen3_vl_moe_text": ("qwen3_moe", _QWEN3_VL | {"norm_topk_prob": True, "num_experts_per_tok": 4}),
}

FAMILIES = {
    "llama": Family(optional_bias="qkvo"),
    "mistral": Family(windows=windows.mistral, defaults={"num_key_value_heads": 8}),
    "qwen2": Family(qkv_bias=True, windows=windows.qwen),
    "mimo": Family(qkv_bias=True, windows=windows.qwen, mtp="model.mtp_layers."),
    "qwen3": Family(optional_bias="qkvo", qk_norm=True, windows=windows.qwen, defaults={"head_dim": 128}),
    "gemma": Family(
        optional_bias="qkvo",
        activation="gelu_pytorch_tanh",
        more=gemmas.gemma,
        derived=gemmas.gemma_activation,
        files=FileLayout(norm_offset=1.0),
        defaults={"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256}
        | {"tie_word_embeddings": True, "max_position_embeddings": 8192},
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": replace(
        _GEMMA4,
        defaults={
            **_GEMMA4.defaults,
            "max_position_embeddings": 262144,
            "sliding_window": 1024,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "phi3": Family(windows=windows.everywhere, partial_rope=True, defaults={"rms_norm_eps": 1e-5}),
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2,
        windows=windows.patterned(4),
        more=blocks.olmo3,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5},
    ),
    "granite": Family(optional_bias="qkvo", more=blocks.granite),
    "smollm3": Family(
        optional_bias="qkvo",
        windows=windows.smollm3,
        more=blocks.smollm3,
        defaults={"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    ),
    "glm": Family(
        optional_bias="qkv",
        partial_rope=True,
        files=FileLayout(interleaved_rope=True),
        defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7}
        | {"partial_rotary_factor": 0.5, "attention_bias": True},
    ),
    "glm4": Family(
        optional_bias="qkv",
        norm_placement="sandwich",
        partial_rope=True,
        files=FileLayout(layouts.GLM_NORMS, interleaved_rope=True),
        defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7}
        | {"partial_rotary_factor": 0.5, "attention_bias": True},
    ),
    "cohere": Family(
        optional_bias="qkvo",
        norm="layer",
        norm_placement="parallel",
        more=blocks.cohere,
        files=FileLayout(interleaved_rope=True),
        eps_name="layer_norm_eps",
        defaults={"layer_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 5e5},
    ),
    "cohere2": Family(
        optional_bias="qkvo",
        norm="layer",
        norm_placement="parallel",
        windows=windows.patterned(4),
        more=blocks.cohere2,
        files=FileLayout(interleaved_rope=True),
        eps_name="layer_norm_eps",
        defaults={"layer_norm_eps": 1e-5, "tie_word_embeddings": True},
    ),
    "exaone4": Family(
        qk_norm=True,
        norm_placement="post",
        windows=windows.exaone4,
        more=blocks.exaone4,
        files=FileLayout(layouts.POST_NORMS),
        defaults={"rms_norm_eps": 1e-5},
    ),
    "ministral": Family(windows=windows.ministral, defaults={"num_key_value_heads": 8}),
    "ministral3": Family(
        windows=windows.everywhere,
        more=blocks.ministral3,
        rope_fields=(blocks.QUERY_GROWTH,),
        rope=blocks.MISTRAL_ROPE
        | {"rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384},
        defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    ),
    "seed_oss": Family(
        optional_bias="qkv",
        more=blocks.seed,
        defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    ),
    "ernie4_5": Family(
        more=blocks.without_biases,
        files=FileLayout(interleaved_rope=True),
        defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
        | {"tie_word_embeddings": True},
    ),
    "arcee": Family(optional_bias="qkvo", activation="relu2", defaults={"rms_norm_eps": 1e-5}),
    "helium": Family(
        optional_bias="qkv",
        files=FileLayout(interleaved_rope=True),
        defaults={"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 1e5},
    ),
    "cwm": Family(
        windows=windows.after_full(4, 8192),
        rope={"rope_type": "llama3", "factor": 16.0, "original_max_position_embeddings": 8192}
        | {"rope_theta": 1e6, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    ),
    "hyperclovax": Family(
        optional_bias="qkvo",
        norm_placement="sandwich",
        more=blocks.hyperclovax,
        files=FileLayout({"post_norm1": "attention_output_norm", "post_norm2": "feed_forward_output_norm"}),
    ),
    "granite_swa": Family(
        optional_bias="qkvo",
        windows=windows.after_full(4, 128),
        more=blocks.granite_swa,
        defaults={"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    ),
    "youtu": Family(
        more=blocks.latent_attention,
        defaults={"q_lora_rank": 1536, "tie_word_embeddings": True},
    ),
    **MIXTURES,
    "granitemoehybrid": Family(
        optional_bias="qkvo",
        more=hybrids.granite_hybrid,
        files=FileLayout(layouts.GRANITE_HYBRID_NAMES),
    ),
    "falcon_h1": Family(
        more=hybrids.falcon,
        files=FileLayout(layouts.FALCON_H1_NAMES),
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    ),
    "nemotron_h": Family(
        activation="relu2",
        activation_name="mlp_hidden_act",
        derived=hybrids.nemotron_sizes,
        more=hybrids.nemotron,
        files=FileLayout(replaced=layouts.NEMOTRON_H_NAMES),
        mtp="mtp.",
        eps_name="layer_norm_epsilon",
        defaults={"head_dim": 128, "num_key_value_heads": 8, "layer_norm_epsilon": 1e-5}
        | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688},
    ),
    "lfm2": Family(
        qk_norm=True,
        more=hybrids.lfm2,
        files=FileLayout(layouts.LFM2_NAMES),
        eps_name="norm_eps",
        defaults={"norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 1e6, "tie_word_embeddings": True},
    ),
    "lfm2_moe": Family(
        qk_norm=True,
        moe=experts.lfm2,
        derived=blocks.other_keys(n_routed_experts="num_experts", first_k_dense_replace="num_dense_layers"),
        more=hybrids.lfm2,
        files=FileLayout(layouts.LFM2_NAMES | {"expert_bias": "gate.e_score_correction_bias"}),
        eps_name="norm_eps",
        defaults={"norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 1e6, "tie_word_embeddings": True}
        | {"block_auto_adjust_ff_dim": False, "moe_intermediate_size": 1792, "first_k_dense_replace": 2}
        | {"n_routed_experts": 32, "num_experts_per_tok": 4},
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "qwen3_next": replace(_QWEN3_5_MOE, defaults={**_QWEN3_5_MOE.defaults, "num_experts_per_tok": 10}),
}

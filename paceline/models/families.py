"""The supported model families in one table.

A family is a line of FAMILIES: its differences from llama. config_reader.py reads the rest alike for all. The
keys are those of Hugging Face; GGUF metadata is translated to them first, so that there is one set of checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.models.config import ModelConfig, MoeConfig
from paceline.models.expert_fields import (
    deepseek_v2_experts,
    glm4_experts,
    gpt_oss_experts,
    llama4_experts,
    mixtral_experts,
    qwen_experts,
)
from paceline.models.family_fields import (
    QUERY_GROWTH,
    cohere2_blocks,
    exaone4_blocks,
    glm4_moe_blocks,
    gpt_oss_blocks,
    granite_blocks,
    latent_blocks,
    llama4_blocks,
    ministral3_blocks,
    olmo3_blocks,
    smollm3_blocks,
)
from paceline.models.fields import Fields
from paceline.models.file_layouts import (
    FALCON_H1_NAMES,
    GEMMA4_NAMES,
    GLM_NORMS,
    GRANITE_HYBRID_NAMES,
    LFM2_NAMES,
    LLAMA_FILES,
    NEMOTRON_H_NAMES,
    POST_NORMS,
    SANDWICH_NORMS,
    FileLayout,
)
from paceline.models.gemma_fields import gemma2_blocks, gemma3_blocks, gemma4_blocks, gemma4_windows
from paceline.models.hybrid_fields import (
    falcon_blocks,
    granite_hybrid_blocks,
    lfm2_blocks,
    nemotron_blocks,
    nemotron_sizes,
    qwen_hybrid_blocks,
    qwen_hybrid_experts,
)
from paceline.models.layer_kinds import (
    Windows,
    exaone4_windows,
    ministral_windows,
    mistral_windows,
    no_windows,
    pattern_windows,
    qwen_moe_windows,
    qwen_windows,
    smollm3_windows,
    windows_everywhere,
)

# transformers' name -> ours
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}


@dataclass(frozen=True)
class Family:
    """A family's differences from llama."""

    qkv_bias: bool = False  # biases on q, k and v, always
    optional_bias: str = "none"  # which projections have biases if there is attention_bias: none, qkv, qkvo
    qk_norm: bool = False
    joint_qk_norm: bool = False
    norm: str = "rms"
    norm_placement: str = "pre"
    activation: str = "silu"  # as transformers names it
    partial_rope: bool = False  # whether a model may rotate a part of each head only
    windows: Callable[[Fields, int], Windows] = no_windows
    moe: Callable[[Fields, int], MoeConfig] | None = None
    more: Callable[[Fields, ModelConfig], dict[str, Any]] | None = None  # further fields of ModelConfig
    derived: Callable[[Fields], dict[str, object]] | None = None  # keys that follow from others
    files: FileLayout = LLAMA_FILES
    # prefix of the tensors of its block for multi-token prediction, with {layers} for the number of layers;
    # empty: it has none
    mtp: str = ""
    activation_name: str = "hidden_act"
    eps_name: str = "rms_norm_eps"
    rope_fields: tuple[str, ...] = ()  # that its rope parameters may have beside family_fields.ROPE_FIELDS
    quantizations: tuple[str, ...] = ()  # that its safetensors may have beside quantized.method.METHODS
    defaults: Mapping[str, object] = field(default_factory=dict)  # transformers' for keys that a config lacks


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
    windows=pattern_windows(2),
    more=gemma2_blocks,
    files=FileLayout(SANDWICH_NORMS, norm_offset=1.0),
    defaults=_GEMMA_SIZES
    | {"vocab_size": 256000, "max_position_embeddings": 8192}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
)
_GEMMA3 = replace(
    _GEMMA2,
    qk_norm=True,
    windows=pattern_windows(6),
    more=gemma3_blocks,
    files=FileLayout(SANDWICH_NORMS, norm_offset=1.0),
    defaults=_GEMMA_SIZES | {"vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6},
)
_GEMMA4 = replace(
    _GEMMA3,
    windows=gemma4_windows,
    more=gemma4_blocks,
    files=FileLayout(GEMMA4_NAMES),
    defaults=_GEMMA_SIZES | {"vocab_size": 262144, "max_position_embeddings": 131072},
)
_OLMO2 = Family(
    optional_bias="qkvo",
    joint_qk_norm=True,
    norm_placement="post",
    files=FileLayout(POST_NORMS),
    defaults={"rms_norm_eps": 1e-5},
)
_QWEN3_5_SIZES: dict[str, object] = {"head_dim": 256, "partial_rotary_factor": 0.25}
_QWEN3_5 = Family(
    optional_bias="qkvo",
    qk_norm=True,
    partial_rope=True,
    more=qwen_hybrid_blocks,
    files=FileLayout({"shared_expert": "shared_experts"}, norm_offset=1.0, gated_queries=True),
    mtp="mtp.",
    defaults=_QWEN3_5_SIZES,
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    moe=qwen_hybrid_experts,
    defaults=_QWEN3_5_SIZES
    | {"moe_intermediate_size": 512, "intermediate_size": 5632, "norm_topk_prob": True},
)

_DEEPSEEK_V3 = Family(
    moe=glm4_experts,
    more=latent_blocks,
    mtp="model.layers.{layers}.",
    defaults={"n_routed_experts": 256, "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4}
    | {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "max_position_embeddings": 4096},
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
    "qwen3_vl_moe_text": ("qwen3_moe", _QWEN3_VL | {"norm_topk_prob": True}),
}

FAMILIES = {
    "llama": Family(optional_bias="qkvo"),
    "mistral": Family(windows=mistral_windows, defaults={"num_key_value_heads": 8}),
    "qwen2": Family(qkv_bias=True, windows=qwen_windows),
    "mimo": Family(qkv_bias=True, windows=qwen_windows, mtp="model.mtp_layers."),
    "qwen3": Family(optional_bias="qkvo", qk_norm=True, windows=qwen_windows, defaults={"head_dim": 128}),
    "qwen3_moe": Family(optional_bias="qkvo", qk_norm=True, windows=qwen_moe_windows, moe=qwen_experts),
    "mixtral": Family(
        windows=windows_everywhere,
        moe=mixtral_experts,
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
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
    "phi3": Family(windows=windows_everywhere, partial_rope=True, defaults={"rms_norm_eps": 1e-5}),
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2,
        windows=pattern_windows(4),
        more=olmo3_blocks,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5},
    ),
    "granite": Family(optional_bias="qkvo", more=granite_blocks),
    "smollm3": Family(
        optional_bias="qkvo",
        windows=smollm3_windows,
        more=smollm3_blocks,
        defaults={"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    ),
    "glm4": Family(
        optional_bias="qkv",
        norm_placement="sandwich",
        partial_rope=True,
        files=FileLayout(GLM_NORMS, interleaved_rope=True),
        defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7}
        | {"partial_rotary_factor": 0.5, "attention_bias": True},
    ),
    "glm4_moe": Family(
        optional_bias="qkv",
        partial_rope=True,
        moe=glm4_experts,
        more=glm4_moe_blocks,
        mtp="model.layers.{layers}.",
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    ),
    "deepseek_v2": Family(
        moe=deepseek_v2_experts,
        more=latent_blocks,
        defaults={"n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2}
        | {"first_k_dense_replace": 0, "norm_topk_prob": False, "max_position_embeddings": 2048},
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "gpt_oss": Family(
        optional_bias="qkvo",
        windows=pattern_windows(2, 128),
        moe=gpt_oss_experts,
        more=gpt_oss_blocks,
        files=FileLayout({"router": "gate"}, stacked_experts="alternating"),
        quantizations=("mxfp4",),
        defaults={"head_dim": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "attention_bias": True}
        | {"num_local_experts": 128, "num_experts_per_tok": 4, "rope_theta": 150000.0},
    ),
    "llama4_text": Family(
        optional_bias="qkvo",
        moe=llama4_experts,
        more=llama4_blocks,
        files=FileLayout(
            {"feed_forward": "mlp", "router": "gate", "shared_expert": "shared_experts"},
            interleaved_rope=True,
            stacked_experts="halves",
        ),
        defaults={"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
    ),
    "cohere2": Family(
        optional_bias="qkvo",
        norm="layer",
        norm_placement="parallel",
        windows=pattern_windows(4),
        more=cohere2_blocks,
        files=FileLayout(interleaved_rope=True),
        eps_name="layer_norm_eps",
        defaults={"layer_norm_eps": 1e-5, "tie_word_embeddings": True},
    ),
    "exaone4": Family(
        qk_norm=True,
        norm_placement="post",
        windows=exaone4_windows,
        more=exaone4_blocks,
        files=FileLayout(POST_NORMS),
        defaults={"rms_norm_eps": 1e-5},
    ),
    "ministral": Family(windows=ministral_windows, defaults={"num_key_value_heads": 8}),
    "ministral3": Family(
        windows=windows_everywhere,
        more=ministral3_blocks,
        rope_fields=(QUERY_GROWTH,),
        defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    ),
    "granitemoehybrid": Family(
        optional_bias="qkvo",
        more=granite_hybrid_blocks,
        files=FileLayout(GRANITE_HYBRID_NAMES),
    ),
    "falcon_h1": Family(
        more=falcon_blocks,
        files=FileLayout(FALCON_H1_NAMES),
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    ),
    "nemotron_h": Family(
        activation="relu2",
        activation_name="mlp_hidden_act",
        derived=nemotron_sizes,
        more=nemotron_blocks,
        files=FileLayout(replaced=NEMOTRON_H_NAMES),
        mtp="mtp.",
        eps_name="layer_norm_epsilon",
        defaults={"head_dim": 128, "num_key_value_heads": 8, "layer_norm_epsilon": 1e-5}
        | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688},
    ),
    "lfm2": Family(
        qk_norm=True,
        more=lfm2_blocks,
        files=FileLayout(LFM2_NAMES),
        eps_name="norm_eps",
        defaults={"norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 1e6, "tie_word_embeddings": True},
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "qwen3_next": _QWEN3_5_MOE,
}

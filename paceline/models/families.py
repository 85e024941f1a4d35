"""The supported model families in one table, and the parsing of config.json to a ModelConfig.

A family is a line of FAMILIES: its differences from llama. Everything else is read the same way for all. The
keys are those of Hugging Face; GGUF metadata is translated to them first, so that there is one set of checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models.config import ModelConfig, MoeConfig, RopeConfig
from paceline.models.family_fields import (
    QUERY_GROWTH,
    Windows,
    cohere2_blocks,
    deepseek_v2_experts,
    exaone4_blocks,
    exaone4_windows,
    glm4_experts,
    glm4_moe_blocks,
    gpt_oss_blocks,
    gpt_oss_experts,
    granite_blocks,
    latent_blocks,
    llama4_blocks,
    llama4_experts,
    ministral3_blocks,
    ministral_windows,
    mistral_windows,
    mixtral_experts,
    no_windows,
    olmo3_blocks,
    pattern_windows,
    qwen_experts,
    qwen_moe_windows,
    qwen_windows,
    rope_config,
    rope_fields,
    smollm3_blocks,
    smollm3_windows,
    windows_everywhere,
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
from paceline.models.quantized.method import METHODS, REMEDY

MAX_LAYERS = 10_000
MAX_CONTEXT = 1 << 24  # tokens; backends have tables of this size. The longest published is 10 million
# transformers' name -> ours
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}


def model_config(values: Mapping[str, object], source: str) -> ModelConfig:
    """The ModelConfig of a config.json (or its equivalent), every field checked.

    `source` names the file in errors. An architecture or a feature that we do not run is an
    UnsupportedModelError; a missing or impossible number is a CheckpointError.
    """
    fields = text_fields(Fields(values, source))
    name = fields.text("model_type")
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"{source}: model_type {name!r} is not supported. Supported are {', '.join(FAMILIES)}."
        )
    family = FAMILIES[name]
    fields = Fields({**family.defaults, **fields.values}, fields.source)
    if family.derived:
        fields = Fields({**fields.values, **family.derived(fields)}, fields.source)
    _refuse_unsupported(fields, family)
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    head_dim = fields.integer("head_dim", max(1, hidden_size // num_heads))
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{source}: {num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly. "
            f"The file is damaged: fetch the model again."
        )
    if head_dim % 2:
        raise UnsupportedModelError(f"{source}: head_dim {head_dim} is odd; rotary embedding needs pairs.")
    attention_bias = fields.flag("attention_bias", False)
    rope = _with_partial_rope(rope_config(fields, 10000.0, family.rope_fields), fields, family, head_dim)
    _check_divisors(rope, head_dim, fields)
    config = ModelConfig(
        family=name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.number(family.eps_name, 1e-6),
        rope=rope,
        max_position=fields.integer("max_position_embeddings", most=MAX_CONTEXT),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=family.qkv_bias or (attention_bias and family.optional_bias != "none"),
        output_bias=attention_bias and family.optional_bias == "qkvo",
        qk_norm=family.qk_norm,
        sliding_windows=family.windows(fields, num_layers),
        moe=family.moe(fields, num_layers) if family.moe else None,
        activation=ACTIVATIONS[fields.text(family.activation_name, family.activation)],
        norm=family.norm,
        norm_placement=family.norm_placement,
        joint_qk_norm=family.joint_qk_norm,
    )
    return replace(config, **family.more(fields, config)) if family.more else config


def text_fields(fields: Fields) -> Fields:
    """The configuration of the language model, if the file describes other models beside it."""
    text = fields.group("text_config")
    if not text.values:
        return fields
    outer = {name: fields.values[name] for name in ("tie_word_embeddings",) if fields.has(name)}
    return Fields({**outer, **text.values}, text.source)


def _with_partial_rope(rope: RopeConfig, fields: Fields, family: Family, head_dim: int) -> RopeConfig:
    """The rope of families that may rotate a part of each head only."""
    share = _rotary_share(fields)
    if share == 1:
        return rope
    if not family.partial_rope or not 0 < share < 1 or int(head_dim * share) % 2:
        raise UnsupportedModelError(
            f"{fields.source}: partial rotary embedding ({share:g} of heads of {head_dim}) is not supported "
            f"in this family. Use a model of another one."
        )
    return replace(rope, dim=int(head_dim * share))


def _check_divisors(rope: RopeConfig, head_dim: int, fields: Fields) -> None:
    """CheckpointError if longrope does not have a number for each frequency."""
    expected = (rope.dim or head_dim) // 2
    for name, divisors in (("short_factor", rope.short_divisors), ("long_factor", rope.long_divisors)):
        if rope.scaling == "longrope" and len(divisors) != expected:
            raise CheckpointError(
                f"{fields.source} has {len(divisors)} numbers in {name}; expected {expected}, one for each "
                "rotated pair. The file is damaged or was edited: fetch the model again."
            )


def _rotary_share(fields: Fields) -> float:
    """The share of a head that is rotated."""
    return rope_fields(fields).number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    """UnsupportedModelError for features that would silently change outputs if they were ignored."""
    activation = fields.text(family.activation_name, family.activation)
    if activation != family.activation:
        raise UnsupportedModelError(
            f"{fields.source}: {family.activation_name} {activation!r} is not supported, only "
            f"{family.activation}."
        )
    if fields.flag("mlp_bias", False):
        raise UnsupportedModelError(f"{fields.source}: mlp_bias is not supported; use a model without it.")
    # "vision": of images only
    if fields.values.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise UnsupportedModelError(f"{fields.source}: bidirectional attention is not supported.")
    method = fields.group("quantization_config").text("quant_method", "none")
    if fields.has("quantization_config") and method not in (*family.quantizations, *METHODS):
        raise UnsupportedModelError(
            f"{fields.source}: quant_method {method!r} is not supported, only {', '.join(METHODS)}. {REMEDY}"
        )


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

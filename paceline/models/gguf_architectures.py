"""The architectures of GGUF files: the family of each, and how its files differ from those of llama.

Metadata is translated to the keys of config.json. What a file leaves to its reader, because the architecture
implies it, is said here too: the scale of Gemma's attention, say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from paceline.errors import UnsupportedModelError
from paceline.models.fields import Fields
from paceline.models.layer_kinds import FULL, SLIDING

Values = dict[str, object]
MAX_MTP_LAYERS = 64  # models have one or a few

# our config key <- metadata key, without the architecture's prefix
CONFIG_KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "moe_intermediate_size": "expert_feed_forward_length",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "attention_output_norm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "feed_forward_output_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
WITHOUT_SUFFIX = ("attn_sinks", "exp_probs_b", "ssm_dt")  # parts whose names here end before .weight or .bias
CONVOLUTIONS = ("shortconv.conv", "ssm_conv1d")  # parts of [channels, 1, kernel]
_JOINED_MLP = {"ffn_up": "mlp.gate_up_proj"}
_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping"}
_CAPS |= {"final_logit_softcapping": "final_logit_softcapping"}


_DELTA_NET_KEYS = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "full_attention_interval": "full_attention_interval",
}
_DELTA_NET_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_SHARED_EXPERT_NAMES = {
    f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}


def _nothing_more(fields: Fields) -> Values:
    return {}


@dataclass(frozen=True)
class Architecture:
    """How the files of an architecture differ from those that CONFIG_KEYS and BLOCK_NAMES describe."""

    family: str  # of families.FAMILIES
    interleaved_rope: bool = False  # the two parts of a rotated pair are neighbours in the rows of q and k
    keys: Mapping[str, str] = field(default_factory=dict)  # config key <- metadata key, beside CONFIG_KEYS
    names: Mapping[str, str] = field(default_factory=dict)  # of a layer's parts, beside BLOCK_NAMES
    more: Callable[[Fields], Values] = _nothing_more  # config keys that take more than a metadata key
    truncated_yarn: bool = True  # see RopeConfig.truncate
    tiled_values: bool = False  # see RecurrentConfig.tiled_values, if key heads are shared


def _llama(fields: Fields) -> Values:
    """Files of mistral and mixtral call themselves llama."""
    if fields.has("expert_count") and fields.integer("expert_count", least=0) > 0:
        return {"model_type": "mixtral"} | _window(fields)
    return {"model_type": "mistral"} | _window(fields) if fields.has("attention.sliding_window") else {}


def _window(fields: Fields) -> Values:
    """The sliding window; 0 means none."""
    window = fields.integer("attention.sliding_window", 0, least=0)
    return {"sliding_window": window or None}


def _windows(fields: Fields) -> Values:
    """The window size and which layers have it, from a period in layers or one flag per layer."""
    pattern = fields.values.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        return _window(fields) | {"layer_types": [SLIDING if flag else FULL for flag in pattern.tolist()]}
    return _window(fields) | {"sliding_window_pattern": pattern}


def _qwen3_moe(fields: Fields) -> Values:
    """No dense layer uses the width that files without one lack."""
    width = "feed_forward_length" if fields.has("feed_forward_length") else "expert_feed_forward_length"
    return {"intermediate_size": fields.values.get(width)}


def _gemma_scale(fields: Fields, largest: int) -> Values:
    """The scale of attention, which files do not have: the largest model of a generation has another."""
    heads, width = fields.integer("attention.head_count"), fields.integer("embedding_length")
    is_largest = fields.integer("block_count") == largest
    return {
        "query_pre_attn_scalar": width // heads if is_largest else fields.integer("attention.key_length", 256)
    }


def _gemma2(fields: Fields) -> Values:
    return _windows(fields) | _gemma_scale(fields, largest=46)


def _gemma3(fields: Fields) -> Values:
    """Without a window, all layers are as those that see everything."""
    windows = _windows(fields) if fields.has("attention.sliding_window") else {"sliding_window_pattern": 1}
    return windows | _gemma_scale(fields, largest=62)


def _olmo2(fields: Fields) -> Values:
    """OLMo 3 calls itself olmo2, and has windows."""
    if not fields.has("attention.sliding_window"):
        return {}
    return {"model_type": "olmo3"} | _windows(fields)


def _granite(fields: Fields) -> Values:
    if not fields.flag("rope.scaling.finetuned", True):
        raise UnsupportedModelError(
            f"{fields.source}: granite models without rotary embedding are not supported."
        )
    return {}


def _glm4(fields: Fields) -> Values:
    if fields.has("rope.dimension_sections"):
        raise UnsupportedModelError(
            f"{fields.source}: rotary embedding of several sections is not supported."
        )
    return _without_mtp(fields)


def _without_mtp(fields: Fields) -> Values:
    """The layers of the model itself: files count those of multi-token prediction, too."""
    return {"num_hidden_layers": fields.integer("block_count") - mtp_layers(fields)}


def mtp_layers(fields: Fields) -> int:
    """How many of the last layers are for multi-token prediction, which GGUF files are not used for."""
    return fields.integer("nextn_predict_layers", 0, least=0, most=MAX_MTP_LAYERS)


def _lfm2(fields: Fields) -> Values:
    """Layers without KV heads are short convolutions. Files have the final size of the MLP."""
    heads = fields.values.get("attention.head_count_kv")
    if not isinstance(heads, np.ndarray) or not heads.any():
        raise fields.wrong("attention.head_count_kv", "the number of KV heads of each layer")
    return {
        "num_key_value_heads": int(heads.max()),
        "layer_types": [FULL if count else "conv" for count in heads.tolist()],
        "block_auto_adjust_ff_dim": False,
    }


def _qwen35(fields: Fields) -> Values:
    """The size of value heads, which files have of all heads together, and the share of heads with rope."""
    heads, size = fields.integer("ssm.time_step_rank"), fields.integer("ssm.inner_size")
    if size % heads:
        raise fields.wrong("ssm.inner_size", f"a multiple of the {heads} value heads")
    rotated = fields.integer("rope.dimension_count") / fields.integer("attention.key_length")
    own = {"linear_value_head_dim": size // heads, "partial_rotary_factor": rotated}
    return _without_mtp(fields) | own


def _qwen35_moe(fields: Fields) -> Values:
    return _qwen35(fields) | _qwen3_moe(fields)


def _gpt_oss(fields: Fields) -> Values:
    return _windows(fields) | {"intermediate_size": fields.values.get("expert_feed_forward_length")}


ARCHITECTURES = {
    "llama": Architecture("llama", interleaved_rope=True, more=_llama),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", more=_qwen3_moe),
    "gemma2": Architecture("gemma2", keys=_CAPS, more=_gemma2),
    "gemma3": Architecture(
        "gemma3_text", keys=_CAPS | {"rope_local_base_freq": "rope.freq_base_swa"}, more=_gemma3
    ),
    "phi3": Architecture("phi3", names=_JOINED_MLP, more=_window),
    "olmo2": Architecture("olmo2", more=_olmo2),
    "granite": Architecture(
        "granite",
        interleaved_rope=True,
        keys={
            "embedding_multiplier": "embedding_scale",
            "attention_multiplier": "attention.scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        more=_granite,
    ),
    "smollm3": Architecture("smollm3", interleaved_rope=True),
    "glm4": Architecture("glm4", interleaved_rope=True, names=_JOINED_MLP, more=_glm4),
    "glm4moe": Architecture(
        "glm4_moe",
        keys={
            "n_routed_experts": "expert_count",
            "n_shared_experts": "expert_shared_count",
            "first_k_dense_replace": "leading_dense_block_count",
            "routed_scaling_factor": "expert_weights_scale",
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
        },
        names={
            "post_attention_norm": "post_attention_layernorm",
            "exp_probs_b": "mlp.gate.e_score_correction_bias",
            **_SHARED_EXPERT_NAMES,
        },
        more=_glm4,
    ),
    "cohere2": Architecture(
        "cohere2",
        interleaved_rope=True,
        keys={"layer_norm_eps": "attention.layer_norm_epsilon", "logit_scale": "logit_scale"},
        more=_windows,
    ),
    "exaone4": Architecture("exaone4", more=_windows),
    "lfm2": Architecture(
        "lfm2",
        keys={"norm_eps": "attention.layer_norm_rms_epsilon", "conv_L_cache": "shortconv.l_cache"},
        names={
            "shortconv.conv": "conv.conv",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.o_proj",
        },
        more=_lfm2,
    ),
    "qwen35": Architecture(
        "qwen3_5_text", keys=_DELTA_NET_KEYS, names=_DELTA_NET_NAMES, more=_qwen35, tiled_values=True
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        keys=_DELTA_NET_KEYS | {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        names=_DELTA_NET_NAMES | _SHARED_EXPERT_NAMES | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
        more=_qwen35_moe,
        tiled_values=True,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        names={"post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks"},
        more=_gpt_oss,
        truncated_yarn=False,  # no key says so
    ),
}

"""The architectures of GGUF files: the family of each, and how its files differ from those of llama.

Metadata is translated to the keys of config.json. What a file leaves to its reader, because the architecture
implies it, is said here too: the scale of Gemma's attention, say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from paceline.models.families.fields import Fields
from paceline.models.gguf import fields as readers

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
# parts whose names here end before .weight or .bias
WITHOUT_SUFFIX = (
    "attn_sinks",
    "exp_probs_b",
    "ssm_dt",
    "ssm_a",
    "ssm_d",
    "layer_output_scale",
    "ffn_down_exps",
)
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
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_MAMBA_KEYS = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
}
_MAMBA_NAMES = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt": "mamba.dt_bias",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_LFM2_KEYS = {"norm_eps": "attention.layer_norm_rms_epsilon", "conv_L_cache": "shortconv.l_cache"}
_LFM2_NAMES = {
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.o_proj",
}
_GRANITE_KEYS = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_SIGMOID_EXPERT_KEYS = {
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
_SHARED_EXPERT_NAMES = {
    f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}
_CORRECTED_EXPERT_NAMES = _SHARED_EXPERT_NAMES | {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
_SHARED_EXPERT_KEYS = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
# a block for multi-token prediction: parts of its layer -> names in safetensors, after the family's prefix
_DEEPSEEK_MTP = {
    "nextn.enorm.": "enorm.",
    "nextn.hnorm.": "hnorm.",
    "nextn.eh_proj.": "eh_proj.",
    "nextn.shared_head_norm.": "shared_head.norm.",
    "": "",
}
_QWEN_MTP = {
    "nextn.enorm.": "pre_fc_norm_embedding.",
    "nextn.hnorm.": "pre_fc_norm_hidden.",
    "nextn.eh_proj.": "fc.",
    "nextn.shared_head_norm.": "norm.",
    "": "layers.0.",
}
_GATED_EXPERT_NAMES = _SHARED_EXPERT_NAMES | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}


@dataclass(frozen=True)
class Architecture:
    """How the files of an architecture differ from CONFIG_KEYS and BLOCK_NAMES."""

    family: str  # of families.FAMILIES
    interleaved_rope: bool = False  # the two parts of a rotated pair are neighbours in the rows of q and k
    keys: Mapping[str, str] = field(default_factory=dict)  # config key <- metadata key, beside CONFIG_KEYS
    names: Mapping[str, str] = field(default_factory=dict)  # of a layer's parts, beside BLOCK_NAMES
    top_names: Mapping[str, str] = field(default_factory=dict)  # of other tensors, beside TOP_NAMES
    # config keys that take more than a metadata key
    more: Callable[[Fields], readers.Values] = readers.nothing_more
    truncated_yarn: bool = True  # see RopeConfig.truncate
    query_growth: float | None = None  # see QUERY_GROWTH, in files that leave it out
    yarn_multiplier: float = 1.0  # of yarn's scale for all of a head, in yarn_log_multiplier
    ropes_by_kind: bool = False  # layers with a window have another rope, and other sizes of heads
    tiled_values: bool = False  # see RecurrentConfig.tiled_values, if key heads are shared
    mtp: Mapping[str, str] = field(default_factory=dict)  # see _DEEPSEEK_MTP; empty: the block is left out


_NEMOTRON_H = Architecture(
    "nemotron_h",
    keys={
        "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
        "conv_kernel": "ssm.conv_kernel",
        "ssm_state_size": "ssm.state_size",
        "n_groups": "ssm.group_count",
        "mamba_num_heads": "ssm.time_step_rank",
        "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "moe_latent_size": "moe_latent_size",
    }
    | _SIGMOID_EXPERT_KEYS,
    names=_MAMBA_NAMES
    | _CORRECTED_EXPERT_NAMES
    | {"ffn_latent_down": "mlp.fc1_latent_proj", "ffn_latent_up": "mlp.fc2_latent_proj"},
    more=readers.nemotron_h,
)
_DEEPSEEK2 = Architecture(
    "deepseek_v2",
    keys={
        "q_lora_rank": "attention.q_lora_rank",
        "kv_lora_rank": "attention.kv_lora_rank",
        "qk_rope_head_dim": "rope.dimension_count",
    }
    | _SIGMOID_EXPERT_KEYS,
    names={
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
        "exp_probs_b": "mlp.gate.e_score_correction_bias",
        **_SHARED_EXPERT_NAMES,
    },
    more=readers.deepseek2,
    yarn_multiplier=0.1,
    mtp=_DEEPSEEK_MTP,
)

ARCHITECTURES = {
    "llama": Architecture("llama", interleaved_rope=True, more=readers.llama),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", more=readers.qwen3_moe),
    # beside vision models, whose files are others; of a text, all sections of their rope have its positions
    "qwen2vl": Architecture("qwen2"),
    "qwen3vl": Architecture("qwen3"),
    "qwen3vlmoe": Architecture("qwen3_moe", more=readers.qwen3_moe),
    "gemma": Architecture("gemma"),
    "command-r": Architecture(
        "cohere",
        interleaved_rope=True,
        keys={"layer_norm_eps": "attention.layer_norm_epsilon", "logit_scale": "logit_scale"},
    ),
    "seed_oss": Architecture("seed_oss", names={"post_attention_norm": "post_attention_layernorm"}),
    "arcee": Architecture("arcee", interleaved_rope=True),
    "ernie4_5": Architecture("ernie4_5", interleaved_rope=True),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        interleaved_rope=True,
        keys={
            "n_routed_experts": "expert_count",
            "n_shared_experts": "expert_shared_count",
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_layer_interval": "interleave_moe_layer_step",
        },
        names=_CORRECTED_EXPERT_NAMES,
    ),
    "qwen2moe": Architecture(
        "qwen2_moe", keys=_SHARED_EXPERT_KEYS, names=_GATED_EXPERT_NAMES, more=readers.qwen2_moe
    ),
    "olmoe": Architecture("olmoe", more=readers.olmoe),
    "granitemoe": Architecture(
        "granitemoe",
        interleaved_rope=True,
        keys=_GRANITE_KEYS | {"shared_intermediate_size": "expert_shared_feed_forward_length"},
        names=_SHARED_EXPERT_NAMES,
    ),
    "dots1": Architecture("dots1", keys=_SIGMOID_EXPERT_KEYS, names=_CORRECTED_EXPERT_NAMES),
    "exaone-moe": Architecture(
        "exaone_moe",
        keys=_SIGMOID_EXPERT_KEYS,
        names=_CORRECTED_EXPERT_NAMES,
        more=readers.exaone_moe,
    ),
    "hy_v3": Architecture(
        "hy_v3", keys=_SIGMOID_EXPERT_KEYS, names=_CORRECTED_EXPERT_NAMES, more=readers.hy_v3
    ),
    "mellum": Architecture(
        "mellum", keys={"rope_local_base_freq": "rope.freq_base_swa"}, more=readers.mellum
    ),
    "granite_swa": Architecture(
        "granite_swa",
        interleaved_rope=True,
        keys=_GRANITE_KEYS | {"shared_intermediate_size": "expert_shared_feed_forward_length"},
        names={
            "attn_sinks": "self_attn.sinks",
            "ffn_up_shexp": "mlp.shared_experts.gate_up_proj",
            "ffn_down_shexp": "mlp.shared_experts.down_proj",
        },
        more=readers.granite_swa,
    ),
    "minimax-m2": Architecture("minimax_m2", names=_CORRECTED_EXPERT_NAMES),
    "afmoe": Architecture(
        "afmoe",
        keys=_SIGMOID_EXPERT_KEYS,
        names=_CORRECTED_EXPERT_NAMES | {"attn_gate": "self_attn.gate_proj"},
        more=readers.afmoe,
    ),
    "gemma2": Architecture("gemma2", keys=_CAPS, more=readers.gemma2),
    "gemma3": Architecture(
        "gemma3_text", keys=_CAPS | {"rope_local_base_freq": "rope.freq_base_swa"}, more=readers.gemma3
    ),
    "gemma4": Architecture(
        "gemma4_text",
        keys={
            "final_logit_softcapping": "final_logit_softcapping",
            "num_kv_shared_layers": "attention.shared_kv_layers",
            "num_experts": "expert_count",
            "top_k_experts": "expert_used_count",
        },
        names={f"ffn_{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
        | {
            "post_ffw_norm_1": "mlp.shared_output_norm",
            "pre_ffw_norm_2": "mlp.experts_norm",
            "post_ffw_norm_2": "mlp.experts_output_norm",
            "ffn_down_exps": "mlp.gate.per_expert_scale",
            "layer_output_scale": "layer_scalar",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
        },
        more=readers.gemma4,
        ropes_by_kind=True,
    ),
    "phi3": Architecture("phi3", names=_JOINED_MLP, more=readers.window),
    "olmo2": Architecture("olmo2", more=readers.olmo2),
    "granite": Architecture(
        "granite",
        interleaved_rope=True,
        keys=_GRANITE_KEYS,
        more=readers.granite,
    ),
    "smollm3": Architecture("smollm3", interleaved_rope=True),
    "glm4": Architecture("glm4", interleaved_rope=True, names=_JOINED_MLP, more=readers.glm4),
    "glm4moe": Architecture(
        "glm4_moe",
        keys=_SIGMOID_EXPERT_KEYS,
        names={
            "post_attention_norm": "post_attention_layernorm",
            "exp_probs_b": "mlp.gate.e_score_correction_bias",
            **_SHARED_EXPERT_NAMES,
        },
        more=readers.glm4,
        mtp=_DEEPSEEK_MTP,
    ),
    "deepseek2": _DEEPSEEK2,
    "mistral4": replace(_DEEPSEEK2, family="mistral4", more=readers.mistral4, query_growth=0.1, mtp={}),
    "llama4": Architecture(
        "llama4_text",
        interleaved_rope=True,
        keys={
            "intermediate_size": "expert_feed_forward_length",
            "intermediate_size_mlp": "feed_forward_length",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        names=_SHARED_EXPERT_NAMES,
        more=readers.llama4,
    ),
    "mistral3": Architecture("ministral3", interleaved_rope=True, more=readers.mistral3),
    "cohere2": Architecture(
        "cohere2",
        interleaved_rope=True,
        keys={"layer_norm_eps": "attention.layer_norm_epsilon", "logit_scale": "logit_scale"},
        more=readers.windows,
    ),
    "cohere2moe": Architecture(
        "cohere2_moe",
        interleaved_rope=True,
        keys={
            "layer_norm_eps": "attention.layer_norm_epsilon",
            "logit_scale": "logit_scale",
            "intermediate_size": "expert_feed_forward_length",
            "prefix_dense_intermediate_size": "feed_forward_length",
            "first_k_dense_replace": "leading_dense_block_count",
            "num_shared_experts": "expert_shared_count",
        },
        more=readers.cohere2_moe,
    ),
    "exaone4": Architecture("exaone4", more=readers.windows),
    "lfm2": Architecture("lfm2", keys=_LFM2_KEYS, names=_LFM2_NAMES, more=readers.lfm2),
    "lfm2moe": Architecture(
        "lfm2_moe",
        keys=_LFM2_KEYS
        | {"n_routed_experts": "expert_count", "first_k_dense_replace": "leading_dense_block_count"},
        names=_LFM2_NAMES | _CORRECTED_EXPERT_NAMES,
        more=readers.lfm2,
    ),
    "qwen35": Architecture(
        "qwen3_5_text",
        keys=_DELTA_NET_KEYS,
        names=_DELTA_NET_NAMES,
        more=readers.qwen35,
        tiled_values=True,
        mtp=_QWEN_MTP,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        keys=_DELTA_NET_KEYS | _SHARED_EXPERT_KEYS,
        names=_DELTA_NET_NAMES | _GATED_EXPERT_NAMES,
        more=readers.qwen35_moe,
        tiled_values=True,
        mtp=_QWEN_MTP,
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        keys=_DELTA_NET_KEYS | _SHARED_EXPERT_KEYS,
        names=_DELTA_NET_NAMES
        | _GATED_EXPERT_NAMES
        | {"ssm_ba": "linear_attn.in_proj_ba", "ssm_in": "linear_attn.in_proj_qkvz"},
        more=readers.qwen35_moe,
        mtp=_QWEN_MTP,
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        interleaved_rope=True,
        keys=_GRANITE_KEYS | _MAMBA_KEYS,
        names=_MAMBA_NAMES | _SHARED_EXPERT_NAMES,
        more=readers.granite_hybrid,
    ),
    "falcon-h1": Architecture("falcon_h1", keys=_MAMBA_KEYS, names=_MAMBA_NAMES, more=readers.falcon_h1),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "gpt-oss": Architecture(
        "gpt_oss",
        names={"post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks"},
        more=readers.gpt_oss,
        truncated_yarn=False,  # no key says so
    ),
}

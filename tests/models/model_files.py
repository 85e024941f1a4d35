"""Tiny model files made on the fly: the same random tensors as a folder or as a GGUF file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy

from paceline.models.config import ModelConfig
from paceline.models.families.config_reader import model_config
from paceline.models.files.layout import expected_tensors
from tests.models import near_files

Tensors = dict[str, np.ndarray]

SIZES: dict[str, Any] = {**near_files.SIZES, "num_hidden_layers": 2}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES, "tie_word_embeddings": True},
    "llama-biased": {"model_type": "llama", **SIZES, "attention_bias": True},
    "mistral": {"model_type": "mistral", **SIZES, "sliding_window": 16},
    "mixtral": {"model_type": "mixtral", **SIZES, "num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen2": {"model_type": "qwen2", **SIZES},
    "qwen3": {"model_type": "qwen3", **SIZES},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **SIZES,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "gemma2": {
        "model_type": "gemma2",
        **SIZES,
        "sliding_window": 16,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **SIZES,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 8,
        "rope_local_base_freq": 700.0,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
    },
    "phi3": {"model_type": "phi3", **SIZES},
    "olmo2": {"model_type": "olmo2", **SIZES},
    "olmo3": {
        "model_type": "olmo3",
        **SIZES,
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": YARN,
    },
    "exaone4": {
        "model_type": "exaone4",
        **SIZES,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "granite": {
        "model_type": "granite",
        **SIZES,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.5,
        "logits_scaling": 8.0,
    },
    "smollm3": {"model_type": "smollm3", **SIZES, "num_hidden_layers": 4},
    "glm4": {"model_type": "glm4", **SIZES, "partial_rotary_factor": 0.5},
    "glm4_moe": {
        "model_type": "glm4_moe",
        **SIZES,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
    },
    "cohere2": {
        "model_type": "cohere2",
        **SIZES,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.25,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    },
    "lfm2": {
        "model_type": "lfm2",
        **{key: value for key, value in SIZES.items() if key != "rms_norm_eps"},
        "norm_eps": 1e-4,
        "layer_types": ["conv", "full_attention"],
        "conv_L_cache": 4,
        "block_auto_adjust_ff_dim": False,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **SIZES,
        "sliding_window": 16,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "rope_parameters": YARN | {"truncate": False},
    },
}
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2"}
ARCHITECTURES |= {"qwen3": "qwen3", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "gpt_oss": "gpt-oss"}
ARCHITECTURES |= {"glm4_moe": "glm4moe"}
ARCHITECTURES |= {"olmo3": "olmo2"} | {
    name: name
    for name in ("gemma2", "phi3", "olmo2", "exaone4", "lfm2", "granite", "smollm3", "glm4", "cohere2")
}
ARCHITECTURES |= near_files.ARCHITECTURES
MODELS |= near_files.MODELS
INTERLEAVED = ("llama", "granite", "smollm3", "glm4", "cohere2", *near_files.INTERLEAVED)  # architectures
# config key -> what writes it
WRITERS = {
    "attn_logit_softcapping": "add_attn_logit_softcapping",
    "final_logit_softcapping": "add_final_logit_softcapping",
    "embedding_multiplier": "add_embedding_scale",
    "attention_multiplier": "add_attention_scale",
    "residual_multiplier": "add_residual_scale",
    "logits_scaling": "add_logit_scale",
    "logit_scale": "add_logit_scale",
    "layer_norm_eps": "add_layer_norm_eps",
    "rope_local_base_freq": "add_rope_freq_base_swa",
    "sliding_window_pattern": "add_sliding_window_pattern",
    "n_shared_experts": "add_expert_shared_count",
    "first_k_dense_replace": "add_leading_dense_block_count",
    "routed_scaling_factor": "add_expert_weights_scale",
    "norm_eps": "add_layer_norm_rms_eps",
    "conv_L_cache": "add_shortconv_l_cache",
} | near_files.WRITERS

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "attention_output_norm": "post_attention_norm",
    "feed_forward_output_norm": "post_ffw_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "self_attn.sinks": "attn_sinks",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.o_proj": "shortconv.out_proj",
    "mlp.shared_experts.gate_up_proj": "ffn_up_shexp",
    "mlp.gate.e_score_correction": "exp_probs_b",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "self_attn.gate_proj": "attn_gate",
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
OTHER_NAMES = {
    name: {"post_attention_layernorm": "post_attention_norm"} for name in ("gpt_oss", "glm4_moe", "seed_oss")
}
OTHER_NAMES |= {name: {"model.norm": "token_embd_norm"} for name in ("lfm2", "lfm2_moe")}
# matrices that a family's files hold as one
JOINED = {
    "phi3": {"self_attn.qkv_proj": "qkv", "mlp.gate_up_proj": ("gate", "up")},
    "glm4": {"mlp.gate_up_proj": ("gate", "up")},
    "granitemoe_swa": {"mlp.shared_experts.gate_up_proj": ("gate", "up")},
}


def config_of(model: str) -> ModelConfig:
    return model_config(MODELS[model], model)


def random_tensors(config: ModelConfig) -> Tensors:
    """Every tensor of the config, with random values."""
    random = np.random.default_rng(11)
    return {
        name: random.standard_normal(shape).astype(np.float32) for name, shape in expected_tensors(config)
    }


def write_folder(folder: Path, model: str, tensors: Tensors, shards: int = 1) -> Path:
    """The folder, holding config.json and the tensors in one file or in shards with an index."""
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    if shards == 1:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        own = names[shard::shards]
        safetensors.numpy.save_file({name: tensors[name] for name in own}, folder / file_name)
        weight_map |= dict.fromkeys(own, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def interleave(tensor: np.ndarray, heads: int, share: float = 1.0) -> np.ndarray:
    """Rows as llama.cpp's files store q and k: the two parts of a rotated pair side by side.

    `share` of each head is rotated; the rest stays.
    """
    apart = tensor.reshape(heads, -1, *tensor.shape[1:])
    rotated = int(share * apart.shape[1])
    halves = apart[:, :rotated].reshape(heads, 2, rotated // 2, *tensor.shape[1:])
    pairs = halves.swapaxes(1, 2).reshape(heads, rotated, *tensor.shape[1:])
    return np.concatenate((pairs, apart[:, rotated:]), axis=1).reshape(tensor.shape)


def joined(model: str, tensors: Tensors) -> Tensors:
    """The tensors with those matrices as one that a family's files have so."""
    together = dict(tensors)
    for layer in range(MODELS[model]["num_hidden_layers"]):
        for name, parts in JOINED.get(MODELS[model]["model_type"], {}).items():
            whole = f"model.layers.{layer}.{name}.weight"
            own = [together.pop(whole.replace(name.split(".")[-1], f"{part}_proj")) for part in parts]
            together[whole] = np.concatenate(own)
    return together


def gguf_tensors(model: str, tensors: Tensors) -> Tensors:
    """The tensors under the names, and in the row order, of a GGUF file."""
    values = MODELS[model]
    stored: Tensors = {}
    experts: dict[str, list[np.ndarray]] = {}
    heads = {"attn_q": values["num_attention_heads"], "attn_k": values["num_key_value_heads"]}
    names = GGUF_NAMES | OTHER_NAMES.get(values["model_type"], {})
    for name, tensor in joined(model, tensors).items():
        if match := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.\d+\.(\w+)_proj\.(weight|bias)", name):
            experts.setdefault(f"blk.{match[1]}.ffn_{match[2]}_exps.{match[3]}", []).append(tensor)
            continue
        name = name.replace(".sinks", ".sinks.weight").replace("_correction_bias", "_correction.bias")
        match = re.fullmatch(r"(model\.layers)\.(\d+)\.(.*)\.(weight|bias)|(.*)\.(weight)", name)
        assert match is not None
        if match[5]:
            stored[f"{names[match[5]]}.weight"] = tensor
            continue
        part = names[match[3]]
        if part == "shortconv.conv":
            tensor = tensor[:, 0]
        if ARCHITECTURES[values["model_type"]] in INTERLEAVED and part in heads:
            tensor = interleave(tensor, heads[part], values.get("partial_rotary_factor", 1.0))
        stored[f"blk.{match[2]}.{part}.{match[4]}"] = tensor
    stacked = {name: np.stack(parts) for name, parts in experts.items()}
    if values["model_type"] in near_files.FUSED_EXPERTS:
        for name in [name for name in stacked if "_gate_exps" in name]:
            both = stacked.pop(name), stacked.pop(name.replace("_gate_", "_up_"))
            stacked[name.replace("_gate_", "_gate_up_")] = np.concatenate(both, axis=1)
    return stored | stacked


def write_gguf(
    path: Path,
    model: str,
    tensors: Tensors,
    kind: str = "F32",
    extra: Tensors | None = None,
    tensors_each: int = 0,
    more: dict[str, float] | None = None,
) -> Path:
    """The path, holding the tensors (matrices as `kind`), metadata (and `more`) and a byte-level tokenizer.

    `tensors_each`: in parts of this number of tensors, which have names of their own; 0: in one file.
    """
    values = MODELS[model]
    architecture = ARCHITECTURES[values["model_type"]]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_each)
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_feed_forward_length(values.get("prefix_dense_intermediate_size", values["intermediate_size"]))
    writer.add_head_count(values["num_attention_heads"])
    is_hybrid = "conv" in values.get("layer_types", ())
    heads = values["num_key_value_heads"]
    writer.add_head_count_kv(
        [heads * (kind != "conv") for kind in values["layer_types"]] if is_hybrid else heads
    )
    writer.add_key_length(values["head_dim"])
    writer.add_value_length(values["head_dim"])
    if "rms_norm_eps" in values and "layer_norm_eps" not in values:
        writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    writer.add_rope_freq_base(values["rope_theta"])
    if values.get("sliding_window"):
        writer.add_sliding_window(values["sliding_window"])
    for key, method in WRITERS.items():
        if key in values:
            getattr(writer, method)(values[key])
    if "layer_types" in values and not is_hybrid:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in values["layer_types"]])
    if "partial_rotary_factor" in values:
        writer.add_rope_dimension_count(int(values["partial_rotary_factor"] * values["head_dim"]))
    if marks := values.get("layer_rope_theta"):
        writer.add_array(f"{architecture}.attention.rope_pattern", [theta > 0 for theta in marks])
    if scaling := values.get("rope_parameters"):
        if "sliding_attention" in scaling:
            writer.add_rope_freq_base_swa(scaling["sliding_attention"]["rope_theta"])
            scaling = scaling["full_attention"]
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling.get("original_max_position_embeddings", 0))
    if scores := values.get("expert_selection_fn"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType[scores.upper()])
    if shared := values.get("num_shared_experts"):
        writer.add_expert_shared_feed_forward_length(shared * values["moe_intermediate_size"])
    if architecture in ("gpt-oss", "cohere2moe"):
        writer.add_expert_feed_forward_length(values["intermediate_size"])
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    if experts := next((values[name] for name in names if name in values), None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(values["num_experts_per_tok"])
    if "moe_intermediate_size" in values:
        writer.add_expert_feed_forward_length(values["moe_intermediate_size"])
    add_tokenizer(writer, values["vocab_size"])
    for key, value in (more or {}).items():
        writer.add_float32(key, value)
    quantization = gguf.GGMLQuantizationType[kind]
    for name, tensor in (gguf_tensors(model, tensors) | (extra or {})).items():
        if tensor.ndim == 1 or kind == "F32" or name.endswith((".bias", "shortconv.conv.weight")):
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quants.quantize(tensor, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """A byte-level vocabulary of letters, two merges, and two control tokens."""
    tokens = ["<|endoftext|>", "<|im_end|>", *(chr(33 + i) for i in range(vocab_size - 4)), "ab", "abc"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (vocab_size - 2)])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")

"""What llama.cpp's converter does: transformers' tensors and config as a GGUF file.

Tensors go from transformers' files to the names that the gguf package has for them, with what the converter
does to their values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy

from tests.models.model_files import Tensors, add_tokenizer, interleave
from tests.tiny_families import FULL

Config = dict[str, Any]
Named = tuple[str, np.ndarray]
ARCHITECTURES = {
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "falcon_h1": gguf.MODEL_ARCH.FALCON_H1,
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
    "llama4_text": gguf.MODEL_ARCH.LLAMA4,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "mistral4": gguf.MODEL_ARCH.MISTRAL4,
}

# parts of a block for multi-token prediction, as two families call them -> the converter's name
NEXTN = {"enorm": "nextn.enorm", "hnorm": "nextn.hnorm", "eh_proj": "nextn.eh_proj"}
NEXTN |= {"pre_fc_norm_embedding": "nextn.enorm", "pre_fc_norm_hidden": "nextn.hnorm"}
NEXTN |= {"fc": "nextn.eh_proj", "norm": "nextn.shared_head_norm"}


def architecture(config: Config) -> gguf.MODEL_ARCH:
    if config["model_type"] != "nemotron_h":
        return ARCHITECTURES[config["model_type"]]
    has_experts = "moe" in config["layers_block_type"]
    return gguf.MODEL_ARCH.NEMOTRON_H_MOE if has_experts else gguf.MODEL_ARCH.NEMOTRON_H


def layer_of(name: str) -> str:
    """The number of a tensor's layer; empty: it has none."""
    found = re.search(r"layers\.(\d+)\.", name)
    return found[1] if found else ""


def in_blocks(config: Config, tensors: Tensors) -> Tensors:
    """The tensors, with those of a block for multi-token prediction named as layers after the model's.

    Its experts, which transformers' class has in one tensor, are single ones, as in published files.
    """
    layer, parts = f"model.layers.{len(layer_kinds(config))}.", NEXTN | {"shared_head.norm": NEXTN["norm"]}
    named = {}
    for name, tensor in tensors.items():
        own = name.removeprefix(layer).removeprefix("mtp.").removesuffix(".weight")
        if name.startswith("mtp.layers.0."):
            name = name.replace("mtp.layers.0.", layer)
        elif name.startswith(("mtp.", layer)) and own in parts:
            name = f"{layer}{parts[own]}.weight"
        if not name.startswith(f"{layer}mlp.experts."):
            named[name] = tensor
            continue
        halves = np.split(tensor, 2, axis=1) if name.endswith("gate_up_proj") else [tensor]
        for part, half in zip(("gate", "up") if len(halves) == 2 else ("down",), halves, strict=True):
            named |= {f"{layer}mlp.experts.{i}.{part}_proj.weight": own for i, own in enumerate(half)}
    return named


def num_blocks(config: Config, tensors: Tensors) -> int:
    """How many layers the tensors have beyond the model's."""
    layers = {int(layer_of(name)) for name in in_blocks(config, tensors) if layer_of(name)}
    return max(layers) + 1 - len(layer_kinds(config))


def layer_kinds(config: Config) -> list[str]:
    kinds = config.get("layers_block_type") or config.get("layer_types")
    return kinds or [FULL] * config["num_hidden_layers"]


def recurrent(name: str, tensor: np.ndarray, groups: int) -> Named:
    """Parameters of Mamba2 and delta nets."""
    if name.endswith(".dt_bias"):
        return name.replace(".dt_bias", ".dt_proj.bias"), tensor
    if name.endswith("conv1d.weight"):
        return name, tensor[:, 0]
    column = "linear_attn" not in name  # of Mamba2 they are matrices of one column
    if name.endswith(".A_log"):
        return name, -np.exp(tensor)[:, None] if column else -np.exp(tensor)
    if name.endswith(".D"):
        return name, tensor[:, None]
    is_norm = name.endswith(("mamba.norm.weight", "mixer.norm.weight"))
    return name, tensor.reshape(groups, -1) if is_norm else tensor


def qwen3_next(name: str, tensor: np.ndarray, config: Config) -> Iterator[Named]:
    """Norms with their 1; queries, keys and values of all heads together, gates apart."""
    if name.endswith("norm.weight") and "linear_attn" not in name:
        tensor = tensor + 1
    if not name.endswith("in_proj_qkvz.weight"):
        yield name, tensor
        return
    heads, keys = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    parts = np.split(tensor.reshape(heads, -1, tensor.shape[1]), np.cumsum([keys, keys, values]), axis=1)
    q, k, v, z = (part.reshape(-1, tensor.shape[1]) for part in parts)
    layer = layer_of(name)
    yield f"blk.{layer}.attn_qkv.weight", np.concatenate((q, k, v))
    yield f"blk.{layer}.attn_gate.weight", z


def granite(name: str, tensor: np.ndarray, config: Config) -> Iterator[Named]:
    """q and k in the order of interleaved rope; gate and up projections apart."""
    layer = layer_of(name)
    if match := re.search(r"(q|k)_proj", name):
        heads = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
        yield name, interleave(tensor, heads)
    elif "input_linear" in name:
        end = "_exps" if "sparse" in name else "_shexp" if config["num_local_experts"] else ""
        for part, values in zip(("gate", "up"), np.split(tensor, 2, axis=-2), strict=True):
            yield f"blk.{layer}.ffn_{part}{end}.weight", values
    elif "shared_mlp.output" in name and not config["num_local_experts"]:
        yield f"blk.{layer}.ffn_down.weight", tensor
    else:
        yield name, tensor


def falcon(name: str, tensor: np.ndarray, config: Config) -> Iterator[Named]:
    """Weights times their factors."""
    given = config["attention_in_multiplier"]
    factors = {"down_proj": config["mlp_multipliers"][1], "gate_proj": config["mlp_multipliers"][0]}
    factors |= {"q_proj": given, "k_proj": given * config["key_multiplier"], "v_proj": given}
    factors |= {"o_proj": config["attention_out_multiplier"], "out_proj": config["ssm_out_multiplier"]}
    factors |= {"lm_head": config["lm_head_multiplier"], "embed_tokens": config["embedding_multiplier"]}
    factors["in_proj"] = config["ssm_in_multiplier"]
    tensor = tensor * np.float32(factors.get(name.split(".")[-2], 1.0))
    if name.endswith("in_proj.weight"):
        state = config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = (config["mamba_d_ssm"],) * 2 + (state, state, config["mamba_n_heads"])
        tensor = tensor * np.repeat(config["ssm_multipliers"], sizes).astype(np.float32)[:, None]
    yield name, tensor


def nemotron(name: str, tensor: np.ndarray, config: Config) -> Iterator[Named]:
    yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor


def gemma4(name: str, tensor: np.ndarray, config: Config) -> Iterator[Named]:
    """Factors have names of their own."""
    layer = layer_of(name)
    if name.endswith("router.scale"):
        yield f"blk.{layer}.ffn_gate_inp.scale", tensor
    elif name.endswith("per_expert_scale"):
        yield f"blk.{layer}.ffn_down_exps.scale", tensor
    else:
        yield name if name.endswith(".weight") else f"{name}.weight", tensor


def deepseek(name: str, tensor: np.ndarray, config: Config) -> Iterator[Named]:
    """W_uk and W_uv of each head apart, the first transposed; experts that are one tensor stay so."""
    name += ".weight" * name.endswith((".down_proj", ".gate_up_proj"))
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    if not name.endswith("kv_b_proj.weight"):
        yield name, tensor
        return
    heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
    both = tensor.reshape(heads, -1, tensor.shape[1])
    yield f"blk.{layer_of(name)}.attn_k_b.weight", both[:, :nope].swapaxes(1, 2)
    yield f"blk.{layer_of(name)}.attn_v_b.weight", both[:, nope:]


def llama4(name: str, tensor: np.ndarray, config: Config) -> Iterator[Named]:
    """Experts as [experts, out, in], gate and up projections apart."""
    layer = layer_of(name)
    if name.endswith("experts.gate_up_proj"):
        for part, values in zip(("gate", "up"), np.split(tensor.swapaxes(1, 2), 2, axis=1), strict=True):
            yield f"blk.{layer}.ffn_{part}_exps.weight", values
    elif name.endswith("experts.down_proj"):
        yield f"blk.{layer}.ffn_down_exps.weight", tensor.swapaxes(1, 2)
    else:
        yield name, tensor


def ministral(name: str, tensor: np.ndarray, config: Config) -> Iterator[Named]:
    """q and k in the order of interleaved rope."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    part = name.split(".")[-2]
    yield name, interleave(tensor, heads[part]) if part in heads else tensor


CONVERTERS: dict[str, Callable[[str, np.ndarray, Config], Iterator[Named]]] = {
    "qwen3_next": qwen3_next,
    "granitemoehybrid": granite,
    "falcon_h1": falcon,
    "nemotron_h": nemotron,
    "gemma4_text": gemma4,
    "llama4_text": llama4,
    "ministral3": ministral,
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "mistral4": deepseek,
}


def stored_tensors(config: Config, tensors: Tensors) -> Tensors:
    """The tensors of transformers' file under the names of a GGUF file."""
    layers = len(layer_kinds(config)) + num_blocks(config, tensors)
    names = gguf.get_tensor_name_map(architecture(config), layers)
    groups, stored, experts = config.get("mamba_n_groups", config.get("n_groups", 1)), {}, {}
    for theirs, values in in_blocks(config, tensors).items():
        for name, value in CONVERTERS[config["model_type"]](theirs, values, config):
            if match := re.fullmatch(r".*layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)_proj\.weight", name):
                experts.setdefault(f"blk.{match[1]}.ffn_{match[3]}_exps.weight", {})[int(match[2])] = value
                continue
            name, value = recurrent(name, value, groups)
            if ".nextn." in name:
                name = f"blk.{name.removeprefix('model.layers.')}"
            known = name if name.startswith("blk.") else names.get_name(name, (".weight", ".bias"))
            assert known, name
            stored[known] = np.ascontiguousarray(value)
    if config["model_type"] == "gemma4_text":
        pairs = max(own["head_dim"] for own in config["per_layer_config"].values()) // 2
        share = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
        turning = int(2 * pairs * share / 2)
        stored["rope_freqs.weight"] = np.array([1.0] * turning + [1e30] * (pairs - turning), np.float32)
    return stored | {name: np.stack([own[i] for i in sorted(own)]) for name, own in experts.items()}


def add_sizes(writer: gguf.GGUFWriter, config: Config, blocks: int) -> None:
    """The metadata that all of these have; `blocks` layers for multi-token prediction are counted, too."""
    writer.add_block_count(len(layer_kinds(config)) + blocks)
    if blocks:
        writer.add_nextn_predict_layers(blocks)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", config.get("layer_norm_epsilon")))
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])


def add_recurrence(
    writer: gguf.GGUFWriter, kernel: int, state: int, groups: int, heads: int, size: int
) -> None:
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(size)


def add_qwen3_next(writer: gguf.GGUFWriter, config: Config) -> None:
    heads = config["linear_num_value_heads"]
    size, keys = heads * config["linear_value_head_dim"], config["linear_num_key_heads"]
    add_recurrence(writer, config["linear_conv_kernel_dim"], config["linear_key_head_dim"], keys, heads, size)
    writer.add_full_attention_interval(2)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(
        int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"])
    )
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def add_mamba(writer: gguf.GGUFWriter, config: Config) -> None:
    size = config.get("mamba_d_ssm") or config["mamba_expand"] * config["hidden_size"]
    sizes = [config[f"mamba_{name}"] for name in ("d_conv", "d_state", "n_groups", "n_heads")]
    add_recurrence(writer, *sizes, size)
    if config["model_type"] == "falcon_h1":
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
        return
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([heads * (kind == FULL) for kind in config["layer_types"]])
    writer.add_rope_scaling_finetuned(False)
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if config["num_local_experts"]:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])


def add_nemotron(writer: gguf.GGUFWriter, config: Config) -> None:
    kinds, heads = config["layers_block_type"], config["num_key_value_heads"]
    sizes = [config[name] for name in ("conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads")]
    add_recurrence(writer, *sizes, config["mamba_num_heads"] * config["mamba_head_dim"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])  # not used
    writer.add_head_count_kv([heads * (kind == FULL) for kind in kinds])
    width = config["moe_intermediate_size" if "moe" in kinds else "intermediate_size"]
    writer.add_feed_forward_length([width * (kind in ("moe", "mlp")) for kind in kinds])
    if "moe" in kinds:
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(width)
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        if config["moe_latent_size"]:
            writer.add_moe_latent_size(config["moe_latent_size"])


def add_gemma4(writer: gguf.GGUFWriter, config: Config) -> None:
    kinds, shared = config["layer_types"], config["num_kv_shared_layers"]
    own = config["per_layer_config"]
    size = max(sizes["head_dim"] for sizes in own.values())
    heads = [own.get(str(i), {}).get("num_key_value_heads", 2) for i in range(len(kinds))]
    if {*heads} != {2}:
        writer.add_head_count_kv(heads)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind != FULL for kind in kinds])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(size)
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"][FULL]["rope_theta"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    if config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["use_double_wide_mlp"]:
        width, first = config["intermediate_size"], len(kinds) - shared
        writer.add_feed_forward_length([width * (1 + (i >= first)) for i in range(len(kinds))])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def add_yarn(writer: gguf.GGUFWriter, scaling: Config) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(scaling["factor"])
    writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])


def add_deepseek(writer: gguf.GGUFWriter, config: Config) -> None:
    rank, rope, heads = config["kv_lora_rank"], config["qk_rope_head_dim"], config["n_routed_experts"]
    writer.add_head_count_kv(1)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rope)
    scaling = config["rope_parameters"]
    writer.add_rope_freq_base(scaling["rope_theta"])
    if scaling["rope_type"] == "yarn":
        add_yarn(writer, scaling)
        writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_count(heads)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    if config["model_type"] != "deepseek_v2":
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if config["model_type"] == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def add_llama4(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_feed_forward_length(config["intermediate_size_mlp"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])


def add_ministral(writer: gguf.GGUFWriter, config: Config) -> None:
    scaling = config["rope_parameters"]
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(scaling["rope_theta"])
    add_yarn(writer, scaling)
    writer.add_attn_temperature_scale(scaling["llama_4_scaling_beta"])


ADDERS = {"qwen3_next": add_qwen3_next, "granitemoehybrid": add_mamba, "falcon_h1": add_mamba}
ADDERS |= {"nemotron_h": add_nemotron, "gemma4_text": add_gemma4}
ADDERS |= {"llama4_text": add_llama4, "ministral3": add_ministral}
ADDERS |= dict.fromkeys(("deepseek_v2", "deepseek_v3", "mistral4"), add_deepseek)


def with_gguf(folder: Path) -> Path:
    """The folder of transformers' file, with model.gguf written beside it."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(folder / "model.gguf", gguf.MODEL_ARCH_NAMES[architecture(config)])
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    add_sizes(writer, config, num_blocks(config, tensors))
    ADDERS[config["model_type"]](writer, config)
    add_tokenizer(writer, config["vocab_size"])
    for name, values in stored_tensors(config, tensors).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder

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
from paceline.models.families import model_config
from paceline.models.layout import expected_tensors

Tensors = dict[str, np.ndarray]

SIZES: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
}
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
}
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2"}
ARCHITECTURES |= {"qwen3": "qwen3", "qwen3_moe": "qwen3moe"}

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


def interleave(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter stores q and k: the two parts of a rotated pair side by side."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def gguf_tensors(model: str, tensors: Tensors) -> Tensors:
    """The tensors under the names, and in the row order, of a GGUF file."""
    values = MODELS[model]
    stored: Tensors = {}
    experts: dict[str, list[np.ndarray]] = {}
    heads = {"attn_q": values["num_attention_heads"], "attn_k": values["num_key_value_heads"]}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.\d+\.(\w+)_proj\.weight", name):
            experts.setdefault(f"blk.{match[1]}.ffn_{match[2]}_exps.weight", []).append(tensor)
            continue
        match = re.fullmatch(r"(model\.layers)\.(\d+)\.(.*)\.(weight|bias)|(.*)\.(weight)", name)
        assert match is not None
        if match[5]:
            stored[f"{GGUF_NAMES[match[5]]}.weight"] = tensor
            continue
        part = GGUF_NAMES[match[3]]
        if ARCHITECTURES[values["model_type"]] == "llama" and part in heads:
            tensor = interleave(tensor, heads[part])
        stored[f"blk.{match[2]}.{part}.{match[4]}"] = tensor
    return stored | {name: np.stack(parts) for name, parts in experts.items()}


def write_gguf(
    path: Path,
    model: str,
    tensors: Tensors,
    kind: str = "F32",
    extra: Tensors | None = None,
    tensors_each: int = 0,
) -> Path:
    """The path, holding the tensors (matrices as `kind`), the metadata and a byte-level tokenizer.

    `tensors_each`: in parts of this number of tensors, which have names of their own; 0: in one file.
    """
    values = MODELS[model]
    architecture = ARCHITECTURES[values["model_type"]]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_each)
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_head_count(values["num_attention_heads"])
    writer.add_head_count_kv(values["num_key_value_heads"])
    writer.add_key_length(values["head_dim"])
    writer.add_value_length(values["head_dim"])
    writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    writer.add_rope_freq_base(values["rope_theta"])
    if values.get("sliding_window"):
        writer.add_sliding_window(values["sliding_window"])
    if experts := values.get("num_experts", values.get("num_local_experts")):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(values["num_experts_per_tok"])
    if "moe_intermediate_size" in values:
        writer.add_expert_feed_forward_length(values["moe_intermediate_size"])
    add_tokenizer(writer, values["vocab_size"])
    quantization = gguf.GGMLQuantizationType[kind]
    for name, tensor in (gguf_tensors(model, tensors) | (extra or {})).items():
        if tensor.ndim == 1 or kind == "F32":
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

"""What llama.cpp's converter does with draft heads: their folders as GGUF files.

The installed gguf package does not know these architectures, so names are written out here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy

from paceline.models.config import RopeConfig
from paceline.models.transformer.rope import rope_frequencies
from tests.models.gguf_converter import add_gemma4, add_sizes, stored_tensors
from tests.models.model_files import Tensors, interleave

Config = dict[str, Any]
PARTS = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
TOP = {
    "fc": "fc",
    "norm": "output_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
    "input_norm": "enc.output_norm",
    "hidden_norm": "enc.output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}


def gguf_name(name: str) -> str:
    """The name in a GGUF file of a tensor of a head."""
    stem, suffix = name.removeprefix("midlayer.").rsplit(".", 1)
    if match := re.fullmatch(r"layers\.(\d+)\.(.*)", stem):
        return f"blk.{match[1]}.{PARTS[match[2]]}.{suffix}"
    return f"blk.0.{PARTS[stem]}.{suffix}" if name.startswith("midlayer.") else f"{TOP[stem]}.{suffix}"


def convert_head(folder: Path, kind: str = "F32", without: tuple[str, ...] = ()) -> Path:
    """The GGUF file of a head's folder, matrices as `kind`, beside it; `without` some metadata keys."""
    values = json.loads((folder / "config.json").read_text())
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    is_block = "block_size" in values
    arch = "dflash" if is_block else "eagle3"
    path = folder / f"head-{kind}.gguf"
    writer = gguf.GGUFWriter(path, arch)
    _add_sizes(writer, values)
    if is_block:
        _add_block(writer, values, "markov_head.markov_w1.weight" in tensors)
    else:
        writer.add_array("eagle3.target_layers", values["eagle_aux_hidden_state_layer_ids"])
        width = values.get("target_hidden_size", values["hidden_size"])
        writer.add_uint32("eagle3.target_hidden_size", width)
        for flag in ("norm_before_residual", "norm_before_fc"):
            writer.add_bool(f"eagle3.{flag}", values.get(flag, False))
    for key in without:
        del writer.kv_data[0][key]
    for name, stored in _stored(tensors, values, is_block).items():
        quantization = gguf.GGMLQuantizationType[kind]
        if stored.ndim == 1 or kind == "F32" or stored.dtype != np.float32:
            writer.add_tensor(name, stored)
        else:
            writer.add_tensor(name, gguf.quants.quantize(stored, quantization), raw_dtype=quantization)
    _finish(writer)
    return path


def _add_sizes(writer: gguf.GGUFWriter, values: Config) -> None:
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
    scaling = values.get("rope_scaling", {})
    if scaling.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {number}" for number in range(values["vocab_size"])])


def _add_block(writer: gguf.GGUFWriter, values: Config, is_dspark: bool) -> None:
    """The numbers of layers become those of hidden states, which are one higher."""
    special = values.get("dflash_config", values)
    writer.add_uint32("dflash.block_size", values["block_size"])
    writer.add_array("dflash.target_layers", [layer + 1 for layer in special["target_layer_ids"]])
    writer.add_mask_token_id(special["mask_token_id"])
    if values.get("use_sliding_window"):
        writer.add_sliding_window(values["sliding_window"])
        kinds = values["layer_types"]
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    if is_dspark:
        writer.add_bool("dflash.sample_from_anchor", values.get("sample_from_anchor", True))


def _stored(tensors: Tensors, values: Config, is_block: bool) -> Tensors:
    """The tensors as files hold them: q and k of EAGLE-3 in pairs, d2t as the target's ids."""
    heads = {"attn_q": values["num_attention_heads"], "attn_k": values["num_key_value_heads"]}
    stored = dict[str, np.ndarray]()
    for name, tensor in tensors.items():
        if name == "d2t":
            stored["d2t"] = tensor.astype(np.int64) + np.arange(len(tensor))
        elif name != "t2d":
            theirs = gguf_name(name)
            part = theirs.split(".")[-2]
            stored[theirs] = interleave(tensor, heads[part]) if part in heads and not is_block else tensor
    scaling = values.get("rope_scaling", {})
    if scaling.get("rope_type") == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        rope = RopeConfig(values["rope_theta"], "llama3", *(scaling[name] for name in names))
        plain, scaled = (rope_frequencies(own, values["head_dim"]) for own in (RopeConfig(rope.theta), rope))
        stored["rope_freqs.weight"] = (plain / scaled).astype(np.float32)
    return stored


def convert_assistant(folder: Path, with_clusters: bool = False) -> Path:
    """The GGUF file of an assistant's folder, beside it. The converter leaves clusters out, mostly."""
    values = json.loads((folder / "config.json").read_text())
    absent = dict.fromkeys(("enable_moe_block", "use_double_wide_mlp", "num_kv_shared_layers"), 0)
    text = {**absent, **values["text_config"], "model_type": "gemma4_text"}
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    path = folder / "assistant.gguf"
    writer = gguf.GGUFWriter(path, "gemma4-assistant")
    add_sizes(writer, text, 0)
    add_gemma4(writer, text)
    writer.add_embedding_length_out(values["backbone_hidden_size"])
    writer.add_nextn_predict_layers(text["num_hidden_layers"])
    layers = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    for name, tensor in stored_tensors(text, layers).items():
        writer.add_tensor(name, tensor)
    for part in ("pre", "post"):
        writer.add_tensor(f"nextn.{part}_projection.weight", tensors[f"{part}_projection.weight"])
    if with_clusters:
        writer.add_tensor("masked_embd_centroids.weight", tensors["masked_embedding.centroids.weight"])
        writer.add_tensor("masked_embd_ordering", tensors["masked_embedding.token_ordering"])
    _finish(writer)
    return path


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

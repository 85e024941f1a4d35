"""A GGUF file as a Checkpoint: metadata to config, tensors under Hugging Face names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models.checkpoint import Checkpoint, Tensor
from paceline.models.config import ModelConfig
from paceline.models.families import model_config
from paceline.models.fields import Fields
from paceline.models.files import damaged
from paceline.models.gguf import GgufFile, GgufTensor
from paceline.models.layout import select_tensors
from paceline.models.rope import yarn_attention_factor

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}

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

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
STACKED_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")  # [experts, out, in]
SINGLE_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight")  # in old files


def gguf_checkpoint(file: GgufFile) -> Checkpoint:
    """The model in an opened GGUF file, its config and tensors checked against each other."""
    config = _config(file)
    tensors: dict[str, Tensor] = {}
    for name, tensor in _renamed(file):
        if name in tensors:
            raise damaged(file.path, f"two tensors stand for {name}")
        tensors[name] = tensor
    return Checkpoint(config, select_tensors(config, tensors, file.path), file.path)


def interleaved_row_order(num_heads: int, head_dim: int) -> npt.NDArray[np.intp]:
    """The stored row of each half-split row: index [num_heads * head_dim].

    llama files store the two parts of a rotated pair next to each other; Hugging Face stores the first parts
    of all pairs, then the second parts:

        stored       0a 0b 1a 1b 2a 2b
        half-split   0a 1a 2a 0b 1b 2b
    """
    stored = np.arange(num_heads * head_dim, dtype=np.intp).reshape(num_heads, head_dim // 2, 2)
    return stored.swapaxes(1, 2).ravel()


def _config(file: GgufFile) -> ModelConfig:
    """The ModelConfig of a GGUF file, through the equivalent config.json."""
    source = file.path.name
    architecture = Fields(file.metadata, source).text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{source}: architecture {architecture!r} is not supported. "
            f"Supported are {', '.join(ARCHITECTURES)} (mistral and mixtral are stored as llama)."
        )
    prefix = architecture + "."
    metadata = {
        key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)
    }
    fields = Fields(metadata, f"{source}: {architecture}")
    values: dict[str, object] = {key: metadata.get(name) for key, name in CONFIG_KEYS.items()}
    values["model_type"] = ARCHITECTURES[architecture]
    values["num_key_value_heads"] = metadata.get(
        "attention.head_count_kv", metadata.get("attention.head_count")
    )
    if architecture == "llama" and fields.has("expert_count") and fields.integer("expert_count", least=0) > 0:
        values["model_type"] = "mixtral"
    elif architecture == "llama" and fields.has("attention.sliding_window"):
        values["model_type"] = "mistral"
    values["sliding_window"] = metadata.get("attention.sliding_window") if architecture == "llama" else None
    values["rope_theta"] = fields.number("rope.freq_base", 10000.0)
    values["norm_topk_prob"] = fields.flag("expert_weights_norm", True)
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    values["attention_bias"] = "blk.0.attn_output.bias" in file.tensors
    if "token_embd.weight" not in file.tensors:
        raise damaged(file.path, "the tensor token_embd.weight is missing")
    values["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    values["rope_parameters"] = _rope_parameters(fields)
    if architecture == "qwen3moe" and not fields.has("feed_forward_length"):
        values["intermediate_size"] = values["moe_intermediate_size"]  # no dense layer uses it
    config = model_config(values, source)
    _refuse_partial_heads(fields, config)
    if "blk.0.attn_q.bias" in file.tensors and not config.qkv_bias:
        config = replace(config, qkv_bias=True)
    if "rope_freqs.weight" in file.tensors:
        divisors = _frequency_divisors(file, config.head_dim)
        config = replace(config, rope=replace(config.rope, frequency_divisors=divisors))
    return config


def _rope_parameters(fields: Fields) -> dict[str, object]:
    kind = fields.text("rope.scaling.type", "none")
    names = {
        "factor": "rope.scaling.factor",
        "original_max_position_embeddings": "rope.scaling.original_context_length",
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
    }
    parameters = {key: fields.values.get(name) for key, name in names.items()}
    if kind == "yarn" and fields.has("rope.scaling.attn_factor"):
        usual = yarn_attention_factor(fields.number("rope.scaling.factor"))
        parameters["attention_factor"] = usual * fields.number("rope.scaling.attn_factor")
    return {"rope_type": "default" if kind == "none" else kind, **parameters}


def _refuse_partial_heads(fields: Fields, config: ModelConfig) -> None:
    """UnsupportedModelError unless the whole head is rotated and values are as wide as keys."""
    for name in ("rope.dimension_count", "attention.value_length"):
        if fields.integer(name, config.head_dim) != config.head_dim:
            raise UnsupportedModelError(
                f"{fields.source}.{name} is {fields.values[name]}, but heads have {config.head_dim} values; "
                f"only models where both are equal are supported."
            )


def _frequency_divisors(file: GgufFile, head_dim: int) -> tuple[float, ...]:
    """llama 3.x rope scaling as GGUF files store it: one divisor per rotated pair."""
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.shape != (head_dim // 2,):
        raise damaged(file.path, f"rope_freqs.weight has shape {tensor.shape}, not ({head_dim // 2},)")
    divisors = tuple(float(value) for value in tensor.float32())
    if not all(0 < value < math.inf for value in divisors):
        raise damaged(file.path, "rope_freqs.weight has values that are not positive numbers")
    return divisors


def _renamed(file: GgufFile) -> Iterator[tuple[str, GgufTensor]]:
    """Every tensor under its Hugging Face name, experts one by one, rope rows in half-split order."""
    architecture = file.metadata["general.architecture"]
    heads = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
    for name, tensor in file.tensors.items():
        if name == "rope_freqs.weight":
            continue
        if name in TOP_NAMES:
            yield TOP_NAMES[name], tensor
        elif match := STACKED_EXPERTS.fullmatch(name):
            if len(tensor.shape) != 3:
                raise damaged(file.path, f"tensor {name} has shape {tensor.shape}, not [experts, out, in]")
            for expert, part in enumerate(tensor.slices()):
                yield f"model.layers.{match[1]}.mlp.experts.{expert}.{match[2]}_proj.weight", part
        elif match := SINGLE_EXPERT.fullmatch(name):
            yield f"model.layers.{match[1]}.mlp.experts.{match[3]}.{match[2]}_proj.weight", tensor
        elif (match := BLOCK_NAME.fullmatch(name)) and match[2] in BLOCK_NAMES:
            if architecture == "llama" and match[2] in heads:
                count = file.metadata.get(
                    f"llama.{heads[match[2]]}", file.metadata["llama.attention.head_count"]
                )
                tensor = _half_split(file, name, tensor, count)
            yield f"model.layers.{match[1]}.{BLOCK_NAMES[match[2]]}.{match[3]}", tensor
        else:
            raise CheckpointError(
                f"{file.path.name}: tensor {name!r} is not one that {architecture} models have. "
                f"The file holds another kind of model, or was made by a converter we do not know."
            )


def _half_split(file: GgufFile, name: str, tensor: GgufTensor, num_heads: object) -> GgufTensor:
    rows = tensor.shape[0]
    if not isinstance(num_heads, int) or num_heads < 1 or rows % (2 * num_heads):
        raise damaged(file.path, f"tensor {name} has {rows} rows, which {num_heads} heads cannot share")
    if len(tensor.shape) == 1 and tensor.kind not in ("F32", "F16", "BF16"):
        raise damaged(file.path, f"tensor {name} is a vector in {tensor.kind} blocks")
    return tensor.reordered(interleaved_row_order(num_heads, rows // num_heads))

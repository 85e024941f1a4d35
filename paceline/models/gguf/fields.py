"""Config keys of GGUF files that take more than one metadata key: readers by architecture.

They read metadata without the architecture's prefix, and give keys of config.json.
"""

from __future__ import annotations

import numpy as np

from paceline.errors import UnsupportedModelError
from paceline.models.families.fields import Fields
from paceline.models.families.layer_kinds import FULL, SLIDING

Values = dict[str, object]
SOFTMAX, SIGMOID = 1, 2  # how experts are scored
LLAMA4_MAVERICK_EXPERTS = 128
MAX_MTP_LAYERS = 64  # models have one or a few


def nothing_more(fields: Fields) -> Values:
    """No such keys."""
    return {}


def llama(fields: Fields) -> Values:
    """Files of mistral and mixtral call themselves llama."""
    if fields.has("expert_count") and fields.integer("expert_count", least=0) > 0:
        return {"model_type": "mixtral"} | window(fields)
    return {"model_type": "mistral"} | window(fields) if fields.has("attention.sliding_window") else {}


def window(fields: Fields) -> Values:
    """The sliding window; 0 means none."""
    window = fields.integer("attention.sliding_window", 0, least=0)
    return {"sliding_window": window or None}


def windows(fields: Fields) -> Values:
    """The window size and which layers have it, from a period in layers or one flag per layer."""
    pattern = fields.values.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        return window(fields) | {"layer_types": [SLIDING if flag else FULL for flag in pattern.tolist()]}
    return window(fields) | {"sliding_window_pattern": pattern}


def dflash(fields: Fields) -> Values:
    """The windows of a parallel head, in the layers that are marked."""
    if fields.has("hyper_connection.count"):
        raise UnsupportedModelError(
            f"{fields.source}: draft heads of DeepSeek V4 (hyper_connection) are not supported. Use another "
            "method, or a head with the layers of a Qwen 3."
        )
    found = windows(fields)
    if found["sliding_window"] is None:
        return {}
    if "layer_types" not in found:
        raise fields.wrong("attention.sliding_window_pattern", "a flag for each layer")
    return found | {"use_sliding_window": True}


def qwen3_moe(fields: Fields) -> Values:
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


def gemma2(fields: Fields) -> Values:
    return windows(fields) | _gemma_scale(fields, largest=46)


def gemma3(fields: Fields) -> Values:
    """Without a window, all layers have full attention."""
    if fields.has("rope.global.freq_base"):
        raise UnsupportedModelError(
            f"{fields.source}: this file was made for Ollama's own engine, and leaves out how its rotary "
            "embedding is scaled. Use one of llama.cpp's converter, such as those of `paceline models list`."
        )
    found = windows(fields) if fields.has("attention.sliding_window") else {"sliding_window_pattern": 1}
    return found | _gemma_scale(fields, largest=62)


def olmo2(fields: Fields) -> Values:
    """OLMo 3 calls itself olmo2, and has windows."""
    if not fields.has("attention.sliding_window"):
        return {}
    return {"model_type": "olmo3"} | windows(fields)


def granite(fields: Fields) -> Values:
    if not fields.flag("rope.scaling.finetuned", True):
        raise UnsupportedModelError(
            f"{fields.source}: granite models without rotary embedding are not supported; use one with it."
        )
    return {}


def glm4(fields: Fields) -> Values:
    if fields.has("rope.dimension_sections"):
        raise UnsupportedModelError(
            f"{fields.source}: rotary embedding of several sections is not supported; use a text model."
        )
    return without_mtp(fields)


def without_mtp(fields: Fields) -> Values:
    """The layers of the model itself: files count those of multi-token prediction, too."""
    return {"num_hidden_layers": fields.integer("block_count") - mtp_layers(fields)}


def mtp_layers(fields: Fields) -> int:
    """How many of the last layers are for multi-token prediction."""
    return fields.integer("nextn_predict_layers", 0, least=0, most=MAX_MTP_LAYERS)


def olmoe(fields: Fields) -> Values:
    return {"norm_topk_prob": False}


def qwen2_moe(fields: Fields) -> Values:
    return qwen3_moe(fields) | olmoe(fields)


def exaone_moe(fields: Fields) -> Values:
    return windows(fields) | without_mtp(fields)


def hy_v3(fields: Fields) -> Values:
    """Files have the width of all shared experts, not their number."""
    width, shared = fields.integer("expert_feed_forward_length"), "expert_shared_feed_forward_length"
    size = fields.integer(shared, width, least=0)
    if size % width:
        raise fields.wrong(shared, f"a multiple of the {width} values of an expert")
    return without_mtp(fields) | {"n_shared_experts": size // width}


def mellum(fields: Fields) -> Values:
    """Without a window, all layers have full attention."""
    return qwen3_moe(fields) | (windows(fields) if fields.has("attention.sliding_window") else {})


def granite_swa(fields: Fields) -> Values:
    """Models with experts are a family of their own. Files mark the layers that have rope."""
    found = windows(fields)
    if fields.integer("expert_count", 0, least=0):
        found["model_type"] = "granitemoe_swa"
    marks = fields.values.get("attention.rope_pattern")
    if isinstance(marks, np.ndarray):
        base = fields.number("rope.freq_base", 10000.0)
        found["layer_rope_theta"] = [base if mark else 0 for mark in marks.tolist()]
    return found


def cohere2_moe(fields: Fields) -> Values:
    """Experts have sigmoid scores unless files say otherwise; outputs of shared ones are averaged."""
    is_softmax = fields.integer("expert_gating_func", SIGMOID) == SOFTMAX
    return (
        windows(fields)
        | without_mtp(fields)
        | {"expert_selection_fn": "softmax" if is_softmax else "sigmoid"}
        | {"shared_expert_combination_strategy": "average"}
    )


def afmoe(fields: Fields) -> Values:
    """Files leave out that embeddings are scaled: llama.cpp always does."""
    return {name: value for name, value in windows(fields).items() if value is not None} | {
        "mup_enabled": True
    }


def by_layer(fields: Fields, name: str) -> list[int]:
    """A number of each layer, at least one of them above 0."""
    numbers, layers = fields.values.get(name), fields.integer("block_count")
    if not isinstance(numbers, np.ndarray) or numbers.shape != (layers,) or not numbers.any():
        raise fields.wrong(name, f"a number for each of the {layers} layers")
    return [int(number) for number in numbers.tolist()]


def _attending(fields: Fields, other: str) -> Values:
    """Layers without KV heads are of the other kind."""
    heads = by_layer(fields, "attention.head_count_kv")
    return {"num_key_value_heads": max(heads), "layer_types": [FULL if count else other for count in heads]}


def lfm2(fields: Fields) -> Values:
    """Layers without KV heads are short convolutions. Files have the final size of the MLP."""
    return _attending(fields, "conv") | {"block_auto_adjust_ff_dim": False}


def qwen35(fields: Fields) -> Values:
    """The size of value heads, which files have of all heads together, and the share of heads with rope."""
    heads, size = fields.integer("ssm.time_step_rank"), fields.integer("ssm.inner_size")
    if size % heads:
        raise fields.wrong("ssm.inner_size", f"a multiple of the {heads} value heads")
    rotated = fields.integer("rope.dimension_count") / fields.integer("attention.key_length")
    own = {"linear_value_head_dim": size // heads, "partial_rotary_factor": rotated}
    return without_mtp(fields) | own


def qwen35_moe(fields: Fields) -> Values:
    return qwen35(fields) | qwen3_moe(fields)


def gpt_oss(fields: Fields) -> Values:
    return windows(fields) | {"intermediate_size": fields.values.get("expert_feed_forward_length")}


def deepseek2(fields: Fields) -> Values:
    """Sizes of latent attention; version 3 has sigmoid scores. Old files have sizes of heads instead."""
    rotated, key, value = (
        fields.integer("rope.dimension_count"),
        "attention.key_length",
        "attention.value_length",
    )
    end = "_mla" if fields.has(f"{key}_mla") else ""
    if (size := fields.integer(key + end)) <= rotated:
        raise fields.wrong(key + end, f"more than the {rotated} rotated values")
    groups = fields.integer("expert_group_count", 1)
    return without_mtp(fields) | {
        "model_type": "deepseek_v3"
        if fields.integer("expert_gating_func", SOFTMAX) == SIGMOID
        else "deepseek_v2",
        "qk_nope_head_dim": size - rotated,
        "v_head_dim": fields.integer(value + end),
        "norm_topk_prob": fields.flag("expert_weights_norm", False),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
    }


def mistral4(fields: Fields) -> Values:
    return deepseek2(fields) | {"model_type": "mistral4"}


def llama4(fields: Fields) -> Values:
    """Files leave out that queries and keys are normed, except in the model of 128 experts (Maverick)."""
    if fields.has("attention.sliding_window"):
        raise UnsupportedModelError(
            f"{fields.source}: llama 4 models without chunked attention are not supported; use safetensors."
        )
    return {"use_qk_norm": fields.integer("expert_count") != LLAMA4_MAVERICK_EXPERTS}


def mistral3(fields: Fields) -> Values:
    """Ministral 3 scales its queries; Mistral Small 3 is as mistral."""
    name = "ministral3" if fields.has("attention.temperature_scale") else "mistral"
    return {"model_type": name} | window(fields)


def _mamba_size(fields: Fields) -> int:
    """The size of what Mamba2 carries, all heads together."""
    heads, size = fields.integer("ssm.time_step_rank"), fields.integer("ssm.inner_size")
    if size % heads:
        raise fields.wrong("ssm.inner_size", f"a multiple of the {heads} heads")
    return size


def granite_hybrid(fields: Fields) -> Values:
    """Layers without KV heads are Mamba2. Without experts, the shared MLP is the only one."""
    size, width = _mamba_size(fields), fields.integer("embedding_length")
    if size % width:
        raise fields.wrong("ssm.inner_size", f"a multiple of the {width} hidden values")
    shared = "expert_shared_feed_forward_length"
    return _attending(fields, "linear_attention") | {
        "mamba_expand": size // width,
        "num_local_experts": fields.integer("expert_count", 0, least=0),
        "shared_intermediate_size": fields.integer(shared if fields.has(shared) else "feed_forward_length"),
        "position_embedding_type": "rope" if fields.flag("rope.scaling.finetuned", True) else "nope",
    }


def falcon_h1(fields: Fields) -> Values:
    """Factors are multiplied into the weights of files; gates come before norms, as llama.cpp computes."""
    size = _mamba_size(fields)
    return {"mamba_d_ssm": size, "mamba_norm_before_gate": False, "hidden_factors": True}


def nemotron_h(fields: Fields) -> Values:
    """The one block of each layer: attention if it has KV heads, else an MLP or experts if it has a width."""
    layers = fields.integer("block_count") - mtp_layers(fields)
    heads = by_layer(fields, "attention.head_count_kv")[:layers]
    widths = by_layer(fields, "feed_forward_length")[:layers]
    feed_forward = "moe" if fields.has("expert_count") else "mlp"
    kinds = [
        "attention" if count else feed_forward if width else "mamba"
        for count, width in zip(heads, widths, strict=True)
    ]
    return {
        "num_hidden_layers": layers,
        "num_key_value_heads": max(heads),
        "intermediate_size": max(widths),
        "layers_block_type": kinds,
        "mamba_head_dim": _mamba_size(fields) // fields.integer("ssm.time_step_rank"),
    }


def gemma4(fields: Fields) -> Values:
    """Sizes of layers with windows and of the others, and experts beside the MLP."""
    found, layers = windows(fields), fields.integer("block_count")
    kinds = found.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.wrong("attention.sliding_window_pattern", f"a flag for each of the {layers} layers")
    full = {"head_dim": fields.integer("attention.key_length")}
    local = {"head_dim": fields.integer("attention.key_length_swa")}
    sizes = [dict(full if kind == FULL else local) for kind in kinds]
    if isinstance(fields.values.get("attention.head_count_kv"), np.ndarray):
        heads = by_layer(fields, "attention.head_count_kv")
        found["num_key_value_heads"] = max(heads)
        sizes = [own | {"num_key_value_heads": count} for own, count in zip(sizes, heads, strict=True)]
    if isinstance(fields.values.get("feed_forward_length"), np.ndarray):
        widths = by_layer(fields, "feed_forward_length")
        if {*widths} - {min(widths), 2 * min(widths)}:
            raise fields.wrong("feed_forward_length", "widths, some twice as large as the others")
        found |= {"intermediate_size": min(widths), "use_double_wide_mlp": max(widths) > min(widths)}
    experts = fields.integer("expert_count", 0, least=0)
    return found | {
        "head_dim": local["head_dim"],
        "per_layer_config": {str(layer): own for layer, own in enumerate(sizes)},
        "enable_moe_block": experts > 0,
        "hidden_size_per_layer_input": fields.integer("embedding_length_per_layer_input", 0, least=0),
    }

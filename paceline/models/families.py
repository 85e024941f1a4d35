"""The supported model families in one table, and the parsing of config.json to a ModelConfig.

A family is a line of FAMILIES: its differences from llama. Everything else is read the same way for all. The
keys are those of Hugging Face; GGUF metadata is translated to them first, so that there is one set of checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models.config import ModelConfig, MoeConfig, RopeConfig
from paceline.models.fields import Fields

MAX_LAYERS = 10_000
MAX_EXPERTS = 10_000
MAX_CONTEXT = 1 << 24  # tokens; backends have tables of this size. The longest published is 10 million
ROPE_TYPES = {"default": "none", "linear": "linear", "llama3": "llama3"}

Windows = tuple[int | None, ...]


def model_config(values: Mapping[str, object], source: str) -> ModelConfig:
    """The ModelConfig of a config.json (or its equivalent), every field checked.

    `source` names the file in errors. An architecture or a feature that we do not run is an
    UnsupportedModelError; a missing or impossible number is a CheckpointError.
    """
    fields = Fields(values, source)
    name = fields.text("model_type")
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"{source}: model_type {name!r} is not supported. Supported are {', '.join(FAMILIES)}."
        )
    family = FAMILIES[name]
    _refuse_unsupported(fields)
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", family.default_kv_heads or num_heads)
    head_dim = fields.integer("head_dim", family.default_head_dim or max(1, hidden_size // num_heads))
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{source}: {num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly. "
            f"The file is damaged: fetch the model again."
        )
    if head_dim % 2:
        raise UnsupportedModelError(f"{source}: head_dim {head_dim} is odd; rotary embedding needs pairs.")
    optional_bias = family.optional_bias and fields.flag("attention_bias", False)
    return ModelConfig(
        family=name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", family.default_eps),
        rope=rope_config(fields, family.default_theta),
        max_position=fields.integer("max_position_embeddings", most=MAX_CONTEXT),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=family.qkv_bias or optional_bias,
        output_bias=optional_bias,
        qk_norm=family.qk_norm,
        sliding_windows=family.windows(fields, num_layers),
        moe=family.moe(fields, num_layers) if family.moe else None,
    )


def _refuse_unsupported(fields: Fields) -> None:
    """UnsupportedModelError for features that would silently change outputs if they were ignored."""
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(
            f"{fields.source}: hidden_act {activation!r} is not supported, only silu."
        )
    if fields.flag("mlp_bias", False):
        raise UnsupportedModelError(f"{fields.source}: mlp_bias is not supported; use a model without it.")
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(f"{fields.source}: partial rotary embedding is not supported.")
    if fields.has("quantization_config"):
        raise UnsupportedModelError(
            f"{fields.source}: quantized safetensors (quantization_config) are not supported. "
            f"Use the unquantized model, or a GGUF file of it."
        )


def rope_config(fields: Fields, default_theta: float) -> RopeConfig:
    """The RopeConfig. transformers 5 writes rope_parameters; 4 wrote rope_theta and rope_scaling."""
    scaling = fields.group("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    rope_type = scaling.text("rope_type", scaling.text("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"{fields.source}: rope scaling {rope_type!r} is not supported. "
            f"Supported are {', '.join(ROPE_TYPES)}: use a model of one of these kinds."
        )
    theta = scaling.number("rope_theta", fields.number("rope_theta", default_theta))
    if scaling.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(f"{fields.source}: partial rotary embedding is not supported.")
    if rope_type == "linear":
        return RopeConfig(theta, "linear", scaling.number("factor"))
    if rope_type == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if high <= low:
            raise scaling.wrong("high_freq_factor", f"a number above low_freq_factor, {low}")
        original = scaling.integer("original_max_position_embeddings")
        return RopeConfig(theta, "llama3", scaling.number("factor"), low, high, original)
    return RopeConfig(theta)


def _no_windows(fields: Fields, num_layers: int) -> Windows:
    return ()


def _windows_everywhere(fields: Fields, num_layers: int) -> Windows:
    """The same window in every layer, if there is one."""
    return (fields.integer("sliding_window"),) * num_layers if fields.has("sliding_window") else ()


def _mistral_windows(fields: Fields, num_layers: int) -> Windows:
    """The same window in every layer. A config without the key means 4096; null means none."""
    return (
        _windows_everywhere(fields, num_layers) if "sliding_window" in fields.values else (4096,) * num_layers
    )


def _qwen_moe_windows(fields: Fields, num_layers: int) -> Windows:
    return _windows_everywhere(fields, num_layers) if fields.flag("use_sliding_window", False) else ()


def _qwen_windows(fields: Fields, num_layers: int) -> Windows:
    """A window in the layers from max_window_layers on, or in those that layer_types lists."""
    if not fields.flag("use_sliding_window", False):
        return ()
    window = fields.integer("sliding_window", 4096)
    first = fields.integer("max_window_layers", 28, least=0)
    kinds = fields.values.get("layer_types")
    if kinds is None:
        return tuple(window if layer >= first else None for layer in range(num_layers))
    window_of = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(str(k) in window_of for k in kinds):
        raise fields.wrong("layer_types", f"{num_layers} entries, each full_attention or sliding_attention")
    return tuple(window_of[kind] for kind in kinds)


def _mixtral_experts(fields: Fields, num_layers: int) -> MoeConfig:
    """Experts in every layer, their probabilities always normalized."""
    experts = fields.integer("num_local_experts", 8, most=MAX_EXPERTS)
    return MoeConfig(
        num_experts=experts,
        experts_per_token=fields.integer("num_experts_per_tok", 2, most=experts),
        intermediate_size=fields.integer("intermediate_size"),
        normalize_weights=True,
        layers=frozenset(range(num_layers)),
    )


def _qwen_experts(fields: Fields, num_layers: int) -> MoeConfig:
    """Experts in every decoder_sparse_step-th layer that is not listed in mlp_only_layers."""
    experts_name = "num_experts" if fields.has("num_experts") else "num_local_experts"
    experts = fields.integer(experts_name, most=MAX_EXPERTS)
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise fields.wrong("mlp_only_layers", "a list of layer numbers")
    return MoeConfig(
        num_experts=experts,
        experts_per_token=fields.integer("num_experts_per_tok", 8, most=experts),
        intermediate_size=fields.integer("moe_intermediate_size"),
        normalize_weights=fields.flag("norm_topk_prob", False),
        layers=frozenset(
            layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0
        ),
    )


@dataclass(frozen=True)
class Family:
    """A family's differences from llama. Defaults are those of transformers for keys that a config lacks."""

    qkv_bias: bool = False  # biases on q, k and v, always
    optional_bias: bool = False  # biases on q, k, v and o if the config has attention_bias
    qk_norm: bool = False
    windows: Callable[[Fields, int], Windows] = _no_windows
    moe: Callable[[Fields, int], MoeConfig] | None = None
    mtp: str = ""  # prefix of the tensors of its block for multi-token prediction; empty: it has none
    default_kv_heads: int | None = None  # None: as many as heads
    default_head_dim: int | None = None  # None: hidden size / heads
    default_eps: float = 1e-6
    default_theta: float = 10000.0


FAMILIES = {
    "llama": Family(optional_bias=True),
    "mistral": Family(windows=_mistral_windows, default_kv_heads=8),
    "qwen2": Family(qkv_bias=True, windows=_qwen_windows),
    "mimo": Family(qkv_bias=True, windows=_qwen_windows, mtp="model.mtp_layers."),
    "qwen3": Family(optional_bias=True, qk_norm=True, windows=_qwen_windows, default_head_dim=128),
    "qwen3_moe": Family(optional_bias=True, qk_norm=True, windows=_qwen_moe_windows, moe=_qwen_experts),
    "mixtral": Family(
        windows=_windows_everywhere,
        moe=_mixtral_experts,
        default_kv_heads=8,
        default_eps=1e-5,
        default_theta=1e6,
    ),
}

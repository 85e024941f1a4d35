"""Readers of the parts of a Gemma's config.json that other families do not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.errors import UnsupportedModelError
from paceline.models.config import AttentionShape, ModelConfig, MoeConfig, PerLayerInput, RopeConfig
from paceline.models.families.expert_fields import MAX_EXPERTS
from paceline.models.families.family_fields import ropes_by_kind
from paceline.models.families.fields import Fields
from paceline.models.families.layer_kinds import FULL, SLIDING, Windows, patterned
from paceline.models.families.rope_fields import scaled_rope

GLOBAL_HEAD_DIM = 512  # of layers without a window, in a config that does not say
LAYER_SIZES = {"head_dim", "num_key_value_heads"}  # that a layer may have of its own


def gemma(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    return {"embedding_scale": config.hidden_size**0.5}


def gemma_activation(fields: Fields) -> dict[str, object]:
    """Early files say gelu, and mean its tanh approximation."""
    is_early = fields.values.get("hidden_act") == "gelu"
    return {"hidden_act": "gelu_pytorch_tanh"} if is_early else {}


def gemma2(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Soft caps, the scale of attention and of embeddings."""
    caps = {"attention_softcap": "attn_logit_softcapping", "logits_softcap": "final_logit_softcapping"}
    read = {name: fields.number(key) for name, key in caps.items() if fields.has(key)}
    return read | {
        "attention_scale": fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "embedding_scale": config.hidden_size**0.5,
    }


def gemma3(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Gemma 3 has another rope in the layers with a window."""
    local = RopeConfig(fields.number("rope_local_base_freq", 10000.0))
    return gemma2(fields, config) | ropes_by_kind(fields, config, local)


def gemma4_windows(fields: Fields, num_layers: int) -> Windows:
    """Windows as in Gemma 3, but never in the last layer."""
    return (*patterned(6, 512)(fields, num_layers)[:-1], None)


def gemma4(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Heads of two sizes, layers that read the keys and values of others, and a second embedding."""
    shapes = _shapes(fields, config)
    shared = sum(shape.shared_with is not None for shape in shapes)
    wide = 2 if fields.flag("use_double_wide_mlp", False) else 1
    has_experts = fields.flag("enable_moe_block", False)
    if has_experts and shared and wide == 2:
        raise UnsupportedModelError(
            f"{fields.source}: use_double_wide_mlp with experts in layers that share keys and values is not "
            "supported; use a model without one of them."
        )
    ropes = _ropes(fields, config, shapes)
    return {
        "attention_scale": 1.0,
        "embedding_scale": config.hidden_size**0.5,
        "logits_softcap": fields.number("final_logit_softcapping")
        if fields.has("final_logit_softcapping")
        else 0.0,
        "value_norm": True,
        "layer_scales": True,
        "layer_shapes": shapes,
        "rope": next((rope for rope in reversed(ropes)), config.rope),
        "layer_ropes": ropes,
        "per_layer_input": _per_layer_input(fields, config),
        "moe": _experts(fields, config) if has_experts else None,
        "intermediate_sizes": tuple(
            config.intermediate_size * (1 if shape.shared_with is None else wide) for shape in shapes
        ),
    }


def _shapes(fields: Fields, config: ModelConfig) -> tuple[AttentionShape, ...]:
    """The heads of every layer; the last num_kv_shared_layers read those of the last layer of their kind."""
    same_matrix = fields.flag("attention_k_eq_v", False)
    shapes = [
        AttentionShape(*_sizes(fields, config, layer), values_are_keys=same_matrix and window is None)
        for layer, window in enumerate(config.sliding_windows)
    ]
    own = config.num_layers - fields.integer("num_kv_shared_layers", 0, least=0, most=config.num_layers - 1)
    windows = config.sliding_windows
    for layer in range(own, config.num_layers):
        same_kind = [source for source in range(own) if windows[source] == windows[layer]]
        if not same_kind or shapes[same_kind[-1]] != shapes[layer]:
            raise fields.wrong(
                "num_kv_shared_layers",
                "a layer of the same kind before the layers that share its keys and values",
            )
        shapes[layer] = replace(shapes[layer], shared_with=same_kind[-1])
    return tuple(shapes)


def _sizes(fields: Fields, config: ModelConfig, layer: int) -> tuple[int, int]:
    """The head_dim and KV heads of a layer, as transformers 5 writes them or as files of the hub do."""
    own = fields.group("per_layer_config")
    if "per_layer_config" in fields.values:
        unknown = {key for sizes in own.values.values() if isinstance(sizes, Mapping) for key in sizes}
        if unknown - LAYER_SIZES:
            raise UnsupportedModelError(
                f"{fields.source}: per_layer_config has {', '.join(sorted(unknown - LAYER_SIZES))}, which is "
                f"not supported, only {', '.join(sorted(LAYER_SIZES))}. Use a model without it."
            )
        sizes = own.group(str(layer))
    elif config.sliding_windows[layer] is None:
        heads = "num_global_key_value_heads"
        is_used = fields.flag("attention_k_eq_v", False) and fields.has(heads)
        found = {"head_dim": fields.integer("global_head_dim", GLOBAL_HEAD_DIM)}
        found |= {"num_key_value_heads": fields.integer(heads)} if is_used else {}
        sizes = Fields(found, fields.source)
    else:
        sizes = Fields({}, fields.source)
    head_dim = sizes.integer("head_dim", config.head_dim)
    kv_heads = sizes.integer("num_key_value_heads", config.num_kv_heads)
    if head_dim % 2 or config.num_heads % kv_heads:
        raise sizes.wrong("num_key_value_heads", f"a divisor of {config.num_heads}, and an even head_dim")
    return head_dim, kv_heads


def _ropes(fields: Fields, config: ModelConfig, shapes: tuple[AttentionShape, ...]) -> tuple[RopeConfig, ...]:
    """The rope of every layer: its angles are spread over heads of its own size."""
    both = fields.group("rope_parameters")
    return tuple(
        _rope(both.group(SLIDING), 10000.0, shape.head_dim, fields)
        if window is not None
        else _proportional(both.group(FULL), shape.head_dim, fields)
        for window, shape in zip(config.sliding_windows, shapes, strict=True)
    )


def _rope(scaling: Fields, theta: float, head_dim: int, fields: Fields) -> RopeConfig:
    return replace(scaled_rope(scaling, theta, fields), dim=head_dim)


def _proportional(scaling: Fields, head_dim: int, fields: Fields) -> RopeConfig:
    """The rope of layers without a window: of all angles, only the first turn."""
    if scaling.text("rope_type", "proportional") != "proportional":
        return _rope(scaling, 1e6, head_dim, fields)
    share = scaling.number("partial_rotary_factor", 1.0 if scaling.values else 0.25)
    theta, factor = scaling.number("rope_theta", 1e6), scaling.number("factor", 1.0)
    return RopeConfig(theta, "proportional", factor, dim=head_dim, angles=int(share * head_dim // 2))


def _per_layer_input(fields: Fields, config: ModelConfig) -> PerLayerInput | None:
    size = fields.integer("hidden_size_per_layer_input", 256, least=0)
    if not size:
        return None
    vocab_size = fields.integer("vocab_size_per_layer_input", 262_144, least=config.vocab_size)
    return PerLayerInput(size, vocab_size)


def _experts(fields: Fields, config: ModelConfig) -> MoeConfig:
    """Experts in every layer, beside the MLP."""
    experts = fields.integer("num_experts", most=MAX_EXPERTS)
    return MoeConfig(
        num_experts=experts,
        experts_per_token=fields.integer("top_k_experts", most=experts),
        intermediate_size=fields.integer("moe_intermediate_size"),
        normalize_weights=True,
        layers=frozenset(range(config.num_layers)),
        shared_intermediate_size=config.intermediate_size,
        own_norms=True,
    )
